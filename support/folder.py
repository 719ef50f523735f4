"""The folders that a run finds, makes and locks: its own, and the one with Python's source."""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dataloader import MANIFEST
from support.checkpoint import checkpoints
from support.cli import UserError
from support.log import LOG
from support.world import World


def find_run(typed: dict) -> Path | None:
    """Return the folder of the run to continue, or None to begin a new one, or raise UserError."""
    name, resume = typed.get("out_dir"), typed.get("resume")
    continues = resume or typed.get("auto_resume")
    if not name:
        if continues:
            raise UserError("which run? name its folder with --out-dir")
        return None
    out_dir = Path(name)
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"--out-dir {name} is not a folder")
    if checkpoints(out_dir):
        if continues:
            return out_dir
        raise UserError(f"--out-dir {name} holds a run: add --resume, or name another folder")
    if resume:
        raise UserError(f"--resume: {name} holds no checkpoint")
    files = {path.name for path in out_dir.glob("*")}
    if LOG not in files and files & {"config.json", "loss.png"}:  # which we would overwrite
        raise UserError(f"--out-dir {name} holds another program's files: name another folder")
    return None


def make(name: str) -> Path:
    """Make the folder of a new run, which is out/NNN if it has no name."""
    number = 0
    try:
        while not name:
            number += 1
            with suppress(FileExistsError):  # another run may just have taken it
                Path(f"out/{number:03d}").mkdir(parents=True)
                name = f"out/{number:03d}"
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out-dir {name} can't be made: {error}") from error
    return Path(name)


def lock(out_dir: Path, world: World) -> FileLock | None:
    """Lock a run's folder on the main rank, and remove what a run that died left there."""
    if not world.is_main:
        return None
    file_lock = FileLock(out_dir / ".lock")
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"--out-dir {out_dir} belongs to a live run: name another") from None
    except (OSError, NotImplementedError) as error:  # Lustre and NFS may have no locks
        print(f"{out_dir} can't be locked ({error}): let no other run use it", file=sys.stderr)
    for unfinished in out_dir.glob("step_*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    return file_lock


def make_python_source(data_dir: Path):
    """If data_dir is that of Python's source, tokenize it, unless it is there."""
    if data_dir.name.startswith("stdlib-") and not (data_dir / MANIFEST).exists():
        print(f"tokenizing Python's standard library into {data_dir}", flush=True)
        program = Path(__file__).parent.with_name("prepare_data.py")
        tokenizer = data_dir.name.removeprefix("stdlib-")
        command = [sys.executable, str(program), "--tokenizer", tokenizer, "--data-dir"]
        if subprocess.call([*command, str(data_dir)]):  # it has printed why
            raise UserError(f"{data_dir} could not be made: name other data with --data-dir")
