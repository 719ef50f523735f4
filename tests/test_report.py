"""Tests ../support/report.py: what a run says at its start, when it goes on, and at its end."""

import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import digest, flags, losses, records, train

import train_gpt2
from support import report


def test_gpt2_on_bytes_for_want_of_its_vocabulary_says_so(whole):
    record = json.loads((whole[1] / "log.jsonl").read_text().splitlines()[0])
    sizes = [(1, 10), (2, 20), (3, 30)]
    for more in ({}, {"model": "nano"}, {"data_dir": "mine"}, {"init_from": "x"}):
        flags = record["flags"] | {"model": "gpt2", "data_dir": "", "init_from": ""} | more
        changed, is_said = record | {"flags": flags}, not more
        text = report.start_text(changed, sizes, 7)
        assert ("\non bytes, since GPT-2's vocabulary is not here: fetch http" in text) == is_said
        assert "7 sequences of 16 tokens (bytes): " in text


@pytest.fixture
def first_record(whole) -> dict:
    return json.loads((whole[1] / "log.jsonl").read_text().splitlines()[0])


def start_lines(record: dict, **more) -> list[str]:
    """What is said of a record with other flags."""
    changed = record | {"flags": record["flags"] | more}
    return report.start_text(changed, [(1, 10), (2, 20), (3, 30)], 7).splitlines()


def test_a_run_says_what_it_is(first_record):
    own = start_lines(first_record, data_dir="", out_dir="out/7")
    assert own[0] == "run: out/7, new"
    assert own[1].endswith(", Python's own source, since there is no --data-dir")
    assert start_lines(first_record)[1] == f"data: {first_record['flags']['data_dir']}"


def test_resume_says_whether_there_was_something(first_record, tmp_path):
    (tmp_path / "finetuned").mkdir()
    (tmp_path / "finetuned" / "checkpoint_000005.pt").touch()
    named = {"resume": True, "out_dir": str(tmp_path / "fintuned")}
    said = start_lines(first_record, **named)[0]
    assert said.endswith(f"nothing to resume there; did you mean {tmp_path / 'finetuned'}?")
    assert start_lines(first_record, **named | {"out_dir": "x"})[0].endswith("to resume there")
    assert start_lines(first_record | {"goes_on": True}, **named)[0].endswith(", goes on")


def test_a_torch_for_cpus_beside_a_gpu_is_told(first_record, monkeypatch):
    said = "an NVIDIA GPU is here, but this torch is for CPUs: pytorch.org"
    for gpu, version, is_told in (("nvidia-smi", None, True), (None, None, False),
                                  ("nvidia-smi", "13.0", False)):  # fmt: skip
        monkeypatch.setattr(shutil, "which", lambda name, gpu=gpu: gpu)
        monkeypatch.setattr(torch.version, "cuda", version)
        assert (said in start_lines(first_record)) == is_told


def test_a_run_ends_with_its_figures_and_the_next_commands(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="a run", eval_every=4)
    code, out, err = train(line, tmp_path)
    assert code == 0, err
    [done, sample, curves] = out.splitlines()[-3:]
    last = records(tmp_path / "a run", "val_loss")[12]
    assert done.startswith("done: 12 steps in 0:0") and f"validation {last:.4f} (" in done
    assert "best " in done and done.endswith("; written: a run/checkpoint_000012.pt")
    assert sample.endswith("--resume --out-dir 'a run' --sample-only")
    assert curves == "curves: python benchmarks/plot.py 'a run'"
    again = train([*line, "--resume"], tmp_path)
    assert again[0] == 0 and again[1].splitlines()[-3:] == out.splitlines()[-3:]
    assert "already complete" in again[2]


def test_resume_needs_no_flag_again(data_dir, tmp_path):
    """The flags that made the run are its own, to the last bit; what is given wins."""
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=3e-3, dropout=0.1, flash=False)
    whole, _, err = train(line, tmp_path)
    assert whole == 0, err
    expected = digest(tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoint_000012.pt"):
        path.unlink()
    code, out, err = train(["--resume", "--out-dir=run"], tmp_path)
    assert code == 0 and digest(tmp_path / "run") == expected, err
    assert out.startswith("run goes on with its own --") and " --learning-rate=0.003 " in out
    assert "not bit for bit" not in out
    code, out, err = train(["--resume", "--out-dir=run", "--steps=14"], tmp_path)
    assert code == 0 and "--steps 14 instead of 12" in out, err
    assert max(losses(tmp_path / "run")) == 14


def test_a_damaged_record_of_flags_and_a_start_without_a_step_are_passed_over(tmp_path):
    good = {"flags": {"model": "nano", "steps": 7}, "given": ["steps"], "chosen": []}
    bad = [{"flags": [1], "chosen": []}, {"flags": {"model": "x", "steps": "x"}, "chosen": []},
           {"flags": {}, "chosen": []}, {"flags": None}]  # fmt: skip
    failed = {"flags": {"model": "nano", "steps": 9}, "given": ["steps"], "chosen": []}
    lines = [json.dumps(record) for record in (good, *bad, {"step": 1, "loss": 2.5}, failed)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))

    def known(found):
        return found | {"steps": found["steps"] + 0}

    own, told = report.goes_on_with(tmp_path, {}, known, set())
    assert own == {"model": "nano", "steps": 7, "out_dir": str(tmp_path)} and "--steps=7" in told


def test_the_terminal_shows_every_so_many_steps_and_the_log_all(data_dir, tmp_path):
    code, out, err = train(flags(data_dir=data_dir, out_dir="run", log_every=5), tmp_path)
    assert code == 0, err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == [
        "1/12", "5/12", "10/12", "12/12"]  # fmt: skip
    assert len(losses(tmp_path / "run")) == 12


def test_a_speed_up_that_was_given_stays_and_one_that_is_typed_wins(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", flash=None, bf16=None)
    code, _, err = train([*line, "--speed-ups=bf16"], tmp_path)
    assert code == 0, err
    code, out, err = train(["--resume", "--out-dir=run", "--steps=14"], tmp_path)
    assert code == 0 and "not bit for bit" not in out and "--no-bf16" not in out, err
    code, out, err = train(
        ["--resume", "--out-dir=run", "--steps=16", "--speed-ups=fused", "--no-compile",
         "--no-pad-vocab"], tmp_path
    )  # fmt: skip
    assert code == 0 and "--fused True instead of False" in out, err


@pytest.mark.parametrize("ms", [math.nan, math.inf, 1e300])
def test_a_damaged_figure_ends_no_finished_run(tmp_path, ms):
    records = [{"step": 1, "loss": 2.5, "ms": ms}, {"step": 1, "val_loss": ms}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert report.end_text(tmp_path).startswith("done")


def test_the_newest_checkpoint_is_the_one_with_the_most_steps(tmp_path):
    for name in ("999999", "1000000", "best"):
        (tmp_path / f"checkpoint_{name}.pt").touch()
    assert f"written: {tmp_path / 'checkpoint_1000000.pt'}\n" in report.end_text(tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_samples_are_seen_on_a_terminal(monkeypatch, capsys):
    """Piece by piece, beside a line that overwrites itself."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    report.Status(bool, True)("a sample")
    train_gpt2.log.show_samples(iter([iter(["a ", "piece"]), iter(["another"])]))
    assert capsys.readouterr().out == "a piece\n---\nanother\n"


def test_without_stdout_and_stderr_nothing_is_shown(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    report.Status(bool, True)("opening the data")
    train_gpt2.log.show("a line")


def test_a_terminal_shows_what_goes_on_and_what_is_left(monkeypatch):
    times, noted = iter([0, 0, 0, 60, 61, 120]), []
    monkeypatch.setattr(report.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(sys, "stderr", Terminal())
    status = report.Status(noted.append, True)
    for phase in ("opening the data", "micro-step 1/4 of step 1", "micro-step 2/4 of step 1"):
        status(phase)
    assert len(noted) == 3 and "opening the data" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().rstrip().endswith("micro-step 2/4 of step 1, 0:03:00 left")


def test_a_pipe_gets_no_line_that_overwrites_itself(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    report.Status(bool, True)("micro-step 1/4 of step 1")
    assert not sys.stderr.getvalue()


def test_what_to_type_after_a_stop_is_for_as_many_ranks():
    to_go_on = "train_gpt2.py --resume --out-dir 'out/a b'"
    assert report.stop_text(Path("out/a b"), 7, 1).endswith(f"to go on: python {to_go_on}")
    assert report.stop_text(Path("out/a b"), 7, 8).endswith(f": torchrun (as before) {to_go_on}")
