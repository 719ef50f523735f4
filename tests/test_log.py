"""Tests ../support/log.py: log.jsonl, the terminal, Weights & Biases and loss.png."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import NEEDS_POSIX, ended, flags, losses, redirect, server, train

from config import DEFAULTS, OF_COMMAND, TrainConfig
from support.cli import UserError, show
from support.log import LOG, Log, draw, find_tracker, read_log

CONFIG = TrainConfig(warmup_steps=0, steps=3)

# ---- log.jsonl -----------------------------------------------------------------------------------


def test_the_first_record_is_what_the_run_is_and_the_last_how_it_ended(whole):
    for ranks in (1, 2):
        records = read_log(whole[ranks])
        assert records[0]["flags"].keys() == DEFAULTS.keys() - {*OF_COMMAND} | {"machine"}
        assert {"device", "ranks", "threads", "torch", "commit"} == {
            *records[0]["flags"]["machine"]
        }
        assert records[0]["flags"] == json.loads((whole[ranks] / "config.json").read_text())
        assert records[0]["process"] > 0 and records[0]["resumed"] == 0
        assert records[-1]["done"] == 12
        assert all("time" in record for record in records)
        steps = [record for record in records if "loss" in record]
        assert [record["step"] for record in steps] == list(range(1, 13))
        assert all({"grad_norm", "learning_rate"} <= record.keys() for record in steps)
        speeds = [192 / record["ms"] * 1000 for record in steps]
        assert [record["tokens_per_s"] for record in steps] == pytest.approx(speeds)


def test_a_line_that_a_kill_has_cut_costs_that_line_alone(tmp_path):
    assert read_log(tmp_path) == []
    torn = b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo'
    for end in (b"", b"\xff\x00", b"\n", b"\0" * 4096):
        (tmp_path / LOG).write_bytes(torn + end)
        log = Log(tmp_path, vars(CONFIG), 1, is_main=True)
        log.record(step=2, loss=2.25)
        log.record(done=2)
        log.file.close()
        records = read_log(tmp_path)
        assert [record.get("loss") for record in records] == [2.5, 2.25, None]
        assert read_log(tmp_path)[-1]["done"] == 2


def test_only_the_main_rank_writes(tmp_path, capsys):
    log = Log(tmp_path, vars(CONFIG), 0, is_main=False)
    log.print("a")
    log.step({"step": 1}, "b")
    log.record(done=1)
    assert capsys.readouterr().out == "" and not [*tmp_path.iterdir()]


# ---- The terminal --------------------------------------------------------------------------------


def test_the_terminal_shows_every_so_many_steps_and_the_log_all(data_dir, tmp_path):
    code, out, err = train(flags(data_dir=data_dir, out_dir="run", log_every=5), tmp_path)
    assert code == 0 and err == ""
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert shown == ["1/12", "5/12", "10/12", "12/12"]
    assert len(losses(tmp_path / "run")) == 12
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")


def show_to(target: str, out: Path):
    """Show two lines to a reader that has gone, a terminal that is closed, or a disk that is full,
    and end as Python does."""
    redirect(out)
    if target == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif target == "terminal":
        master, writer = os.openpty()
        os.close(master)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writer, 1)
    for _ in range(2):
        try:
            show("a line")
        except OSError as error:
            print(type(error).__name__, error.errno, file=sys.stderr)
    sys.stdout.flush()


@NEEDS_POSIX
@pytest.mark.parametrize("target", ["pipe", "terminal", "/dev/full"])
def test_only_a_full_disk_is_an_error_of_showing(target, tmp_path):
    if target[0] == "/" and not os.path.exists(target):
        pytest.skip("this system has none")
    process = server().Process(target=show_to, args=(target, tmp_path / "out"))
    code, _, err = ended(process, tmp_path / "out")
    assert code == 0 and err.splitlines() == (["OSError 28"] if target == "/dev/full" else [])


# ---- loss.png ------------------------------------------------------------------------------------


def test_a_picture_of_any_log_is_drawn(tmp_path, monkeypatch):
    def step(n: int, **figures) -> str:
        return json.dumps({"step": n} | figures) + "\n"

    validated = step(0, val_loss=5.5) + step(4, val_loss=5.0)
    many = "".join(step(n, loss=5.0 - n / 999) for n in range(1, 999))
    for text in (step(1, loss=5.0), many + validated, many + step(3, loss=2.0)):
        (tmp_path / LOG).write_text(text)
        draw(tmp_path, "a run")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert {path.name for path in tmp_path.iterdir()} == {LOG, "loss.png"}
        (tmp_path / "loss.png").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        draw(tmp_path, "without matplotlib")
    (tmp_path / LOG).write_text(step(1, saved=1) + validated)  # as before the first step
    draw(tmp_path, "without losses")
    assert not (tmp_path / "loss.png").exists()


# ---- Weights & Biases ----------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_tracker_gets_the_figures_of_each_step(library, tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(log=lambda figures, step: logged.append((step, figures)))
    module = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, library, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == library)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config = replace(CONFIG, wandb=True)
    log = Log(tmp_path, vars(config), 0, is_main=True)
    log.step({"step": 1, "loss": 2.5, "grad_norm": 0.5, "none": None}, "")
    log.record(saved=1, save_s=0.1)
    log.record(step=1, val_loss=2.25, sample="text")
    log.file.close()
    assert logged == [(1, {"loss": 2.5, "grad_norm": 0.5}), (1, {"val_loss": 2.25})]
    assert started == [{"project": "mine", "name": tmp_path.name, "config": asdict(config)}]


def test_a_tracker_that_is_not_installed_is_a_mistake(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--wandb .*pip install wandb"):
        find_tracker()
