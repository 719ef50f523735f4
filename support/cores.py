"""The cores that a run shares with other programs: what they cost it, and no number of it.

A step's products are dealt out to a thread for each core, and all wait for the last one. In PyTorch
for Linux (OpenMP by GCC's libgomp) they wait actively for 300,000 turns of a loop, and then sleep.
That is fastest on a quiet machine. Where another program uses a core, a thread that waits keeps the
one it waits for from running, and a step takes four times as long. libgomp waits for 1,000 turns
only where a process has more threads than cores. So while others take a core, and only then,
threads that do nothing make it so.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

PERIOD = 0.25  # seconds between looks
MOST_WAITING = 0.1  # share of the time: 0.02 on two quiet cores, 0.25 with one of them busy


@contextmanager
def shared_cores() -> Iterator[None]:
    """Look after the cores inside, unless the user has said how OpenMP's threads wait."""
    done = threading.Event()
    is_chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if waited() and torch.get_num_threads() > 1 and not is_chosen:
        threading.Thread(target=look_after, args=(done,), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def look_after(done: threading.Event):
    before, start, crowd = waited(), time.perf_counter(), None
    while not done.wait(PERIOD):
        now, end = waited(), time.perf_counter()
        longest = max((ns - before.get(name, ns) for name, ns in now.items()), default=0) / 1e9
        is_busy = longest > MOST_WAITING * (end - start)
        before, start = now, end
        if is_busy and not crowd:
            crowd = make_crowd()
        elif crowd and not is_busy:
            crowd.set()
            crowd = None
    if crowd:
        crowd.set()


def waited() -> dict[str, int]:
    """The nanoseconds in which each thread of this process could run and had no core, as Linux
    tells them; nothing elsewhere."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            found[path.parent.name] = int(path.read_text().split()[1])
    return found


def make_crowd() -> threading.Event:
    """Threads that only are there, more than there are cores, until the event is set."""
    end = threading.Event()

    def stand():
        torch.ones(2**17)  # OpenMP gives this thread a team, which lives as long as it does
        end.wait()

    for _ in range((len(os.sched_getaffinity(0)) - 1) // (torch.get_num_threads() - 1)):
        threading.Thread(target=stand, daemon=True).start()
    return end
