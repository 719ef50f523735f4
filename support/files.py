"""Files that are written whole or not at all, and folders that one process writes."""

import errno
import os
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from support.ending import print_error

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


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
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def sync(folder: Path):
    """Sync the names in a folder to disk. Otherwise, a new file may be lost in a power failure."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def lock_folder(lock: FileLock):
    """Acquire a lock. Raise Timeout if another process holds it. Print a line if the disk supports
    no locks, like Lustre without -o flock."""
    try:
        lock.acquire(timeout=0)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise  # also Timeout, which is an OSError
        folder = Path(lock.lock_file).parent
        print_error(f"{folder} can't be locked ({error}): don't let another process write to it")
