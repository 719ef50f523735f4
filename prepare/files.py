"""Writing files atomically, reading untrusted files, and locking folders."""

import difflib
import errno
import io
import os
import re
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from prepare.ending import DiskError, print_error

REPO = Path(__file__).parent.parent
LOCK = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
MAX_SMALL = 1 << 28  # bytes of JSON or a vocabulary; HellaSwag has 2**24
IN_USE = (errno.EACCES, errno.EPERM, errno.EBUSY)


def did_you_mean(name: str, parent: str = "") -> str:
    """Return "; did you mean PATH?" for a `name` that does not exist: PATH is the same name in the
    folder `parent`, or an existing path that is spelled like it. Return "" if there is none."""
    if parent and os.path.lexists(Path(parent, name)):
        return f"; did you mean {Path(parent, name)}?"
    path, rest = Path(name), Path()
    while path.name and not os.path.lexists(path.parent):  # an earlier part is misspelt
        path, rest = path.parent, path.name / rest
    with suppress(OSError):
        # Names that differ only in digits are those of a series: run-1, run-2.
        letters = re.sub(r"\d", "", path.name)
        others = [n for n in os.listdir(path.parent) if re.sub(r"\d", "", n) != letters]
        for other in difflib.get_close_matches(path.name, others, cutoff=0.75):
            if os.path.lexists(path.parent / other / rest):
                return f"; did you mean {path.parent / other / rest}?"
    return ""


@contextmanager
def whole_file(path: Path):
    """Open a binary file that appears at path whole or not at all, even if the power fails."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)  # it may be left from a killed process, or link elsewhere
    try:
        with open(unfinished, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def open_regular(path: Path) -> io.BufferedReader:
    """Open an untrusted file. Raise OSError if it is not a regular file, because opening a pipe may
    wait forever, and a device may have no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    return open(path, "rb")


def read_small(path: Path) -> bytes:
    """Return the content of an untrusted file. Raise OSError if it is not a regular file, or too
    large to be what we expect."""
    with open_regular(path) as f:
        if os.fstat(f.fileno()).st_size > MAX_SMALL:
            raise OSError(f"{path} is larger than {MAX_SMALL:,} bytes")
        return f.read()


def sync(folder: Path):
    """Sync the names in a folder to disk. Otherwise, a new file may be lost in a power failure."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def rename(source: Path, target: Path):
    """Rename a file or folder, replacing target if it is a file. Retry for 10 s, because on Windows
    and some network disks, a virus scanner or backup may hold the file open for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            os.replace(source, target)
            return
        except OSError as error:
            if error.errno not in IN_USE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class FolderLock:
    """Keeps other processes from writing to a folder until this one ends or calls release."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = FileLock(folder / LOCK)
        self.locked: os.stat_result | None = None  # the lock file, once we have locked it

    def acquire(self, wait: bool = False):
        """Lock the folder. Raise Timeout if another process has locked it, unless `wait` is set.
        Print a line if the disk doesn't support locks (Lustre without -o flock)."""
        try:
            self.lock.acquire(timeout=-1 if wait else 0)
            self.locked = os.stat(self.lock.lock_file)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                raise  # also Timeout, which is an OSError
            text = f"{self.folder} can't be locked ({error})"
            print_error(f"{text}: don't let another process write to it")

    def release(self):
        self.lock.release()

    def check(self):
        """Raise DiskError if the folder is no longer the locked one. The open lock file keeps
        its inode number, even on file systems whose other inode numbers change."""
        with suppress(OSError):
            if not self.locked or os.path.samestat(self.locked, os.stat(self.lock.lock_file)):
                return
        text = f"{self.folder} is gone, or another folder has its name"
        raise DiskError(f"{text}: was it moved, its disk unmounted, or its {LOCK} removed?")
