"""What a run leaves for people: log.jsonl, the terminal's line, TensorBoard, the profile, loss.png.

The log is append-only, one JSON record a line. Who reads it takes any line for what it is worth:
a kill may have torn it, a disk may have changed it.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType

from support.files import whole_file


def make_log(out_dir: Path, is_main: bool, board) -> Callable:
    """log(text, **record): a line on the terminal and the record in log.jsonl, by the main rank.
    Where there is a board, a writer for TensorBoard, it gets each figure of a step."""
    path = out_dir / "log.jsonl"
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    file = open(path, "a", encoding="utf-8") if is_main else None
    if file and torn:
        file.write("\n")

    def log(text: str, **record):
        nonlocal board
        if file:
            show(text)
            try:
                file.write(json.dumps({"time": time.time()} | record) + "\n")
                file.flush()
            except OSError as error:
                error.filename = str(path)  # Python names the file only when it is opened
                raise
        scalars = {name: value for name, value in record.items() if isinstance(value, float)}
        try:
            for name, value in scalars.items() if board and "step" in record else ():
                board.add_scalar(name, value, record["step"])
            if board:
                board.flush()
        except Exception as error:  # its own threads and files: not worth a run
            board = None
            show(f"no more for TensorBoard: {type(error).__name__}: {error!s:.200}")

    return log


def tensorboard() -> type:
    """What writes for TensorBoard into a folder; ValueError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs a library: pip install tensorboard") from None
    return SummaryWriter


def show(text: str, end: str = "\n"):
    """Print, as long as there is somebody to read it."""
    try:
        print(printable(text), end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """With what a terminal would obey, or can't show, escaped: control characters but newline and
    tab, and bytes that are no text."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda m: ascii(m[0])[1:-1], text)


def in_words(figures: dict[str, float]) -> str:
    names = {"val_loss": "loss"}
    return ", ".join(f"{names.get(n, n).replace('_', ' ')} {v:.4f}" for n, v in figures.items())


def spike(losses: list[float], loss: float) -> str:
    """A word on a loss that is far above those before it."""
    recent = losses[-100:]
    if len(recent) < 20:
        return ""
    sigmas = (loss - np.mean(recent)) / max(np.std(recent), 1e-3)
    text = f"SPIKE: {sigmas:.0f} standard deviations above the last {len(recent)} losses"
    return text if sigmas > 6 else ""


def read_log(out_dir: Path) -> list[dict]:
    """The records of a run; a line that is none, torn by a kill or damaged, is left out."""
    path, records = out_dir / "log.jsonl", []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in filter(None, lines):
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def logged(out_dir: Path, name: str) -> dict[int, float]:
    """Step -> the figure of this name; of two the later one, as after a resume."""
    found = [r for r in read_log(out_dir) if isinstance(r.get(name), float)]
    return {r["step"]: r[name] for r in found if type(r.get("step")) is int}


def noted(out_dir: Path, step: int) -> set[str]:
    """The names of what the log has of the weights after step: since it was trained last."""
    names = set()
    for record in read_log(out_dir):
        if record.get("step") == step:
            names = set() if "loss" in record else names | record.keys()
    return names


@contextmanager
def profiled(path: Path, is_cuda: bool, log: Callable, step: int) -> Iterator[None]:
    """Writes a Chrome trace of what happens inside to path, and tells the log the ten largest
    kernels with their shares of the time."""
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(path))
    times = {
        event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total)
        for event in profiler.key_averages()
        if event.device_type == (DeviceType.CUDA if is_cuda else DeviceType.CPU)
        and not event.is_user_annotation  # a span around kernels
    }
    largest = sorted(times, key=times.get, reverse=True)[:10]
    shares = {name: times[name] / sum(times.values()) for name in largest}
    lines = [f"{share:6.1%}  {name:.80}" for name, share in shares.items()]
    log("\n".join([f"step {step} in {path}:", *lines]), profiled=step, shares=shares)


def draw_loss(path: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure()).add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for name, style in (("loss", "-"), ("val_loss", "o-")):
        values = logged(path.parent, name)
        axes.plot(list(values), list(values.values()), style, label=name)
    axes.legend()
    with whole_file(path) as f:
        figure.savefig(f, format="png")
    return True
