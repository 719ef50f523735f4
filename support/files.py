"""Files that are written whole or not at all."""

import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path):
    """Open a binary file that becomes path whole or not at all, even if the power fails."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)  # a killed process left it, or it is a link to elsewhere
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
    """Have the disk keep the names in a folder: a new file is safe only once its name is."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        os.fsync(number)
        os.close(number)
