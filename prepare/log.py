"""A run's output, which is never read back: log.jsonl, terminal, Weights & Biases and loss.png."""

import ctypes
import json
import logging
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import numpy as np
from tqdm import tqdm

from prepare import ending
from prepare.ending import UserError, printable
from prepare.files import FolderLock, whole_file
from prepare.run_folder import LOG, WANDB_ID

if sys.platform == "win32":
    import msvcrt


class Log:
    """Prints, and writes log.jsonl (one JSON record per line), on the main rank only."""

    def __init__(self, lock: FolderLock, is_main: bool, wandb_run: Any = None):
        self.lock = lock
        self.is_main = is_main
        self.wandb_run = wandb_run
        self.start: dict = {}  # the first record, which begins each file
        self.has_warned = False  # of overfitting
        self.recent_seconds: deque[float] = deque(maxlen=100)  # durations of the last steps
        if is_main:
            self.open()

    def open(self):
        self.file = open(self.lock.folder / LOG, "ab+")
        # If a killed process left an incomplete last line, keep it and start a new line.
        if self.file.tell():
            self.file.seek(-1, os.SEEK_END)
            if self.file.read(1) != b"\n":
                self.file.write(b"\n")

    def print(self, text: str):
        if self.is_main:
            show(text)

    def print_step(self, text: str, is_due: bool):
        """Print a step's line if it is due. Otherwise, on a terminal, show it until the next."""
        if is_due:
            self.print(text)
        elif self.is_main and is_terminal(sys.stdout):
            # It must fit: \r only goes back in a terminal's last row.
            text = text[: shutil.get_terminal_size().columns - 1]
            show(text, end="\r")
            ending.brief = text

    def record(self, **fields):
        """Append a record to log.jsonl, and send its numbers to Weights & Biases."""
        if not self.is_main:
            return
        try:
            if "flags" in fields:
                self.start = fields
            if not self.is_in_place():  # logrotate has moved it
                self.lock.check()
                self.file.close()
                self.open()
                self.write(self.start)
            self.write(fields)
            self.file.flush()
        except OSError as error:
            error.filename = str(self.file.name)  # Python sets the name only if opening fails
            raise
        self.send(fields)

    def write(self, fields: dict):
        self.file.write(json.dumps({"time": time.time()} | fields).encode() + b"\n")

    def send(self, fields: dict):
        numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
        if self.wandb_run and "step" in fields and numbers:
            try:
                if hasattr(self.wandb_run, "define_metric"):
                    # W&B's own step can't go back, so it would drop what a resume repeats.
                    self.wandb_run.log(numbers | {"step": fields["step"]})
                else:  # trackio
                    self.wandb_run.log(numbers, step=fields["step"])
            except Exception as error:  # a failure of wandb must not end the run
                self.wandb_run = None
                reason = f"{type(error).__name__}: {error!s:.200}"
                show(f"Weights & Biases logging has stopped: {reason}")

    def is_in_place(self) -> bool:
        """Return whether the open file is still the one with the log's name."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.file.name))
        return False

    def time_left(self, num_steps: int) -> timedelta:
        """Return how long num_steps will take at the recent speed."""
        return timedelta(seconds=int(np.mean(self.recent_seconds) * num_steps))


def show(text: str, end: str = "\n"):
    """Print text. A reader that is gone (`| head`, a closed terminal) must not stop a run."""
    try:
        print(ending.over_brief() + printable(text), end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether stream is a terminal. A notebook cell looks like one, but is not."""
    if stream is None or not stream.isatty() or in_notebook():
        return False
    if sys.platform == "win32":  # there, NUL calls itself a terminal
        handle = msvcrt.get_osfhandle(stream.fileno())
        return ctypes.windll.kernel32.GetConsoleMode(handle, ctypes.byref(ctypes.c_uint32())) != 0
    return True


def in_notebook() -> bool:
    return "JPY_PARENT_PID" in os.environ  # set by Jupyter, and inherited by child processes


def progress(items: Iterable, label: str, is_main: bool) -> Iterable:
    """Return items with a progress bar, which appears after a second and only on a terminal."""
    is_shown = is_main and is_terminal(sys.stderr)
    return tqdm(items, desc=label, leave=False, delay=1, disable=not is_shown)


def tracker() -> str:
    """Return the library that --wandb uses. Raise UserError if none is installed."""
    for name in ("wandb", "trackio"):
        if find_spec(name):
            return name
    raise UserError("--wandb needs Weights & Biases: pip install wandb, or pip install trackio")


def start_wandb(out_dir: Path, config: dict, is_main: bool) -> Any:
    """Return a new or resumed run of Weights & Biases, or of trackio if only that is installed.
    Return None on all but the main rank."""
    if not is_main:
        return None
    options = {"project": os.environ.get("WANDB_PROJECT", "train_gpt2"), "config": config}
    try:
        # The id is in the folder, since a later run may have a folder of the same name.
        file = out_dir / WANDB_ID
        if not file.exists():
            file.write_text(uuid4().hex[:16])
        run_id, name = file.read_text(), out_dir.name
        library = import_module(tracker())
        if tracker() == "trackio":  # it knows a run by its name
            return library.init(name=f"{name}-{run_id[:6]}", resume="allow", **options)
        run = library.init(name=name, id=run_id, dir=str(out_dir), resume="allow", **options)
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:  # both raise many kinds of exceptions
        cure = "pip install wandb; wandb login, or set WANDB_MODE=offline, or pip install trackio"
        raise UserError(f"--wandb: {error!s:.200}: {cure}") from error


def is_drawn(step: int, num_steps: int) -> bool:
    """Return whether loss.png and checkpoints keep this step's loss. They keep at most 1,000."""
    return step % math.ceil(num_steps / 1000) == 0


def draw_losses(path: Path, title: str, losses: dict[int, float], val_losses: dict[int, float]):
    """Plot losses by step into path. Raise ImportError if matplotlib is not installed."""
    logging.getLogger("matplotlib").setLevel("ERROR")  # it warns if there is no home folder
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss (nats per token)")
    if losses:
        steps, values = [*losses], [*losses.values()]
        axes.plot(steps, values, ".", markersize=2, color="#c9dbf5")
        width = max(1, len(values) // 50)
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        label = f"training: {smooth[-1]:.3f}" + (f", mean of {width} points" if width > 1 else "")
        axes.plot(steps[width // 2 :][: len(smooth)], smooth, color="#4a7fd0", label=label)
    if val_losses:
        last = max(val_losses)
        label = f"validation: {val_losses[last]:.3f} after step {last:,}"
        axes.plot([*val_losses], [*val_losses.values()], "o", color="#d1480f", label=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=12)
    with whole_file(path) as f:
        figure.savefig(f, format="png", dpi=200)
