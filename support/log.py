"""A run's output: log.jsonl, the terminal, and Weights & Biases."""

import importlib.util
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from support.cli import UserError, show

LOG = "log.jsonl"


class Log:
    """Prints, moves the bar, and writes log.jsonl (one JSON record per line), on the main rank."""

    def __init__(self, out_dir: Path, flags: dict, step: int, is_main: bool):
        self.is_main, self.tracker = is_main, None
        if is_main and flags["wandb"]:
            project = os.environ.get("WANDB_PROJECT", "train_gpt2")
            self.tracker = find_tracker().init(project=project, name=out_dir.name, config=flags)
        self.file = open(out_dir / LOG if is_main else os.devnull, "ab+")
        self.file.seek(0)
        if self.file.read()[-1:] not in (b"", b"\n"):  # a kill has cut the last line
            self.file.write(b"\n")
        disable = None if is_main else True  # None: no bar unless stderr is a terminal
        self.bar = tqdm(total=flags["steps"], initial=step, leave=False, disable=disable)

    def record(self, text: str = "", **fields):
        """Append a record to log.jsonl, print text if there is any, and send the record's numbers
        to Weights & Biases."""
        self.file.write(json.dumps({"time": time.time()} | fields).encode() + b"\n")
        self.file.flush()
        if "loss" in fields:  # of a step
            with suppress(OSError):  # the terminal may be closed
                self.bar.update()
        if text and self.is_main:
            show(text)
        numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
        if self.tracker and "step" in fields and numbers:
            self.tracker.log(numbers, step=fields["step"])


def read_log(out_dir: Path) -> list[dict]:
    """Return the records of a run's log, without lines that a kill or a full disk has cut."""
    records = []
    with suppress(FileNotFoundError), open(out_dir / LOG, "rb") as lines:
        for line in lines:
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


def find_tracker() -> Any:
    """Return wandb, or trackio if only that is installed."""
    for name in ("wandb", "trackio"):
        if importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise UserError("--wandb needs Weights & Biases: pip install wandb, or pip install trackio")
