"""How a run ends: the user's mistakes, other errors that are one line, signals, and hangs.

Exit codes: 0 done, or already complete; 1 a bug or a hang, with a traceback; 2 the user's mistake;
3 stopped by a signal, and saved; 4 a loss or gradient that is not finite, or ranks that differ;
6 the disk; 7 no good checkpoint; 130 stopped by a signal in the start, or by a second one.

train_gpt2.py imports this module before torch, so it imports nothing outside the standard library.
"""

import ctypes
import errno
import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

DONE = 0
STOPPED = 3
INTERRUPTED = 130

DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
TIMEOUT_S = 900  # without any progress, a run ends
SECOND_SIGNAL_S = 2  # torchrun passes on what the terminal has already sent to its ranks


class RunError(Exception):
    """Ends the program with one line and its exit code. Any other exception is a bug."""

    exit_code = 1


class UserError(RunError):
    exit_code = 2  # the line names the flag and the cure


class NumericalError(RunError):
    exit_code = 4


class DiskError(RunError):
    exit_code = 6


class NoGoodCheckpoint(RunError):
    exit_code = 7


def printable(text: str) -> str:
    """Escape what a terminal would obey, or can't show: control characters but newline and tab,
    lone surrogates, and characters that change the direction."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda match: ascii(match[0])[1:-1], text)


def print_error(text: str):
    """Print one line on stderr. Whoever read it may be gone, which is no reason to fail."""
    with suppress(OSError):
        print(f"train_gpt2.py: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)


def report(text: str):
    """Print the line that a run ends with."""
    print_error(text)
    tell_torchrun(text)


def tell_torchrun(text: str):
    """Have torchrun end with this line. It prints a traceback of its own, and at the end of that,
    what the rank that it saw fail first has left in the file that it names. Any rank may be it, so
    each leaves the line, also where only one prints it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = printable(" ".join(text.split()))
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGUSR1. While there are unsaved steps, one is only recorded: the
    loop finishes its step, saves and stops. While there are none, as in the start or in an
    evaluation, it raises KeyboardInterrupt at once. So does a second one, from SECOND_SIGNAL_S on.
    A closed terminal (SIGHUP) stops nothing, except torchrun, which then stops its ranks."""

    def __init__(self, is_main: bool):
        self.is_main = is_main
        self.received = False
        self.received_at = math.inf  # s, the first one
        self.has_saved = False  # there is a checkpoint to resume from
        self.has_unsaved_steps = False
        self.is_over = False  # the run has ended, and only cleans up
        self.previous = {}

    def __enter__(self):
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            if hasattr(signal, name):  # Windows has fewer
                stops = name != "SIGHUP" or "TORCHELASTIC_RUN_ID" in os.environ
                number = getattr(signal, name)
                handler = self.handle if stops else signal.SIG_IGN
                self.previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        if self.is_over:
            return
        now = time.monotonic()
        is_first = not self.received
        self.received = True  # even if KeyboardInterrupt follows: a destructor would drop that
        self.received_at = min(now, self.received_at)
        if not self.has_unsaved_steps or now - self.received_at > SECOND_SIGNAL_S:
            self.is_over = self.has_saved and not self.has_unsaved_steps  # nothing is left to lose
            raise KeyboardInterrupt
        if is_first and self.is_main:
            with suppress(OSError):  # os.write, since the signal may have interrupted a print
                text = "finishing this step and saving it; to quit unsaved, Ctrl-C again after 2 s"
                os.write(2, f"\n{text}\n".encode())


def reset_watchdog():
    """End the process in TIMEOUT_S with the stack of each thread and exit code 1, unless this is
    called again before: by each micro-batch, batch of an evaluation, and save."""
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=2)


def stop_watchdog():
    faulthandler.cancel_dump_traceback_later()


def end_with_torchrun():
    """Have Linux kill this rank when its torchrun dies, however it dies: it would train on, unseen,
    and keep the run's lock. Call it before importing torch, which may outlast torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun may have died before prctl was called. It keeps a store for its ranks.
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, timeout=60).close()
        except (KeyError, ValueError, OSError):
            print_error("torchrun has died: start it again")
            sys.exit(1)
