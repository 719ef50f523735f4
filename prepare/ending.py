"""How a program ends: exit codes, one-line errors, signals, watchdog, and torchrun's last line.

Exit codes: 0 done, or already complete; 1 a bug or a hang, with a traceback; 2 the user's mistake;
3 stopped by a signal or the end of --max-hours, everything saved; 4 a loss or gradient that is not
finite (no update was made), or ranks with different weights (nothing was saved); 6 the disk failed
or is full, or the run's folder was moved; 7 every checkpoint is damaged; 130 stopped before there
was anything to save, or by a second signal.

train_gpt2.py imports this module before torch, so it may import only the standard library.
"""

import ctypes
import errno
import faulthandler
import json
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum, auto
from importlib import metadata
from pathlib import Path

DONE, STOPPED, INTERRUPTED = 0, 3, 130

DISK_ERRORS = "ENOSPC EDQUOT EFBIG EIO EROFS ENXIO ENODEV ENOMEDIUM ESTALE EREMOTEIO ENOTCONN"
DISK_ERRORS += " ESHUTDOWN ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH"  # network disks
DISK_ERRNOS = {getattr(errno, name) for name in DISK_ERRORS.split() if hasattr(errno, name)}
TIMEOUT_S = 900  # a process that makes no progress for this long counts as hung
NUM_TICKS = 10  # the watchdog looks this often in TIMEOUT_S
# Modules in which the main thread may wait for a person: debuggers, and output to a terminal.
WAITING = {"bdb", "pydevd", "support.log", "tqdm.std"}
SECOND_SIGNAL_S = 2  # the terminal signals every rank, and then torchrun does so again
NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")  # the last: Ctrl-Break
SIGNALS = [number for number in signal.Signals if number.name in NAMES]

LIBRARIES = ("torch", "numpy", "tiktoken", "tqdm", "safetensors", "tokenizers", "filelock")
STARTED_AT = time.monotonic()  # of this process
brief = ""  # a line on the terminal, which the next one overwrites
program = "train_gpt2.py"  # the first word of each error line; each program sets its own


class RunError(Exception):
    """Ends the program with a one-line message and an exit code. Any other exception is a bug."""

    exit_code = 1


class UserError(RunError):
    exit_code = 2  # for errors whose message names the cure


class NumericalError(RunError):
    exit_code = 4


class DiskError(RunError):
    exit_code = 6


class NoGoodCheckpoint(RunError):
    exit_code = 7


def is_main_rank() -> bool:
    return (os.environ.get("RANK") or "0") == "0"


def printable(text: str) -> str:
    """Escape characters that a terminal would act on or can't show: control characters other than
    newline and tab, lone surrogates, and characters that change the writing direction."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda match: ascii(match[0])[1:-1], text)


def over_brief() -> str:
    """Return what erases the brief line on the terminal, if there is one."""
    global brief  # noqa: PLW0603
    eraser = f"{' ' * len(brief)}\r" if brief else ""
    brief = ""
    return eraser


def print_error(text: str):
    """Print text as one line on stderr. Do not fail if nobody reads stderr any more."""
    line = f"{program}: {printable(' '.join(text.split()))}"
    with suppress(OSError):
        eraser = over_brief() if sys.stderr.isatty() else ""
        print(eraser + line, file=sys.stderr, flush=True)


def tell_torchrun(text: str):
    """Make torchrun's traceback end with this text. Torchrun prints the error file of whichever
    rank failed first, so every rank writes its file, even if only one prints."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = printable(" ".join(text.split()))
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


class Phase(Enum):
    """The phase of a run, which decides what a signal does."""

    STARTING = auto()  # nothing is saved yet: stop at once
    SAVED = auto()  # every step is saved, as in an evaluation: cut the evaluation short, then stop
    UNSAVED = auto()  # some steps are unsaved: finish the step, save, stop
    LEAVING = auto()  # everything is saved, and the process is ending: ignore the signal


class StopSignals:
    """Handles stop signals according to the phase of the run. Before anything is saved, a signal
    raises KeyboardInterrupt at once. After that, the first signal is only a vote, because all ranks
    must stop at the same step, and one more than SECOND_SIGNAL_S later raises. SIGHUP (a closed
    terminal) is ignored, except under torchrun, which then stops its ranks."""

    phase = Phase.STARTING
    received_at = math.inf  # time.monotonic() at the first signal
    end_at = math.inf  # time.monotonic() when --max-hours is over

    @property
    def is_time_up(self) -> bool:
        return time.monotonic() >= self.end_at

    @property
    def received(self) -> bool:
        """Whether to stop, because of a signal or because --max-hours is over."""
        return self.received_at < math.inf or self.is_time_up

    def __enter__(self):
        self.phase, self.received_at, self.end_at = Phase.STARTING, math.inf, math.inf
        self.previous: dict = {}  # the original handlers
        for number in SIGNALS:
            stops = number.name != "SIGHUP" or "TORCHELASTIC_RUN_ID" in os.environ
            self.previous[number] = signal.signal(number, self.handle if stops else signal.SIG_IGN)
        return self

    def __exit__(self, *_):
        self.received_at = math.inf
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, *_):
        if self.phase is Phase.LEAVING:
            return
        is_first = self.received_at == math.inf
        # Record the signal first: Python drops a KeyboardInterrupt raised in a destructor.
        now = time.monotonic()
        self.received_at = min(now, self.received_at)
        if self.phase is Phase.STARTING or now - self.received_at > SECOND_SIGNAL_S:
            raise KeyboardInterrupt
        if is_first and self.phase is Phase.UNSAVED and is_main_rank():
            text = "finishing and saving this step; a second signal after 2 s quits without saving"
            with suppress(OSError):  # os.write, as the signal may have interrupted a print
                os.write(2, f"\n{text}\n".encode())


signals = StopSignals()


def until_signal(items: Iterable) -> Iterator:
    """Yield items until this process gets a stop signal. Each one is progress."""
    for item in items:
        if signals.received:
            return
        watchdog.reset()
        yield item


def ignore_signals():
    """Ignore all stop signals. main() installs handlers and at its end restores this, so that a
    late signal can't change the exit code of a run that has saved everything."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code for an error, or None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return DiskError.exit_code
    # dataloader.py imports none of our modules, so its errors have exit codes without RunError.
    return getattr(error, "exit_code", None)


def report(error: BaseException) -> int | None:
    """Print error and return its exit code. Return None for a bug, which needs its traceback."""
    exit_code = exit_code_of(error)
    if exit_code == INTERRUPTED:
        unsaved = "; steps since the last checkpoint are not saved"
        if is_main_rank():
            reason = "because --max-hours is over" if signals.is_time_up else "by a signal"
            print_error(f"stopped {reason}{unsaved if signals.phase is Phase.UNSAVED else ''}")
    elif exit_code is not None:
        text = f"error: {error}"
        if exit_code == DiskError.exit_code and signals.phase is not Phase.STARTING:
            text += "; once this is fixed, --resume continues from the last checkpoint, if any"
        print_error(text)
        tell_torchrun(text)
    return exit_code


class Watchdog:
    """Ends a process that makes no progress for TIMEOUT_S, and shows where its threads are. It
    counts only time in which the process could run: not while it is stopped (Ctrl-Z, a laptop's
    lid) or waits for a person. faulthandler.dump_traceback_later counts all time."""

    def __init__(self):
        self.ticks_left = math.inf  # of NUM_TICKS; below 0, the process counts as hung
        self.thread: threading.Thread | None = None

    def reset(self):
        """Wait for TIMEOUT_S from now on. Micro-batches, evaluation batches and saves call this."""
        self.ticks_left = NUM_TICKS
        if not (self.thread and self.thread.is_alive()):
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()

    def stop(self):
        self.ticks_left = math.inf

    def watch(self):
        while self.ticks_left >= 0:
            started = time.monotonic()
            time.sleep(TIMEOUT_S / NUM_TICKS)
            was_stopped = time.monotonic() - started > 2 * TIMEOUT_S / NUM_TICKS
            if not (was_stopped or waits_for_person()):
                self.ticks_left -= 1
        print_error(f"no progress for {TIMEOUT_S} s; the stacks of all threads:")
        faulthandler.dump_traceback(file=2)
        os._exit(1)


watchdog = Watchdog()


def waits_for_person() -> bool:
    """Return whether a debugger waits for a command, or output for its reader (Ctrl-S, `less`, a
    click into a Windows console)."""
    frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    modules = {caller.f_globals.get("__name__") for caller, _ in traceback.walk_stack(frame)}
    if not WAITING.isdisjoint(modules):
        return True
    with suppress(OSError, ValueError):  # a stream is closed, or this is Windows
        return len(select.select([], [1, 2], [], 0)[1]) < 2  # also if another rank is printing
    return False


def open_standard_streams():
    """Open /dev/null in place of closed standard streams (`2>&-`, some daemons). Otherwise, a file
    that we open later, such as a checkpoint, gets number 2, where messages are written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open takes the lowest free number; child processes need it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def explain_import_error(kind, error: BaseException, trace):
    """Print one line instead of a traceback if a library is missing or torch is too old."""
    text = ""
    if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
        requirements = Path(__file__).parent.parent / "requirements.txt"
        cure = f'"{sys.executable}" -m pip install -r "{requirements}"'
        text = f"{error.name} is not installed for this Python: {cure}"
        text += " (a .venv that was moved must be made again)"
    elif isinstance(error, ImportError) and (error.name or "").startswith("torch"):
        with suppress(Exception):  # a broken installation may have no version
            text = why_too_old(metadata.version("torch"))
    if not text:
        sys.__excepthook__(kind, error, trace)
        return
    print_error(f"error: {text}")
    os._exit(UserError.exit_code)  # Python itself would exit with 1


def why_too_old(version: str) -> str:
    """Return what to say about a version of torch that is too old, else ""."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) >= (2, 5):
        return ""
    return f"torch {version} is too old; use 2.5 or later: pip install -U torch"


def guard_imports():
    """Make Ctrl-C end the slow import of torch without a traceback. Ask Linux to kill this rank if
    torchrun dies, because the rank would otherwise keep training and hold the run's lock."""
    open_standard_streams()
    sys.excepthook = explain_import_error
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Torchrun may have died before we called prctl. If it is alive, its store answers.
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, timeout=60).close()
        except (KeyError, ValueError, OSError):
            print_error("torchrun has died: start it again")
            sys.exit(1)
