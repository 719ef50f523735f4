"""How a run ends: signals that save first, the watchdog, exit codes, one line for each error.

From Ctrl-C to the exit: stop_signals notes it; train_step at its end, and watch.Watcher at each
part of what it does, ask and agree with the other ranks; train saves, logs that it was stopped, and
returns 3. The second one is a KeyboardInterrupt, which main explains: 130.

Exit codes: 0 done; 2 a mistake of the user; 3 stopped by a signal after saving; 4 numbers that are
not finite, or ranks that differ; 5 no progress, or a rank or torchrun lost; 6 the disk; 7 no good
checkpoint; 130 stopped at once, without saving.
"""

import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tqdm import tqdm

from support.device import is_out_of_memory
from support.files import DISK_ERRORS


@dataclass
class Signals:
    """SIGINT, SIGTERM and SIGUSR1 since the start. Once there are steps to save, the first one ends
    the run after its step; before, and a second one, at once."""

    times: list[float] = field(default_factory=list)
    save_first: bool = False


@contextmanager
def stop_signals(is_main: bool) -> Iterator[Signals]:
    """Note the signals that come inside. A second one counts when it comes two seconds after the
    first: torchrun passes on to its ranks what the terminal has already sent them. A terminal that
    closes stops nothing, but torchrun, which passes that on too and then kills its ranks."""
    signals, is_torchrun = Signals(), "TORCHELASTIC_RUN_ID" in os.environ

    def say(words: bytes):
        with suppress(OSError):  # not by print, which the signal may have interrupted
            clear = b"\r\x1b[K" if os.isatty(2) else b""  # the line of report.Status
            os.write(2, clear + b"train_gpt2.py: " + words + b"\n")

    def note(number, frame):
        times = signals.times
        times.append(time.monotonic())
        if not signals.save_first or times[-1] - times[0] > 2:
            raise KeyboardInterrupt  # Python ignores it in a destructor: hence the list
        if is_main and len(times) == 1:
            say(b"finishing this step and saving it; again: end now")
        elif is_main and not is_torchrun:
            say(b"heard; once more after two seconds: end now")

    handlers = dict.fromkeys(("SIGINT", "SIGTERM", "SIGUSR1"), note) | {
        "SIGHUP": note if is_torchrun else signal.SIG_IGN
    }
    here = {getattr(signal, n): h for n, h in handlers.items() if hasattr(signal, n)}  # not Windows
    before = {number: signal.signal(number, handler) for number, handler in here.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watchdog(threading.Thread):
    """Ends the process with exit code 5 when nothing has happened for timeout_s, and says where.
    Among several ranks already GRACE_S after a signal, which a rank that waits for another one
    can't act on, or after twice the longest silence of a step so far; and when torchrun has died,
    whose ranks would go on for ever. Seconds are counted, not read from a clock, so that a process
    that was stopped and continued is not late."""

    GRACE_S = 20  # torchrun's is 30, unless it has a --shutdown-timeout

    def __init__(self, timeout_s: int, rank: int, num_ranks: int, torchrun: int | None):
        super().__init__(daemon=True)
        self.timeout_s, self.ended = timeout_s or math.inf, threading.Event()
        self.rank, self.num_ranks, self.torchrun = rank, num_ranks, torchrun
        self.signals, self.wakeup = socket.socketpair()
        self.signals.setblocking(False)
        self.wakeup.setblocking(False)
        self.phase, self.idle_s, self.longest_s = "the start", 0, 0

    @property
    def grace_s(self) -> float:
        return min(self.timeout_s, max(self.GRACE_S, 2 * self.longest_s))

    def note(self, phase: str):
        if self.phase.startswith("micro-step"):
            self.longest_s = max(self.longest_s, self.idle_s)
        self.phase, self.idle_s = phase, 0

    def __enter__(self):
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        self.start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(-1)
        self.ended.set()
        self.join()
        self.signals.close()
        self.wakeup.close()

    def run(self):
        limit_s, why = self.timeout_s, "(--timeout-s)"
        while not self.ended.wait(1):
            self.idle_s += 1
            with suppress(BlockingIOError):
                if self.signals.recv(1) and self.num_ranks > 1:
                    limit_s, why, self.idle_s = self.grace_s, "after a signal", 0
            if self.idle_s > (self.timeout_s if self.phase.startswith("a save") else limit_s):
                self.end(f"no progress for {self.idle_s} s {why} in {self.phase}")
            if self.torchrun and os.getppid() != self.torchrun:
                self.end(f"torchrun has died in {self.phase}")

    def end(self, why: str):
        try:
            fail(5, f"error: rank {self.rank}: {why}; --resume goes on", True)
            sys.stderr.flush()
        finally:  # also if nobody can be told
            os._exit(5)


def ended(train: Callable[[], int], is_main: bool) -> int:
    """The exit code of a training, before which all that a user may mistake was checked: an OSError
    is the disk's, and a ValueError a bug. What ends it is told at once, since a rank that fails
    alone may wait for the others when it leaves them."""
    try:
        return train()
    except ValueError as error:
        raise AssertionError("a bug, no mistake of yours: please report it") from error
    except ArithmeticError as error:
        return fail(4, f"error: {error}", is_main)
    except OSError as error:
        return fail(6, f"error: {error}", is_main or not getattr(error, "is_agreed", False))


def explained(error: BaseException) -> tuple[int, str]:
    """The exit code and the words for an error that is known; any other is raised again."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by a signal, at once: --resume goes on from the last save"
    if isinstance(error, OSError | ValueError):
        is_disk = getattr(error, "errno", None) in DISK_ERRORS
        return getattr(error, "exit_code", 6 if is_disk else 2), f"error: {error}"
    if is_out_of_memory(error):
        cure = "lower --micro-batch-size, or add --recompute"
        return 2, f"error: a step does not fit the memory: {cure}: {error}"
    if isinstance(error, RuntimeError) and re.search("gloo|NCCL|peer", str(error)):
        return 5, f"error: lost another rank: {error!s:.300}"
    if isinstance(error, RuntimeError) and "NVIDIA driver" in str(error):
        why = str(error).partition(". ")[0]  # what follows are addresses
        cure = "update it, or install a torch for an older CUDA (pytorch.org)"
        return 2, f"error: {why}: {cure}, or set CUDA_VISIBLE_DEVICES= for the CPU"
    raise error


def fail(code: int, why: str, is_main: bool = True) -> int:
    """Say why on one line of at most 300 characters, whose end has the cure, from one rank, and
    return the exit code. What is not to be seen, or turns the line round, is escaped."""
    line = " ".join(["train_gpt2.py:", *why.split()])
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if is_main:
        with suppress(OSError):  # nobody may read it any more
            with tqdm.external_write_mode(sys.stderr, nolock=True):  # no line of report.Status
                line = line if len(line) <= 300 else f"{line[:180]} ... {line[-115:]}"
                print(line, file=sys.stderr, flush=True)
    return code
