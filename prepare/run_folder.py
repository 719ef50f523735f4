"""A run's folder: how it is chosen and taken. docs/reference.md lists its contents."""

import difflib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from prepare.cli import quoted
from prepare.ending import DISK_ERRNOS, DiskError, UserError
from prepare.files import FolderLock, read_small, sync

LOG, SUMMARY, PICTURE, SUMS = "log.jsonl", "summary.json", "loss.png", "SHA256SUMS"
PROCESS = ".process"  # says which process has the folder's lock
WANDB_ID = "wandb_id.txt"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(out_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    pattern = re.compile(r"step_(\d{6}|[1-9]\d{6,17})", re.ASCII)
    paths = out_dir.glob("step_*") if os.path.isdir(out_dir) else []  # the name may be too long
    found = [path for path in paths if pattern.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def run_of_newest(paths: Iterable[Path]) -> Path | None:
    """Return the run in whose folder the path that was written last is, or None without paths."""
    written = {}
    for path in paths:
        with suppress(OSError):  # a live run has just removed it
            written[path.parent] = path.stat().st_mtime
    return max(written, key=written.__getitem__, default=None)


def newest_run(parent: Path) -> Path | None:
    """Return the run in `parent` that saved a checkpoint most recently, or None without runs."""
    return run_of_newest(step for path in parent.glob("*") for step in checkpoints(path)[:1])


def choose_out_dir(name: str, resume: bool) -> Path:
    """Return the folder that --out-dir names. Without a name, return the next free folder of
    out/001, out/002, ..., or, to resume, the newest run. Raise UserError if a run can't use it."""
    if not name:
        runs = [p.name for p in Path("out").glob("*") if re.fullmatch("[0-9]{3,9}", p.name)]
        newest = max(map(int, runs), default=0)
        name = f"out/{newest if newest and resume else newest + 1:03d}"
        name = str(run_of_newest(Path("out").glob(f"*/{LOG}")) or name) if resume else name
    out_dir = Path(name)
    if not os.path.lexists(out_dir):
        return out_dir
    if not out_dir.is_dir():
        raise UserError(f"--out-dir {out_dir} is not a folder: use another name")
    if checkpoints(out_dir):
        if not resume:
            cure = "add --resume, or name another folder"
            raise UserError(f"--out-dir {out_dir} holds a run: {cure}")
    elif (out_dir / SUMS).exists() and (out_dir / "state.json").exists():
        raise UserError(f"--out-dir {out_dir} is a checkpoint: name its run, {out_dir.parent}")
    else:
        # Other files may stay, but not those that this run would overwrite or mistake for its own.
        # A process that dies before its first checkpoint leaves a log and folders named step_*.tmp.
        ours = [out_dir / SUMMARY, out_dir / PICTURE, *out_dir.glob("step_[0-9]*")]
        others = [p for p in ours if os.path.lexists(p) and not (p.suffix == ".tmp" and p.is_dir())]
        if others:
            text = f"--out-dir {out_dir} holds {min(others).name} but no run"
            raise UserError(f"{text}: use a new folder")
    log = out_dir / LOG
    if log.is_symlink() or (log.exists() and not log.is_file()):
        raise UserError(f"{log} is a link or not a file: remove it, or name another folder")
    return out_dir


def check_nothing_is_meant(lock: FolderLock, typed: dict):
    """Raise UserError if the folder of lock, which --resume names, holds no checkpoint, and the
    user may mean something else."""
    out_dir = lock.folder
    text = f"--out-dir {out_dir} holds no checkpoint to resume from"
    if checkpoints(out_dir):
        return
    # Without one of these flags, a new run would hardly be the one that the user means.
    is_short = not typed.keys() & {"data_dir", "init_from", "model"}
    is_old = is_short and "out_dir" in typed  # the run is elsewhere, or its name is misspelt
    if os.path.isdir(out_dir):
        if all(os.path.exists(out_dir / file) for file in ("config.json", "model.safetensors")):
            cure = f"begin a new run with --init-from {quoted(str(out_dir))}"
            raise UserError(f"{text}, but a model: {cure}")
        below = newest_run(out_dir)
        if below:
            raise UserError(f"{text}, but runs: name one of them, such as {below}")
        for path in sorted(out_dir.glob("*.pt")):  # nanoGPT's ckpt.pt, for example
            if not (out_dir / LOG).exists():
                cure = f"begin a new run with --init-from {quoted(str(path))} and another --out-dir"
                raise UserError(f"{text}, but {path.name}: {cure}")
        begun_with, line = start_of(out_dir)
        if is_short and begun_with - {*typed, "resume", "out_dir", "device", "max_hours"}:
            take_folder(out_dir, lock, is_new=False)  # raises if the run is live
            text += ": its run ended before it saved one, or its checkpoints are gone"
            raise UserError(f"{text}: repeat {line or 'its whole command'}")
        if is_old and not (out_dir / LOG).exists():
            raise UserError(f"{text}: name the run's folder, or leave --resume out")
        return
    name, runs = out_dir.name, [p.name for p in out_dir.parent.glob("*") if checkpoints(p)]
    near = difflib.get_close_matches(name, runs, len(runs) or 1)  # the nearest first
    meant = [out_dir.with_name(other) for other in near if is_old or is_slip(name, other)]
    cure = "to begin a new run of that name, "
    cure += "leave --resume out" if is_old else f"first type mkdir -p {quoted(str(out_dir))}"
    for path in filter(checkpoints, [Path("out", out_dir), *meant]):
        raise UserError(f"{text}; did you mean {path}? If not, {cure}")
    if is_old:
        raise UserError(f"{text}: name the run's folder; {cure}")


def start_of(out_dir: Path) -> tuple[set[str], str]:
    """Return the names of the flags that were typed for the run in out_dir, at its beginning or at
    a resume, and the command that began it. Skip damaged lines of its log."""
    names: set[str] = set()
    line = ""
    with suppress(OSError), open(out_dir / LOG, "rb") as f:
        for record in f:
            if b'"typed"' not in record:
                continue
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                start = json.loads(record)
                typed = {name for name in start["typed"] if name in start["flags"]}
                if start.get("resumed") is None:  # an earlier run saved nothing
                    names, line = set(), str(start.get("command", ""))
                names |= typed
    return names, line


def is_slip(name: str, other: str) -> bool:
    """Return whether names differ by a slip of the hand in a single word, as novla and novela do.
    Those of a series, such as run-1 and run-2 or muon=True and muon=False, do not."""
    words, others = (re.split(r"[-_,=. ]", each) for each in (name, other))
    pairs = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    if len(words) != len(others) or len(pairs) != 1:
        return False
    a, b = (re.sub(r"\d", "", word) for word in pairs[0])
    similarity = difflib.SequenceMatcher(None, a, b).ratio()
    return a != b and abs(len(a) - len(b)) <= 1 and similarity >= 0.8


def take_folder(out_dir: Path, lock: FolderLock, is_new: bool):
    """Create a run's folder, and lock it until this process ends. Raise UserError if another run
    has locked it, or if it was new (is_new) but another run has used it since, and DiskError if the
    disk is full or fails."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        sync(out_dir.parent)
        lock.acquire()
        if lock.locked:
            (out_dir / PROCESS).unlink(missing_ok=True)  # of a process that was killed
    except Timeout:
        process = ""
        with suppress(OSError):
            process = (out_dir / PROCESS).read_text("utf-8", "replace")[:99]
        cure = f"wait for its end, stop {process or 'its process'}, or use another folder"
        raise UserError(f"--out-dir {out_dir} belongs to a live run: {cure}") from None
    except OSError as error:
        kind = DiskError if error.errno in DISK_ERRNOS else UserError
        raise kind(f"can't write to --out-dir ({error}): use another one") from error
    if is_new and (out_dir / LOG).exists():
        raise UserError(f"--out-dir {out_dir} was just taken by another run: use another folder")
    for unfinished in out_dir.glob("step_[0-9]*.tmp"):  # left by a process that died
        shutil.rmtree(unfinished, ignore_errors=True)


def begin(out_dir: Path, lock: FolderLock, is_new: bool):
    """Take a run's folder if it is new, and write there which process has it."""
    if is_new:
        take_folder(out_dir, lock, is_new)
    (out_dir / PROCESS).write_bytes(this_process())


def leave(out_dir: Path):
    """Remove what `begin` wrote, unless the folder is another process's by now."""
    with suppress(OSError):
        if (out_dir / PROCESS).read_bytes() == this_process():
            (out_dir / PROCESS).unlink()


def this_process() -> bytes:
    return f"process {os.getpid()} on {platform.node()}".encode(errors="replace")


def check_disk_space(out_dir: Path, num_params: int, keep: int):
    """Raise DiskError if the disk for out_dir lacks space for the run's checkpoints. While
    one is being written, `keep` older ones and the best are still on disk."""
    num_more = max(1, keep + 2 - len(checkpoints(out_dir)))
    num_bytes = num_more * 12 * num_params  # weights and two moments in float32
    parents = [out_dir.absolute(), *out_dir.absolute().parents]
    existing = next(filter(os.path.exists, parents), None)
    if existing is None:
        raise UserError(f"--out-dir {out_dir}: there is no drive {out_dir.anchor}")
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        room = f"{as_size(num_bytes)}, but only {as_size(free)} is free"
        raise DiskError(f"--out-dir {out_dir}: checkpoints need {room}: make space for them")


def as_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def read_summary(out_dir: Path) -> dict:
    """Return the contents of summary.json, or {} if it can't be read."""
    try:
        return dict(json.loads(read_small(out_dir / SUMMARY)))
    except (OSError, ValueError, TypeError):
        return {}
