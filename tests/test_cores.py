"""Tests ../support/cores.py."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from support import cores

ROOT = Path(cores.__file__).parent.parent
NEEDS = pytest.mark.skipif(
    not cores.waited() or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


def run(program: str, **env: str) -> str:
    """What it prints, in a process with PyTorch's own number of threads."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
    } | env
    words = [sys.executable, "-c", program]
    return subprocess.run(
        words, env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def wait_for(what) -> bool:
    end = time.monotonic() + 10
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


def have(monkeypatch, num_threads: int, num_cores: int):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(num_cores)}, raising=False)


CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine that others take a share of, and the crowds that stand on it."""
    now = {"share": 0.0, "crowds": []}

    def waited() -> dict[str, int]:
        return {"quiet": 5, "main": int(now["share"] * time.perf_counter() * 1e9)}

    class Crowd(threading.Event):
        def __init__(self, size: int):
            super().__init__()
            now["crowds"].append(self)

        leave = threading.Event.set

    monkeypatch.setattr(cores, "waited", waited)
    monkeypatch.setattr(cores, "Crowd", Crowd)
    monkeypatch.setattr(cores, "PERIOD_S", 0.02)
    have(monkeypatch, 2, 2)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return now


def test_a_crowd_stands_while_others_take_a_core_and_only_then(machine):
    crowds = machine["crowds"]
    with cores.shared_cores(CPU):
        time.sleep(0.2)
        assert not crowds  # quiet
        machine["share"] = 0.5
        assert wait_for(lambda: len(crowds) == 1)
        time.sleep(0.2)
        assert len(crowds) == 1 and not crowds[0].is_set()  # one is enough
        machine["share"] = 0.0
        assert wait_for(crowds[0].is_set)
        machine["share"] = 0.5
        assert wait_for(lambda: len(crowds) == 2)
    assert crowds[1].is_set()  # none is left behind


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_stays(machine, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    machine["share"] = 0.5
    with cores.shared_cores(CPU):
        time.sleep(0.2)
    assert not machine["crowds"]


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "size"),
    [(1, 2, 0), (2, 2, 1), (2, 1, 0), (4, 8, 2), (16, 16, 1), (32, 64, 2), (64, 64, 0), (2, 64, 0)],
)
def test_a_crowd_is_more_threads_than_cores_and_few(monkeypatch, num_threads, num_cores, size):
    have(monkeypatch, num_threads, num_cores)
    assert cores.crowd_size() == size
    assert size == 0 or num_threads + size * (num_threads - 1) > num_cores


@pytest.mark.parametrize("lacks", ["a CPU", "who tells", "threads"])
def test_where_nothing_is_to_be_had_nobody_looks(machine, monkeypatch, lacks):
    if lacks == "who tells":
        monkeypatch.setattr(cores, "waited", dict)
    elif lacks == "threads":
        have(monkeypatch, 1, 2)
    before = threading.active_count()
    with cores.shared_cores(torch.device("cuda") if lacks == "a CPU" else CPU):
        assert threading.active_count() == before


@NEEDS
def test_waiting_for_a_core_is_seen():
    """Beside a program of higher priority on the same core."""
    program = """
import os, subprocess, sys, time
from support.cores import waited
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
os.nice(10)
before, start = waited(), time.perf_counter()
while time.perf_counter() < start + 2:
    pass
seconds = time.perf_counter() - start
other.kill()
print(max(time - before.get(name, time) for name, time in waited().items()) / seconds / 1e9)
"""
    assert float(run(program)) > 0.6


@NEEDS
def test_a_crowd_lets_threads_sleep_while_they_wait_and_changes_no_bit():
    program = """
import resource, time, torch
from support.cores import Crowd
torch.manual_seed(0)
a = torch.randn(512, 192)
b = torch.randn(192, 192)
def sleeps() -> tuple[int, float]:
    before, x = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, a
    for _ in range(300):
        x = torch.tanh(x @ b).softmax(-1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, x
sleeps()
found = [sleeps()]
crowd = Crowd(1)
time.sleep(0.5)
found.append(sleeps())
crowd.leave()
found.append(sleeps())
assert all(torch.equal(found[0][1], x) for _, x in found)
print(*(n for n, _ in found))
"""
    alone, crowded, after = map(int, run(program).split())
    assert crowded > 100 + 5 * max(alone, after)
