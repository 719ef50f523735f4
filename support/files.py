"""Files that are written whole or not at all."""

import os
from contextlib import contextmanager
from pathlib import Path


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
