"""Tests ../support/log.py: what a run leaves for people."""

import json
import sys
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import questions, run

import train_gpt2
from train_gpt2 import TrainConfig


def test_every_flag_and_every_choice_is_in_the_first_record(whole):
    record = json.loads((whole[1] / "log.jsonl").read_text().splitlines()[0])
    assert set(record["flags"]) == {f.name for f in fields(TrainConfig)}
    assert {"torch", "python", "commit", "device", "threads", "ranks"} <= set(record["environment"])
    assert record["off"]["compile"] and record["flags"]["compile"] is False
    assert {"tf32", "compile"} <= set(record["chosen"]) and "steps" not in record["chosen"]


def test_each_step_is_a_record_with_its_figures(whole):
    lines = [json.loads(line) for line in (whole[2] / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(192 / line["ms"] * 1000)
        assert {"grad_norm", "learning_rate", "tflops", "matmul_share", "peak_mib"} <= set(line)


def test_the_loss_is_drawn_where_matplotlib_is(data_dir, tmp_path):
    pytest.importorskip("matplotlib")
    assert (
        (run(tmp_path, data_dir, hellaswag=questions(tmp_path)) / "loss.png")
        .read_bytes()
        .startswith(b"\x89PNG")
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
def test_a_spike_is_a_notice():
    losses = list(np.random.default_rng(0).normal(3, 0.1, 50))
    assert not train_gpt2.log.spike(losses, 3.4) and not train_gpt2.log.spike(losses[:19], 30)
    assert "SPIKE: " in train_gpt2.log.spike(losses, 4.5)


def test_weights_and_biases_get_the_figures_of_each_step(tmp_path, monkeypatch):
    """As one run for a folder, also after a resume."""
    started, logged = [], []
    stand_in = SimpleNamespace(init=lambda **how: started.append(how) or SimpleNamespace(
        log=logged.append))  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for _ in range(2):
        log = train_gpt2.log.make_log(tmp_path, False, [train_gpt2.log.wandb()(tmp_path)])
        log("step 1", step=1, loss=2.5, grad_norm=0.5)
        log("saved", saved=1, save_s=0.1)
    assert logged == [{"loss": 2.5, "grad_norm": 0.5, "step": 1}] * 2
    assert started[0] == started[1] and started[0]["resume"] == "allow"
    (tmp_path / "wandb_id").unlink()  # a folder of the same name, on another machine
    train_gpt2.log.wandb()(tmp_path)
    assert started[2]["id"] != started[0]["id"]


def test_weights_and_biases_without_an_account_is_one_line(tmp_path, monkeypatch):
    def init(**how):
        raise Exception("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match="--wandb: No API key .*: wandb login, or set WANDB_MODE"):
        train_gpt2.log.wandb()(tmp_path)
