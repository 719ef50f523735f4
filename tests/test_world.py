"""Tests ../support/world.py: who the ranks are, how they agree, and how a run is asked to stop."""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from conftest import NEEDS_POSIX, ended, finish, flags, redirect, server, start_ranks

import train_gpt2
from dataloader import ShardError
from support.cli import RunError, UserError
from support.world import DONE, INTERRUPTED, LAUNCHERS, Stop, World, find_world

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
CPU = torch.device("cpu")


@pytest.fixture
def env(monkeypatch):
    """A function that sets the variables of launchers; all others of them are not set."""

    def put(variables: dict[str, str]):
        for name in (*ONE, "LOCAL_WORLD_SIZE", *LAUNCHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put({})
    return put


# ---- Who the ranks are ---------------------------------------------------------------------------


def test_a_rank_is_what_torchrun_says(env):
    env({"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    assert find_world("") == find_world("cpu") == World(11, 16, CPU)
    assert not find_world("").is_main
    env({})
    assert find_world("") == World(0, 1, CPU) and find_world("").is_main
    env(ONE | {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2"})  # torchrun on each node, by srun
    assert find_world("") == World(0, 2, CPU)


@pytest.mark.parametrize("variables", [ONE, {"PMI_SIZE": "1"},
                                       {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}])  # fmt: skip
def test_one_process_is_alone_whatever_its_launcher_sets(variables, env):
    env(variables)
    assert find_world("") == World(0, 1, CPU)


@pytest.mark.parametrize("name", ["WORLD_SIZE", *LAUNCHERS])
def test_ranks_that_torchrun_did_not_start_are_refused(name, env):
    env({name: "4", "LOCAL_RANK": "0"})
    with pytest.raises(UserError, match=rf"{name} is 4.*torchrun"):
        find_world("")


@pytest.mark.parametrize("kind", ["cuda", "cuda:7", "mps", "nothing", "meta", "xpu"])
def test_a_device_that_is_not_there_is_named(kind, env):
    with pytest.raises(UserError, match=kind):
        find_world(kind)


# ---- How they agree ------------------------------------------------------------------------------


def test_a_rank_that_is_alone_agrees_with_itself():
    world = World(0, 1, CPU)
    assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    assert world.gather("a") == ["a"] and world.together(max, 1, 2) == 2
    world.check_same("all", world)
    with pytest.raises(UserError, match="^no$"):
        world.together(raise_error, UserError("no"))
    with pytest.raises(RuntimeError):  # a bug stays one
        world.together(raise_error, RuntimeError())


def raise_error(error: Exception, *_):
    raise error


def fail_on(ranks: tuple[int, ...], error: Exception, world: World):
    values = torch.tensor([1.0, math.inf if world.rank else 1.0])
    assert world.sum(values).tolist() == [2, math.inf]
    assert world.gather(world.rank) == [0, 1]
    assert world.together(str, world.rank) == str(world.rank)
    rows = torch.zeros(2, 3, dtype=torch.bfloat16)
    rows[world.rank] = world.rank + 0.5
    world.gather_rows(rows)
    assert rows.tolist() == [[0.5] * 3, [1.5] * 3]
    world.check_same("numbers", {"--seed": 1})
    world.together(lambda: raise_error(error) if world.rank in ranks else None)


def differ(world: World):
    world.check_same("the weights", [7, world.rank])


ENDS = [  # what each of two ranks does instead of a run, and what comes of it
    (partial(fail_on, (), RunError("none")), DONE, ""),
    (partial(fail_on, (1,), RunError("a disk")), 1, "rank 1: a disk"),
    (partial(fail_on, (1,), UserError("a flag")), 2, "rank 1: a flag"),
    (partial(fail_on, (1,), ShardError("a shard")), 2, "rank 1: a shard"),
    (partial(fail_on, (0, 1), UserError("a flag")), 2, "error: a flag"),
    (differ, 1, "the weights of rank 1"),
]


@pytest.mark.parametrize(("act", "code", "words"), ENDS)
def test_two_ranks_end_alike_and_the_main_one_says_why(act, code, words, tmp_path):
    processes = start_ranks([], tmp_path, 2, inject=partial(instead_of_a_run, act))
    found, out, err = finish(processes, tmp_path)
    assert (found, processes[1].exitcode, out) == (code, code, ""), err
    assert words in err and err.count("\n") == bool(words)
    assert "rank 1" in err or code == 0 or words == "error: a flag"
    assert (tmp_path / "rank1.err").read_text() == ""


def instead_of_a_run(act, rank: int):
    train_gpt2.Run = lambda typed, saved, world: act(world)
    train_gpt2.train = lambda run: DONE


NOTE_THREADS = """
import os, sys
from pathlib import Path

import train_gpt2

code = train_gpt2.main(sys.argv[1:])
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
Path("threads" + os.environ["RANK"]).write_text("".join(names))
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_outlives_the_group_of_ranks(data_dir, tmp_path):
    """A thread that frees a tensor while Python ends aborts the process, once in some thousand.
    In processes of their own: those of the other tests have imported all of torch before."""
    (tmp_path / "note_threads.py").write_text(NOTE_THREADS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = flags(data_dir=data_dir, out_dir="run", steps=1, warmup_steps=0)
    variables = os.environ | {"PYTHONPATH": os.path.dirname(train_gpt2.__file__)}
    command = [*torchrun, "note_threads.py", *line]
    subprocess.run(command, check=True, cwd=tmp_path, env=variables)
    for rank in range(2):
        names = (tmp_path / f"threads{rank}").read_text()
        assert "python" in names and "gloo" not in names


# ---- How a run is asked to stop ------------------------------------------------------------------


def in_process(function, out) -> tuple[int, str, str]:
    return ended(server().Process(target=do, args=(function, out)), out)


def do(function, out):
    redirect(out)
    function()
    os._exit(DONE)


def send(name: str):
    os.kill(os.getpid(), getattr(signal, name))


def is_signalled(first: str, second: str):
    stop = Stop(math.inf)
    assert not stop
    send(first)
    assert stop  # and this process lives
    send(second)  # within two seconds: of torchrun, which had the same
    assert stop
    stop.signalled_at -= 1.9
    send(second)
    print("alive", flush=True)
    stop.signalled_at -= 0.2
    send(second)
    print("never printed", flush=True)


@NEEDS_POSIX
@pytest.mark.parametrize(
    "names", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGUSR1", "SIGHUP")]
)
def test_a_signal_asks_a_later_one_ends_and_what_comes_between_is_the_first(names, tmp_path):
    code, out, err = in_process(partial(is_signalled, *names), tmp_path / "out")
    assert (code, out) == (INTERRUPTED, "alive\n") and "second signal" in err


def is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop(math.inf)
    for _ in range(2):
        send("SIGHUP")
        assert not stop
    send("SIGTERM")
    assert stop


def is_late():
    assert Stop(time.monotonic() - 0.1) and not Stop(time.monotonic() + 9) and not Stop(math.inf)


def has_no_stderr():
    os.close(2)
    stop = Stop(math.inf)
    send("SIGTERM")
    assert stop


@NEEDS_POSIX
@pytest.mark.parametrize("case", [is_ignored, is_late, has_no_stderr])
def test_a_run_stops_after_its_hours_or_a_signal_but_not_one_that_nohup_ignores(case, tmp_path):
    code, _, err = in_process(case, tmp_path / "out")
    assert code == DONE, err
