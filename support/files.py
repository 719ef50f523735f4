"""Files that are whole or not there, folders that one process has: what all that write share."""

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)  # no mistake of the command


@contextmanager
def whole_file(path: Path) -> Iterator:
    """A binary file to write that becomes path whole or not at all, also when the power fails."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    try:
        with open(unfinished, "xb") as f:  # x follows no link to elsewhere
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is safe once the folder is on the disk too
        os.fsync(folder := os.open(path.parent, os.O_RDONLY))
        os.close(folder)


def locked(folder: Path) -> IO:
    """Make folder and keep other processes out of it until the file that this returns is closed, as
    the end of a process does in any way. BlockingIOError, with its number, if there is another."""
    folder.mkdir(parents=True, exist_ok=True)
    f = open(folder / "lock", "a+", encoding="utf-8", errors="replace", opener=own_file)
    try:
        if os.name == "nt":
            import msvcrt

            f.seek(1 << 30)  # what is locked can't be read there
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Windows has the second
        f.seek(0)
        owner = f"process {f.read() or '(unknown)'}"
        f.close()
        raise BlockingIOError(f"{folder} is being written by {owner}") from None
    f.truncate(0)
    f.write(f"{os.getpid()} on {platform.node()}")
    f.flush()
    return f


def own_file(path: str, flags: int) -> int:
    """Opens a file to be written over; OSError if it is a link to another, or none."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is a link or no file: remove it")
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
