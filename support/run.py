"""A run: its parts, which of them a checkpoint keeps, and how to save, restore and end a run."""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from config import TrainConfig
from dataloader import ShardLoader, TokenFolder
from model import GPT
from support import checkpoint, log
from support.card import CARD, model_card
from support.cli import command, launched
from support.ending import STOPPED, DiskError, Phase, signals, tell_torchrun, watchdog
from support.evaluate import Question, num_val_sequences
from support.files import FolderLock, whole_file
from support.ranks import World, check_ranks_agree
from support.run_folder import PICTURE, SUMMARY, checkpoints, step_of
from support.tokenizer import as_json, load_tokenizer


@dataclass
class Run:
    """The run of this process: first the parts that stay the same, then those that change."""

    config: TrainConfig
    world: World
    out_dir: Path
    lock: FolderLock  # of out_dir; only the main rank has acquired it
    log: log.Log
    environment: dict  # what affects results besides the flags: torch, processor, ranks, ...
    data: TokenFolder
    val_loader: ShardLoader
    questions: list[Question]
    net: nn.Module  # what the training loop calls: model, wrapped in torch.compile and DDP

    model: GPT  # the plain module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing without --fp16
    loader: ShardLoader  # of the training data
    step: int = 0  # steps done
    first_step: int = 0  # the step at which this process started
    saved_step: int = -1  # the step of the newest checkpoint
    began_at_old_end: bool = False  # whether this process began at the saved run's last step
    must_stop: bool = False  # whether any rank got a stop signal; the same on every rank
    has_read_back: bool = False  # whether this process has read back its first checkpoint
    losses: dict[int, float] = field(default_factory=dict)  # by step, for loss.png
    val_losses: dict[int, float] = field(default_factory=dict)  # by step


def state_of(run: Run) -> dict:
    """Return the contents of state.json: all that a resume needs besides weights and moments."""
    # We save no RNG state, as all randomness depends only on the seed and step.
    return {
        "step": run.step,
        "position": run.loader.position,  # the loader's whole state
        "micro_batch_size": run.loader.B,  # config has 0 unless the user typed a size
        "scaler": run.scaler.state_dict(),  # the loss scale of --fp16
        "losses": run.losses,
        "val_losses": run.val_losses,
        "config": asdict(run.config),
        "environment": run.environment | {"beta2": run.optimizer.defaults["betas"][1]},
        "tokenizer": run.data.tokenizer,
        "data": run.data.fingerprint,
    }


def restore(run: Run, path: Path, state: dict):
    """Load everything except the weights from a checkpoint and its state."""
    checkpoint.load_optimizer(path, run.model, run.optimizer)
    run.step = run.first_step = run.saved_step = state["step"]
    run.loader.position = state["position"]
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    run.losses, run.val_losses = state["losses"], state["val_losses"]
    saved, now = state["config"], run.config.eval_tokens
    before = saved.get("eval_tokens", now)
    # Losses on other tokens can't be compared. If there is no validation now, they stay in force.
    if now and num_val_sequences(now, run.val_loader) != num_val_sequences(before, run.val_loader):
        run.val_losses = {}
    # A run saves before it validates, so no checkpoint holds the validation after its last step.
    run.began_at_old_end = run.step == saved.get("steps")
    signals.phase = Phase.SAVED


def vote_to_stop(run: Run):
    """Set run.must_stop if any rank got a stop signal. Each rank waits for all others."""
    run.must_stop = any(run.world.gather(signals.received))


def save(run: Run):
    """Compare the weights of all ranks, and write a checkpoint on the main rank. Then vote again,
    because a signal may have come meanwhile."""
    watchdog.reset()
    # The averaged loss would not show that a rank's weights have drifted, say on a faulty GPU.
    check_ranks_agree(run.model, run.step, run.world)
    watchdog.stop()  # a slow disk may take longer than the limit
    run.world.call_on_main(write_checkpoint, run)
    watchdog.reset()
    run.saved_step = run.step
    signals.phase = Phase.SAVED
    vote_to_stop(run)


def write_checkpoint(run: Run):
    started = time.perf_counter()
    # A background thread would have to copy everything first, to gain two seconds per 250 steps.
    path = checkpoint.save(run.lock, run.model, run.optimizer, state_of(run))
    if not run.has_read_back:
        checkpoint.check_read_back(path, run.model, run.optimizer)
        run.has_read_back = True
    checkpoint.rotate(run.out_dir, run.step, run.config.keep, run.val_losses)
    run.log.record(saved=run.step, path=str(path), save_s=time.perf_counter() - started)
    if run.step:
        run.log.print(f"saved {path}")


def update_card(run: Run):
    """Add the newest validation to its checkpoint's README.md, unless a person has edited that."""
    if not run.world.is_main:
        return
    state = state_of(run)
    before = {step: loss for step, loss in run.val_losses.items() if step != run.step}
    with suppress(OSError, DiskError):  # the next save reports it
        run.lock.check()
        path = run.out_dir / f"step_{run.step:06d}" / CARD
        if path.read_bytes() == model_card(run.model, state | {"val_losses": before}).encode():
            with whole_file(path) as f:
                f.write(model_card(run.model, state).encode())


def draw(run: Run):
    """Draw loss.png, if matplotlib is installed."""
    if not run.world.is_main or not (run.losses or run.val_losses):
        return
    title = f"{run.config.model}, {run.config.steps:,} steps of {run.config.batch_tokens:,} tokens"
    try:
        run.lock.check()
        log.draw_losses(run.out_dir / PICTURE, title, run.losses, run.val_losses)
    except ImportError:
        if run.step >= run.config.steps:
            run.log.print(f"no {run.out_dir / PICTURE}, since matplotlib is not installed")
    except Exception as error:  # a failed plot must not end a run
        run.log.print(f"no loss.png: {error}")


def stop(run: Run) -> int:
    """Say how to continue a run that a signal stopped, and return its exit code."""
    signals.phase = Phase.LEAVING
    draw(run)
    run.log.record(stopped=run.step)  # the last record; a job script looks for it
    line = command("train_gpt2.py", "--resume", "--out-dir", str(run.out_dir))
    if run.config.max_hours:
        line += f" --max-hours {run.config.max_hours:g}"
    line = launched(line)
    text = f"stopped after step {run.step}, which is saved"
    if signals.is_time_up:
        text += f", because --max-hours {run.config.max_hours:g} is over"
    run.log.print(f"{text}; to continue: {line}")
    tell_torchrun(text)  # which takes our exit code for a failure
    return STOPPED


def finish(run: Run):
    signals.phase = Phase.LEAVING
    run.world.call_on_main(write_summary, run)


def write_summary(run: Run):
    """Write summary.json, which marks the run as complete, and print the last lines."""
    # This comes after the last evaluation, since a run killed during it is incomplete.
    run.lock.check()
    # Rotate again, because the last validation may have changed which checkpoint is the best.
    checkpoint.rotate(run.out_dir, run.step, run.config.keep, run.val_losses)
    path = run.out_dir / f"step_{run.step:06d}"
    best_path = checkpoint.best_of(checkpoints(run.out_dir), run.val_losses)
    summary = {"steps": run.step, "checkpoint": path.name}
    text = f"done: {run.step:,} steps"
    sample = f"sample: {command('sample.py', str(run.out_dir))}"
    if not load_tokenizer(run.data.tokenizer):
        sample = "no sample, because the tokenizer of the data is not here"
    if best_path:
        best = step_of(best_path)
        last_loss, best_loss = run.val_losses[max(run.val_losses)], run.val_losses[best]
        summary |= {"val_loss": last_loss, "best_step": best, "best_val_loss": best_loss}
        text += f", validation {last_loss:.4f}, best {best_loss:.4f} after step {best:,}"
        if best != run.step:
            sample += f"\nbest checkpoint: {command('sample.py', str(best_path))}"
    with whole_file(run.out_dir / SUMMARY) as f:
        f.write(as_json(summary))
    run.log.record(done=run.step)
    curves = f"curves: {command(str(Path('benchmarks', 'plot.py')), str(run.out_dir))}"
    run.log.print(f"{text}; saved in {path}\n{sample}\n{curves}")
