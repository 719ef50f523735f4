"""What the tests of the data share."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dataloader
import prepare_data
from support.corpus import open_folder
from support.files import missing_vocab

PROGRAM = prepare_data.__file__
NEEDS_POSIX = pytest.mark.skipif(os.name != "posix", reason="needs links, pipes and fork")
NEEDS_GPT2 = pytest.mark.skipif(
    bool(missing_vocab()), reason="TIKTOKEN_CACHE_DIR has no GPT-2 vocabulary"
)


def write_shard(path: Path, tokens: np.ndarray):
    path.write_bytes(dataloader.shard_header(len(tokens)) + tokens.astype("<u2").tobytes())


def jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf8")
    return path


def prepare(folder: Path, *flags) -> int:
    return prepare_data.main(["--data-dir", str(folder), *map(str, flags)])


def start(folder: Path, *flags) -> subprocess.Popen:
    """Start prepare_data.py in a process of its own."""
    command = [sys.executable, PROGRAM, "--data-dir", folder, *flags]
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
