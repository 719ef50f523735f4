"""Files that are written whole or not at all, and GPT-2's vocabulary as tiktoken keeps it."""

import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
VOCAB_URLS = [VOCAB_URL + "vocab.bpe", VOCAB_URL + "encoder.json"]


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


def vocab_files() -> list[Path]:
    """Return where tiktoken keeps GPT-2's two files: under the SHA-1 of their address."""
    folder = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", folder)
    return [Path(folder, hashlib.sha1(url.encode()).hexdigest()) for url in VOCAB_URLS]


def missing_vocab() -> list[Path]:
    return [path for path in vocab_files() if not path.exists()]


def vocab_cure() -> str:
    pairs = [f"{url} as {path.name}" for url, path in zip(VOCAB_URLS, vocab_files(), strict=True)]
    return f"fetch {' and '.join(pairs)} elsewhere, and set TIKTOKEN_CACHE_DIR to their folder"
