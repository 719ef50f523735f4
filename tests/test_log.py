"""Tests ../support/log.py: what a run shows people, in log.jsonl and on the terminal."""

import io
import json
import os
import re
import shutil
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import NEEDS_POSIX, flags, losses, records, train

import train_gpt2
from config import TrainConfig
from model import GPTConfig
from support import log as log_module
from support import report
from support.cli import quoted
from support.ending import DiskError, UserError
from support.files import REPO, FolderLock
from support.log import Log, start_wandb

# ---- log.jsonl -----------------------------------------------------------------------------------


def test_every_flag_and_every_choice_is_in_the_first_record(whole):
    record = json.loads((whole[1] / "log.jsonl").read_text().splitlines()[0])
    assert set(record["flags"]) == {f.name for f in fields(TrainConfig)}
    assert {"torch", "python", "commit", "device", "threads", "ranks"} <= set(record["environment"])
    assert record["reasons"]["--no-compile"] and record["flags"]["compile"] is False
    assert "steps" in record["typed"] and "compile" not in record["typed"]
    assert record["tokenizer"] == "bytes" and record["resumed"] is None


def test_a_start_is_a_record_with_the_tokens_that_are_validated_on(data_dir, tmp_path):
    for eval_tokens in (0, 30, 10**9):  # 10**9: all that there are
        line = flags(
            data_dir=data_dir, out_dir=f"run{eval_tokens}", steps=3, eval_tokens=eval_tokens
        )
        code, out, err = train(line, tmp_path)
        assert code == 0, err
        log = tmp_path / f"run{eval_tokens}" / "log.jsonl"
        num_tokens = json.loads(log.read_text().splitlines()[0])["val_tokens"]
        assert f" {num_tokens:,} tokens for validation" in out
        assert num_tokens == {0: 0, 30: 16}.get(eval_tokens, num_tokens)
    assert 30 < num_tokens < 10**9


def test_each_step_is_a_record_with_its_figures(whole):
    lines = [json.loads(line) for line in (whole[2] / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(192 / line["ms"] * 1000)
        assert {"grad_norm", "learning_rate", "tflops", "matmul_share", "peak_mib"} <= set(line)
    assert all("time" in line for line in lines) and lines[-1]["done"] == 12


# ---- The terminal --------------------------------------------------------------------------------


def test_the_terminal_shows_every_so_many_steps_and_the_log_all(data_dir, tmp_path):
    code, out, err = train(flags(data_dir=data_dir, out_dir="run", log_every=5), tmp_path)
    assert code == 0 and err == ""
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert shown == ["1/12", "5/12", "10/12", "12/12"]
    assert len(losses(tmp_path / "run")) == 12
    if pytest.importorskip("matplotlib"):
        assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_says_what_it_is_and_ends_with_the_next_commands(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="a run", eval_every=4)
    code, out, err = train(line, tmp_path)
    assert code == 0, err
    first, *_, done, sample, curves = out.splitlines()
    assert first == "run: a run, new" and f"data: {data_dir}, bytes: " in out
    val_losses = records(tmp_path / "a run", "val_loss")
    best = min(val_losses, key=val_losses.get)
    assert done.startswith(f"done: 12 steps, validation {val_losses[12]:.4f}, best ")
    last = Path("a run", "step_000012")
    assert f"{val_losses[best]:.4f} after step {best}; saved in {last}" in done
    repo = os.path.relpath(REPO, tmp_path)  # the commands work where they are printed
    assert sample == f"sample: {quoted('python', os.path.join(repo, 'sample.py'), 'a run')}"
    plot = os.path.join(repo, "benchmarks", "plot.py")
    assert curves == f"curves: {quoted('python', plot, 'a run')}"


def test_the_end_names_the_best_checkpoint_if_it_is_not_the_last(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", eval_every=4, learning_rate=0)  # all are alike
    code, out, err = train(line, tmp_path)
    assert code == 0, err
    command = next(line for line in out.splitlines() if line.startswith("best checkpoint: python "))
    arguments = command.split()[4:]
    assert arguments == [str(Path("run", "step_000004"))]
    code, _, err = train([*arguments, "--sample-tokens=3", "--prompt="], tmp_path, script="sample")
    assert code == 0, err


def lines_of(warn, *args, log: Log | None = None, **run) -> list[str]:
    """What one of the logger's functions prints about a run."""
    lines = []
    log = log or Log(FolderLock(Path("nowhere")), is_main=False)
    log.print = lines.append
    warn(SimpleNamespace(log=log, **run), *args)
    return lines


def test_a_validation_loss_that_rises_for_a_third_of_the_run_is_told_once():
    config = SimpleNamespace(steps=300)
    val_losses, told = {}, []
    log = Log(FolderLock(Path("nowhere")), is_main=False)
    for step, loss in {0: 9, 50: 3, 100: 3.2, 150: 3.02, 200: 3.1, 250: 3.2, 300: 3.3}.items():
        val_losses[step] = loss
        lines = lines_of(
            report.warn_if_overfitting, log=log, config=config, step=step, val_losses=val_losses
        )
        told += [step] * len(lines)
        assert all("since step 50:" in line and "--dropout" in line for line in lines)
    assert told == [200]
    # A loss that is not finite is not among them, and may be the only one.
    assert not lines_of(report.warn_if_overfitting, config=config, step=300, val_losses={})


def test_many_epochs_are_told(data_dir, tmp_path):
    for steps, is_told in ((12, False), (60, True)):
        line = flags(data_dir=data_dir, out_dir=f"run{steps}", steps=steps, save_every=0)
        _, out, _ = train(line, tmp_path)
        assert bool(re.search(r"^\d+ epochs: ", out, re.M)) == is_told


def test_a_step_of_minutes_is_told_before_it_is_over():
    config = SimpleNamespace(model="gpt2", batch_tokens=524288, steps=50)
    assert not lines_of(report.warn_if_slow, 59, config=config, step=0, first_step=0)
    (line,) = lines_of(report.warn_if_slow, 600, config=config, step=0, first_step=0)
    assert "0:10:00" in line and "8:20:00" in line and "--model nano" in line
    (line,) = lines_of(report.warn_if_slow, 600, config=config, step=10, first_step=10)  # resumed
    assert "6:40:00" in line and "--model nano" not in line


@NEEDS_POSIX  # Windows asks the system what a terminal is
def test_a_cell_of_a_notebook_is_no_terminal(monkeypatch):
    """Jupyter gives the commands of a cell a pseudo terminal."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert log_module.is_terminal(sys.stdout)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not log_module.is_terminal(sys.stdout)


def warnings_of(environment: dict, tokenizer: str) -> list[str]:
    config = SimpleNamespace(model="nano", fp16=False)
    data = SimpleNamespace(tokenizer=tokenizer, notes=[])
    model = SimpleNamespace(config=GPTConfig())
    run = SimpleNamespace(config=config, data=data, environment=environment, model=model)
    return report.start_warnings(run, num_epochs=1)


def test_what_is_missing_on_this_machine_is_told(monkeypatch):
    cases = (("smi", "2.13.0+cpu", True), (None, "2.13.0+cpu", False), ("smi", "2.13.0", False))
    for gpu, version, is_told in cases:
        monkeypatch.setattr(shutil, "which", lambda name, gpu=gpu: gpu)
        hints = warnings_of({"device": "cpu", "torch": version}, "bytes")
        assert any("torch is for CPUs" in line for line in hints) == is_told
    monkeypatch.setattr(report, "load_tokenizer", lambda name: None)
    assert "encoder.json as vocab.json" in warnings_of({"device": "cuda", "torch": ""}, "gpt2")[0]


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_goes_away_stops_nothing(capfd, monkeypatch):
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        log_module.show("a line")
        log_module.show("another")


def test_without_stdout_and_stderr_nothing_is_shown(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    log_module.show("a line")
    assert [*log_module.progress(range(3), "step 1", True)] == [0, 1, 2]


@NEEDS_POSIX
@pytest.mark.parametrize(("is_terminal", "is_main"), [(1, 1), (1, 0), (0, 1)])
def test_only_a_terminal_gets_lines_that_overwrite_themselves(is_terminal, is_main, monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: bool(is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    for _ in log_module.progress(range(2), "validation", bool(is_main)):
        time.sleep(0.6)
    assert ("validation" in stderr.getvalue()) == bool(is_terminal and is_main)


@NEEDS_POSIX
@pytest.mark.parametrize("is_terminal", [True, False])
def test_steps_between_the_printed_ones_overwrite_each_other_on_a_terminal(
    is_terminal, tmp_path, monkeypatch
):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("COLUMNS", "12")
    stdout = io.StringIO()
    stdout.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stdout)
    log = Log(FolderLock(tmp_path), True)
    log.print_step("step 1", True)
    log.print_step("step 2, which is too long", False)
    log.print_step("step 3", False)
    log.print("saved")
    log.file.close()
    brief = "step 2, whi\r" + 11 * " " + "\rstep 3\r" + 6 * " " + "\r"
    assert stdout.getvalue() == f"step 1\n{brief * is_terminal}saved\n"


@NEEDS_POSIX
def test_a_log_that_was_moved_is_opened_again(tmp_path):
    """As logrotate does. The run's folder itself may not have been replaced."""
    run = tmp_path / "run"
    run.mkdir()
    lock = FolderLock(run)
    lock.acquire()
    log = Log(lock, True)
    log.record(flags={"steps": 3})
    log.record(step=1, loss=2.5)
    (run / "log.jsonl").rename(run / "log.jsonl.1")
    log.record(step=2, loss=2.5)
    log.record(step=3, loss=2.5)
    texts = [(run / name).read_text() for name in ("log.jsonl.1", "log.jsonl")]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [[r.get("step") for r in part] for part in records] == [[None, 1], [None, 2, 3]]
    assert records[1][0]["flags"] == {"steps": 3}  # each part can be read alone
    run.rename(tmp_path / "moved")
    run.mkdir()
    with pytest.raises(DiskError, match="another folder has its name"):
        log.record(step=4, loss=2.5)
    log.file.close()
    assert not list(run.iterdir())


def test_a_stranger_finds_all_that_repeats_a_run(whole):
    record = json.loads((whole[2] / "log.jsonl").read_text().splitlines()[0])
    assert record["command"].startswith("torchrun --standalone --nproc_per_node=2 ")
    assert "train_gpt2.py --model nano " in record["command"]
    assert " --batch-tokens 192 " in record["command"] and "commit" in record["environment"]
    assert "compile" not in record["typed"] and " --no-compile" in record["command"]  # chosen
    assert record["betas"] == [0.8, 0.95] and record["eps"] == 1e-8
    assert record["preparation"]["flags"]["val_fraction"] == 0.2
    assert record["preparation"]["input"] and record["preparation"]["account"]


# ---- Weights & Biases ----------------------------------------------------------------------------


class Tracked:
    """A run as trackio has it. W&B's also has define_metric, and its own step can't go back."""

    def __init__(self, logged: list, last_step: int):
        self.logged, self.last_step = logged, last_step

    def log(self, figures: dict, step: int | None = None):
        assert step is None or step >= self.last_step, "W&B would drop this"
        self.logged.append(figures | ({} if step is None else {"step": step}))


class TrackedByWandb(Tracked):
    def define_metric(self, name: str, step_metric: str):
        assert (name, step_metric) == ("*", "step")


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_weights_and_biases_get_the_figures_of_each_step(library, tmp_path, monkeypatch):
    """As one run for a run, also after a resume, but not for the next run in the same folder."""
    started, logged = [], []

    def init(**options):
        kind = TrackedByWandb if library == "wandb" else Tracked
        started.append(options)
        return kind(logged, 2 * (len(started) - 1) if library == "wandb" else 0)

    monkeypatch.setitem(sys.modules, library, SimpleNamespace(init=init))
    monkeypatch.setattr(log_module, "find_spec", lambda name: name == library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    for _ in range(2):
        log = Log(FolderLock(out_dir), True, start_wandb(out_dir, {"steps": 3}, True))
        log.record(step=1, loss=2.5, grad_norm=0.5)
        log.record(saved=1, save_s=0.1)
        log.file.close()
    assert logged == [{"loss": 2.5, "grad_norm": 0.5, "step": 1}] * 2
    assert started[0] == started[1] and started[0]["resume"] == "allow"
    assert started[0]["project"] == "train_gpt2" and started[0]["name"].startswith("run")
    assert started[0]["config"] == {"steps": 3}
    shutil.rmtree(out_dir)
    out_dir.mkdir()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    start_wandb(out_dir, {}, True)
    assert started[2]["project"] == "mine"
    key = "id" if library == "wandb" else "name"  # by which it knows a run
    assert started[2][key] != started[0][key]


def test_weights_and_biases_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log_module, "find_spec", lambda name: None)
    assert train_gpt2.main(["--wandb", "--device", "cpu"]) == 2
    assert "--wandb needs Weights & Biases: pip install wandb" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_weights_and_biases_without_an_account_is_one_line(tmp_path, monkeypatch):
    def init(**options):
        raise Exception("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(log_module, "find_spec", lambda name: name == "wandb")
    with pytest.raises(UserError, match="--wandb: No API key .*: .*wandb login, or set WANDB_MODE"):
        start_wandb(tmp_path, {}, True)
