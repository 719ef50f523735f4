"""The cores that a run shares with other programs: what they cost it, and no number of it.

A step's products are dealt out to a thread for each core, and all wait for the last one. In PyTorch
for Linux (OpenMP by GCC's libgomp) they wait actively for 300,000 turns of a loop, and then sleep.
That is fastest on a quiet machine. Where another program uses a core, a thread that waits keeps the
one it waits for from running. A process with more threads than cores waits for 100 turns alone
(gomp_throttled_spin_count_var in libgomp's env.c). So while others take a core, and only then,
threads that do nothing make it one. What that brings: benchmarks/busy.py.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

PERIOD_S = 0.25  # between looks
MOST_WAITING = 0.1  # share of the time: 0.02 on two quiet cores, 0.25 with one of them busy
MOST_THREADS = 32  # libgomp ends a process that may have no more of them


@contextmanager
def shared_cores(device: torch.device) -> Iterator[None]:
    """Look after the cores inside, where the device is a CPU, unless the user has said how OpenMP's
    threads wait."""
    done = threading.Event()
    observer = threading.Thread(target=look_after, args=(done,), daemon=True)
    is_chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if device.type == "cpu" and waited() and crowd_size() and not is_chosen:
        observer.start()
    try:
        yield
    finally:
        done.set()
        if observer.ident:
            observer.join()


def look_after(done: threading.Event):
    """While some thread of this process waits for a core for more than a share of the time, there
    is a crowd, until done."""
    before, start, crowd = waited(), time.perf_counter(), None
    while not done.wait(PERIOD_S):
        now, end = waited(), time.perf_counter()
        longest = max((ns - before.get(name, ns) for name, ns in now.items()), default=0) / 1e9
        is_busy = longest > MOST_WAITING * (end - start)
        before, start = now, end
        if is_busy and not crowd:
            crowd = Crowd(crowd_size())
        elif crowd and not is_busy:
            crowd.leave()
            crowd = None
    if crowd:
        crowd.leave()


def waited() -> dict[str, int]:
    """The nanoseconds in which each thread of this process could run and had no core, as Linux
    tells them; nothing elsewhere."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            found[path.parent.name] = int(path.read_text().split()[1])
    return found


def crowd_size() -> int:
    """How many threads with a team of OpenMP's make more threads than cores; 0 where there is one
    thread, which waits for nobody, or so few that the others have cores of their own."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    size = (cores - 1) // (threads - 1) if 1 < threads <= MOST_THREADS else 0
    return size if size <= 2 else 0


class Crowd:
    """So many threads that only are there."""

    def __init__(self, size: int):
        self.end = threading.Event()
        self.threads = [threading.Thread(target=self.stand, daemon=True) for _ in range(size)]
        for thread in self.threads:
            thread.start()

    def stand(self):
        torch.ones(2**17)  # OpenMP gives this thread a team, which lives as long as it does
        self.end.wait()

    def leave(self):
        self.end.set()
        for thread in self.threads:
            thread.join()
