"""Tests ../prepare_data.py."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import string
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from conftest import NEEDS_GPT2, NEEDS_POSIX, jsonl, prepare
from data_helpers import PROGRAM, content, error_of, start, stream, write_texts
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
from dataloader import ShardError, open_folder
from prepare import inputs
from prepare.shards import UNFINISHED
from prepare.tokenizer import Tokenizer, load_tokenizer, read_tokenizer, train_tokenizer


class Killed(BaseException):
    pass


# ---- Flags ---------------------------------------------------------------------------------------

MISTAKES = {
    "no file": ("--input nowhere --data-dir data", "--input nowhere: there is no such file"),
    "no text": ("--input empty --data-dir data", "tokens for train, too few: file skipped, empty"),
    "a letter": ("--input a --data-dir data", "0 tokens for train, too few: add more text"),
    "no folder for text": ("--input a", "--input needs --data-dir"),
    "no records": ("--input a --data-dir data --text-field x", "--text-field x has no effect"),
    "a name alone": ("book.txt", "did you mean --input book.txt?"),
    "other names": ("--input a --out data", "--out here is --data-dir"),
    "misspelt": ("--inptu a", "did you mean --input?"),
    "no number": ("--seed x", "invalid int value"),
    "too large": ("--val-fraction 0.6", "must be at most 0.5"),
    "no tokenizer": ("--tokenizer gpt4", "--tokenizer gpt4 is none of bpe, bytes, gpt2, a run, or"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("a").write_text("a")
    line, why = MISTAKES[mistake]
    assert prepare_data.main(line.split()) == 2
    error = error_of(capsys)
    assert why in error and error.startswith("prepare_data.py: error: ")
    assert sorted(os.listdir()) == ["a", "empty"]


def test_a_validation_split_that_is_too_small_is_said(tmp_path, capsys):
    """A hundredth of these records is a few hundred bytes."""
    texts = jsonl(
        tmp_path / "texts.jsonl", *({"text": f"record {i} of many words"} for i in range(400))
    )
    for fraction, is_small in (("0.01", True), ("0.4", False)):
        line = ["--input", texts, "--data-dir", tmp_path / fraction, "--tokenizer", "bytes"]
        assert prepare_data.main([*map(str, line), "--val-fraction", fraction]) == 0
        assert ("validation tokens are too few" in capsys.readouterr().out) == is_small


def test_it_starts_without_torch(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    code = f"import sys, runpy; sys.argv[1:] = ['--input', 'a.txt', '--data-dir', 'data']\n" \
           f"try: runpy.run_path({PROGRAM!r}, run_name='__main__')\n" \
           f"except SystemExit as end: print(end.code, 'torch' in sys.modules)"  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(Path(PROGRAM).parent)}
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=env, text=True)
    assert out.splitlines()[-1] == "0 False"


# ---- Tokens --------------------------------------------------------------------------------------

AWKWARD = [
    b"", b"\0", b"\xff\xfe", b"\xe2\x80", b"a\r\nb\r", b"<|endoftext|>", b" " * 40, b"x" * 40,
    "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}".encode(), "\u00a0 \u3000\n\u2028 \x85 a".encode(),
    b"it's we'll 'tis", b"\n\n  def f():\n\t\treturn 1\n", "\u4f60\u597d \u4e16\u754c\n".encode(),
]  # fmt: skip
SPACES = st.text(" \t\n\r\f\x1c\x85\u00a0\u3000a'1", max_size=60).map(str.encode)
DOCUMENT = st.lists(
    SPACES | st.sampled_from(AWKWARD) | st.binary(max_size=9) | st.text().map(str.encode)
).map(b"".join)


def tokens_of_pieces(document: bytes, tokenizer: str) -> list[int]:
    """Return the tokens of a document that is cut every 16 bytes or so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "PIECE", 16)
        blocks = iter([document[i : i + 16] for i in range(0, len(document), 16)])
        parts = [(i == 0, piece) for i, piece in enumerate(inputs.pieces(blocks))]
    assert b"".join(piece for _, piece in parts) == document
    assert load_tokenizer(tokenizer)
    return prepare_data.tokenize(tokenizer, parts).tolist()


@settings(max_examples=100, deadline=None)
@given(DOCUMENT)
def test_bytes_cut_anywhere_join_to_the_document(document):
    expected = [256, *document] if document else []
    assert tokens_of_pieces(document, "bytes") == expected


@NEEDS_GPT2
@settings(max_examples=300, deadline=None)
@given(DOCUMENT)
def test_gpt2s_tokens_of_pieces_are_those_of_the_document(document):
    import tiktoken

    text = document.decode(errors="replace")
    ids = tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert tokens_of_pieces(document, "gpt2") == ([50256, *ids] if document else [])


def test_without_a_network_the_message_names_the_files_to_fetch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("prepare.tokenizer.TOKENIZERS", {})  # other tests may have loaded it
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert prepare(tmp_path / "data", "--input", __file__, "--tokenizer", "gpt2") == 2
    error = error_of(capsys)
    assert "no network" in error and "encoder.json as vocab.json" in error
    assert os.listdir(tmp_path) == []


# ---- The split and the shards --------------------------------------------------------------------


def documents_of(folder: Path, split: str, end_of_text: int = 256) -> list[list[int]]:
    """Return the documents of a split in tokens, each without <|endoftext|>."""
    tokens = np.array(stream(folder, split))
    starts = np.flatnonzero(tokens == end_of_text)
    assert starts[0] == 0
    return [part[1:].tolist() for part in np.split(tokens, starts[1:])]


def test_whole_documents_are_drawn_for_validation_by_number_and_seed(tmp_path):
    texts = [b"%d" % n for n in range(1000)]
    source = jsonl(tmp_path / "a.jsonl", *({"text": text.decode()} for text in texts))
    drawn = set()
    for seed in range(4):
        folder = tmp_path / str(seed)
        flags = ("--input", source, "--val-fraction", 0.5, "--seed", seed)
        assert prepare(folder, *flags) == 0
        train, val = (list(map(bytes, documents_of(folder, split))) for split in ("train", "val"))
        assert sorted(train + val) == sorted(texts)  # so none is in both
        assert train == sorted(train, key=int) and val == sorted(val, key=int)
        rng = random.Random(seed)  # the split depends on seed and number alone
        assert val == [text for text in texts[1:] if rng.random() < 0.5]
        drawn.add(tuple(val))
    assert len(drawn) == 4


@pytest.mark.parametrize("count", [1, 5])
def test_of_too_few_documents_the_last_tenth_of_each_is_validation(count, tmp_path, capsys):
    book = bytes(range(97, 123)) * 100
    (tmp_path / "books").mkdir()
    for n in range(count):
        (tmp_path / "books" / f"{n}.txt").write_bytes(book)
    assert prepare(tmp_path / "data", "--input", tmp_path / "books") == 0
    assert stream(tmp_path / "data", "train") == [256, *book[:2340]] * count
    assert stream(tmp_path / "data", "val") == [*book[2340:]] * count
    out = capsys.readouterr().out
    assert f"val: {count * 260:,} tokens; shards: 1; documents: the last tenth of each, " in out
    assert f"train: {count * 2341:,} tokens; shards: 1; documents: {count}\n" in out


def test_a_document_is_not_cut_inside_a_character(tmp_path):
    for size in range(200, 230):
        (tmp_path / "book.txt").write_text("\u4f60" * size, "utf8")
        folder = tmp_path / str(size)
        assert prepare(folder, "--input", tmp_path / "book.txt") == 0
        train, val = (
            bytes(stream(folder, split)[split == "train" :]) for split in ("train", "val")
        )
        assert len(train.decode() + val.decode()) == size
        assert abs(len(val) - size * 3 / 10) < 4


def test_the_manifest_says_what_the_shards_hold(tmp_path):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--shard-tokens", 1024, "--val-fraction", 0.3)
    assert prepare(tmp_path / "data", *flags) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    sha256 = load_tokenizer("bytes").sha256
    expected = {"name": "bytes", "sha256": sha256, "vocab_size": 257, "end_of_text": 256}
    assert manifest["tokenizer"] == expected
    num_documents = 0
    for split in ("train", "val"):
        entries = manifest[split]["shards"]
        assert all(entry["tokens"] == 1024 for entry in entries[:-1])
        for entry, shard in zip(
            entries, getattr(open_folder(tmp_path / "data"), split), strict=True
        ):
            tokens = shard.read(0, entry["tokens"])
            assert entry["largest_id"] == tokens.max()
            assert entry["documents"] == (tokens == 256).sum()
            assert entry["sha256"] == hashlib.sha256(shard.path.read_bytes()).hexdigest()
            num_documents += entry["documents"]
    assert num_documents == 40


@pytest.mark.parametrize(
    "tokenizer", ["bytes", "bpe", pytest.param("gpt2", marks=[NEEDS_GPT2, pytest.mark.slow])]
)
def test_workers_change_no_byte_and_the_tokens_are_the_tokenizers(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "MIN_FOR_WORKERS", 0)
    root = Path(PROGRAM).parent
    files = sorted([*root.glob("*.py"), *root.glob("prepare/*.py"), *root.glob("tests/*.py")])
    flags = ("--input", *files, "--tokenizer", tokenizer, "--shard-tokens", 20_011)
    folders = [tmp_path / str(workers) for workers in (0, 1, 3)]
    for folder in folders:
        assert prepare(folder, *flags, "--val-fraction", 0.1, "--workers", folder.name) == 0
    assert content(folders[0]) == content(folders[1]) == content(folders[2])
    ours = read_tokenizer(folders[0])
    found = [
        document
        for split in ("train", "val")
        for document in documents_of(folders[0], split, ours.end_of_text)
    ]
    texts = [file.read_bytes() for file in files]
    assert sorted(found) == sorted(ours.encode_bytes(text).tolist() for text in texts if text)
    data = open_folder(folders[0])
    assert (data.tokenizer, data.vocab_size) == (ours.name, ours.size)
    assert ours.size == {"bytes": 257, "bpe": 4096, "gpt2": 50257}[tokenizer]


def test_the_vocabulary_is_trained_on_a_part_of_a_long_text_from_all_of_it(tmp_path, monkeypatch):
    for letter in string.ascii_lowercase:
        (tmp_path / f"{letter}.txt").write_text(f"{letter * 7} {letter * 9} " * 30_000)
    monkeypatch.setattr(prepare_data, "SAMPLE_BYTES", 4 << 20)
    read = []

    def train(texts, vocab_size):
        read.extend(texts)
        return train_tokenizer(read, vocab_size)

    monkeypatch.setattr(prepare_data, "train_tokenizer", train)
    flags = ("--input", tmp_path / "*.txt", "--tokenizer", "bpe", "--vocab-size", 300)
    assert prepare(tmp_path / "data", *flags) == 0
    size = sum(map(len, read))
    assert 1 << 20 <= size <= 6 << 20  # of 14 MB
    letters = [letter for letter in string.ascii_lowercase if any(letter in text for text in read)]
    assert letters[0] < "m" < letters[-1] and len(letters) < 26


def test_another_folders_tokenizer_is_taken_and_may_be_a_runs(tmp_path, whole, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--tokenizer")
    assert prepare(tmp_path / "a", *flags, "bpe", "--vocab-size", 300) == 0
    assert prepare(tmp_path / "b", *flags, tmp_path / "a") == 0
    assert stream(tmp_path / "a", "train") == stream(tmp_path / "b", "train")
    for name, theirs in (("c", whole[1] / "step_000012"), ("e", whole[1])):
        assert prepare(tmp_path / name, *flags, theirs) == 0
        assert open_folder(tmp_path / name).tokenizer == "bytes"
    capsys.readouterr()
    assert prepare(tmp_path / "d", *flags, texts) == 2
    assert "is none of bpe, bytes, gpt2, a run, or a folder" in error_of(capsys)
    (tmp_path / "alphabet").mkdir()
    for name, data in Tokenizer({"a": 0, "b": 1}, [], None).files().items():
        (tmp_path / "alphabet" / name).write_bytes(data)
    assert prepare(tmp_path / "d", *flags, tmp_path / "alphabet") == 2
    assert "alphabet has no end of text, which separates documents" in error_of(capsys)
    assert prepare(tmp_path / "d", *flags, "bytes", "--vocab-size", 300) == 2
    assert "--vocab-size 300 needs --tokenizer bpe" in error_of(capsys)
    assert not (tmp_path / "d").exists()


def test_a_folder_that_holds_a_vocabulary_is_not_written_to(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "merges.txt").write_text("somebody's")
    assert prepare(tmp_path / "data", "--input", __file__) == 2
    assert "holds merges.txt but no manifest.json" in error_of(capsys)
    assert content(tmp_path / "data") == {"merges.txt": b"somebody's"}


def test_a_preparation_goes_on_with_the_tokenizer_that_it_began_with(tmp_path, monkeypatch, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--tokenizer", "bpe", "--vocab-size", 300, "--shard-tokens", 1024)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare_data.Split, "finish_shard", kill_after_two)
        prepare(tmp_path / "data", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "train_tokenizer", None)  # it is not trained again
        assert prepare(tmp_path / "data", *flags) == 0
    assert prepare(tmp_path / "whole", *flags) == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")
    capsys.readouterr()
    assert prepare(tmp_path / "data", *flags, "--vocab-size", 301) == 2
    assert "was made with --vocab-size 300, not 301" in error_of(capsys)


def kill_after_two(split, finish_shard=prepare_data.Split.finish_shard):
    if len(split.shards) == 2:
        raise Killed
    finish_shard(split)


@pytest.mark.slow
@NEEDS_POSIX  # for its resource
def test_a_long_text_takes_little_memory(tmp_path):
    """The peak of a process does not grow with its input, beyond the shard that it fills."""
    peaks = []
    for megabytes in (4, 64):
        with open(tmp_path / "book.txt", "wb") as file:
            file.writelines([b"some words and \xe4\xbd\xa0\n" * 50_000] * megabytes)
        flags = ["--input", tmp_path / "book.txt", "--data-dir", tmp_path / f"{megabytes}"]
        code = "import resource, sys, prepare_data\n" \
               "assert prepare_data.main(sys.argv[1:]) == 0\n" \
               "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"  # fmt: skip
        command = [sys.executable, "-c", code, *flags, "--shard-tokens", "1000000"]
        env = os.environ | {"PYTHONPATH": str(Path(PROGRAM).parent)}
        out = subprocess.check_output(list(map(str, command)), env=env, text=True)
        peaks.append(int(out.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 20


# ---- Repeated ------------------------------------------------------------------------------------


def joined(texts: Path):
    """The same text in one document less."""
    first, second = sorted(texts.iterdir())[1:3]
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()


OTHERS = {
    "longer": lambda texts: (texts / "39.txt").write_text("x" * 2000),
    "shorter": lambda texts: (texts / "39.txt").unlink(),
    "one more": lambda texts: (texts / "40.txt").write_text("x"),
    "another letter": lambda texts: (texts / "01.txt").write_bytes(b"Line 1\n" * 6),
    "joined": joined,
}


def test_a_command_that_is_done_says_so_and_changes_nothing(tmp_path, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *flags) == 0
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "data").iterdir()}
    totals = capsys.readouterr().out
    assert prepare(tmp_path / "data", *flags, "--workers", 1) == 0
    assert capsys.readouterr().out == "already complete:\n" + totals
    assert totals.endswith(f"ready: python train_gpt2.py --data-dir {tmp_path / 'data'}\n")
    for flag, value in (("--seed", 7), ("--shard-tokens", 9000), ("--val-fraction", 0.02)):
        assert prepare(tmp_path / "data", *flags, flag, value) == 2
        assert f"data was made with {flag} " in error_of(capsys)
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "data").iterdir()}


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_of_other_text_is_refused_and_kept(other, tmp_path, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *flags) == 0
    before = content(tmp_path / "data")
    OTHERS[other](texts)
    capsys.readouterr()
    assert prepare(tmp_path / "data", *flags) == 2
    assert "was made from other text: remove it, or name another --data-dir" in error_of(capsys)
    assert before == content(tmp_path / "data")


def test_a_folder_with_other_files_is_used_and_they_stay(tmp_path):
    """Also the folder of the texts, and one that is empty."""
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "empty").mkdir()
    assert prepare(tmp_path / "empty", "--input", texts) == 0
    mine = content(texts)
    for _ in range(2):
        assert prepare(texts, "--input", texts) == 0
        assert content(texts).items() >= mine.items()
        assert open_folder(texts).fingerprint == open_folder(tmp_path / "empty").fingerprint


def test_who_is_refused_leaves_the_files_of_who_is_at_work(tmp_path, capsys):
    texts, folder = write_texts(tmp_path / "texts"), tmp_path / "data"
    folder.mkdir()
    (folder / UNFINISHED).write_text("of the other")
    is_held, is_refused = Event(), Event()

    def work():
        with FileLock(folder / ".lock"):
            is_held.set()
            is_refused.wait(60)

    other = Thread(target=work)
    other.start()
    is_held.wait()
    assert prepare(folder, "--input", texts) == 2
    assert f"another process is writing to {folder}" in error_of(capsys)
    assert (folder / UNFINISHED).read_text() == "of the other" and (folder / ".lock").exists()
    is_refused.set()
    other.join()


def test_what_was_killed_before_its_first_shard_may_go_on_with_other_flags(tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "texts")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare_data.Split, "finish_shard", kill)
        prepare(tmp_path / "data", "--input", texts, "--tokenizer", "bpe", "--vocab-size", 300)
    assert prepare(tmp_path / "data", "--input", texts) == 0
    assert open_folder(tmp_path / "data").tokenizer == "bytes"


def kill(_):
    raise Killed


def test_in_the_folder_of_the_input_only_our_own_names_are_no_input(tmp_path, capsys):
    """Also what a write leaves that was killed, which once was other text at the next start."""
    texts = write_texts(tmp_path / "texts")
    jsonl(texts / "a.json", {"text": "a document of the user"})
    assert prepare(tmp_path / "whole", "--input", texts) == 0
    (texts / "train_000000.bin.tmp").write_text("half a shard")
    (texts / f"{UNFINISHED}.tmp").write_text("half a manifest")
    assert prepare(texts, "--input", texts) == 0
    assert stream(texts, "train") == stream(tmp_path / "whole", "train")


@pytest.mark.parametrize("name", ["train.bin", "fineweb_val_000000.bin", "tokens.npy"])
def test_shards_of_others_are_refused_and_kept(name, tmp_path, capsys):
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("mine")
    assert prepare(tmp_path / "data", "--input", texts) == 2
    assert f"holds {name} but no manifest.json: choose another" in error_of(capsys)
    assert content(tmp_path / "data") == {name: b"mine"}


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(tmp_path):
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "data").write_text("mine")
    assert prepare(tmp_path / "data", "--input", texts) == 2
    assert (tmp_path / "data").read_text() == "mine"


def test_its_own_shards_are_no_input(tmp_path, monkeypatch):
    monkeypatch.chdir(write_texts(tmp_path / "texts"))
    for _ in range(2):
        assert prepare(Path("zz"), "--input", ".") == 0
    assert prepare(tmp_path / "whole", "--input", "*.txt") == 0
    assert stream(Path("zz"), "train") == stream(tmp_path / "whole", "train")


def unbroken_and_calls(texts: Path, tmp_path: Path, flags: tuple, monkeypatch) -> tuple:
    """Return the files of an unbroken preparation, and a counter of its writes, which raises
    Killed at the one with the number kill_at."""
    monkeypatch.setattr(prepare_data, "PIECE", 200)
    monkeypatch.setattr(inputs, "PIECE", 200)

    class Counter:
        calls = kill_at = 0

    def counting(function):
        def counted(*args):
            Counter.calls += 1
            if Counter.calls == Counter.kill_at:
                raise Killed
            return function(*args)

        return counted

    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of them take minutes
    for name in ("replace", "fsync", "rename"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    assert prepare(tmp_path / "whole", "--input", texts, *flags) == 0
    return content(tmp_path / "whole"), Counter


@pytest.mark.parametrize(
    "fraction",
    [
        pytest.param(0.3, id="val drawn"),
        pytest.param(1e-5, id="val the last tenths", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_write_the_same_command_goes_on(fraction, tmp_path, monkeypatch, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--shard-tokens", 2048, "--val-fraction", fraction)
    whole, counter = unbroken_and_calls(texts, tmp_path, flags, monkeypatch)
    most = counter.calls
    assert most > 40
    for k in range(1, most + 1):
        folder = tmp_path / f"killed{k}"
        counter.calls, counter.kill_at = 0, k
        with pytest.raises(Killed):
            prepare(folder, "--input", texts, *flags)
        with suppress(ShardError):  # a run refuses it, unless only its last synchronization lacks
            assert open_folder(folder) and k == most
        counter.kill_at = 0
        assert prepare(folder, "--input", texts, *flags) == 0
        assert content(folder) == whole


def test_what_is_whole_is_kept_and_not_tokenized_again(tmp_path, monkeypatch, capsys):
    texts = write_texts(tmp_path / "texts")
    flags = ("--shard-tokens", 1024)
    whole, counter = unbroken_and_calls(texts, tmp_path, flags, monkeypatch)
    counter.calls, counter.kill_at = 0, 3 * counter.calls // 4
    with pytest.raises(Killed):
        prepare(tmp_path / "data", "--input", texts, *flags)
    unfinished = tmp_path / "data"
    manifest = json.loads((unfinished / UNFINISHED).read_bytes())
    names = [entry["name"] for entry in manifest["train"]["shards"]]
    kept = {name: (unfinished / name).stat() for name in names}
    assert len(kept) > 15
    assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 2048) == 2
    assert "data was made with --shard-tokens 1024, not 2048" in error_of(capsys)
    first = texts / "01.txt"
    original = first.read_bytes()
    first.write_bytes(original + b"x")
    assert prepare(tmp_path / "data", "--input", texts, *flags) == 2
    assert "data was made from other text" in error_of(capsys)
    first.write_bytes(original)
    num_tokenized = 0
    tokenize = prepare_data.tokenize

    def counting(tokenizer, parts):
        nonlocal num_tokenized
        tokens = tokenize(tokenizer, parts)
        num_tokenized += len(tokens)
        return tokens

    monkeypatch.setattr(prepare_data, "tokenize", counting)
    assert prepare(tmp_path / "data", "--input", texts, *flags) == 0
    assert num_tokenized < sum(map(len, whole.values())) / 2 / 2
    assert content(tmp_path / "data") == whole
    for name, stat in kept.items():
        found = (tmp_path / "data" / name).stat()
        assert (found.st_ino, found.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


def test_a_shard_that_was_cut_is_told(tmp_path, capsys):
    texts = write_texts(tmp_path / "texts")
    assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 8000) == 0
    (tmp_path / "data" / "train_000001.bin").write_bytes(b"")
    capsys.readouterr()
    assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 8000) == 2
    assert "train_000001.bin is not a complete shard" in error_of(capsys)


@NEEDS_POSIX
def test_workers_end_with_their_parent(tmp_path):
    parent = multiprocessing.Process(target=start_and_die, args=(tmp_path,))
    parent.start()
    parent.join()
    for _ in range(200):
        if all_have_ended(tmp_path / "workers"):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlives its parent")


def start_and_die(folder: Path):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, prepare_data.start_worker, (folder,)) as pool:
        pool.submit(os.getpid).result()
        (folder / "workers").write_text(" ".join(map(str, pool._processes)))
        os._exit(1)


def all_have_ended(path: Path) -> bool:
    for pid in path.read_text().split():
        with suppress(OSError):
            os.kill(int(pid), 0)
            return False
    return True


def test_a_worker_that_is_killed_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "MIN_FOR_WORKERS", 0)
    monkeypatch.setattr(prepare_data, "start_worker", die)
    line = ("--input", write_texts(tmp_path / "texts"), "--tokenizer", "bpe", "--vocab-size", 300)
    assert prepare(tmp_path / "data", *line, "--workers", 2) == 2
    assert "a tokenizer process was killed" in error_of(capsys)


def die(_):
    os._exit(1)


def test_an_older_version_that_was_stopped_is_not_continued(tmp_path, monkeypatch, capsys):
    """It may have cut the text into other batches, so that some would be left out."""
    flags = ("--input", write_texts(tmp_path / "texts"), "--shard-tokens", 2000)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare_data.Split, "finish_shard", kill_after_two)
        prepare(tmp_path / "data", *flags)
    manifest = tmp_path / "data" / UNFINISHED
    newest = manifest.read_text()
    manifest.write_text(newest.replace(f'"format": {prepare_data.FORMAT},', ""))
    capsys.readouterr()
    assert prepare(tmp_path / "data", *flags) == 2
    assert "in part by an older version of this code: remove it" in error_of(capsys)
    manifest.write_text(newest)
    assert prepare(tmp_path / "data", *flags) == 0


def test_a_text_that_may_not_be_read_is_named_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "texts")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(prepare_data, "sha256_of", refuse)  # root may read any file
    assert prepare(tmp_path / "data", "--input", tmp_path / "texts") == 2
    assert "Permission denied" in error_of(capsys) and os.listdir(tmp_path) == ["texts"]


def test_a_flipped_bit_is_found_when_the_command_is_repeated(tmp_path, capsys):
    line = ("--input", write_texts(tmp_path / "texts"), "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *line) == 0
    assert prepare(tmp_path / "data", *line) == 0
    shard = bytearray((tmp_path / "data" / "train_000001.bin").read_bytes())
    shard[5000] ^= 1
    (tmp_path / "data" / "train_000001.bin").write_bytes(shard)
    capsys.readouterr()
    assert prepare(tmp_path / "data", *line) == 2
    assert "train_000001.bin is damaged: remove" in error_of(capsys)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("function", ["fsync", "replace", "mkdir"])
def test_a_disk_that_fails_is_exit_code_6_and_the_same_command_goes_on(
    function, number, tmp_path, monkeypatch, capsys
):
    texts = write_texts(tmp_path / "texts")
    flags = ("--input", texts, "--shard-tokens", 8000)

    def failing(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing)
        assert prepare(tmp_path / "data", *flags) == 6
    error = error_of(capsys)
    assert os.strerror(number) in error and "repeat the command" in error
    assert not list((tmp_path / "data").glob("*.bin"))
    assert prepare(tmp_path / "data", *flags) == 0
    assert prepare(tmp_path / "whole", *flags) == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def much_text(folder: Path, megabytes: int) -> Path:
    folder.mkdir()
    size = 0
    for n, file in enumerate(inputs.standard_library()):
        if size < megabytes * 1e6:
            (folder / f"{n:05}.py").write_bytes(Path(file).read_bytes())
            size += os.path.getsize(file)
    return folder


def is_free(lock):
    try:
        lock.acquire()
    except Timeout:
        return False
    lock.release()
    return True


@pytest.mark.slow
@NEEDS_POSIX
@NEEDS_GPT2
def test_of_two_at_once_one_is_refused(tmp_path):
    texts = much_text(tmp_path / "texts", 5)
    flags = ("--input", texts, "--tokenizer", "gpt2", "--workers", 2, "--shard-tokens", 20_000)
    process = start(tmp_path / "data", *flags)
    unfinished = tmp_path / "data"
    lock = FileLock(unfinished / ".lock", timeout=0)
    for name in (".lock", UNFINISHED):
        while not (unfinished / name).exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)  # so that it is not faster than the second one
        while is_free(lock):  # it has made the file, and not locked it yet
            process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
            process.send_signal(signal.SIGSTOP)
        second = start(tmp_path / "data", *flags)
        assert f"another process is writing to {unfinished}" in second.communicate()[1]
        assert second.returncode == 2 and (unfinished / name).exists()
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", pytest.param("gpt2", marks=NEEDS_GPT2)])
def test_killed_at_20_random_moments_the_folder_is_the_same(tokenizer, workers, tmp_path):
    texts = much_text(tmp_path / "texts", 8)
    flags = (
        "--input",
        texts,
        "--tokenizer",
        tokenizer,
        "--workers",
        workers,
        "--shard-tokens",
        50_000,
    )
    begin = time.monotonic()
    start(tmp_path / "whole", *flags).communicate()
    longest = time.monotonic() - begin
    rng = random.Random(0)
    kills = rounds = 0
    while kills < 20:
        folder, rounds = tmp_path / f"killed{rounds}", rounds + 1
        while not (folder / "manifest.json").exists():
            process = start(folder, *flags)
            try:
                process.wait(rng.uniform(0.1, 1) * longest)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            process.communicate()
            assert process.returncode in (0, -9)
        assert content(folder) == content(tmp_path / "whole")
