"""The folder of a run: which one it is, that it is this process's alone and has room, the state
that goes there, and who writes it."""

import math
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from dataloader import ShardLoader
from model import GPT
from support.checkpoint import checkpoints, save_checkpoint
from support.files import locked


def choose_out_dir(name: str, resume: bool) -> Path:
    """The folder that --out-dir names, or the next free one, not made yet; ValueError if it holds a
    run and there is no --resume to own it."""
    if not name:
        names = [path.name for path in Path("out").glob("[0-9]*")]
        used = [int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)]
        newest = max(used, default=0)
        return Path("out", f"{newest if newest and resume else newest + 1:03d}")
    path = Path(name)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out-dir {path} is a file: name a folder")
    if path.is_dir() and not resume and (checkpoints(path) or (path / "log.jsonl").exists()):
        raise ValueError(f"--out-dir {path} holds a run: add --resume, or name another folder")
    return path


def take(out_dir: Path, keep: int, size: int, seen: list[Path]) -> IO:
    """Make the run's folder this process's own, for as long as what this returns is open. OSError
    if another process has it, or has written checkpoints since these were seen; if log.jsonl is a
    link or no file; or if the disk has too little room for keep checkpoints of so many bytes."""
    log = out_dir / "log.jsonl"
    if log.is_symlink() or (log.exists() and not log.is_file()):
        why = f"{log} is a link, or no file: a run writes into its own folder"
        raise OSError(f"{why}; move it away")
    num_more = max(1, keep + 2 - len(checkpoints(out_dir)))
    above = (out_dir.absolute(), *out_dir.absolute().parents)
    free = shutil.disk_usage(next(path for path in above if path.exists())).free
    if free < num_more * size:
        room = f"{num_more * size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise OSError(f"--out-dir {out_dir}: {num_more} more checkpoints need {room}: name another")
    lock = locked(out_dir)
    if {*checkpoints(out_dir)} - {*seen}:
        lock.close()
        raise OSError(f"--out-dir {out_dir} has a new checkpoint meanwhile: repeat the command")
    for path in [*out_dir.glob("checkpoint_*.pt.tmp"), *out_dir.glob("loss.png.tmp")]:
        path.unlink()  # of a process that died
    return lock


def check_identity(saved: dict, wanted: dict, data, out_dir: Path):
    """ValueError if the flags or the data ask for another run than the one that was saved."""
    config, saved = saved["config"], saved["identity"]
    for name, value in wanted.items():
        if saved.get(name) != value:
            flag = "--" + name.replace("_", "-")
            why = f"{flag}: the run in {out_dir} has {saved.get(name)}, this one {value}"
            if name == "data_dir":
                began = config.get(name) or "Python's own source"
                why = f"{flag} {data.train[0].path.parent} has other tokens than {began} had when"
                why += f" the run in {out_dir} began"
            raise ValueError(f"{why}; give it as it was, or another --out-dir")


@dataclass
class TrainState:
    """What changes in a run, and all that it needs to go on."""

    model: GPT
    optimizer: torch.optim.Optimizer
    loader: ShardLoader
    scaler: torch.amp.GradScaler  # of --fp16; else it does nothing
    step: int = 0
    val_losses: dict[int, float] = field(default_factory=dict)  # by step: which checkpoint is best

    def state_dict(self) -> dict:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": self.scaler.state_dict(),
            "position": self.loader.position,
            "val_losses": dict(self.val_losses),
        }

    def load_state_dict(self, saved: dict):
        """Go on from saved. Learning rate, betas and decay stay the command line's: PyTorch's own
        load would bring back the old ones."""
        self.step = saved["step"]
        self.val_losses = dict(saved["val_losses"])
        self.model.load_state_dict(saved["model"])
        groups = torch.optim.AdamW.state_dict(self.optimizer)["param_groups"]
        self.optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        for moments in self.optimizer.state.values():  # of its own: saved may be mapped from a file
            moments |= {name: value.clone() for name, value in moments.items()}
        if scaler := saved["scaler"]:  # there is none without --fp16
            self.scaler.load_state_dict(scaler)
        self.loader.position = saved["position"]

    def leave_out(self, loss: float, norm: float, bad: list[float], num_micro: int) -> str:
        """Why a step of so many batches was not applied, if float16 can't hold its gradient: the
        scaler has halved the scale. Else FloatingPointError. bad says of each rank whether its own
        loss was not finite."""
        has_scale, scale = self.scaler.is_enabled(), self.scaler.get_scale()
        if has_scale and math.isfinite(loss) and scale >= 1:
            return f"not applied: the gradient overflows float16, its scale is {scale:.0f} now"
        whose = ", ".join(str(rank) for rank, is_bad in enumerate(bad) if is_bad) or "none alone"
        end = self.loader.position
        begin = end - num_micro * self.loader.B * self.loader.num_ranks
        raise FloatingPointError(
            f"step {self.step + 1} gave loss {loss} (rank: {whose}) and gradient norm {norm}, on"
            f" sequences {begin:,} to {end - 1:,}: not applied, the weights are those of step"
            f" {self.step}; try a --learning-rate below {self.optimizer.defaults['lr']}"
        )


class Saver:
    """Writes the checkpoints of a run: with a GPU from a copy, while the training goes on. At its
    end, as a context, all are written; report is told if the last one could not be."""

    def __init__(self, out_dir: Path, keep: int, device: torch.device, log: Callable,
                 report: Callable[[str], object]):  # fmt: skip
        self.out_dir, self.keep, self.device = out_dir, keep, device
        self.log, self.report = log, report
        self.writer, self.copies = ThreadPoolExecutor(1), {}
        self.saving: Future | None = None
        self.step = -1  # of saving
        self.told: BaseException | None = None  # what save has raised

    @property
    def in_background(self) -> bool:
        """A CPU has its hands full."""
        return self.device.type != "cpu"

    @property
    def has_failed(self) -> bool:
        return bool(self.saving and self.saving.done() and self.saving.exception())

    def save(self, saved: dict, wait: bool):
        """Write saved. OSError if it can't be written, or if the one before could not, which does
        not keep this one from it."""
        failed = self.saving and self.saving.exception()  # waits for it
        if saved["step"] == self.step and not failed:
            return
        content, waits = saved, wait or not self.in_background
        try:
            content = copied(saved, self.copies) if self.in_background else saved
        except RuntimeError:  # no memory for copies, or it fails again in write
            self.copies, waits = {}, True
        self.saving, self.step = self.writer.submit(self.write, content), saved["step"]
        self.told = failed
        if waits or failed:
            self.told = self.saving.exception() or failed  # waits
        if self.told:
            raise self.told

    def write(self, saved: dict):
        start = time.perf_counter()
        path = save_checkpoint(self.out_dir, saved, self.keep)
        seconds = time.perf_counter() - start
        self.log(f"saved {path}", saved=saved["step"], path=str(path), save_s=seconds)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.writer.shutdown()
        lost = self.saving and self.saving.exception()
        if lost and lost is not self.told:
            self.report(f"error: {lost}")


def copied(saved, copies: dict):
    """The same with its tensors copied to the computer's memory, into copies: those of the save
    before, since new memory takes longer to get than to fill. A tied tensor has one copy."""
    if isinstance(saved, dict):
        return {name: copied(value, copies) for name, value in saved.items()}
    if not isinstance(saved, Tensor):
        return saved
    key = saved.data_ptr(), saved.shape, saved.dtype
    if key not in copies:  # not pinned: PyTorch would round each up to a power of two
        copies[key] = torch.empty_like(saved, device="cpu")
    return copies[key].copy_(saved)
