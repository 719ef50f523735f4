"""The folders that a run finds, makes and locks: its own, and the one with Python's source."""

import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from dataloader import MANIFEST
from support.checkpoint import checkpoints
from support.cli import UserError
from support.log import LOG
from support.world import World


def find_run(typed: dict) -> Path | None:
    """Return the folder of the run to continue, or None to begin a new one. Raise UserError if
    there is no run to resume, or one where a new one should begin."""
    name, resume = typed.get("out_dir"), typed.get("resume")
    continues = resume or typed.get("auto_resume")
    if not name:
        if continues:
            raise UserError("which run? name its folder with --out-dir")
        return None
    if Path(name).exists() and not Path(name).is_dir():
        raise UserError(f"--out-dir {name} is not a folder")
    if checkpoints(Path(name)):
        if not continues:
            raise UserError(f"--out-dir {name} holds a run: add --resume, or name another folder")
        return Path(name)
    if resume:
        raise UserError(f"--resume: {name} holds no checkpoint")
    for file in ("config.json", "loss.png"):  # which a run writes
        if Path(name, file).exists() and not Path(name, LOG).exists():
            raise UserError(f"--out-dir {name} holds {file}, but no run: name another folder")
    return None


def make(name: str, world: World) -> FileLock | None:
    """Make and lock the folder of a new run on the main rank: out/NNN if it has no name."""
    if not world.is_main:
        return None
    try:
        while not name:
            free = next(n for n in count(1) if not Path(f"out/{n:03d}").exists())
            with suppress(FileExistsError):  # another run has just taken it
                Path(f"out/{free:03d}").mkdir(parents=True)
                name = f"out/{free:03d}"
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out-dir {name} can't be made: {error}") from error
    return lock(Path(name), world)


def lock(out_dir: Path, world: World) -> FileLock | None:
    """Lock a run's folder on the main rank, until this process ends."""
    if not world.is_main:
        return None
    file_lock = FileLock(out_dir / ".lock")
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"--out-dir {out_dir} belongs to a live run: name another") from None
    except (OSError, NotImplementedError) as error:  # Lustre and NFS may have no locks
        print(f"{out_dir} can't be locked ({error}): let no other run use it", file=sys.stderr)
    for unfinished in out_dir.glob("step_*.tmp"):  # left by a process that died
        shutil.rmtree(unfinished, ignore_errors=True)
    return file_lock


def make_python_source(data_dir: Path):
    """If data_dir is that of Python's source, tokenize it, unless it is there."""
    if not data_dir.name.startswith("stdlib-") or (data_dir / MANIFEST).exists():
        return
    data_dir.parent.mkdir(exist_ok=True)
    with FileLock(data_dir.with_suffix(".lock")):  # another rank may be at it
        if not (data_dir / MANIFEST).exists():
            print(f"tokenizing Python's standard library into {data_dir}", flush=True)
            program = Path(__file__).parent.with_name("prepare_data.py")
            tokenizer = data_dir.name.removeprefix("stdlib-")
            command = [program, "--tokenizer", tokenizer, "--data-dir", data_dir]
            if subprocess.run(
                [sys.executable, *map(str, command)]
            ).returncode:  # it has printed why
                raise UserError(f"{data_dir} could not be made: name other data with --data-dir")
