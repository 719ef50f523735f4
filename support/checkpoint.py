"""Checkpoints: their format, and how to write, verify, read and rotate them.

A checkpoint is a folder, step_000250, that Hugging Face's tools load as a model:
    config.json             the shape of the network
    model.safetensors       its weights, with Hugging Face's names and layout, without padding
    generation_config.json  the token that ends a text
    vocab.json, merges.txt, tokenizer_config.json      the tokenizer, if it is known
    optimizer.safetensors   the optimizer's state: PARAMETER.exp_avg, ...
    state.json              everything else that a resume needs: see state_of in run.py
    SHA256SUMS              the digests of these files, for `sha256sum -c SHA256SUMS`
    README.md               a model card for people; it has no digest, so that they can edit it

We write it as step_000250.tmp, sync it, and rename it, so a checkpoint is complete or absent.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from config import TrainConfig
from model import GPT
from support import pretrained
from support.card import CARD, model_card
from support.ending import DiskError, NoGoodCheckpoint, UserError, print_error
from support.files import FolderLock, did_you_mean, open_regular, read_small, rename, sync
from support.run_folder import SUMS, checkpoints, step_of
from support.tokenizer import Tokenizer, as_json, load_tokenizer

FORMAT = 4  # of state.json
STATE = {"step": int, "position": int, "micro_batch_size": int, "scaler": dict, "losses": dict}
STATE |= {"val_losses": dict, "environment": dict, "tokenizer": str, "data": str}
ENVIRONMENT = ("torch", "threads", "ranks", "device_name")  # what a resume compares
WEIGHTS = ("config.json", "model.safetensors")  # all that sampling and --init-from need
FOR_RESUME = (*WEIGHTS, "optimizer.safetensors", "state.json", SUMS)


class DamagedCheckpoint(UserError):
    """A checkpoint file is missing, or does not match its digest."""


def save(lock: FolderLock, model: GPT, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write a checkpoint into the locked folder and return its path, or raise DiskError."""
    lock.check()
    path = lock.folder / f"step_{state['step']:06d}"
    unfinished = path.with_name(f"{path.name}.tmp")
    tokenizer = load_tokenizer(state["tokenizer"])
    files = tokenizer.files(model.config.seq_len) if tokenizer else {}
    settings = pretrained.hf_config(model.config, state["tokenizer"])
    end_of_text = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    files["config.json"], files["generation_config.json"] = as_json(settings), as_json(end_of_text)
    files["state.json"] = as_json({"format": FORMAT} | state)
    files[CARD] = model_card(model, state).encode()
    try:
        unfinished.mkdir()  # without parents, which would bring back a folder that was moved
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        save_file(pretrained.hf_weights(model), unfinished / "model.safetensors", {"format": "pt"})
        save_file(optimizer_tensors(model, optimizer), unfinished / "optimizer.safetensors")
        for file in unfinished.glob("*.safetensors"):  # save_file lets only the owner read them
            with suppress(OSError):  # some file systems do not support modes
                shutil.copymode(unfinished / "state.json", file)
        with ThreadPoolExecutor() as pool:  # to process both large files at once
            lines = list(pool.map(sync_and_sum, sorted(unfinished.iterdir())))
        sums = [line for line in lines if not line.endswith(f" {CARD}\n")]
        (unfinished / SUMS).write_bytes("".join(sums).encode())
        sync_and_sum(unfinished / SUMS)
        sync(unfinished)
        lock.check()
        if path.exists():  # a damaged checkpoint, which the resume skipped
            remove(path)
        rename(unfinished, path)
        sync(lock.folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise DiskError(f"{path} can't be written: {error}") from error
    return path


def sync_and_sum(path: Path) -> str:
    """Sync a file to disk, and return its SHA256SUMS line."""
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
    """Remove a checkpoint. Rename it first, so that a half-deleted one never keeps the name."""
    doomed = path.with_name(f"{path.name}.removed.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    try:
        shutil.rmtree(doomed)
    except OSError as error:  # another program may have a file in it open
        print_error(f"{doomed} can't be removed: {error}")


def rotate(out_dir: Path, step: int, keep: int, val_losses: dict[int, float]):
    """Remove all checkpoints except the newest `keep` and the one with the best validation loss. A
    checkpoint after `step` is removed, too, because it is damaged and the resume skipped it, unless
    it has weights that somebody may want."""
    good = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    best = best_of(good, val_losses)
    for path in checkpoints(out_dir):
        is_wanted = step_of(path) > step and has_weights_only(path)
        if path not in good[:keep] and path != best and not is_wanted:
            try:
                remove(path)
            except OSError as error:  # on Windows, a file in it is open: the next save tries again
                print_error(f"{path} can't be removed: {error}")


def best_of(paths: list[Path], val_losses: dict[int, float]) -> Path | None:
    """Return the checkpoint with the best validation loss, or None if none was validated."""
    validated = [path for path in paths if step_of(path) in val_losses]
    return min(validated, key=lambda p: (val_losses[step_of(p)], step_of(p)), default=None)


def newest(out_dir: Path, for_resume: bool = True) -> Path | None:
    """Return the newest checkpoint whose digests are right, or None if there is no checkpoint.
    Print the name of each damaged checkpoint, and raise NoGoodCheckpoint if all are damaged."""
    paths = checkpoints(out_dir)
    for path in paths:
        try:
            verify(path, for_resume)
            return path
        except DamagedCheckpoint as error:
            if not os.path.lexists(path):  # the live run in out_dir has just removed it
                return newest(out_dir, for_resume)
            print_error(f"{error}; trying the previous checkpoint")
    if paths:
        raise NoGoodCheckpoint(f"no checkpoint in {out_dir} is good")
    return None


def has_weights_only(path: Path) -> bool:
    """Return whether a checkpoint has its weights, but lacks something that a resume needs."""
    missing = {name for name in FOR_RESUME if not os.path.lexists(path / name)}
    return bool(missing) and not missing & {*WEIGHTS}


def verify(path: Path, for_resume: bool = True):
    """Raise DamagedCheckpoint unless every file has its digest in SHA256SUMS. If not for a resume,
    only the weights must be there, because people pass on checkpoints without the rest."""
    needed = FOR_RESUME if for_resume else WEIGHTS
    missing = [name for name in needed if not os.path.lexists(path / name)]
    if missing:
        needs = ", which a resume needs, but not --init-from" if has_weights_only(path) else ""
        raise DamagedCheckpoint(f"{path} lacks {', '.join(missing)}{needs}")
    file = path / SUMS
    if not os.path.lexists(file):
        return
    try:
        # Split only at \n, to catch a bit flip that turns \n into another line ending.
        *lines, after_last = read_small(file).decode("ascii").split("\n")
        names = [line[66:] for line in lines]  # skip 64 digits and two spaces
        if after_last or not {SUMS, *names}.issuperset(needed):
            raise ValueError("it is incomplete")
        for name, line in zip(names, lines, strict=True):
            if name != Path(name).name:
                raise ValueError("it names a file in another folder")
            file = path / name
            if not for_resume and not os.path.lexists(file):
                continue
            with open_regular(file) as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
            if line != f"{digest}  {name}":
                raise ValueError(f"its SHA-256 differs from {SUMS}")
    except (OSError, ValueError) as error:  # OSError: a missing file or a bad sector
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error


def read_state(path: Path) -> dict:
    """Return the state.json of a verified checkpoint. Raise UserError for an unknown format, or if
    it holds a value that we can't have written (somebody edited it and its digest)."""
    file = path / "state.json"
    try:
        state = json.loads(read_small(file))
        if state["format"] == 3:  # written up to 2026-11-25
            config = state["config"]
            config["schedule"] = "cosine" if config["cosine"] else "constant"
            state["micro_batch_size"] = config["micro_batch_size"]
        elif state["format"] != FORMAT:
            raise UserError(f"another version of this code wrote {path}: use that version")
        check_state(state, step_of(path))
        for name in ("losses", "val_losses"):  # JSON turned the steps, which are keys, into strings
            state[name] = {int(step): float(loss) for step, loss in state[name].items()}
        return state
    except UserError:
        raise
    except Exception as error:  # it may hold anything
        raise UserError(f"{file} was not written by a run: {error!r:.99}") from error


def check_state(state: dict, step: int):
    for f in fields(TrainConfig):
        value = state["config"].get(f.name, f.default)
        if not isinstance(value, (int, float) if isinstance(f.default, float) else type(f.default)):
            raise TypeError(f"{f.name} is {value!s:.20}")
    for name, kind in STATE.items():
        if not isinstance(state[name], kind):
            raise TypeError(f"{name} is {state[name]!s:.20}")
    for name in ENVIRONMENT:
        state["environment"][name]  # raises if it is missing
    if state["step"] != step or state["position"] < 0 or state["micro_batch_size"] < 1:
        raise ValueError("its step, position or micro_batch_size is wrong")


def load_optimizer(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Load the optimizer's state, but keep its current options (learning rate, betas, decay)."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[p]: i for i, p in enumerate(params)}
    state: dict = {}  # parameter number -> key -> tensor
    for name, tensor in load_file(path / "optimizer.safetensors").items():
        param, _, key = name.rpartition(".")
        if param not in numbers:
            raise UserError(f"another version of this code wrote {path}: its optimizer has {name}")
        state.setdefault(numbers[param], {})[key] = tensor.clone()  # not a view of the mapped file
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def check_round_trip(model: GPT, tokenizer: str, path: Path):
    """Raise an error unless saving the network and reading it back would preserve it. Thus, a code
    change that breaks saving fails before the first step, not at a resume. path is for errors."""
    settings = json.loads(as_json(pretrained.hf_config(model.config, tokenizer)))
    check_same(pretrained.from_hf(settings, pretrained.hf_weights(model), path), model)


def check_read_back(path: Path, model: GPT, optimizer: torch.optim.Optimizer):
    """Raise an error unless a resume from this checkpoint would read exactly what was saved."""
    try:
        saved = pretrained.read_hf(path)
        written = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{path} can't be read back: {error}") from error
    check_same(saved, model)
    for name, tensor in optimizer_tensors(model, optimizer).items():
        if not torch.equal(tensor.cpu(), written[name]):
            raise RuntimeError(f"{path}: {name} differs when read back")


def check_same(saved: pretrained.Pretrained, model: GPT):
    if saved.shape != model.config:
        raise RuntimeError(f"{saved.path}: saved {model.config}, read back {saved.shape}")
    for name, p in model.named_parameters():
        if not torch.equal(p.detach().cpu()[: len(saved.weights[name])], saved.weights[name]):
            raise RuntimeError(f"{saved.path}: {name} differs when read back")


def fingerprint(path: Path) -> str:
    """Return a fingerprint of a checkpoint, as this rank's machine sees it."""
    try:
        names = sorted(os.listdir(path))
        digests = read_small(path / SUMS)
    except OSError as error:
        return str(error)
    return hashlib.sha256(f"{names} {digests!r}".encode()).hexdigest()[:16]


def find_weights(name: str) -> Path:
    """Return the path of --init-from's weights (if it names a run, the newest checkpoint)."""
    path = Path(name)
    if not os.path.lexists(name):
        others = [other.name for other in checkpoints(path.parent)]
        if others:
            raise UserError(f"{name} is not there: {path.parent} has {', '.join(others)}")
        if path.parent != Path() and os.path.isdir(path.parent):  # not a Hugging Face name
            raise UserError(f"{name}: there is no such file or folder{did_you_mean(name)}")
        if " " in name:
            raise UserError(f"{name}: there is no such file or folder; is it a --prompt?")
        return pretrained.download(name)
    checkpoint_of_run = newest(path, for_resume=False)
    if checkpoint_of_run is None and (path / SUMS).is_file():
        verify(path, for_resume=False)
    return checkpoint_of_run or path


def read_newest(name: str) -> pretrained.Pretrained:
    """Return the weights that --init-from names (if it names a run, the newest)."""
    path = find_weights(name)
    try:
        return pretrained.read_weights(path)
    except Exception:
        if os.path.lexists(path):
            raise
        return read_newest(name)  # a live run has just removed it


def open_model(name: str) -> tuple[GPT, pretrained.Pretrained]:
    """Return the network that a run, a checkpoint or other weights hold, and what their files say.
    Its weights are moved into the network."""
    saved = read_newest(name)
    model = GPT(saved.shape).eval()
    pretrained.load_weights(model, saved)
    return model, saved


def load_model(name: str) -> tuple[GPT, Tokenizer | None]:
    """Return a run's network and tokenizer (None if it is not here), for notebooks and scripts."""
    model, saved = open_model(name)
    return model, load_tokenizer(saved.tokenizer)
