"""What a run shows people: log.jsonl, lines on the terminal, progress bars, Weights & Biases, and
loss.png. The trainer never reads any of it back."""

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from tqdm import tqdm

from support.cli import FREE, ONCE, ROUNDS, spell, typed_as
from support.errors import UserError, printable
from support.files import whole_file
from support.tokenizer import missing_vocab, vocab_cure

if TYPE_CHECKING:
    from train_gpt2 import Run

LOG = "log.jsonl"
OVERFITTING_CURE = "try fewer --steps, a --dropout of 0.2 or more, or more text"


class Logger:
    """Writes log.jsonl, one JSON record a line, and prints: on the main rank alone."""

    def __init__(self, out_dir: Path, is_main: bool, wandb_run=None):
        self.is_main = is_main
        self.wandb_run = wandb_run
        self.has_warned = False  # of overfitting
        self.recent_seconds: deque[float] = deque(maxlen=100)
        if not is_main:
            return
        self.path = out_dir / LOG
        self.file = open(self.path, "ab+")
        # A kill may have torn the last line. It is left as it is; ours begin on a new one.
        if self.file.tell():
            self.file.seek(-1, os.SEEK_END)
            if self.file.read(1) != b"\n":
                self.file.write(b"\n")

    def print(self, text: str):
        if self.is_main:
            show(text)

    def record(self, **fields):
        """Append a record to log.jsonl, and its numbers to Weights & Biases."""
        if not self.is_main:
            return
        try:
            self.file.write(json.dumps({"time": time.time()} | fields).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            error.filename = str(self.path)  # Python names a file only where it is opened
            raise
        numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
        if self.wandb_run and "step" in fields and numbers:
            try:
                self.wandb_run.log(numbers | {"step": fields["step"]})
            except Exception as error:  # its threads, files and network are not worth the run
                self.wandb_run = None
                show(
                    f"Weights & Biases logging has stopped: {type(error).__name__}: {error!s:.200}"
                )

    def time_left(self, seconds: float, steps_left: int) -> timedelta:
        """Return the time of the steps that are left, given the seconds of the last one."""
        self.recent_seconds.append(seconds)
        return timedelta(seconds=int(np.mean(self.recent_seconds) * steps_left))


def show(text: str, end: str = "\n"):
    """Print, as long as somebody reads it: `| head` and a closed terminal stop no run."""
    try:
        print(printable(text), end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether stream is a terminal, and not a cell of a notebook, which looks like one."""
    return stream is not None and stream.isatty() and not in_notebook()


def in_notebook() -> bool:
    return "JPY_PARENT_PID" in os.environ  # set by Jupyter, and inherited


def default_interval(num_steps: int) -> int:
    """Return the steps between lines on stdout: where it is kept, as in a notebook or a file, a
    line per step would hide all others."""
    return 1 if is_terminal(sys.stdout) else math.ceil(num_steps / 20)


def progress(items: Iterable, label: str, is_main: bool) -> Iterable:
    """Return items, with a progress bar on a terminal if going through them takes a second."""
    is_shown = is_main and is_terminal(sys.stderr)
    return tqdm(items, desc=label, leave=False, delay=1, disable=not is_shown)


def log_start(run: "Run", off: dict[str, str], state: dict | None):
    """Log where this process runs, and every flag and who chose it."""
    config, loader, model, env = run.config, run.loader, run.model, run.environment
    epochs = config.steps * config.batch_tokens / (len(loader) * loader.T)
    unused_tokens = sum(shard.num_tokens for shard in loader.shards) - len(loader) * loader.T
    start = {"environment": env, "flags": asdict(config), "typed": sorted(run.typed), "off": off}
    run.log.record(**start, tokenizer=run.data.tokenizer, resumed=run.step if state else None)
    decayed, others = model.decay_groups()
    num_decayed, num_others = model.num_elements(decayed), model.num_elements(others)
    optimizer = f"{'Muon and ' if config.muon else ''}{'fused ' if config.fused else ''}AdamW"
    chosen = []
    for f in fields(config):
        value = getattr(config, f.name)
        if value != f.default and f.name not in run.typed and f.metadata["on_resume"] != ONCE:
            chosen.append(typed_as(f.name, value))
    source = "" if config.data_dir else " (Python's own source)"
    lines = [
        f"run: {run.out_dir}, {f'resumed after step {run.step}' if state else 'new'}",
        f"data: {run.data.folder}, {run.data.tokenizer}{source}: {epochs:.2f} epochs of"
        f" {len(loader):,} sequences of {loader.T} tokens; {unused_tokens:,} tokens are left over",
        f"model: {config.model}, {num_decayed + num_others:,} parameters: {len(decayed)} tensors"
        f" ({num_decayed:,}) with weight decay, {len(others)} ({num_others:,}) without",
        f"optimizer: {optimizer}",
        f"device: {env['ranks']} x {env['device_name']}, torch {env['torch']}:"
        f" {env['matmul_tflops']:.3g} TFLOP/s in matrix products",
        f"chosen for you: {' '.join(chosen)}",
        *[f"off: {spell(name)} {reason}" for name, reason in off.items()],
    ]
    if run.data.tokenizer == "bytes" and config.model != "nano" and not config.data_dir:
        lines.append(f"on bytes, since GPT-2's vocabulary is not here: {vocab_cure()}")
    if epochs > 5:
        lines.append(
            f"{epochs:.0f} epochs: the network may learn its text by heart, and the validation"
            f" loss would rise; if it does, {OVERFITTING_CURE}"
        )
    if config.fp16 and env["device"] == "cpu":
        lines.append("--fp16 is for GPUs: on a CPU it is slower than float32")
    lines += hints(env, run.data.tokenizer)
    if state:
        lines += changes_since(state, run)
    run.log.print("\n".join(lines))


def warn_if_slow(run: "Run", seconds: float):
    """Say before the first step of a process is over that it will take minutes."""
    config = run.config
    if run.log.recent_seconds or seconds < 60:
        return
    step_time = timedelta(seconds=round(seconds))
    cure = f"for shorter steps set --batch-tokens below {config.batch_tokens}"
    if config.model != "nano" and run.step == 0:
        cure += "; --model nano learns in minutes on any computer"
    with tqdm.external_write_mode():  # a progress bar of the step is on the terminal
        run.log.print(
            f"a step takes about {step_time} here (h:mm:ss), and the"
            f" {config.steps - run.step:,} to come {step_time * (config.steps - run.step)}: {cure}"
        )


def warn_if_overfitting(run: "Run"):
    """Say once that the best validation is a third of the run ago, and the loss 2 % above it."""
    if run.step not in run.val_losses:  # it is not finite
        return
    best = min(run.val_losses, key=run.val_losses.get)
    is_late = run.step - best > run.config.steps / 3
    has_risen = run.val_losses[run.step] > 1.02 * run.val_losses[best]
    if is_late and has_risen and not run.log.has_warned:
        run.log.has_warned = True
        run.log.print(
            f"overfitting: the validation loss has risen since step {best:,}: {OVERFITTING_CURE}"
        )


def hints(env: dict, tokenizer: str) -> list[str]:
    """Return lines on what is missing on this machine."""
    lines = []
    if env["device"] == "cpu" and "+cpu" in env["torch"] and shutil.which("nvidia-smi"):
        lines.append("an NVIDIA GPU is here, but this torch is for CPUs: see pytorch.org")
    if tokenizer == "gpt2" and missing_vocab():
        lines.append(f"checkpoints lack the tokenizer, which is not here: {vocab_cure()}")
    return lines


def changes_since(state: dict, run: "Run") -> list[str]:
    """Return lines on the flags that a resumed run goes on with, on what has changed since it was
    saved, and on what keeps it from being the uninterrupted run bit for bit."""
    typed = [typed_as(name, value) for name, value in run.typed.items()]
    changes = defaultdict(list)  # by on_resume
    for f in fields(run.config):
        saved, current = state["config"].get(f.name, f.default), getattr(run.config, f.name)
        if saved != current:
            changes[f.metadata["on_resume"]].append(f"{spell(f.name)} {current} instead of {saved}")
    for name in ("torch", "threads", "ranks", "device_name"):
        saved, current = state["environment"][name], run.environment[name]
        if saved != current:
            changes[ROUNDS].append(f"{name} {current} instead of {saved}")
    lines = [
        f"flags given so far: {' '.join(typed)}",
        *[f"changed: {change}" for change in changes[FREE]],
    ]
    if changes[ROUNDS]:
        dropout = ", which changes the dropout masks" if run.config.dropout else ""
        lines.append(f"not bit for bit because of {', '.join(changes[ROUNDS])}{dropout}")
    return lines


def start_wandb(out_dir: Path):
    """Return the Weights & Biases run of out_dir, the same one after a resume. Raise UserError if
    the library is missing, or refuses."""
    try:
        os.environ.setdefault("WANDB_PROJECT", "train_gpt2")
        import wandb

        run_id = hashlib.sha256(str(out_dir.absolute()).encode()).hexdigest()[:16]
        return wandb.init(name=out_dir.name, dir=str(out_dir), id=run_id, resume="allow")
    except Exception as error:  # it has many
        cure = "pip install wandb; wandb login, or set WANDB_MODE=offline"
        raise UserError(f"--wandb: {error!s:.200}: {cure}") from error


def is_drawn(step: int, num_steps: int) -> bool:
    """Return whether a step's loss is among the thousand that loss.png shows of a run, and that
    each checkpoint holds: drawing them takes as long after a million steps as after a thousand."""
    return step % math.ceil(num_steps / 1000) == 0


def draw_losses(path: Path, title: str, losses: dict[int, float], val_losses: dict[int, float]):
    """Draw losses by step into path, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, fontsize=13, parse_math=False)
    if losses:
        steps, values = [*losses], [*losses.values()]
        axes.plot(steps, values, ".", markersize=2, color="#c9dbf5")
        width = max(1, len(values) // 50)
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        label = f"training: {smooth[-1]:.3f}, mean of {width} point{'s' if width > 1 else ''}"
        axes.plot(steps[width // 2 :][: len(smooth)], smooth, color="#4a7fd0", label=label)
    if val_losses:
        last = max(val_losses)
        label = f"validation: {val_losses[last]:.3f} after step {last:,}"
        axes.plot([*val_losses], [*val_losses.values()], "o", color="#d1480f", label=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if losses or val_losses:
        axes.legend(fontsize=12)
    with whole_file(path) as f:
        figure.savefig(f, format="png", dpi=200)
