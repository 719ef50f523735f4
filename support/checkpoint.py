"""A run's state on disk: written whole, read again, rotated, and believed only as it was written.

A checkpoint is an archive of torch.save that holds tensors, dicts, lists, numbers and strings: the
parts named in PARTS, one of them a digest over the others. What read_checkpoint returns is what was
written, to the bit, and fits the network that it names: anything else is a ValueError. The CRC-32s
of the archive find damaged bytes before PyTorch, which checks none, reads them. The digest is of
what PyTorch has made of them: a part marked as a folder leaves a tensor's memory as it was.
"""

import hashlib
import json
import math
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from model import GPT, GPTConfig
from support.files import whole_file

PLAIN = (str, int, float, bool, type(None))
PARTS = {  # of a checkpoint, and the types of what each holds
    "step": (int,), "position": (int,), "val_losses": {int: (float,)},
    "model": {str: (Tensor,)}, "optimizer": {int: {str: (Tensor,)}}, "scaler": {str: (int, float)},
    "identity": {str: PLAIN}, "config": {str: PLAIN}, "environment": {str: PLAIN},
    "digest": (str,),
}  # fmt: skip
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"  # of AdamW; of Muon
STORED = {  # how torch.save writes each part: neither packed nor encrypted, and never a folder
    "compress_type": (zipfile.ZIP_STORED,), "external_attr": (0,), "internal_attr": (0,),
    "create_system": (0,), "flag_bits": (0, 0x8, 0x800, 0x808),
}  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Archives


def load_archive(path: Path, stand_ins: tuple = (), mapped: bool = False) -> dict:
    """What torch.save wrote to path; ValueError if it did not, or if a byte has changed since.
    Ranks share what is mapped, until they copy it. stand_ins: a class and a name to load it for."""
    with open(path, "rb") as file, torch.serialization.safe_globals(list(stand_ins)):
        try:
            check_archive(file)
            file.seek(0)
            saved = torch.load(path if mapped else file, "cpu", weights_only=True, mmap=mapped)
            if not isinstance(saved, dict):
                raise ValueError(f"it holds a {type(saved).__name__}, not parts with names")
            return saved
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes make any reader fail in any way
            why = (str(error) or type(error).__name__).splitlines()[0]
            why = "it holds more than tensors" if "Weights only" in why else why
            raise ValueError(f"{path} is damaged: {why:.200}") from error


def check_archive(file: IO):
    """An exception unless file is a whole archive of plain parts, which take no more room in
    memory than on the disk."""
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        for part in parts:
            is_plain = all(getattr(part, name) in known for name, known in STORED.items())
            if not is_plain or part.compress_size != part.file_size:
                raise ValueError(f"torch.save did not write its {part.filename}")
        if len({part.filename for part in parts}) < len(parts) or archive.comment:
            raise ValueError("torch.save did not write it")
        if sum(part.file_size for part in parts) > file.seek(0, 2):
            raise ValueError("its parts are larger than the file")
        if bad := archive.testzip():
            raise ValueError(f"the CRC-32 of its {bad} is wrong")
        for part in parts:  # PyTorch lets it make a bytearray of any size, which no tensor needs
            if part.filename.endswith("data.pkl") and b"\nbytearray\n" in archive.read(part):
                raise ValueError("it holds more than tensors")


def verify(path: Path):
    """An exception unless every byte of the archive in path is whole, for PyTorch too. Takes no
    memory: PyTorch maps the tensors, and nothing reads them."""
    with open(path, "rb") as file:
        check_archive(file)
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def write_archive(saved: dict, file: IO):
    try:
        torch.save(saved, file)
    except RuntimeError as error:  # tells only a position; what Python raised stands behind it
        raise (error.__context__ or OSError(str(error))) from None
    file.flush()


# --------------------------------------------------------------------------------------------------
# What a checkpoint must hold


def digest(saved: dict) -> str:
    """SHA-256 over the names, types, shapes and values of all parts; a tensor's bytes count by
    their CRC-32, which takes a third of the time, and one core for each tensor."""
    crcs = {}  # of each place in memory: a tied tensor is read once

    def crc32(tensor: Tensor) -> int:
        return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def facts(value):
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.device, value.shape, value.stride(), value.dtype
            crcs[place] = crcs.get(place) or pool.submit(crc32, value)
            return [str(value.dtype), [*value.shape], crcs[place]]
        if isinstance(value, dict):
            return {repr(name): facts(part) for name, part in value.items()}
        return list(map(facts, value)) if isinstance(value, list) else repr(value)

    with ThreadPoolExecutor() as pool:
        parts = {name: facts(value) for name, value in saved.items() if name != "digest"}
        text = json.dumps(parts, default=lambda future: future.result())
    return hashlib.sha256(text.encode()).hexdigest()


def check_parts(saved: dict):
    """ValueError unless saved has each part, of the type that it should be: what follows may rely
    on it."""
    if missing := {*PARTS} - saved.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}: another program wrote it")
    for name, kind in PARTS.items():
        if not fits(saved[name], kind):
            raise ValueError(f"its {name} is not what it should be")
    numbers = saved["scaler"] | {name: saved[name] for name in ("step", "position")}
    for name, value in numbers.items():
        if not 0 <= value < 2**63:
            raise ValueError(f"its {name} is {value:.4g}")


def fits(value, kind) -> bool:
    """Whether value is of one of the types in the tuple kind, or a dict of such ones. No
    bool is an int here, and no subclass of Tensor a Tensor."""
    if isinstance(kind, tuple):
        return type(value) in kind
    [(key, inner)] = kind.items()
    is_dict = isinstance(value, dict) and all(type(name) is key for name in value)
    return is_dict and all(fits(part, inner) for part in value.values())


def check_tensors(saved: dict):
    """ValueError unless each tensor has the shape and type of the parameter that it is for: AdamW
    would write past the end of a smaller one."""
    names = [f.name for f in fields(GPTConfig)]
    shape = GPTConfig(**{name: saved["identity"].get(name) for name in names})
    if len(saved["model"]) != 12 * shape.n_layer + 5:  # so no lie can make what follows take long
        raise ValueError(f"it holds {len(saved['model'])} tensors for {shape.n_layer} layers")
    with torch.device("meta"):
        model = GPT(shape)
    expected = {name: p.shape for name, p in model.state_dict().items()}
    params = [p for group in model.decay_groups() for p in group]
    with_muon = {*model.matrices()} if saved["identity"].get("muon") else ()
    if {*saved["model"]} != {*expected}:
        raise ValueError("its tensors have other names than the network's")
    for name, tensor in saved["model"].items():
        check_tensor(tensor, expected[name], name)
    if saved["optimizer"] and {*saved["optimizer"]} != {*range(len(params))}:
        raise ValueError("its optimizer is that of another network")
    for i, moments in saved["optimizer"].items():
        if {*moments} != ({MOMENTUM} if params[i] in with_muon else {"step", *MOMENTS}):
            raise ValueError(f"its optimizer holds {', '.join(map(str, moments))}")
        for name, tensor in moments.items():
            check_tensor(tensor, torch.Size([]) if name == "step" else params[i].shape, name)
        if not 0 <= moments.get("step", 0) <= saved["step"]:
            raise ValueError(f"its optimizer is {moments['step']} steps old")


def check_tensor(tensor, size: torch.Size, name: str):
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise ValueError(f"its {name} is no float32 tensor")
    if tensor.shape != size or not tensor.is_contiguous():
        raise ValueError(f"its {name} has the shape {(*tensor.shape,)}, not {(*size,)}")
    if not tensor.isfinite().all():
        raise ValueError(f"it holds numbers that are not finite in its {name}")


def check_state(saved: dict, path: Path):
    """ValueError unless saved, read from path, is the whole state of a run, as it was written."""
    try:
        check_parts(saved)
        check_tensors(saved)
        if saved["digest"] != digest(saved):
            raise ValueError("what it holds is not what its digest is of")
        if is_checkpoint(path) and saved["step"] != step_of(path):
            raise ValueError(f"it is of step {saved['step']}")
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]:.200}") from error


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run


def is_checkpoint(path: Path) -> bool:
    return bool(re.fullmatch(r"checkpoint_(\d{6}|[1-9]\d{6,17})\.pt", path.name, re.ASCII))


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("checkpoint_"))


def checkpoints(out_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    paths = [path for path in out_dir.glob("checkpoint_*.pt") if is_checkpoint(path)]
    return sorted(filter(Path.is_file, paths), key=step_of, reverse=True)


def save_checkpoint(out_dir: Path, saved: dict, keep: int) -> Path:
    """Write saved and read it again, then remove older checkpoints: never one of the newest keep
    good ones, nor the one with the best validation. OSError if it can't be written."""
    path = out_dir / f"checkpoint_{saved['step']:06d}.pt"
    kept = {step_of(old) for old in checkpoints(out_dir)}  # what is gone can't be the best
    val_losses = {step: loss for step, loss in saved["val_losses"].items() if step in kept}
    saved = saved | {"val_losses": val_losses}
    try:
        with whole_file(path) as f:
            write_archive(saved | {"digest": digest(saved)}, f)
            verify(Path(f.name))
    except Exception as error:  # as in load_archive
        free = f"{shutil.disk_usage(out_dir).free / 1e9:.1f} GB are free"
        raise OSError(f"{path} can't be written: {error}; {free}") from None
    rotate(out_dir, path, keep, val_losses)
    return path


def rotate(out_dir: Path, path: Path, keep: int, val_losses: dict[int, float]):
    """Remove the checkpoints before path but for the newest keep good ones, itself counted, and the
    one whose validation, of val_losses by step, was the best."""
    paths, num_good = checkpoints(out_dir), 1
    older = paths[paths.index(path) + 1 :]  # a later one is damaged, or it would be newest
    best = min(older, key=lambda old: val_losses.get(step_of(old), math.inf), default=None)
    while older and num_good < keep:
        num_good += is_good(older.pop(0))
    with suppress(OSError):  # the new one is safe, whatever becomes of an old one
        for old in older:
            if old != best:
                old.unlink()


def is_good(path: Path) -> bool:
    try:
        verify(path)
    except Exception:  # as in load_archive
        return False
    return True


def read_checkpoint(path: Path, mapped: bool = False) -> dict:
    """What save_checkpoint wrote; ValueError if it is damaged, FileNotFoundError if it is gone."""
    saved = load_archive(path, mapped=mapped)
    check_state(saved, path)
    return saved


class NoGoodCheckpoint(ValueError):
    """On every rank: all checkpoints of a run are damaged."""

    exit_code, is_agreed = 7, True


def newest_checkpoint(
    out_dir: Path, report: Callable[[str], None], gather: Callable = lambda value: [value],
    check: Callable[[dict], object] = lambda saved: None,
) -> tuple[Path, dict] | None:  # fmt: skip
    """The newest checkpoint that every rank can read, each once, and what it holds; None if there
    is none, NoGoodCheckpoint if none is good. report is told of each that is damaged, or that check
    refuses. gather collects a value of each rank, the main one's first."""
    tried, is_shared = [], len(gather(0)) > 1
    while paths := [path for path in gather(checkpoints(out_dir))[0] if path not in tried]:
        path, saved, why = paths[0], None, ""
        try:
            check(saved := read_checkpoint(path, is_shared))
        except OSError as error:  # a run that goes on meanwhile has removed it
            why = f"{path} can't be read: {error.strerror}"
        except ValueError as error:
            why = f"{path} is damaged: {error}" if saved else str(error)
        found = gather((saved and saved["digest"], why))
        whys = [why for _, why in found if why]
        if not whys and all(other == found[0] for other in found):
            return path, saved
        report(f"{[*whys, f'{path} is not the same on all ranks'][0]}; trying the one before it")
        tried.append(path)
    if tried:
        raise NoGoodCheckpoint(f"--resume: no good checkpoint in {out_dir}")
    return None
