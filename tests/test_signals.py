"""What asks a run to stop, and what takes its terminal, its output or its other ranks away."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import (
    Trial,
    at,
    before,
    digest,
    finish,
    free_port,
    losses,
    questions,
    records,
    send,
    start_ranks,
    train,
    wait_for,
)

import train_gpt2
from support.log import read_log

slow = pytest.mark.slow
INTERRUPTED = 130
QUICK = {"eval_tokens": 64, "num_samples": 0}


def has_step(trial: Trial, step: int = 1) -> bool:
    return trial.log.exists() and f'"step": {step}, "loss"' in trial.log.read_text()


def assert_stopped(trial: Trial, step: int | None = None):
    """It has saved its last step, and its log says so."""
    last = max(losses(trial.out_dir), default=0) if step is None else step
    assert trial.saved()[0] == max(losses(trial.out_dir), default=0) == last
    assert read_log(trial.out_dir)[-1]["stopped"] == last


# ---- One signal, and a second one ----------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_to_one_rank(trial, ranks):
    """One rank hears it, and all stop after the same step."""
    inject = at("train_step", 3, send, signal.SIGTERM, on_rank=ranks - 1)
    processes = start_ranks(trial.command(), trial.folder, ranks, inject=inject)
    code, _, err = finish(processes, trial.folder)
    assert code == 3 and {process.exitcode for process in processes} == {3}, err
    assert "Traceback" not in err
    assert_stopped(trial, 3)
    trial.goes_on(ranks)


PHASES = {  # the checkpoint that is left; None: nothing is saved
    "evaluate.validate 1": None,
    "evaluate.validate 3": 6,
    "evaluate.samples 2": 6,
    "evaluate.answers 2": 6,
    "log_step 4": 5,
    "checkpoint.save 6": 12,
}
FAST = ("evaluate.validate 1", "evaluate.samples 2")


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=() if name in FAST else slow) for name in PHASES]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_signal_in_any_phase(trial, phase, ranks):
    changes = {"eval_every": 3, "hellaswag": questions(trial.folder), "sample_tokens": 5}
    name, nth = phase.split()
    code, _, err = trial.train(ranks, at(name, int(nth), send, signal.SIGTERM), **changes)
    step = PHASES[phase]
    if step is None:
        assert code == INTERRUPTED and trial.saved() == []
    else:
        assert code == 3, err
        assert_stopped(trial, step)
        assert step not in records(trial.out_dir, "val_loss")
    assert "Traceback" not in err
    trial.goes_on(ranks, **changes)
    for name in ("val_loss", "sample", "hellaswag_acc"):
        assert {3, 6, 9, 12} <= records(trial.out_dir, name).keys()


def hours_end(at_step: int, rank: int):
    """Injection: on the last rank --max-hours are over before this step."""
    train_gpt2.STARTED_AT = time.monotonic()
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        is_over = lambda run, stop: setattr(stop, "end_at", 0)  # noqa: E731
        before("train_step", at_step, is_over, rank, rank)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_max_hours(trial, ranks):
    assert trial.train(ranks, max_hours=1e-9)[0] == INTERRUPTED  # nothing is saved yet
    code, _, err = trial.train(ranks, partial(hours_end, 7), max_hours=1)
    assert code == 3, err
    assert_stopped(trial, 7)
    trial.goes_on(ranks, partial(hours_end, 99), max_hours=1)


# ---- The start -----------------------------------------------------------------------------------


def start_rank(trial: Trial, rank: int, port: int) -> subprocess.Popen:
    """python train_gpt2.py, as one of two ranks."""
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, train_gpt2.__file__, *trial.command()]
    pipe = {"stderr": subprocess.PIPE, "text": True, "cwd": trial.folder}
    return subprocess.Popen(command, env=os.environ | env, **pipe)


@slow
def test_ctrl_c_while_connecting(trial):
    """It ends at once, with nothing saved."""
    with start_rank(trial, 1, free_port()) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(20)
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == -signal.SIGINT
        assert "Traceback" not in process.stderr.read() and not trial.out_dir.exists()


@slow
def test_ranks_that_can_not_connect(trial):
    """Another program listens where rank 0 should."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start_rank(trial, 0, port)
        err = process.communicate()[1]
    assert process.returncode == 2 and f"127.0.0.1:{port}" in err and "Traceback" not in err


def test_three_starts_at_once(trial):
    line = trial.command(auto_resume=None, out_dir=None, data_dir=trial.data, steps=3, **QUICK)
    processes = [start_ranks(line, trial.folder)[0] for _ in range(3)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0] * 3
    made = sorted((trial.folder / "out").iterdir())
    assert [path.name for path in made] == ["001", "002", "003"]
    assert all([*losses(path)] == [1, 2, 3] for path in made)


# ---- Terminals, pipes and their ends -------------------------------------------------------------


def closed_reader(number: int, rank: int):
    """Injection: whoever reads the output or the errors leaves after the third step."""
    reader, writer = os.pipe()
    os.dup2(writer, number)
    setattr(sys, ("stdout", "stderr")[number - 1], open(number, "w", closefd=False))
    before("train_step", 3, lambda *_: (os.close(reader), os.close(writer)), 0, rank)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=slow)], ids=["stdout", "stderr"])
def test_reader_that_leaves(trial, number):
    """As `| head`. A line is printed at each step, and one after a signal."""
    line = {"eval_every": 5, "log_every": 1}
    trial.goes_on(inject=partial(closed_reader, number), **line)


# ---- torchrun ------------------------------------------------------------------------------------


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def torchrun(trial: Trial, *options: str, **changes) -> subprocess.Popen:
    command = [*TORCHRUN, *options, train_gpt2.__file__, *trial.command(**changes)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=trial.folder, start_new_session=True, **quiet)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """The processes of a torchrun that run the program already, once there are two."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
    found = [pid for pid, line in lines.items() if train_gpt2.__file__.encode() in line]
    return found if len(found) == 2 else []


@slow
@pytest.mark.parametrize(
    ("number", "who"),
    [(signal.SIGTERM, "torchrun"), (signal.SIGUSR1, "all"), (signal.SIGINT, "a rank")],
)
def test_torchrun_passes_signals_on(trial, number, who):
    """SLURM and systemd signal torchrun and every rank, and torchrun then signals the ranks."""
    option = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP"
    launcher = torchrun(trial, option, steps=10**6)
    wait_for(lambda: has_step(trial, 3))
    pids = ranks_of(launcher)
    chosen = {"torchrun": [launcher.pid], "all": [launcher.pid, *pids], "a rank": pids[-1:]}
    for pid in chosen[who]:
        os.kill(pid, number)
    err = launcher.communicate(timeout=120)[1]
    assert launcher.returncode != 0, err
    assert_stopped(trial)
    code, _, err = train(trial.command(steps=trial.saved()[0] + 3), trial.folder, 2)
    assert code == 0, err


@slow
def test_torchrun_restarts_a_killed_rank(trial):
    with torchrun(trial, "--max-restarts=10", save_every=1, steps=100) as launcher:
        try:
            for starts, step in enumerate((3, 40), 1):
                wait_for(lambda step=step: has_step(trial, step))
                os.kill(ranks_of(launcher)[-1], signal.SIGKILL)
                wait_for(lambda n=starts: trial.log.read_text().count('"resumed"') > n, 60)
            err = launcher.communicate(timeout=400)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, err
    code, _, err = trial.train(2, out_dir="whole", save_every=1, steps=100)
    assert code == 0 and losses(trial.out_dir) == losses(trial.folder / "whole"), err
    assert digest(trial.out_dir) == digest(trial.folder / "whole")
