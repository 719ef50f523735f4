"""Tests ../support/world.py: who the ranks are, how they agree, and how a run is asked to stop."""

import math
import os
import signal
import time
from functools import partial

import pytest
import torch
from conftest import NEEDS_POSIX, finish, in_process, raise_error, start_ranks

import train_gpt2
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


def test_ranks_of_torchrun(env):
    env({"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    assert find_world("") == find_world("cpu") == World(11, 16, CPU)
    assert not find_world("").is_main
    env({})
    assert find_world("") == World(0, 1, CPU) and find_world("").is_main
    env(ONE | {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2"})  # torchrun on each node, by srun
    assert find_world("") == World(0, 2, CPU)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_other_launchers(name, env):
    env({name: "4", "LOCAL_RANK": "0"})
    with pytest.raises(UserError, match=rf"{name} is 4.*torchrun"):
        find_world("")


# ---- How they agree ------------------------------------------------------------------------------


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
    (partial(fail_on, (1,), OSError(5, "a disk", "f")), 1, "rank 1: [Errno 5] a disk: 'f'"),
    (partial(fail_on, (1,), UserError("a flag")), 2, "rank 1: a flag"),
    (partial(fail_on, (0, 1), UserError("a flag")), 2, "error: a flag"),
    (differ, 1, "the weights of rank 1"),
]


@pytest.mark.parametrize(("act", "code", "words"), ENDS)
def test_two_ranks(act, code, words, tmp_path):
    processes = start_ranks([], tmp_path, 2, inject=partial(instead_of_a_run, act))
    found, out, err = finish(processes, tmp_path)
    assert (found, processes[1].exitcode, out) == (code, code, ""), err
    assert words in err and err.count("\n") == bool(words)
    assert "rank 1" in err or code == 0 or words == "error: a flag"
    assert (tmp_path / "rank1.err").read_text() == ""


def instead_of_a_run(act, rank: int):
    train_gpt2.Run = lambda typed, saved, world: act(world)
    train_gpt2.train = lambda run: DONE


# ---- How a run is asked to stop ------------------------------------------------------------------


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
@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGUSR1", "SIGHUP")])
def test_second_signal(names, tmp_path):
    code, out, err = in_process(tmp_path, is_signalled, *names)
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


@NEEDS_POSIX
@pytest.mark.parametrize("case", [is_ignored, is_late])
def test_stop(case, tmp_path):
    code, _, err = in_process(tmp_path, case)
    assert code == DONE, err
