"""What a run leaves for people: log.jsonl, the terminal's line, TensorBoard, loss.png.

The log is append-only, one JSON record a line. Who reads it takes any line for what it is worth:
a kill may have torn it, a disk may have changed it.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from tqdm import tqdm

from support.device import device_name, peak_memory_mib, peak_tflops
from support.files import whole_file


def make_log(out_dir: Path, is_main: bool, boards: list) -> Callable:
    """log(text, **record): a line on the terminal, if there is a text, and the record in log.jsonl,
    by the main rank. Each of boards, writers for TensorBoard or the like, gets a step's figures."""
    path = out_dir / "log.jsonl"
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    file = open(path, "a", encoding="utf-8") if is_main else None
    if file and torn:
        file.write("\n")

    def log(text: str, **record):
        if file:
            if text:
                show(text)
            try:
                file.write(json.dumps({"time": time.time()} | record) + "\n")
                file.flush()
            except OSError as error:
                error.filename = str(path)  # Python names the file only when it is opened
                raise
        scalars = {name: value for name, value in record.items() if isinstance(value, float)}
        for board in list(boards):
            try:
                for name, value in scalars.items() if "step" in record else ():
                    board.add_scalar(name, value, record["step"])
                board.flush()
            except Exception as error:  # its own threads and files: not worth a run
                boards.remove(board)
                name = getattr(board, "title", "TensorBoard")
                show(f"no more for {name}: {type(error).__name__}: {error!s:.200}")

    return log


def tensorboard() -> type:
    """What writes for TensorBoard into a folder; ValueError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs a library: pip install tensorboard") from None
    return SummaryWriter


def wandb() -> type:
    """What writes for Weights & Biases, and is used as tensorboard's is."""
    try:
        import wandb
    except ImportError:
        raise ValueError("--wandb needs a library: pip install wandb") from None

    class Board:
        """The run of a folder; the same one again after a resume."""

        title = "Weights & Biases"

        def __init__(self, folder: Path):
            path = folder / "wandb_id"
            if not path.exists():
                path.write_text(uuid4().hex)
            how = {"project": "train_gpt2", "name": folder.name, "dir": str(folder)}
            try:
                self.run = wandb.init(id=path.read_text(), resume="allow", **how)
            except Exception as error:
                cure = "wandb login, or set WANDB_MODE=offline"
                raise ValueError(f"--wandb: {error!s:.200}: {cure}") from error
            self.figures = {}

        def add_scalar(self, name: str, value: float, step: int):
            self.figures |= {name: value, "step": step}

        def flush(self):
            if self.figures:
                self.run.log(self.figures)
            self.figures = {}

    return Board


def show(text: str, end: str = "\n"):
    """Print, as long as there is somebody to read it."""
    try:
        # above the line of report.Status; a piece of a line has none beside it
        with tqdm.external_write_mode(nolock=True) if end == "\n" else nullcontext():
            print(printable(text), end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_samples(samples: Iterator[Iterator[str]]):
    """Each piece as soon as it is there, and a line between two samples."""
    for number, pieces in enumerate(samples):
        show("\n---\n" if number else "", end="")
        for piece in pieces:
            show(piece, end="")
    show("")


def printable(text: str) -> str:
    """With what a terminal would obey, or can't show, escaped: control characters but newline and
    tab, and bytes that are no text."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda m: ascii(m[0])[1:-1], text)


class Progress:
    """Tells of each step of this process, the terminal of each every-th, the first, the last, and
    what has a notice. A step has batch_tokens, each of which takes so many flops of a rank."""

    def __init__(self, log: Callable, device: torch.device, steps: int, every: int,
                 batch_tokens: int, flops: float, matmul_tflops: float):  # fmt: skip
        self.log, self.device, self.steps, self.every = log, device, steps, every
        self.batch_tokens, self.flops, self.matmul_tflops = batch_tokens, flops, matmul_tflops
        self.peak_tflops = peak_tflops(device_name(device))
        self.seconds, self.losses = [], []

    def step(
        self, step: int, loss: float, norm: float, learning_rate: float, seconds: float, notice: str
    ):
        self.seconds.append(seconds)
        tokens_per_s = self.batch_tokens / seconds
        tflops = tokens_per_s * self.flops / 1e12
        shares = {"matmul_share": tflops / self.matmul_tflops}
        shares |= {"mfu": tflops / self.peak_tflops} if self.peak_tflops else {}
        words = f"{shares['matmul_share']:.0%} of matmul"
        words += f", {shares['mfu']:.0%} MFU" if self.peak_tflops else ""
        left = timedelta(seconds=int(np.mean(self.seconds[-100:]) * (self.steps - step)))
        notice = notice or spike(self.losses, loss)
        self.losses += [loss] * math.isfinite(loss + norm)
        is_told = notice or len(self.seconds) == 1 or step == self.steps or step % self.every == 0
        text = (
            f"step {step}/{self.steps} | loss {loss:.4f} | lr {learning_rate:.2e} |"
            f" norm {norm:.3f} | {1000 * seconds:.0f} ms | {tokens_per_s:,.0f} tokens/s |"
            f" {words} | {left} left{' | ' * bool(notice)}{notice}"
        )
        self.log(
            text if is_told else "",
            step=step, loss=loss if math.isfinite(loss) else None,
            grad_norm=norm if math.isfinite(norm) else None, learning_rate=learning_rate,
            ms=1000 * seconds, **shares, tokens_per_s=tokens_per_s, tflops=tflops,
            peak_mib=peak_memory_mib(self.device), **({"notice": notice} if notice else {}),
        )  # fmt: skip


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


def last_flags(out_dir: Path, known: Callable[[dict], dict]) -> tuple[dict, set[str]]:
    """The flags of the last start of a run that made a step, and the names of those that somebody
    gave then or before; none if it has no record that known takes."""
    has_steps = False
    for record in reversed(read_log(out_dir)):
        has_steps |= "loss" in record
        with suppress(KeyError, TypeError, ValueError):
            if has_steps and record["flags"]["model"]:
                return known(record["flags"]), {*record["given"]}
    return {}, set()


def logged(out_dir: Path, name: str) -> dict[int, float]:
    """Step -> the figure of this name; of two the later one, as after a resume."""
    found = [r for r in read_log(out_dir) if isinstance(r.get(name), float)]
    found = [r for r in found if type(r.get("step")) is int and math.isfinite(r[name])]
    return {r["step"]: r[name] for r in found}


def noted(out_dir: Path, step: int) -> set[str]:
    """The names of what the log has of the weights after step: since it was trained last."""
    names = set()
    for record in read_log(out_dir):
        if record.get("step") == step:
            names = set() if "loss" in record else names | record.keys()
    return names


def draw_loss(path: Path) -> bool:
    """The losses of the run in path's folder, titled with what ran and how it ended; False where
    matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(what_ran(read_log(path.parent)), fontsize=13, parse_math=False)
    names = ("loss", "val_loss", "bits_per_byte")
    losses, validations, in_bytes = (logged(path.parent, name) for name in names)
    steps, values, last = [*losses], [*losses.values()], [*losses.values()][-100:]
    axes.plot(steps, values, ".", markersize=2, color="#c9dbf5")
    num = max(1, len(values) // 50)  # for a mean over a fiftieth of the run
    label = f"training: {np.mean(last):.3f} over the last {len(last)} steps" if last else ""
    smooth = np.convolve(values or [0.0], np.ones(num) / num, "valid")[: len(values)]
    axes.plot(steps[num // 2 :][: len(smooth)], smooth, linewidth=1.5, color="#4a7fd0", label=label)
    steps, values = [*validations], [*validations.values()]
    bits = f" ({in_bytes[steps[-1]]:.3f} bits per byte)" if steps and steps[-1] in in_bytes else ""
    label = f"validation: {values[-1]:.3f}{bits} after step {steps[-1]:,}" if values else ""
    axes.plot(steps, values, "o", color="#d1480f", label=label)  # no line: there may be few
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=12)
    with whole_file(path) as f:
        figure.savefig(f, format="png", dpi=120)
    return True


def what_ran(records: list[dict]) -> str:
    """A run in a line, from what its log says at its last start; nothing where that is damaged."""
    starts = [record for record in records if "flags" in record]
    with suppress(IndexError, KeyError, TypeError, ValueError):
        flags, env = starts[-1]["flags"], starts[-1]["environment"]
        work = f"{flags['steps']:,} steps of {flags['batch_tokens']:,} tokens"
        return f"{flags['model']}: {work}, {env['ranks']} x {env['device_name']}"
    return ""
