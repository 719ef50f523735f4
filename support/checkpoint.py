"""The folder of a run: who owns it, and its checkpoints: saved, verified, read, rotated.

A checkpoint is a folder, step_000250, and a model for Hugging Face's tools:
    config.json             the shape of the network
    model.safetensors       its weights, with Hugging Face's names and layout, without padding
    tokenizer*.json, vocab.json, merges.txt      if the tokenizer is installed here
    optimizer.safetensors   the optimizer's state: PARAMETER.exp_avg, ...
    state.json              all else that a resume needs: see state_of in train_gpt2.py
    SHA256SUMS              of all these files, for `sha256sum -c SHA256SUMS`

It is written as step_000250.tmp, synchronized with the disk, and renamed as a whole: so it is there
whole, or not at all. A resume verifies all digests, and the first save of each process reads it
back as a resume would.
"""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
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
from support.tokenizer import as_json, load_tokenizer

FORMAT = 2  # of state.json
SUMS = "SHA256SUMS"
REQUIRED = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}
LOCK, SUMMARY = ".lock", "summary.json"


class DamagedCheckpoint(Exception):
    """A file of a checkpoint does not have its digest."""


# ---- The folder of a run -------------------------------------------------------------------------


def choose_out_dir(name: str, resume: bool) -> Path:
    """Return the folder that --out-dir names, or without a name the next free out/001, out/002, ...
    (with resume: the newest). Raise UserError if anything but this run is in it."""
    if not name:
        numbers = [int(p.name) for p in Path("out").glob("[0-9]*") if p.name.isdecimal()]
        newest = max((n for n in numbers if n < 10**9), default=0)
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
    # A start that was stopped before its first checkpoint leaves these.
    others = {path.name for path in out_dir.iterdir()} - {LOCK, LOG, "step_000000.tmp"}
    if others and not holds_run:
        raise UserError(f"--out-dir {out_dir} holds {min(others)} and no run: name a new folder")
    if log.is_symlink() or (log.exists() and not log.is_file()):
        raise UserError(f"{log} is a link, or no file: a run writes into its own folder")
    return out_dir


def take_folder(out_dir: Path, lock: FileLock, is_new: bool):
    """Make the folder of a run, and keep other runs out of it until this process ends, however it
    does. Raise UserError if another run has it, or had it since it was looked at."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        sync(out_dir.parent)
        lock.acquire(timeout=0)
    except Timeout:
        cure = "stop it, or name another folder"
        raise UserError(f"--out-dir {out_dir} belongs to a live run: {cure}") from None
    except (OSError, NotImplementedError) as error:  # such as Lustre without -o flock
        cure = "name a folder elsewhere"
        raise UserError(f"--out-dir can't be written or locked ({error}): {cure}") from error
    if is_new and (out_dir / LOG).exists():
        raise UserError(f"--out-dir {out_dir} has a new run meanwhile: name another folder")
    for unfinished in out_dir.glob("step_[0-9]*.tmp"):  # of a process that died
        shutil.rmtree(unfinished, ignore_errors=True)


def check_disk_space(out_dir: Path, num_bytes: int):
    """Raise UserError if the disk of out_dir, which may not exist yet, has less than num_bytes."""
    parents = [out_dir.absolute(), *out_dir.absolute().parents]
    free = shutil.disk_usage(next(path for path in parents if path.exists())).free
    if free < num_bytes:
        room = f"{num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise UserError(f"--out-dir {out_dir}: checkpoints need {room}: name another disk")


def read_summary(out_dir: Path) -> dict:
    """Return what summary.json says of a run that has made its last evaluation; {} if there is
    none, or it can't be read."""
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


# ---- Save ----------------------------------------------------------------------------------------


def save(out_dir: Path, model: GPT, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write a checkpoint and return its folder. Raise DiskError if it can't be written."""
    path = out_dir / f"step_{state['step']:06d}"
    unfinished = path.with_name(f"{path.name}.tmp")
    tokenizer = load_tokenizer(state["tokenizer"])
    files = tokenizer.files(model.config.seq_len) if tokenizer else {}
    files["config.json"] = as_json(pretrained.hf_config(model.config, state["tokenizer"]))
    files["state.json"] = as_json({"format": FORMAT} | state)
    tensors = {
        "model.safetensors": pretrained.hf_weights(model),
        "optimizer.safetensors": optimizer_tensors(model, optimizer),
    }
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        for name, content in tensors.items():
            save_file(content, unfinished / name, {"format": "pt"})
        paths = sorted(unfinished.iterdir())
        with ThreadPoolExecutor() as pool:  # the two large files at the same time
            digests = pool.map(sync_and_hash, paths)
        lines = [f"{digest}  {file.name}\n" for file, digest in zip(paths, digests, strict=True)]
        (unfinished / SUMS).write_bytes("".join(lines).encode())
        sync_and_hash(unfinished / SUMS)
        sync(unfinished)
        remove(path)  # a damaged one of the same step, if any: a resume has gone back before it
        unfinished.rename(path)
        sync(out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(out_dir).free / 1e9
        raise DiskError(f"{path} can't be written: {error}; {free:.1f} GB are free") from error
    return path


def sync_and_hash(path: Path) -> str:
    """Have the disk store a file, and return the SHA-256 of what is in it."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return hashlib.file_digest(f, "sha256").hexdigest()


def optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name: PARAMETER.exp_avg, PARAMETER.step, ..."""
    tensors = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{name}.{key}"] = value
    return tensors


def remove(path: Path):
    """Remove a checkpoint, if it is there: by renaming first, so that no half of one keeps the
    name."""
    if not path.exists():
        return
    doomed = path.with_name(f"{path.name}.removed.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def rotate(out_dir: Path, step: int, keep: int, val_losses: dict[int, float]):
    """Remove all checkpoints but the newest `keep`, and the one with the best validation loss. One
    that is newer than step is damaged: a resume has gone back before it."""
    for path in checkpoints(out_dir):
        if step_of(path) > step:
            remove(path)
    paths = checkpoints(out_dir)
    validated = [path for path in paths if step_of(path) in val_losses]
    best = min(validated, key=lambda path: val_losses[step_of(path)], default=None)
    for path in paths[keep:]:
        if path != best:
            remove(path)


# ---- Read ----------------------------------------------------------------------------------------


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
    sums = {}
    try:
        # Every byte counts: a flipped bit in a newline must not read as another kind of line end.
        *lines, after_last = (path / SUMS).read_bytes().decode("ascii").split("\n")
        for line in lines:
            digest, name = re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line, re.ASCII).groups()
            sums[name] = digest
        if after_last or not sums.keys() >= REQUIRED:
            raise ValueError("it is not whole")
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path / SUMS} is damaged: {error}") from error
    files = [path / name for name in sums]
    with ThreadPoolExecutor() as pool:  # the two large files at the same time
        list(pool.map(check_digest, files, sums.values()))  # raises what one of them raised


def check_digest(file: Path, expected: str):
    """Raise DamagedCheckpoint unless a file can be read and has this SHA-256."""
    try:
        with open(file, "rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as error:  # it is missing, or on a bad sector
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error
    if digest != expected:
        raise DamagedCheckpoint(f"{file} is damaged: its SHA-256 differs from {SUMS}")


def read_state(path: Path) -> dict:
    """Return what state.json says. The checkpoint must have been verified: what is wrong with it
    now is that another version of the code wrote it."""
    state = json.loads((path / "state.json").read_bytes())
    if state["format"] != FORMAT:
        theirs = f"in format {state['format']} instead of {FORMAT}"
        raise UserError(f"another version of the code wrote {path}, {theirs}: use that version")
    return state


def load_optimizer(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Load the optimizer's state. Its options (rate, betas, decay) stay as they are: PyTorch's own
    load_state_dict would bring back the old ones."""
    by_param = {name: {} for name, _ in model.named_parameters()}
    for name, tensor in load_file(path / "optimizer.safetensors").items():
        param, _, key = name.rpartition(".")
        if param not in by_param:
            raise UserError(f"another version of the code wrote {path}: its optimizer has {name}")
        by_param[param][key] = tensor.clone()  # or it would be mapped from the file
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: by_param[names[p]] for i, p in enumerate(params) if by_param[names[p]]}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_readable(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Raise RuntimeError unless a checkpoint, read as a resume would read it, is what was saved. So
    a change to the code that can't be saved or read shows at once, not at the resume."""
    saved = pretrained.read_hf(path)
    if saved.shape != model.config:
        raise RuntimeError(f"{path} was saved as {model.config} and is read as {saved.shape}")
    written = saved.weights | load_file(path / "optimizer.safetensors")
    current = dict(model.named_parameters()) | optimizer_tensors(model, optimizer)
    wte = "transformer.wte.weight"
    current[wte] = current[wte][: model.config.vocab_size]
    for name in current.keys() | written.keys():
        if not torch.equal(current[name].detach().cpu(), written[name]):
            raise RuntimeError(f"{path}: {name} is not read as it was saved")


def fingerprint_here(path: Path) -> str:
    """Return what tells a checkpoint from others, as this rank's machine has it."""
    try:
        return hashlib.sha256((path / SUMS).read_bytes()).hexdigest()[:16]
    except OSError as error:
        return str(error)


def find_weights(name: str) -> Path:
    """Return where the weights that --init-from names are: in a run's newest good checkpoint, in a
    file or folder, or in the cache of the Hugging Face hub."""
    if not os.path.lexists(name):
        return pretrained.download(name)
    path = Path(name)
    if path.is_dir():
        path = newest(path) or path
    if (path / SUMS).is_file():
        try:
            verify(path)
        except DamagedCheckpoint as error:
            raise UserError(f"--init-from {name}: {error}") from error
    return path
