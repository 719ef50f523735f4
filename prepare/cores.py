"""The processor cores that this process may use, and whether other programs use them, too."""

import os
import time
from contextlib import suppress
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/cpu.max")
TIMES = Path("/proc/stat")


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Return how many cores this process may use: a container or a batch system may set limits."""
    cores = len(usable_cores())
    with suppress(OSError, ValueError):  # there is no such limit
        quota, period = LIMIT.read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))  # rounded up
    return cores


def busy_share() -> float:
    """Return the share of its cores' time that this process could not have had in the next 50 ms,
    because others use them. Return 0 if the system does not say."""
    with suppress(OSError, ValueError):
        idle, total = core_times()
        time.sleep(0.05)
        idle_later, total_later = core_times()
        if total_later > total:
            return 1 - (idle_later - idle) / (total_later - total)
    return 0.0


def core_times() -> tuple[int, int]:
    """Return how long the usable cores have been idle since the system started, and how long they
    have been on, in hundredths of a second."""
    names = {f"cpu{number}" for number in usable_cores()}
    idle = total = 0
    for line in TIMES.read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            times = [int(field) for field in fields[:8]]  # the rest is counted in user time already
            idle += times[3] + times[4]  # idle, and waiting for a disk
            total += sum(times)
    return idle, total
