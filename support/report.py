"""What a run prints about itself, both at its start and when something looks wrong."""

import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from config import TrainConfig, has_moved
from dataloader import MANIFEST, read_manifest
from support import checkpoint
from support.cli import command, launched, spell, typed_as
from support.evaluate import num_val_sequences
from support.pretrained import changed_fields, changes, formula_loss
from support.run import Run
from support.tokenizer import load_tokenizer, vocab_cure

CURE = "try fewer --steps, a --dropout of 0.2 or more, or more text"


def print_start(run: Run, typed: dict, reasons: dict[str, str], state: dict | None):
    """Log every flag, and print the folder, data, model, device and automatic flags."""
    config, env, loader = run.config, run.environment, run.loader
    record: dict = {"environment": env, "flags": asdict(config), "typed": sorted(typed)}
    record |= {"reasons": reasons, "micro_batch_size": loader.B, "tokenizer": run.data.tokenizer}
    record["command"] = typed_command(typed, reasons)
    record["preparation"] = preparation(run.data.folder)
    num_val = num_val_sequences(config.eval_tokens, run.val_loader) * loader.T
    record["val_tokens"] = num_val if config.eval_tokens else 0
    record |= {name: run.optimizer.defaults[name] for name in ("betas", "eps")}
    run.log.record(**record, data=run.data.fingerprint, resumed=run.step if state else None)
    epoch_tokens = len(loader) * loader.T
    tokens_left = (config.steps - run.step) * config.batch_tokens
    num_epochs = (loader.position * loader.T + tokens_left) / epoch_tokens
    unused_tokens = sum(shard.num_tokens for shard in loader.shards) - epoch_tokens
    source = "" if config.data_dir else " (Python's own source)"
    decayed, others = run.model.decay_groups()
    num_decayed, num_others = run.model.num_elements(decayed), run.model.num_elements(others)
    adamw = "fused AdamW" if config.fused else "AdamW"
    muon = f"Muon for the blocks' matrices, {adamw} for the rest (--no-muon: {adamw} for all)"
    name = env["device_name"]
    if env["device"] == "cpu":
        name = f"{env['threads']} thread{'s' * (env['threads'] > 1)} of {name}"
    lines = [
        f"run: {run.out_dir}, {f'resumed after step {run.step}' if state else 'new'}",
        f"data: {run.data.folder}, {run.data.tokenizer}{source}: {num_epochs:.2f} epochs of"
        f" {len(loader):,} sequences of {loader.T} tokens; {unused_tokens:,} tokens are left over;"
        f" {record['val_tokens']:,} tokens for validation",
        f"model: {config.model}, {num_decayed + num_others:,} parameters: {len(decayed)} tensors"
        f" ({num_decayed:,}) with weight decay, {len(others)} ({num_others:,}) without",
        f"optimizer: {muon if config.muon else adamw}",
        f"device: {env['ranks']} x {name}, torch {env['torch']}:"
        f" {env['matmul_tflops']:.3g} TFLOP/s in matrix products",
        f"{'flags kept' if state else 'automatic flags'}: {' '.join(untyped_flags(run, typed))}",
        *[f"{flag}: {reason}" for flag, reason in reasons.items()],
        *start_warnings(run, num_epochs),
    ]
    if state:
        lines += changes_since(state, run)
    run.log.print("\n".join(lines))


def typed_command(typed: dict, reasons: dict[str, str]) -> str:
    """Return the command that started this process, with the flags that it has chosen since, for
    `reasons` of this machine: measured again, they may come out differently."""
    flags = [typed_as(name, value) for name, value in typed.items()]
    return launched(" ".join([command("train_gpt2.py"), *flags, *reasons]))


def preparation(folder: Path) -> dict:
    """Return what the manifest says about how the data was made, or {} if others made it."""
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_manifest(folder / MANIFEST)
    return {name: manifest.get(name) for name in ("input", "flags", "files", "account")}


def untyped_flags(run: Run, typed: dict) -> list[str]:
    """Return the flags that differ from their defaults, except those typed on this command line."""
    values = asdict(run.config) | {"micro_batch_size": run.loader.B}
    kept = [f for f in fields(TrainConfig) if f.metadata["on_resume"] != "per command"]
    chosen = [f.name for f in kept if f.name not in typed and values[f.name] != f.default]
    return [typed_as(name, values[name]) for name in chosen]


def start_warnings(run: Run, num_epochs: float) -> list[str]:
    """Return warnings about anything that may surprise the user or is missing on this machine."""
    config, env, tokenizer = run.config, run.environment, run.data.tokenizer
    lines = list(run.data.notes)
    changed = ", ".join(changes(run.model.config))
    if changed:
        lines.append(f"GPT-2 is changed by {changed}, so transformers will refuse the checkpoints")
    for name in changed_fields(run.model.config):
        with suppress(ValueError):  # the small network can't have this value
            if formula_loss(**{name: getattr(run.model.config, name)}) == formula_loss():
                text = f"{spell(name)} does not change what the network computes"
                lines.append(f"{text}: does model.py read it?")
    has_gpt2 = bool(load_tokenizer("gpt2"))
    if not has_gpt2 and tokenizer != "gpt2" and config.model != "nano" and not config.data_dir:
        lines.append(f"training without GPT-2's vocabulary, which is missing: {vocab_cure()}")
    if num_epochs > 5:
        text = f"{num_epochs:.0f} epochs: the network may memorize its text"
        lines.append(f"{text}, and the validation loss would then rise; if it does, {CURE}")
    if config.fp16 and env["device"] == "cpu":
        lines.append("--fp16 is for GPUs: on a CPU it is slower than float32")
    if env["device"] == "cpu" and "+cpu" in env["torch"] and shutil.which("nvidia-smi"):
        lines.append("this machine has an NVIDIA GPU, but torch is for CPUs: see pytorch.org")
    if tokenizer == "gpt2" and not has_gpt2:
        lines.append(f"checkpoints will lack GPT-2's vocabulary: {vocab_cure()}")
    return lines


def changes_since(state: dict, run: Run) -> list[str]:
    """Return lines about changes since the checkpoint, and about which ones alter the last bits."""
    found = defaultdict(list)  # by on_resume
    for f in fields(TrainConfig):
        saved, current = state["config"].get(f.name, f.default), getattr(run.config, f.name)
        if f.name == "micro_batch_size":
            saved, current = state["micro_batch_size"], run.loader.B
        if saved != current:
            found[f.metadata["on_resume"]].append(f"{spell(f.name)} {current} instead of {saved}")
    for name in (*checkpoint.ENVIRONMENT, "processor"):
        current = str(run.environment[name]).split()
        saved = str(state["environment"].get(name, run.environment[name])).split()  # older: no key
        if saved != current:
            new = " ".join(word for word in current if word not in saved) or "none"
            old = " ".join(word for word in saved if word not in current) or "none"
            found["inexact"].append(f"{name} {new} instead of {old}")
    lines = [f"changed: {change}" for change in found["allow"]]
    now = run.environment["formula"]
    if state["environment"].get("formula", now) != now:
        lines.append("changed: model.py no longer computes what it did when the run was saved")
    beta2 = run.optimizer.defaults["betas"][1]
    if state["environment"].get("beta2", beta2) != beta2:
        lines.append(f"changed: beta2 {beta2} instead of {state['environment']['beta2']}")
    if state["val_losses"] and not run.val_losses:
        lines.append("the best checkpoint is chosen anew: validations so far used other tokens")
    if has_moved(state, run.world.device):
        lines.append("new device: speed-ups and micro-batch size are chosen again")
    if found["inexact"]:
        text = f"this resume is not bit for bit because of {', '.join(found['inexact'])}"
        lines.append(f"{text}, so dropout masks may differ" if run.config.dropout else text)
    return lines


def warn_if_rate_jumps(run: Run, old: float, new: float):
    """Warn if flags that changed at a resume more than double the learning rate."""
    if new > 2 * old:
        text = f"the learning rate goes up from {old:.2e} to {new:.2e}, because flags have changed"
        run.log.print(f"{text}: the loss may rise at first, and fall again as the rate does")


def warn_if_slow(run: Run, seconds: float):
    """Warn during the first step of a process if a step takes a minute or more."""
    if seconds < 60:
        return
    step_time = timedelta(seconds=round(seconds))
    left = run.config.steps - run.step
    text = f"a step takes about {step_time} (h:mm:ss), and {left:,} steps {step_time * left}"
    text += f": for shorter steps set --batch-tokens below {run.config.batch_tokens}"
    if run.config.model != "nano" and run.step == 0:
        text += "; --model nano learns in minutes on any computer"
    with tqdm.external_write_mode():  # the step's progress bar is on the terminal
        run.log.print(text)


def warn_if_overfitting(run: Run):
    """Warn once if the validation loss is 2% above its best, set over a third of the run ago."""
    if run.log.has_warned or run.step not in run.val_losses:  # step unsaved or loss not finite
        return
    best = min(run.val_losses, key=run.val_losses.__getitem__)
    is_late = run.step - best > run.config.steps / 3
    if is_late and run.val_losses[run.step] > 1.02 * run.val_losses[best]:
        run.log.has_warned = True
        run.log.print(f"overfitting: the validation loss has risen since step {best:,}: {CURE}")
