"""What the tests of the data share."""

import random
import subprocess
import sys
from pathlib import Path

import prepare_data
from dataloader import open_folder

PROGRAM = prepare_data.__file__


def start(folder: Path, *flags) -> subprocess.Popen:
    """Start prepare_data.py in a process of its own."""
    command = [sys.executable, PROGRAM, "--data-dir", folder, "--tokenizer", "bytes", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(part) for part in command], **pipes)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without the lock."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}


def stream(folder: Path, split: str) -> list[int]:
    """Return all tokens of a split."""
    shards = getattr(open_folder(folder), split)
    return [token for shard in shards for token in shard.read(0, shard.num_tokens).tolist()]


def write_texts(folder: Path) -> Path:
    """Make a folder of 40 documents of up to 2 kB, written in no order."""
    folder.mkdir()
    for n in random.Random(0).sample(range(40), 40):
        (folder / f"{n:02}.txt").write_bytes(b"line %d\n" % n * (5 * n + 1))
    return folder


def error_of(capsys) -> str:
    """Return the one line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("prepare_data.py: ") and error.count("\n") == 1
    return error
