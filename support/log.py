"""A run's output: log.jsonl, the terminal, Weights & Biases and loss.png."""

import errno
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from config import TrainConfig
from support.cli import UserError

LOG = "log.jsonl"


def show(text: str, end: str = "\n"):
    """Print text. A reader that leaves (`| head`, a closed terminal) does not end the program; any
    other failure to write, such as a full disk, raises OSError."""
    try:
        tqdm.write(text, end=end)  # above the bar, if there is one
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again when it ends, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise


class Log:
    """Prints, and writes log.jsonl (one JSON record per line), on the main rank only."""

    def __init__(self, out_dir: Path, config: TrainConfig, step: int, is_main: bool):
        self.is_main = is_main
        if not is_main:
            return
        self.tracker = start_tracker(out_dir, config) if config.wandb else None
        self.file = open(out_dir / LOG, "ab+")
        if self.file.tell():
            self.file.seek(-1, os.SEEK_END)
            if self.file.read(1) != b"\n":  # of a line that a kill has cut
                self.file.write(b"\n")
        self.bar = tqdm(total=config.steps, initial=step, leave=False, disable=None)  # no terminal

    def print(self, text: str):
        if self.is_main:
            show(text)

    def step(self, record: dict, text: str):
        """Record a step, move the bar, and print text if there is any."""
        self.record(**record)
        if self.is_main:
            with suppress(OSError):  # the terminal may be closed
                self.bar.update()
            if text:
                show(text)

    def record(self, **fields):
        """Append a record to log.jsonl, and send its numbers to Weights & Biases."""
        if not self.is_main:
            return
        self.file.write(json.dumps({"time": time.time()} | fields).encode() + b"\n")
        self.file.flush()
        numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
        if self.tracker and "step" in fields and numbers:
            self.tracker.log(numbers, step=fields["step"])


def read_log(out_dir: Path) -> list[dict]:
    """Return the records of a run's log, without lines that a kill or a full disk has cut."""
    records = []
    if (out_dir / LOG).exists():
        for line in (out_dir / LOG).read_bytes().splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


def last_record(out_dir: Path) -> dict:
    return next(reversed(read_log(out_dir)), {})


def find_tracker() -> str:
    """Return "wandb", or "trackio" if only that is installed."""
    name = next(filter(find_spec, ("wandb", "trackio")), None)
    if not name:
        raise UserError("--wandb needs Weights & Biases: pip install wandb, or pip install trackio")
    return name


def start_tracker(out_dir: Path, config: TrainConfig) -> Any:
    project, flags = os.environ.get("WANDB_PROJECT", "train_gpt2"), asdict(config)
    return import_module(find_tracker()).init(project=project, name=out_dir.name, config=flags)


def draw(out_dir: Path, title: str):
    """Draw the losses in a run's log, if there are any, into loss.png, if matplotlib is here."""
    records = read_log(out_dir)  # by step, what a resume has repeated counts once
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    val_losses = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    if not find_spec("matplotlib") or not losses:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss (nats per token)")
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
    figure.savefig(out_dir / "loss.tmp", format="png", dpi=200)
    os.replace(out_dir / "loss.tmp", out_dir / "loss.png")
