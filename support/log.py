"""What a run leaves for people: log.jsonl, the terminal's line, TensorBoard, the profile, loss.png.

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
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType

from support.device import device_name, peak_memory_mib, peak_tflops
from support.files import vocab_cure, whole_file


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


def start_text(record: dict, sizes: list[tuple[int, int]], num_sequences: int) -> str:
    """The first record in words. sizes are tensors and their numbers: with weight decay, without,
    and of the blocks' matrices."""
    (a, num_a), (b, num_b), (c, num_c) = sizes
    env, flags = record["environment"], record["flags"]
    muon = f"Muon on {c} matrices of the blocks with {num_c:,}; else " if flags["muon"] else ""
    spelled = {name: "--" + name.replace("_", "-") for name in flags}
    is_own = flags["model"] == "nano" or flags["data_dir"] or flags["init_from"]
    lacks_vocab = record["tokenizer"] == "bytes" and not is_own
    return "\n".join([
        f"{flags['model']}: {num_a + num_b:,} parameters; weight decay on {a} tensors with"
        f" {num_a:,}, none on {b} with {num_b:,}; {muon}AdamW"
        f" {'fused' if flags['fused'] else 'plain'}",
        f"{env['ranks']} x {env['device_name'] or env['device']}, torch {env['torch']}:"
        f" {record['matmul_tflops']:.3g} TFLOP/s in matrix products",
        f"{num_sequences:,} sequences of {flags['seq_len']} {record['tokenizer']} tokens:"
        f" {record['epochs']:.2f} epochs in {flags['steps']:,} steps,"
        f" {record['unused_tokens']:,} tokens unused",
        *[f"on bytes, since GPT-2's vocabulary is not here: {vocab_cure()}"] * lacks_vocab,
        "chosen: " + " ".join(f"{spelled[name]}={flags[name]}" for name in record["chosen"]),
        *(f"off: {spelled[name]} {why}" for name, why in record["off"].items()),
    ])  # fmt: skip


def resume_text(
    step: int, was: dict, changed: dict, env: dict, rounding: tuple[str, ...], rates: tuple,
    has_digest: bool,
) -> str:  # fmt: skip
    """Where a run goes on, and what has changed since it was saved: what is in env, and the flags
    of rounding, change its bits. rates are the learning rate of then, and of now."""
    told, reasons = [f"resumed after step {step}"], []
    for name, value in changed.items():
        spelled = name if name in env else "--" + name.replace("_", "-")
        is_exact = name not in env and name not in rounding
        (told if is_exact else reasons).append(f"{spelled} {value} instead of {was.get(name)}")
    if rates[0] != rates[1]:
        told.append(f"the learning rate is {rates[1]:.2e}, it was {rates[0]:.2e}")
    if reasons:
        told.append(f"not bit for bit because of {', '.join(reasons)}")
    if not has_digest:
        told.append("its checkpoint has no digest: an older version wrote it")
    return ", ".join(told)


class Progress:
    """Tells of each step of this process. A step has batch_tokens, each of which takes so many
    flops of a rank."""

    def __init__(self, log: Callable, device: torch.device, steps: int, batch_tokens: int,
                 flops: float, matmul_tflops: float, trace_in: Path | None):  # fmt: skip
        self.log, self.device, self.steps, self.trace_in = log, device, steps, trace_in
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
        self.log(
            f"step {step}/{self.steps} | loss {loss:.4f} | lr {learning_rate:.2e} |"
            f" norm {norm:.3f} | {1000 * seconds:.0f} ms | {tokens_per_s:,.0f} tokens/s |"
            f" {words} | {left} left{' | ' * bool(notice)}{notice}",
            step=step, loss=loss if math.isfinite(loss) else None,
            grad_norm=norm if math.isfinite(norm) else None, learning_rate=learning_rate,
            ms=1000 * seconds, **shares, tokens_per_s=tokens_per_s, tflops=tflops,
            peak_mib=peak_memory_mib(self.device), **({"notice": notice} if notice else {}),
        )  # fmt: skip

    def profiled(self, step: int):
        """Where there is a folder to trace_in, the third step of this process is looked into, or
        the last of a shorter one."""
        num_done = len(self.seconds)
        is_it = num_done == 2 or (num_done < 2 and step == self.steps)
        if not (self.trace_in and is_it):
            return nullcontext()
        path = self.trace_in / f"trace_{step:06d}.json"
        return profiled(path, self.device.type == "cuda", self.log, step)


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
    """The losses of the run in path's folder, titled with what ran and how it ended; False where
    matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(what_ran(read_log(path.parent)), fontsize=13, parse_math=False)
    losses, validations = (logged(path.parent, name) for name in ("loss", "val_loss"))
    last, steps, values = [*losses.values()][-100:], [*validations], [*validations.values()]
    label = f"training: {np.mean(last):.3f} over the last {len(last)} steps" if last else ""
    axes.plot([*losses], [*losses.values()], linewidth=0.8, color="#8fb4e8", label=label)
    label = f"validation: {values[-1]:.3f} after step {steps[-1]:,}" if values else ""
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
