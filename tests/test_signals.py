"""What asks a run to stop, and what takes its terminal, its output or its other ranks away."""

import os
import pty
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
    program,
    program_main,
    questions,
    records,
    send,
    server,
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
def test_a_signal_in_a_step_saves_it_and_a_resume_gives_the_same_bits(trial, ranks):
    """One rank hears it, and all stop after the same step."""
    inject = at("train_step", 3, send, signal.SIGTERM, on_rank=ranks - 1)
    processes = start_ranks(trial.command(), trial.folder, ranks, inject=inject)
    code, _, err = finish(processes, trial.folder)
    assert code == 3 and {process.exitcode for process in processes} == {3}, err
    assert "Traceback" not in err
    assert_stopped(trial, 3)
    trial.goes_on(ranks)


def signal_all(name: str, nth: int, number: int, rank: int):
    """Injection: before the nth call of a function on rank 0 all ranks get a signal."""
    Path(f"pid{rank}").write_text(str(os.getpid()))

    def to_all(*_):
        for path in sorted(Path().glob("pid*"), reverse=True):
            os.kill(int(path.read_text()), number)

    before(name, nth, to_all, 0, rank)


NUMBERS = [signal.SIGINT, *(pytest.param(n, marks=slow) for n in (signal.SIGUSR1, signal.SIGHUP))]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_a_signal_to_all_ranks_saves_the_step(trial, ranks, number):
    inject = partial(signal_all, "train_step", 7, number)
    processes = start_ranks(trial.command(), trial.folder, ranks, inject=inject)
    code, _, err = finish(processes, trial.folder)
    assert code == 3 and {process.exitcode for process in processes} == {3}, err
    assert_stopped(trial)
    if ranks < 3:
        trial.goes_on(ranks)


PHASES = {  # the checkpoint that is left; None: nothing is saved
    "evaluate.validate 1": None,
    "evaluate.validate 3": 6,
    "evaluate.samples 2": 6,
    "evaluate.answers 2": 6,
    "draw 2": 4,  # a step later
    "draw 5": 12,
    "train_step 12": 12,
    "log_step 4": 5,
    "checkpoint.save 1": 3,
    "checkpoint.save 6": 12,
}
FAST = ("evaluate.validate 1", "evaluate.samples 2", "evaluate.answers 2", "checkpoint.save 6")


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=() if name in FAST else slow) for name in PHASES]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_a_signal_in_any_phase_stops_saved_and_what_was_cut_short_is_repeated(trial, phase, ranks):
    changes = {"eval_every": 3, "hellaswag": questions(trial.folder), "sample_tokens": 5}
    name, nth = phase.split()
    code, _, err = trial.train(ranks, at(name, int(nth), send, signal.SIGTERM), **changes)
    step = PHASES[phase]
    if phase == "draw 5":  # all is done and saved
        assert code == 0 and "done" in read_log(trial.out_dir)[-1]
    elif step is None:
        assert code == INTERRUPTED and trial.saved() == []
    else:
        assert code == 3, err
        assert_stopped(trial, step)
        assert step not in records(trial.out_dir, "val_loss")
    assert "Traceback" not in err
    trial.goes_on(ranks, **changes | {"eval_every": 3})
    for name in ("val_loss", "sample", "hellaswag_acc"):
        assert {3, 6, 9, 12} <= records(trial.out_dir, name).keys()


def again_after(seconds: float, *_):
    """A terminal signals torchrun and the ranks, and torchrun the ranks once more."""
    for _ in range(3):
        send(signal.SIGINT)
    time.sleep(seconds)
    send(signal.SIGTERM)


@pytest.mark.parametrize(("seconds", "code"), [(1, 3), pytest.param(2.2, INTERRUPTED, marks=slow)])
def test_what_comes_within_two_seconds_is_the_same_signal_and_a_later_one_ends(
    trial, seconds, code
):
    assert trial.train(inject=at("train_step", 7, again_after, seconds))[0] == code
    assert trial.saved()[0] == (7 if code == 3 else 5)
    trial.goes_on()


def hours_end(at_step: int, rank: int):
    """Injection: on the last rank --max-hours are over before this step."""
    train_gpt2.STARTED_AT = time.monotonic()
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        is_over = lambda run, stop: setattr(stop, "end_at", 0)  # noqa: E731
        before("train_step", at_step, is_over, rank, rank)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_after_max_hours_a_run_stops_saved_and_the_same_command_goes_on(trial, ranks):
    assert trial.train(ranks, max_hours=1e-9)[0] == INTERRUPTED  # nothing is saved yet
    code, _, err = trial.train(ranks, partial(hours_end, 7), max_hours=1)
    assert code == 3, err
    assert_stopped(trial, 7)
    trial.goes_on(ranks, partial(hours_end, 99), max_hours=1)


# ---- The start -----------------------------------------------------------------------------------


def start_program(trial: Trial, env: dict | None = None, **changes):
    """train_gpt2.py as `python train_gpt2.py` runs it, in a process with output in a folder."""
    out = trial.folder / "out-of-it"
    args = trial.command(**changes), trial.folder, env or {}, out
    process = server().Process(target=program_main, args=args)
    process.start()
    return process, out


def test_ctrl_c_ends_a_rank_that_waits_for_others_at_once(trial):
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process, out = start_program(trial, env)
    wait_for(lambda: (out / "stderr").exists())
    time.sleep(1)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(3)
    assert process.exitcode == -signal.SIGINT
    assert "Traceback" not in (out / "stderr").read_text() and not trial.out_dir.exists()


@slow
@pytest.mark.parametrize("after_s", [0.2, 0.5, 1, 2, 3])
def test_ctrl_c_in_a_start_ends_at_once_and_leaves_nothing_that_stands_in_the_way(trial, after_s):
    process = start(trial, steps=10**6)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    err = process.communicate(timeout=60)[1]
    if trial.saved():
        assert process.returncode == 3
    else:
        assert process.returncode in (-signal.SIGINT, INTERRUPTED)
        assert time.monotonic() - begin < 2
    assert "Traceback" not in err, err
    steps = max(trial.saved(), default=0) + 3
    assert train(trial.command(steps=steps), trial.folder)[0] == 0


def test_ranks_that_can_not_connect_say_so_in_one_line(trial):
    """Another program listens where rank 0 should."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code, _, err = program(trial.command(), trial.folder, env, trial.folder / "out-of-it")
    assert code == 2 and f"127.0.0.1:{port}" in err and "Traceback" not in err
    env |= {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "99999"}
    code, _, err = program(trial.command(), trial.folder, env, trial.folder / "out-of-it")
    assert code == 2 and "99999" in err and "Traceback" not in err


def test_three_starts_at_once_take_three_folders(trial):
    line = trial.command(auto_resume=None, out_dir=None, data_dir=trial.data, steps=3, **QUICK)
    processes = [start_ranks(line, trial.folder)[0] for _ in range(3)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0] * 3
    made = sorted((trial.folder / "out").iterdir())
    assert [path.name for path in made] == ["001", "002", "003"]
    assert all([*losses(path)] == [1, 2, 3] for path in made)


# ---- Terminals, pipes and their ends -------------------------------------------------------------


def start(trial: Trial, **changes) -> subprocess.Popen:
    """python train_gpt2.py, from nothing."""
    command = [sys.executable, train_gpt2.__file__, *trial.command(**changes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=trial.folder, start_new_session=True, **pipes)


def closed_reader(number: int, rank: int):
    """Injection: whoever reads the output or the errors leaves after the third step."""
    reader, writer = os.pipe()
    os.dup2(writer, number)
    setattr(sys, ("stdout", "stderr")[number - 1], open(number, "w", closefd=False))
    before("train_step", 3, lambda *_: (os.close(reader), os.close(writer)), 0, rank)


@pytest.mark.parametrize("number", [1, 2], ids=["stdout", "stderr"])
def test_a_reader_that_leaves_ends_no_run(trial, number):
    """As `| head`. A line is printed at each step, and one after a signal."""
    line = {"eval_every": 5, "log_every": 1}
    trial.goes_on(inject=partial(closed_reader, number), **line)


def full_output(rank: int):
    sys.stdout = open("/dev/full", "w")


def test_an_output_that_is_full_ends_the_run_with_1(trial):
    code, _, err = trial.train(inject=full_output)
    assert code == 1 and "No space" in err and len(err.splitlines()) == 1, err
    trial.goes_on()


@slow
def test_ctrl_c_to_a_run_and_its_tee_saves_the_step(trial):
    """tee ends first, so the run writes into a pipe without a reader."""
    program = " ".join([sys.executable, train_gpt2.__file__, *trial.command(steps=10**6)])
    shell = ["bash", "-c", f"{program} --log-every 1 2>&1 | tee log; exit ${{PIPESTATUS[0]}}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(shell, cwd=trial.folder, start_new_session=True, **quiet)
    wait_for(lambda: has_step(trial, 3))
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert_stopped(trial)
    assert process.returncode in (3, -signal.SIGINT)  # the run's; or bash's own


def in_terminal(trial: Trial, *before: str, **changes) -> tuple[int, int]:
    """A process whose controlling terminal is a new one, and that terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(trial.folder)
        command = [*before, sys.executable, train_gpt2.__file__, *trial.command(**changes)]
        os.execvp(command[0], command)
    return pid, terminal


def read_some(terminal: int):
    with suppress(OSError):
        os.read(terminal, 1 << 16)


def wait_for_end(pid: int, terminal: int = -1) -> int:
    """The exit code of a process whose terminal is read until then."""
    ended = []
    wait_for(lambda: read_some(terminal) or ended.extend(os.waitpid(pid, os.WNOHANG)) or ended[-2])
    return os.waitstatus_to_exitcode(ended[-1])


def wait_and_read(trial: Trial, terminal: int, step: int):
    os.set_blocking(terminal, False)
    wait_for(lambda: read_some(terminal) or has_step(trial, step))


@slow
@pytest.mark.parametrize("how", ["closed", "Ctrl-C", "Ctrl-C twice"])
def test_a_terminal_that_is_closed_or_has_ctrl_c_saves_the_step(trial, how):
    """Closed, it sends SIGHUP, and each write to it fails with EIO."""
    pid, terminal = in_terminal(trial, steps=10**6, log_every=1)
    wait_and_read(trial, terminal, 3)
    if how == "closed":
        os.close(terminal)
    for _ in range({"closed": 0, "Ctrl-C": 1, "Ctrl-C twice": 2}[how]):
        os.write(terminal, b"\x03")
    code = wait_for_end(pid, terminal)
    assert_stopped(trial)
    assert code == 3


@slow
def test_what_nohup_ignores_stays_ignored(trial):
    pid, terminal = in_terminal(trial, "nohup", eval_every=1)
    wait_and_read(trial, terminal, 1)
    os.close(terminal)
    assert wait_for_end(pid) == 0
    assert digest(trial.out_dir) == digest(trial.whole[1])
    assert "done" in (trial.folder / "nohup.out").read_text()


@slow
def test_repeated_ctrl_c_changes_no_exit_code(trial):
    """Within two seconds it is the same one, through the interpreter's shutdown."""
    with start(trial, steps=10**6) as process:
        wait_for(lambda: has_step(trial))
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        err = process.stderr.read()
    assert_stopped(trial)
    assert process.returncode == 3 and "Traceback" not in err, err


# ---- torchrun ------------------------------------------------------------------------------------


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def torchrun(trial: Trial, *options: str, mistake: str = "", **changes) -> subprocess.Popen:
    more = [mistake] if mistake else []
    command = [*TORCHRUN, *options, train_gpt2.__file__, *trial.command(*more, **changes)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=trial.folder, start_new_session=True, **quiet)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """The processes of a torchrun that run the program already, once there are two."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
    found = [pid for pid, line in lines.items() if train_gpt2.__file__.encode() in line]
    return found if len(found) == 2 else []


@slow
@pytest.mark.parametrize("who", ["torchrun", "all", "a rank"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_torchrun_passes_a_signal_on_and_the_step_is_saved(trial, number, who):
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
def test_torchrun_restarts_a_killed_rank_and_the_run_has_the_same_bits(trial):
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


@slow
@pytest.mark.parametrize("mistake", ["--data-dir=nowhere", "--steps=0", "--stesp=3"])
def test_torchrun_shows_a_mistake_once(trial, mistake):
    launcher = torchrun(trial, mistake=mistake)
    err = launcher.communicate(timeout=100)[1]
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert launcher.returncode == 1 and len(lines) == 1, err
    assert mistake.split("=")[0] in lines[0] and not trial.out_dir.exists()


@slow
def test_a_bug_on_one_rank_ends_all_and_torchrun_shows_its_traceback(trial, tmp_path):
    """main carries torch's @record."""
    edited = tmp_path / "edited.py"
    bug = "\n_log, log_step = log_step, lambda run, *args: _log(run, *args) or 1 / (run.step - 3)\n"
    text = Path(train_gpt2.__file__).read_text()
    start = text.index('if __name__ == "__main__":\n    sys.stdout')
    edited.write_text(text[:start] + bug + text[start:])
    env = os.environ | {"PYTHONPATH": os.path.dirname(train_gpt2.__file__)}
    command = [*TORCHRUN, edited, *trial.command()]
    done = subprocess.run(command, cwd=trial.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    trial.goes_on(2)
