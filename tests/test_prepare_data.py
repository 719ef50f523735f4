"""Tests ../prepare_data.py: all text arrives, once, in a folder that is whole or not there."""

import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, NEEDS_POSIX, content, jsonl, prepare, snapshot, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
from dataloader import ShardError, open_folder
from support import readers
from support.tokenizer import Tokenizer, bytes_tokenizer, read_tokenizer, train_tokenizer

PROGRAM = prepare_data.__file__


def documents_of(folder: Path, split: str) -> list[str]:
    """Return the documents of a split, each of which begins with <|endoftext|> and is UTF-8."""
    tokenizer, shards = read_tokenizer(folder), getattr(open_folder(folder), split)
    tokens = np.concatenate([shard.read(0, shard.num_tokens) for shard in shards])
    first, *parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text))
    assert not len(first)
    return [b"".join(tokenizer.tokens[i] for i in part[1:]).decode() for part in parts]


def error_of(capture) -> str:
    (line,) = capture.readouterr().err.splitlines()
    return line


def names_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.endswith(".lock")}


MISTAKES = {
    "no file": ("--input nowhere --data-dir data", "--input nowhere: there is no such file"),
    "no text": ("--input a --data-dir data", "0 tokens for train, too few: 1 files; 1 records"),
    "damaged": ("--input a.gz --data-dir data", "--input a.gz can't be read: "),
    "no folder for text": ("--input a", "--input needs --data-dir"),
    "no encoding": ("--input a --data-dir data --encoding x", "--encoding x: unknown encoding"),
    "no text encoding": ("--input a --data-dir data --encoding hex", "--encoding hex: 'hex' "),
    "no tokenizer": ("--input a --data-dir data --tokenizer b", "--tokenizer b is not bpe, bytes"),
    "other files": ("--input a.jsonl --data-dir folder", "--data-dir folder is there already"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("a", "a.gz", "folder/notes"):
        Path(name).write_text("a")
    jsonl(Path("a.jsonl"), {"text": "some text"})
    before, (line, why) = snapshot(tmp_path), MISTAKES[mistake]
    assert prepare_data.main(line.split()) == 2
    assert why in error_of(capsys)
    assert {p: t for p, t in snapshot(tmp_path).items() if p.suffix != ".lock"} == before


def test_no_torch(texts, tmp_path):
    code = "import sys, prepare_data as p; print(p.main(sys.argv[1:]), 'torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.path.dirname(PROGRAM)}
    command = [sys.executable, "-c", code, "--input", texts, "--data-dir", tmp_path / "data"]
    assert subprocess.check_output(command, env=env, text=True).endswith("\n0 False\n")


AWKWARD = [
    "\0", "\ufffd", "a\r\nb\r", "<|endoftext|>", " " * 20, "x" * 20, "\u00a0 \u3000\n\u2028 \x85 a",
    "it's we'll 'tis", "\n\n  def f():\n\t\treturn 1\n", "\u4f60\u597d \u4e16\u754c\n",
    "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{DROMEDARY CAMEL}", "\N{COMBINING ACUTE ACCENT} e",
]  # fmt: skip
SPACES = st.text(" \t\n\r\f\v\x1c\x85\u00a0\u3000\u200ba'1", max_size=20)
PARTS = st.lists(SPACES | st.sampled_from(AWKWARD) | st.text(max_size=20))
TOKENIZERS = {
    "bytes": bytes_tokenizer(), "gpt2": prepare_data.gpt2_tokenizer(),
    "odd": Tokenizer({name: 256 - i for name, i in bytes_tokenizer().vocab.items()}, []),
    "bpe": train_tokenizer([" ".join(AWKWARD), Path(__file__).read_text()], 600),
}  # fmt: skip


def cut_into(patch: pytest.MonkeyPatch, piece: int):
    for name, size in (("PIECE", piece), ("LONGEST_PIECE", 5 * piece), ("BLOCK", 7)):
        patch.setattr(readers, name, size)
    patch.setattr(prepare_data, "PIECE", piece)


@pytest.mark.parametrize(
    "tokenizer", ["bytes", "odd", "bpe", pytest.param("gpt2", marks=NEEDS_GPT2)]
)
@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_tokens_of_pieces(tokenizer, parts):
    ours = TOKENIZERS[tokenizer]  # bytes may be cut anywhere, others where they find white space
    text = "".join(part + "a " * bool(ours.merges) for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        cut_into(patch, 8)
        pieces = enumerate(readers.pieces(io.StringIO(text)))
        batch = [("val", i == 0, piece) for i, piece in pieces]
        tokens = prepare_data.tokenize(batch, ours)["val"].tolist()
    assert tokens == [ours.end_of_text] * bool(text) + ours.encode(text)
    assert all(0 < len(piece) <= 40 for _, _, piece in batch)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_any_number_of_workers(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "MIN_FOR_WORKERS", 0)
    cut_into(monkeypatch, 2000)
    rng = random.Random(0)
    sizes = rng.choices([1, 30, 2000], k=50)
    documents = [f"{i}" + "".join(rng.choices(AWKWARD, k=k)) for i, k in enumerate(sizes)]
    jsonl(tmp_path / "a.jsonl", *({"text": document} for document in documents))
    documents.append(Path(PROGRAM).read_text())
    read = []  # to train a vocabulary
    train = lambda texts, size: read.extend(texts) or train_tokenizer(read, size)  # noqa: E731
    monkeypatch.setattr(prepare_data, "train_tokenizer", train)
    monkeypatch.setattr(prepare_data, "SAMPLE", 200_000)  # of 460,000 characters
    flags = ["--shard-tokens=20011", "--val-fraction=0.3"]
    flags += ["--input", tmp_path / "a.jsonl", PROGRAM, "--tokenizer"]
    for workers, kept in zip("123", (0, 200_000, 1 << 27), strict=True):  # bytes of text in memory
        monkeypatch.setattr(prepare_data, "KEPT", kept)
        assert prepare(tmp_path / workers, *flags, tokenizer, "--workers", workers) == 0
    folder = tmp_path / "1"
    assert content(folder) == content(tmp_path / "2") == content(tmp_path / "3")
    val = documents_of(folder, "val")
    assert val == [document for document in documents if document in val] and len(val) == 15
    train = [document for document in documents if document not in val]
    assert documents_of(folder, "train") == train
    assert all(any(piece in text for text in train) for piece in read)
    is_last_drawn = any(len(x) > 99 and x in documents[-1] for x in read)
    assert tokenizer != "bpe" or (is_last_drawn and 5e4 < sum(map(len, read)) / 3 < 2e5)
    manifest, data = json.loads((folder / "manifest.json").read_bytes()), open_folder(folder)
    ours = read_tokenizer(folder)
    assert data.vocab_size == ours.size and data.tokenizer == ours.name
    for split in ("train", "val"):
        entries = manifest[split]["shards"]
        assert all(entry["tokens"] == 20_011 for entry in entries[:-1]) and len(entries) > 1
        for entry, shard in zip(entries, getattr(data, split), strict=True):
            assert entry["largest_id"] == shard.read(0, entry["tokens"]).max()
            assert entry["sha256"] == hashlib.sha256(shard.path.read_bytes()).hexdigest()


def test_val_fraction(tmp_path):
    documents, drawn = [f"document {n}" for n in range(13)], set()
    source = jsonl(tmp_path / "a.jsonl", *({"text": document} for document in documents))
    for number, seed in enumerate((0, 0, 1, 2, 3)):
        folder, flags = tmp_path / f"{number}", ("--val-fraction", 0.15, "--seed", seed)
        assert prepare(folder, "--input", source, *flags) == 0
        val = documents_of(folder, "val")
        assert documents_of(folder, "train") == [x for x in documents if x not in val]
        drawn.add(tuple(val))
    assert len(drawn) == 4 and {len(val) for val in drawn} == {2}


@pytest.mark.parametrize("count", [1, 3, 40])
def test_few_documents(count, tmp_path, monkeypatch):
    cut_into(monkeypatch, 100)
    texts = [("\u4f60" * 90 + " ") * n + "\u597d " * 7 for n in range(5, 5 + count)]
    source = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    batches, real = [], prepare_data.tokenize
    monkeypatch.setattr(prepare_data, "tokenize", lambda x, y: real(batches.append(x) or x, y))
    assert prepare(tmp_path / "data", "--input", source, "--val-fraction", 0.45 / count) == 0
    ends = [(text, len(text) * 9 // 10) for text in texts]
    assert documents_of(tmp_path / "data", "train") == [text[:end] for text, end in ends]
    assert documents_of(tmp_path / "data", "val") == [text[end:] for text, end in ends]
    assert max(sum(len(text) for *_, text in batch) for batch in batches) < 2 * 8 * 100


def test_val_input(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("another text")
    mine = [f"{texts / '07.txt'}", "texts/1*.txt", "other.txt"]  # 07 by another name, too
    assert prepare(tmp_path / "data", "--input", "texts", "--val-input", *mine) == 0
    held_out = [texts / "07.txt", *sorted(texts.glob("1*.txt"))]
    val = [file.read_text() for file in [*held_out, tmp_path / "other.txt"]]
    assert documents_of(tmp_path / "data", "val") == val
    train = [file.read_text() for file in sorted({*texts.iterdir()} - {*held_out})]
    assert documents_of(tmp_path / "data", "train") == train


def test_repeated_command(texts, tmp_path, capsys):
    line = (tmp_path / "data", "--input", texts, "--shard-tokens", 8000)
    assert prepare(*line) == 0
    before, said = snapshot(tmp_path / "data"), capsys.readouterr().out
    assert prepare(*line, "--workers", 3) == 0
    assert capsys.readouterr().out == "already complete:\n" + said
    first, *_, last = sorted(texts.iterdir())
    for act, more in (
        (first.exists, ("--seed", 7)),
        (first.exists, ("--val-input", first)),
        (lambda: last.rename(texts / "40.txt"), ()),
        (lambda: (texts / "40.txt").rename(last) and first.write_text("Line 0\n"), ()),
    ):
        act()
        assert prepare(*line, *more) == 2
        assert "was made with other flags or from other text" in error_of(capsys)
    assert snapshot(tmp_path / "data") == before


def test_own_output_is_no_input(texts, monkeypatch):
    monkeypatch.chdir(texts)
    assert prepare(Path("data"), "--input", "*.txt") == 0
    os.rename("data", "data.tmp")  # of a process that was killed
    for _ in range(2):
        assert prepare(Path("data"), "--input", ".") == 0
    assert len(documents_of(Path("data"), "train")) == 40


@pytest.mark.parametrize("name", [".", "../link", "../file"])
def test_folder_that_is_there(name, texts, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.symlink("folder", tmp_path / "link")
    monkeypatch.chdir(tmp_path / "folder")
    assert prepare(name, "--input", "../texts") == 2 and "name a new folder" in error_of(capsys)
    assert names_in(tmp_path) == {"texts", "folder", "file", "link"} and not names_in(Path("."))


def test_failing_disk(texts, tmp_path, monkeypatch, capsys):
    fsync, calls = os.fsync, []

    def failing(number: int):
        assert names_in(tmp_path) == {"data.tmp", "texts"}
        with pytest.raises(ShardError, match=r"data.tmp is unfinished"):
            open_folder(tmp_path / "data.tmp")
        calls.append(number)
        if len(calls) in (1, 20):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", failing)
    for code in (1, 1, 0):
        assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 1024) == code
        assert code == 0 or "No space left" in error_of(capsys)
        assert names_in(tmp_path) == ({"texts"} if code else {"texts", "data"})
    assert len(calls) > 40 and open_folder(tmp_path / "data")


@pytest.fixture
def much(tmp_path) -> tuple:
    """Flags for a text that takes two workers a second."""
    for folder in ("texts", "bpe"):
        (tmp_path / folder).mkdir()
    words = random.Random(0).choices(Path(PROGRAM).read_text().split(), k=50_000)
    for n in range(20):
        (tmp_path / "texts" / f"{n}.txt").write_text(" ".join(words))
    for name, data in TOKENIZERS["bpe"].files().items():
        (tmp_path / "bpe" / name).write_bytes(data)
    flags = ("--input", tmp_path / "texts", "--tokenizer", tmp_path / "bpe")
    return (*flags, "--shard-tokens", 20_000, "--workers", 2)


def start(folder: Path, *flags) -> subprocess.Popen:
    command = [sys.executable, PROGRAM, "--data-dir", folder, *flags]
    with open(folder.with_suffix(".out"), "wb") as out:
        return subprocess.Popen([*map(str, command)], stdout=out, stderr=2, start_new_session=True)


def wait_for_end(process: subprocess.Popen) -> int:
    """Return the exit code when no process of the group is left."""
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: process.poll() is not None and os.killpg(process.pid, 0), 30)
    return process.returncode


@NEEDS_POSIX
@pytest.mark.slow
def test_killed(much, tmp_path):
    begin = time.monotonic()
    assert start(tmp_path / "whole", *much).wait() == 0
    longest, rng = time.monotonic() - begin, random.Random(0)
    for number in range(8):
        process = start(tmp_path / "data", *much)
        shard = tmp_path / "data.tmp" / f"train_{rng.randrange(60):06}.bin"
        time.sleep(rng.uniform(0, longest)) if number % 2 else wait_for(shard.exists, 60)
        process.kill()
        wait_for_end(process)  # and its workers with it
        if (tmp_path / "data").exists():
            assert content(tmp_path / "data") == content(tmp_path / "whole")
            shutil.rmtree(tmp_path / "data")
    assert start(tmp_path / "data", *much).wait() == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")


ENDS = {  # who is sent which signal, once there is a file, and what it says
    "Ctrl-C": (os.killpg, signal.SIGINT, "train_000060.bin", 130, "interrupted"),
    "SIGTERM": (os.kill, signal.SIGTERM, "train_000060.bin", 130, "interrupted"),
    "a worker is killed": (None, 9, "train_000001.bin", 1, "error: a tokenizer process "),
}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers there")
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=pytest.mark.slow if end == "SIGTERM" else ()) for end in ENDS]
)
def test_stopped(end, much, tmp_path, capfd):
    send, number, file, code, line = ENDS[end]
    process = start(tmp_path / "data", *much)
    wait_for((tmp_path / "data.tmp" / file).exists, 60)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    send(process.pid, number) if send else os.kill(int(workers[-1]), number)
    assert wait_for_end(process) == code
    assert error_of(capfd).startswith(line)
    assert not names_in(tmp_path) - {"texts", "bpe", "data.out"}


@pytest.mark.slow
@NEEDS_POSIX
def test_memory(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 30_000_000)
    code = "import resource, subprocess, sys\n" \
           "subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=2)\n" \
           "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"  # fmt: skip
    flags = ["--input", tmp_path / "a.txt", "--data-dir", tmp_path / "data", "--tokenizer", "bytes"]
    assert int(subprocess.check_output([sys.executable, "-c", code, PROGRAM, *flags])) < 600
