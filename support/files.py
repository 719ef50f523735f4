"""Files that are whole or not there, written here, fetched, or left by tiktoken, and folders that
one process has: what all that write share."""

import errno
import hashlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import quote, unquote

DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)  # no mistake of the command
TRIES, PAUSE_S, TIMEOUT_S = 6, 1, 30  # of a download; the pause doubles with each try
VOCAB_URLS = [  # GPT-2's vocabulary, where tiktoken gets it from
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
]


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
    sync_name(path)


def sync_name(path: Path):
    """A new name is safe once the folder that it is in is on the disk, too."""
    if os.name == "posix":
        os.fsync(folder := os.open(path.parent, os.O_RDONLY))
        os.close(folder)


def write_folder(folder: Path, files: dict[str, bytes]):
    """A new folder with these files, whole or not at all, also when the power fails; OSError if it
    is there."""
    made = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as unfinished:
        new = Path(unfinished, "new")  # unfinished itself is closed to other users
        new.mkdir()
        for name, content in files.items():
            with whole_file(new / name) as f:
                f.write(content)
        if os.name == "posix":
            folder.mkdir()  # fails if it is there by now; a rename would replace an empty one
        os.rename(new, folder)
    for path in made:
        sync_name(path)


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
    except OSError as error:  # Lustre without -o flock, say
        f.close()
        why = f"{folder} can't be locked ({error.strerror})"
        raise OSError(f"{why}: name a folder on another file system") from None
    f.truncate(0)
    f.write(f"{os.getpid()} on {platform.node()}")
    f.flush()
    return f


def own_file(path: str, flags: int) -> int:
    """Opens a file to be written over; OSError if it is a link to another, or none."""
    if os.path.islink(path) or os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is a link or no file: remove it")
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_rest(url: str, path: Path) -> Path:
    """Download what is missing of path.VERSION.part, or all if url has another version by now."""
    import requests  # tiktoken brings it
    from tqdm import tqdm

    parts, headers = list(path.parent.glob(f"{path.name}.*.part")), {"Accept-Encoding": "identity"}
    for part in parts:
        version = unquote(part.name.removeprefix(f"{path.name}.").removesuffix(".part"))
        headers |= {"Range": f"bytes={part.stat().st_size}-", "If-Range": version}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        part = path.with_name(f"{path.name}.{quote(version or 'unknown', safe='')}.part")
        begin = answer.headers.get("Content-Range", "").split("-")[0]
        if answer.status_code != 416:  # past the end: of another version
            answer.raise_for_status()
        goes_on = version and parts == [part] and begin == f"bytes {part.stat().st_size}"
        for old in parts if not goes_on else []:
            old.unlink()
        if answer.status_code in (206, 416) and not goes_on:
            raise requests.ConnectionError("the server has another version than before")
        look = {"desc": path.name, "unit": "B", "unit_scale": True, "disable": None}
        with open(part, "ab", opener=own_file) as f, tqdm(initial=f.tell(), **look) as bar:
            bar.total = f.tell() + int(answer.headers.get("Content-Length", 0))
            for block in answer.iter_content(1 << 16):
                bar.update(f.write(block))
            f.flush()
            os.fsync(f.fileno())
    return part


def fetch(url: str, path: Path, check: Callable[[Path], object]):
    """Download url to path, whole or not at all. A transfer that breaks is gone on with, here and
    when the command is repeated. OSError if it can't be had, ValueError if check refuses it."""
    import requests

    for tries_left in reversed(range(TRIES)):
        try:
            part = fetch_rest(url, path)
            break
        except requests.RequestException as error:
            refused = error.response is not None and 400 <= error.response.status_code < 429
            why, pause = error, PAUSE_S * 2 ** (TRIES - tries_left)
            while why.__context__:  # down to the system's own words
                why = why.__context__
            if isinstance(error, ValueError) or refused or not tries_left:
                raise OSError(f"{url}: {why}") from None
            print(f"{path.name}: {why}; next try in {pause} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    try:
        check(part)
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{url}: {error}") from None
    part.rename(path)


def vocab_files() -> list[Path]:
    """Where tiktoken keeps GPT-2's two vocabulary files: under the SHA-1 of their address."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    return [Path(cache, hashlib.sha1(url.encode()).hexdigest()) for url in VOCAB_URLS]


def missing_vocab() -> list[Path]:
    """Those that tiktoken would have to download. Asked before tiktoken is, which waits for a
    network."""
    return [path for path in vocab_files() if not path.exists()]


def vocab_cure() -> str:
    urls, names = " and ".join(VOCAB_URLS), " and ".join(path.name for path in missing_vocab())
    return f"fetch {urls} elsewhere, name them {names}, and set TIKTOKEN_CACHE_DIR to their folder"
