"""The folder of a run: who owns it, and its checkpoints: saved, verified, read, rotated.

A checkpoint is a folder, step_000250, and a model for Hugging Face's tools:
    config.json             the shape of the network
    model.safetensors       its weights, with Hugging Face's names and layout, without padding
    tokenizer*.json, vocab.json, merges.txt      if the tokenizer is installed here
    optimizer.safetensors   the optimizer's state: PARAMETER.exp_avg, ...
    state.json              all else that a resume needs: see state_of in train_gpt2.py
    SHA256SUMS              of all these files, for `sha256sum -c SHA256SUMS`

It is written as step_000250.tmp, synchronized with the disk, and renamed: it is there whole, or not
at all. A resume verifies all digests; the first save of each process is read back as it would.
"""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import GPT
from support import pretrained
from support.errors import DiskError, NoGoodCheckpoint, UserError, print_error
from support.files import sync
from support.logger import LOG
from support.tokenizer import Tokenizer, as_json, load_tokenizer, provide_vocab

FORMAT = 3  # of state.json
SUMS = "SHA256SUMS"
REQUIRED = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}
LOCK, SUMMARY = ".lock", "summary.json"


class DamagedCheckpoint(UserError):
    """A file of a checkpoint does not have its digest."""


def choose_out_dir(name: str, resume: bool) -> Path:
    """Return the folder that --out-dir names, or without a name the next free out/001, out/002, ...
    (with resume: the newest). Raise UserError if anything but this run is in it."""
    if not name:
        runs = [p.name for p in Path("out").glob("*") if re.fullmatch("[0-9]{3,9}", p.name)]
        newest = max(map(int, runs), default=0)
        name = f"out/{newest if newest and resume else newest + 1:03d}"
    out_dir = Path(name)
    if not os.path.lexists(out_dir):
        return out_dir
    if not out_dir.is_dir():
        raise UserError(f"--out-dir {out_dir} is not a folder: name another")
    log = out_dir / LOG
    holds_run = bool(checkpoints(out_dir))
    if holds_run and not resume:
        raise UserError(f"--out-dir {out_dir} holds a run: add --resume, or name another folder")
    # A start that was stopped before its first checkpoint leaves these, or plot.py has drawn it.
    unfinished = {path for path in out_dir.glob("step_[0-9]*.tmp") if path.is_dir()}
    others = set(out_dir.iterdir()) - unfinished - {out_dir / LOCK, log, out_dir / "wandb"}
    others -= set(out_dir.glob("curves*.png"))
    if not holds_run and (out_dir / SUMS).exists() and (out_dir / "state.json").exists():
        raise UserError(f"--out-dir {out_dir} is a checkpoint: name its run, {out_dir.parent}")
    if others and not holds_run:
        raise UserError(f"--out-dir {out_dir} holds {min(others).name} and no run: name a new one")
    if log.is_symlink() or (log.exists() and not log.is_file()):
        raise UserError(f"{log} is a link, or no file: remove it, or name another folder")
    return out_dir


def take_folder(out_dir: Path, lock: FileLock, is_new: bool):
    """Make the folder of a run, and lock it until this process ends. Raise UserError if another
    run has it, or had it since it was looked at."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        sync(out_dir.parent)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"--out-dir {out_dir} belongs to a live run: name another") from None
    except (OSError, NotImplementedError) as error:  # such as Lustre without -o flock
        raise UserError(f"--out-dir can't be written or locked ({error}): name another") from error
    if is_new and (out_dir / LOG).exists():
        raise UserError(
            f"--out-dir {out_dir} was taken by another run just now: name another folder"
        )
    for unfinished in out_dir.glob("step_[0-9]*.tmp"):  # of a process that died
        shutil.rmtree(unfinished, ignore_errors=True)


def check_disk_space(out_dir: Path, model: GPT, keep: int):
    """Raise UserError if the disk of out_dir, which may not exist yet, has no room for the
    checkpoints that are to come: while one is written, `keep` older ones and the best are there."""
    num_more = max(1, keep + 2 - len(checkpoints(out_dir)))
    # Weights and two moments in float32.
    num_bytes = num_more * 12 * sum(p.numel() for p in model.parameters())
    parents = [out_dir.absolute(), *out_dir.absolute().parents]
    free = shutil.disk_usage(next(path for path in parents if path.exists())).free
    if free < num_bytes:
        room = f"{num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise UserError(f"--out-dir {out_dir}: checkpoints need {room}: name another disk")


def read_summary(out_dir: Path) -> dict:
    """Return what summary.json says; {} before the last evaluation, or if it can't be read."""
    try:
        return dict(json.loads((out_dir / SUMMARY).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(out_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    pattern = re.compile(r"step_(\d{6}|[1-9]\d{6,17})", re.ASCII)
    paths = [path for path in out_dir.glob("step_*") if pattern.fullmatch(path.name)]
    return sorted(filter(Path.is_dir, paths), key=step_of, reverse=True)


def save(out_dir: Path, model: GPT, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write a checkpoint and return its folder. Raise DiskError if it can't be written."""
    path = out_dir / f"step_{state['step']:06d}"
    unfinished = path.with_name(f"{path.name}.tmp")
    tokenizer = load_tokenizer(state["tokenizer"])
    files = tokenizer.files(model.config.seq_len) if tokenizer else {}
    files["config.json"] = as_json(pretrained.hf_config(model.config, state["tokenizer"]))
    files["state.json"] = as_json({"format": FORMAT} | state)
    try:
        unfinished.mkdir(parents=True)
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        save_file(pretrained.hf_weights(model), unfinished / "model.safetensors", {"format": "pt"})
        save_file(optimizer_tensors(model, optimizer), unfinished / "optimizer.safetensors")
        for file in unfinished.glob("*.safetensors"):  # which only their owner may read
            with suppress(OSError):  # some disks have no modes
                shutil.copymode(unfinished / "state.json", file)
        with ThreadPoolExecutor() as pool:  # the two large files at the same time
            lines = list(pool.map(sync_and_sum, sorted(unfinished.iterdir())))
        (unfinished / SUMS).write_bytes("".join(lines).encode())
        sync_and_sum(unfinished / SUMS)
        sync(unfinished)
        if path.exists():  # damaged: a resume has gone back before it
            remove(path)
        unfinished.rename(path)
        sync(out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise DiskError(f"{path} can't be written: {error}") from error
    return path


def sync_and_sum(path: Path) -> str:
    """Have the disk store a file, and return its line of SHA256SUMS."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return f"{hashlib.file_digest(f, 'sha256').hexdigest()}  {path.name}\n"


def optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name: PARAMETER.exp_avg, PARAMETER.step, ..."""
    tensors = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def remove(path: Path):
    """Remove a checkpoint: rename it first, so that no half of one keeps the name."""
    doomed = path.with_name(f"{path.name}.removed.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def rotate(out_dir: Path, step: int, keep: int, val_losses: dict[int, float]):
    """Remove all checkpoints but the newest `keep`, and the one with the best validation loss. One
    that is newer than step is damaged: a resume has gone back before it."""
    good = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    validated = [path for path in good if step_of(path) in val_losses]
    # Of equal ones the first, as in finish, which names it.
    best = min(reversed(validated), key=lambda path: val_losses[step_of(path)], default=None)
    for path in checkpoints(out_dir):
        if path not in good[:keep] and path != best:
            remove(path)


def newest(out_dir: Path) -> Path | None:
    """Return the newest checkpoint whose digests are right, None if there is none. Name each
    damaged one, and raise NoGoodCheckpoint if all are."""
    paths = checkpoints(out_dir)
    for path in paths:
        try:
            verify(path)
            return path
        except DamagedCheckpoint as error:
            print_error(f"{error}; trying the checkpoint before it")
    if paths:
        raise NoGoodCheckpoint(f"no checkpoint in {out_dir} is good")
    return None


def verify(path: Path):
    """Raise DamagedCheckpoint unless every file of a checkpoint has the digest in SHA256SUMS."""
    file = path / SUMS
    try:
        # Every byte counts: a flipped bit in a newline must not read as another kind of line end.
        *lines, after_last = file.read_bytes().decode("ascii").split("\n")
        names = [line[66:] for line in lines]  # after 64 digits and two spaces
        if after_last or not set(names) >= REQUIRED:
            raise ValueError("it is incomplete")
        for name, line in zip(names, lines, strict=True):
            file = path / name
            with open(file, "rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
            if line != f"{digest}  {name}":
                raise ValueError(f"its SHA-256 differs from {SUMS}")
    except (OSError, ValueError) as error:  # OSError: it is missing, or on a bad sector
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error


def read_state(path: Path) -> dict:
    """Return what state.json of a verified checkpoint says. Raise UserError for another format."""
    state = json.loads((path / "state.json").read_bytes())
    if state["format"] != FORMAT:
        raise UserError(f"another version of this code wrote {path}: use that version")
    return state


def load_optimizer(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Load the optimizer's state, but not its old options (rate, betas, decay), as PyTorch does."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[p]: i for i, p in enumerate(params)}
    state = {}
    for name, tensor in load_file(path / "optimizer.safetensors").items():
        param, _, key = name.rpartition(".")
        if param not in numbers:
            raise UserError(f"another version of this code wrote {path}: its optimizer has {name}")
        state.setdefault(numbers[param], {})[key] = tensor.clone()  # not mapped from the file
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def check_saveable(model: GPT, tokenizer: str, path: Path):
    """Raise an error unless the network can be saved and read: so a change to the code that can't
    shows before the first step, not at the resume. path is for its message."""
    settings = json.loads(as_json(pretrained.hf_config(model.config, tokenizer)))
    check_same(pretrained.from_hf(settings, pretrained.hf_weights(model), path), model)


def check_readable(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Raise an error unless a checkpoint, read as a resume would read it, is what was saved."""
    check_same(pretrained.read_hf(path), model)
    written = load_file(path / "optimizer.safetensors")
    for name, tensor in optimizer_tensors(model, optimizer).items():
        if not torch.equal(tensor.cpu(), written[name]):
            raise RuntimeError(f"{path}: {name} is not read as it was saved")


def check_same(saved: pretrained.Pretrained, model: GPT):
    if saved.shape != model.config:
        raise RuntimeError(f"{saved.path} is saved as {model.config} and read as {saved.shape}")
    for name, p in model.named_parameters():
        if not torch.equal(p.detach().cpu()[: len(saved.weights[name])], saved.weights[name]):
            raise RuntimeError(f"{saved.path}: {name} is not read as it was saved")


def fingerprint_here(path: Path) -> str:
    """Return what tells a checkpoint from others, as this rank's machine has it."""
    try:
        names = sorted(file.name for file in path.iterdir())
        digests = (path / SUMS).read_bytes()
    except OSError as error:
        return str(error)
    return hashlib.sha256(f"{names} {digests}".encode()).hexdigest()[:16]


def find_weights(name: str) -> Path:
    """Return where the weights that --init-from names are: in a run's newest good checkpoint, in a
    file or folder, or in the cache of the Hugging Face hub."""
    if not os.path.lexists(name):
        folder = Path(name).parent
        others = [path.name for path in checkpoints(folder)]
        if others:
            raise UserError(f"{name} is not there: {folder} has {', '.join(others)}")
        if folder != Path() and folder.is_dir():  # not a name on the hub
            raise UserError(f"--init-from {name}: there is no such file or folder in {folder}")
        return pretrained.download(name)
    path = Path(name)
    if path.is_dir():
        path = newest(path) or path
    if (path / SUMS).is_file():
        verify(path)
    return path


def load_model(name: str) -> tuple[GPT, Tokenizer | None]:
    """Return the network in a run's newest checkpoint, or whatever else --init-from takes, and its
    tokenizer; None if that is not here. Raise UserError if there is no network, or a damaged one.
    For notebooks: the trainer itself does not call it."""
    path = find_weights(name)
    provide_vocab(path)
    source = pretrained.read(path)
    model = GPT(source.shape).eval()
    pretrained.load_weights(model, source)
    return model, load_tokenizer(source.tokenizer)
