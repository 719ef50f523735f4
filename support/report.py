"""What a run says for people at its start, when it goes on, and at its end; and on a terminal, in
one line that overwrites itself, what goes on between two lines."""

import difflib
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from dataloader import ShardLoader
from model import GPT
from support.files import vocab_cure
from support.log import last_flags, logged


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def goes_on_with(out_dir: Path, typed: dict, known: Callable, once: set) -> tuple[dict, str]:
    """The flags that somebody has given to the run in out_dir and that are not typed now, and its
    model; and in words what they are. Flags of a command alone, once, do not count."""
    flags, given = last_flags(out_dir, known)
    own = {n: v for n, v in flags.items() if n in given | {"model"} and n not in {*once, *typed}}
    told = [f"{spelled(n)}={v}" for n, v in own.items() if n != "model"]
    words = f"{out_dir} goes on with its own {shlex.join(told)}" if told else ""
    return own | ({"out_dir": str(out_dir)} if flags else {}), words


def start(
    facts: dict, given: set[str], unset: dict, model: GPT, loader: ShardLoader
) -> tuple[str, dict]:
    """The first record of a run, in words and for its log: facts and what they lead to."""
    flags, tokens = facts["flags"], sum(shard.num_tokens for shard in loader.shards)
    chosen = [name for name in flags if name not in given and flags[name] != unset[name]]
    record = {name: facts[name] for name in ("environment", "flags")}
    record |= {"chosen": chosen, "given": sorted(given)} | facts
    record |= {"epochs": flags["steps"] * flags["batch_tokens"] / (len(loader) * loader.T)}
    record |= {"unused_tokens": tokens - len(loader) * loader.T}
    record |= {"data": str(loader.shards[0].path.parent)}
    sizes = [(len(g), model.num_elements(g)) for g in (*model.decay_groups(), model.matrices())]
    return start_text(record, sizes, len(loader)), record


def start_text(record: dict, sizes: list[tuple[int, int]], num_sequences: int) -> str:
    """The first record in words. sizes are tensors and their numbers: with weight decay, without,
    and of the blocks' matrices."""
    (a, num_a), (b, num_b), (c, num_c) = sizes
    env, flags = record["environment"], record["flags"]
    muon = f"Muon on {c} matrices of the blocks with {num_c:,}; else " if flags["muon"] else ""
    own = "" if flags["data_dir"] else ", Python's own source, since there is no --data-dir"
    is_own = flags["model"] == "nano" or flags["data_dir"] or flags["init_from"]
    lacks_vocab = record["tokenizer"] == "bytes" and not is_own
    return "\n".join([
        f"run: {flags['out_dir']}, {whether_new(record)}",
        f"data: {record['data']}{own}",
        f"{flags['model']}: {num_a + num_b:,} parameters; weight decay on {a} tensors with"
        f" {num_a:,}, none on {b} with {num_b:,}; {muon}AdamW"
        f" {'fused' if flags['fused'] else 'plain'}",
        f"{env['ranks']} x {env['device_name'] or env['device']}, torch {env['torch']}:"
        f" {record['matmul_tflops']:.3g} TFLOP/s in matrix products",
        *["an NVIDIA GPU is here, but this torch is for CPUs: pytorch.org"] * has_unused_gpu(env),
        f"{num_sequences:,} sequences of {flags['seq_len']} tokens ({record['tokenizer']}):"
        f" {record['epochs']:.2f} epochs in {flags['steps']:,} steps,"
        f" {record['unused_tokens']:,} tokens unused",
        *[f"on bytes, since GPT-2's vocabulary is not here: {vocab_cure()}"] * lacks_vocab,
        "chosen: " + shlex.join(f"{spelled(name)}={flags[name]}" for name in record["chosen"]),
        *["off: " + "; ".join(f"{spelled(n)} {why}" for n, why in record["off"].items())]
        * bool(record["off"]),
    ])  # fmt: skip


def has_unused_gpu(env: dict) -> bool:
    """Whether there is an NVIDIA GPU that the installed torch, built for the CPU, can't use."""
    return env["device"] == "cpu" and not torch.version.cuda and bool(shutil.which("nvidia-smi"))


def whether_new(record: dict) -> str:
    """Whether the run goes on, and if --resume has found nothing, which run was meant perhaps."""
    if record["goes_on"]:
        return "goes on"
    if not record["flags"]["resume"]:
        return "new"
    own = Path(record["flags"]["out_dir"])
    runs = [path.parent.name for path in own.parent.glob("*/checkpoint_*.pt")]
    near = difflib.get_close_matches(own.name, runs, 1)
    hint = f"; did you mean {own.with_name(near[0])}?" if near else ""
    return f"new: nothing to resume there{hint}"


def changes(was: dict, flags: dict, env: dict) -> dict[str, tuple]:
    """Name -> old and new of the flags, and of what in env moves last bits, that are not as they
    were."""
    names = ("torch", "threads", "ranks", "device_name")
    now = flags | {name: env[name] for name in names if was.get(name)}
    return {name: (was.get(name), v) for name, v in now.items() if was.get(name) != v}


def resume_text(
    step: int, changed: dict[str, tuple], env: dict, rounding: set[str], rates: tuple
) -> str:
    """Where a run goes on, and what has changed since it was saved: what is in env, and the flags
    of rounding, change its bits. rates are the learning rate of then, and of now."""
    told, reasons = [f"resumed after step {step}"], []
    for name, (old, new) in changed.items():
        word = name if name in env else spelled(name)
        is_exact = name not in env and name not in rounding
        (told if is_exact else reasons).append(f"{word} {new} instead of {old}")
    if rates[0] != rates[1]:
        told.append(f"the learning rate is {rates[1]:.2e}, it was {rates[0]:.2e}")
    if reasons:
        told.append(f"not bit for bit because of {', '.join(reasons)}")
    return ", ".join(told)


def stop_text(out_dir: Path, step: int, num_ranks: int) -> str:
    """What to type to go on."""
    program = "python" if num_ranks == 1 else "torchrun (as before)"
    command = f"{program} train_gpt2.py --resume --out-dir {shlex.quote(str(out_dir))}"
    return f"stopped by a signal after step {step}; to go on: {command}"


def end_text(out_dir: Path) -> str:
    """How a finished run went, as its log has it, and what to type next."""
    told, losses = ["done"], {}
    with suppress(OSError, OverflowError):  # a log that can't be read is no reason to fail
        names = ("val_loss", "bits_per_byte", "ms")
        losses, in_bytes, ms = (logged(out_dir, name) for name in names)
        time_taken = timedelta(seconds=round(sum(ms.values()) / 1000))
        told = [f"done: {len(ms):,} steps in {time_taken}"] if ms else told
    if losses:
        last, best = max(losses), min(losses, key=losses.get)
        bits = f" ({in_bytes[last]:.4f} bits per byte)" if last in in_bytes else ""
        told += [
            f"validation {losses[last]:.4f}{bits}, best {losses[best]:.4f} after step {best:,}"
        ]
    saved = sorted(out_dir.glob("checkpoint_[0-9]*.pt"), key=lambda path: (len(path.name), path))
    files = [*saved[-1:], out_dir / "loss.png"]
    folder = shlex.quote(str(out_dir))
    return "\n".join(
        [
            f"{', '.join(told)}; written: "
            + ", ".join(str(path) for path in files if path.exists()),
            f"sample: python train_gpt2.py --resume --out-dir {folder} --sample-only",
            f"curves: python benchmarks/plot.py {folder}",
        ]
    )


class Status:
    """Passes each phase of a run on to note, and shows it on a terminal: with what is left where
    the phase says k/n. Not where it is not to be shown, as beside a sample that shows itself."""

    def __init__(self, note: Callable[[str], None], is_shown: bool):
        tqdm.monitor_interval = 0  # no thread of its own
        # None: off where stderr is no terminal
        is_off = None if is_shown and sys.stderr else True
        self.bar = tqdm(bar_format="{desc}", leave=False, disable=is_off)
        self.note, self.shown, self.begin, self.kind = note, -math.inf, time.monotonic(), ""

    def __call__(self, phase: str):
        self.note(phase)
        now, part = time.monotonic(), re.search(r"(\d+)/(\d+)", phase)
        k, n = map(int, part.groups()) if part else (1, 1)
        self.begin = now if k == 1 else self.begin
        kind, was = re.sub(r"\d+", "", phase), self.kind
        if not self.bar.disable and (kind != was or now - self.shown > 0.3):
            self.kind = kind
            left = timedelta(seconds=round((now - self.begin) / max(1, k - 1) * (n - k + 1)))
            self.bar.set_description_str(f"{phase}, {left} left" if k > 1 else phase)
            self.shown = now
