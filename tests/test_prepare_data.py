"""Tests ../prepare_data.py."""

import errno
import hashlib
import http.server
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, Killed, content, jsonl, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flags import check_mistake
from test_inputs import KINDS
from test_questions import HELLASWAG

import dataloader
import prepare_data
from dataloader import HEADER_BYTES, Shard
from support import corpus, files, inputs
from support.corpus import open_folder
from support.files import missing_vocab

PROGRAM = prepare_data.__file__


def stream(shards: list[Shard]) -> list[int]:
    return [token for shard in shards for token in shard.read(0, shard.num_tokens).tolist()]


# --------------------------------------------------------------------------------------------------
# Tokens


def are_dealt_out(documents: list[list[int]], folder: Path) -> bool:
    """Whether train and val hold these documents, each once, each whole, in their order."""
    data = open_folder(folder)
    end = documents[0][:1]
    streams = [np.array(stream(shards) + end) for shards in (data.train, data.val)]
    read = [0, 0]
    for tokens in documents:
        whole = [*tokens, *end]
        nexts = (s[at : at + len(whole)] for s, at in zip(streams, read, strict=True))
        fits = [np.array_equal(found, whole) for found in nexts]
        if True not in fits:
            return False
        read[fits.index(True)] += len(tokens)
    return read == [len(s) - 1 for s in streams]


def check_workers_and_shards(files: list, shard_tokens: int, tmp_path: Path):
    import tiktoken

    flags = ("--input", *files, "--tokenizer", "gpt2", "--shard-tokens", shard_tokens)
    folders = [tmp_path / str(workers) for workers in (0, 1, 2)]
    for workers, folder in enumerate(folders):
        assert prepare(folder, *flags, "--val-fraction", 0.1, "--workers", workers) == 0
    assert content(folders[0]) == content(folders[1]) == content(folders[2])
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    documents = [[50256, *encode(text)] for file in files if (text := Path(file).read_text("utf8"))]
    assert are_dealt_out(documents, folders[0])
    shards = open_folder(folders[0]).train
    assert all(shard.num_tokens == shard_tokens for shard in shards[:-1])


def readable_sources() -> list[str]:
    """Python's own source, less the few files that are not UTF-8 on purpose."""
    files = inputs.standard_library()
    return [file for file in files if not {"test", "lib2to3"} & set(Path(file).parts)]


@NEEDS_GPT2
def test_workers_change_no_byte_and_the_stream_is_tiktokens(tmp_path):
    check_workers_and_shards(readable_sources()[::20], 10_007, tmp_path)


@NEEDS_GPT2
@pytest.mark.slow
@pytest.mark.parametrize("shard_tokens", [65_537, 1_000_000, 100_000_000])
def test_30_mb_in_shards_of_any_size_are_tiktokens_stream(shard_tokens, tmp_path):
    files = readable_sources()
    while sum(map(os.path.getsize, files)) < 30e6:
        files += [str(tmp_path / f"{len(files)}.py")]
        Path(files[-1]).write_bytes(b"\n".join(Path(f).read_bytes() for f in files[:200]))
    check_workers_and_shards(files, shard_tokens, tmp_path)


AWKWARD = [
    b"", b"\0", b"\xff\xfe", b"\xe2\x80", b"a\r\nb\r", b"<|endoftext|>", b" " * 40, b"x" * 40,
    "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}".encode(), "\u00a0 \u3000\n\u2028 \x85 a".encode(),
    b"it's we'll 'tis", b"\n\n  def f():\n\t\treturn 1\n", "\u4f60\u597d \u4e16\u754c\n".encode(),
]  # fmt: skip
SPACES = st.text(" \t\n\r\f\x1c\x85\u00a0\u3000a'1", max_size=60).map(str.encode)
DOCUMENT = st.lists(
    SPACES | st.sampled_from(AWKWARD) | st.binary(max_size=9) | st.text().map(str.encode)
)


def fuzzed(documents: list[bytes], tokenizer: str, shard_tokens: int) -> list[int]:
    """The tokens of documents that are read, cut and sharded in pieces of 16 bytes."""
    args = prepare_data.parse_args(["--tokenizer", tokenizer, "--val-fraction", "0"])
    blocks = ([text[i : i + 5] for i in range(0, len(text), 5)] for text in documents)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(inputs, "PIECE", 16)
        split = prepare_data.Split(Path(folder), "train", shard_tokens)
        for batch in prepare_data.batches(blocks, args, inputs.Tally()):
            tokens = prepare_data.encode(tokenizer, batch)
            split.append(tokens, sum(begins for begins, _ in batch.parts), batch.size)
        split.seal()
        shards = [corpus.open_entry(Path(folder), entry) for entry in split.shards]
        assert all(shard.num_tokens == shard_tokens for shard in shards[:-1])
        assert split.documents == sum(map(bool, documents))
        assert split.bytes == sum(map(len, documents))
        return stream(shards)


@settings(max_examples=100, deadline=None)
@given(st.lists(DOCUMENT.map(b"".join)), st.integers(2, 99))
def test_bytes_cut_anywhere_join_to_the_documents(documents, shard_tokens):
    expected = [token for text in documents if text for token in (256, *text)]
    assert fuzzed(documents, "bytes", shard_tokens) == expected


@NEEDS_GPT2
@settings(max_examples=150, deadline=None)
@given(st.lists(DOCUMENT.map(b"".join)), st.integers(2, 99))
def test_gpt2s_tokens_of_pieces_are_those_of_the_document(documents, shard_tokens):
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    texts = [text.decode(errors="replace") for text in documents if text]
    expected = [token for text in texts for token in (50256, *encode(text))]
    assert fuzzed(documents, "gpt2", shard_tokens) == expected


@NEEDS_GPT2
@pytest.mark.slow
def test_a_line_of_100_mb_is_tiktokens_and_takes_little_memory(tmp_path):
    import tiktoken

    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 9), np.uint8)) for _ in range(5000)]
    line = b" ".join(words[i] for i in rng.integers(0, 5000, 18_500_000))
    assert len(line) > 100e6
    (tmp_path / "line.txt").write_bytes(line)
    flags = ["--data-dir", tmp_path / "data", "--tokenizer", "gpt2", "--workers", "2"]
    program = [sys.executable, PROGRAM, "--input", tmp_path / "line.txt", *flags]
    assert peak_mib(program) < 600
    data = open_folder(tmp_path / "data")
    tokens = np.concatenate([s.read(0, s.num_tokens) for s in data.train + data.val])
    expected = tiktoken.get_encoding("gpt2").encode_to_numpy(line.decode())
    assert tokens[0] == 50256 and np.array_equal(tokens[1:], expected)


def peak_mib(program: list) -> float:
    """The most memory that a program and its workers had at once, shared pages counted once."""
    process, peak = subprocess.Popen(program), 0.0
    while process.poll() is None:
        family = [process.pid]
        for pid in family:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            family += [int(child) for task in tasks for child in read(task).split()]
        rollups = (read(Path(f"/proc/{pid}/smaps_rollup")) for pid in family)
        kib = sum(int(r.split("\nPss:")[1].split()[0]) for r in rollups if "\nPss:" in r)
        peak = max(peak, kib / 1024)
        time.sleep(0.05)
    assert process.returncode == 0
    return peak


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def test_without_a_network_the_message_names_the_files_to_fetch(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tiktoken")
    prepare_data.gpt2_tokenizer.cache_clear()
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # it remembers what other tests loaded
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert prepare(tmp_path / "data", "--input", __file__, "--tokenizer", "gpt2") == 2
    names = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    error = capsys.readouterr().err
    assert all(name in error for name in (*names, "TIKTOKEN_CACHE_DIR"))


# --------------------------------------------------------------------------------------------------
# Inputs


MISTAKES = {
    "no file": (["--input", "nowhere"], "--input nowhere does not exist"),
    "no text": (["--input", "empty"], "the input has 0 tokens for training and 0 for validation"),
    "a word": (["--input", "word"], "has 5 tokens for training and 0 for validation: name more"),
    "nothing to verify": (["--verify"], "manifest.json is missing: name a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("word").write_text("word")
    flags, why = MISTAKES[mistake]
    assert prepare("data", *flags) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert sorted(os.listdir()) == ["empty", "word"]


def joined(texts: Path):
    """The same text in one document less."""
    first, second = sorted(texts.iterdir())[:2]
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()


OTHERS = {
    "longer": lambda texts: (texts / "39.txt").write_text("x" * 2000),
    "shorter": lambda texts: (texts / "00.txt").unlink(),
    "one more": lambda texts: (texts / "40.txt").write_text("x"),
    "joined": joined,
}


def test_a_command_that_is_done_says_so_and_changes_nothing(texts, tmp_path, capsys):
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *flags) == 0
    files, before = (lambda: {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}), {}
    before = files()
    totals = capsys.readouterr().out.splitlines()
    assert prepare(tmp_path / "data", *flags, "--workers", 1) == 0
    assert capsys.readouterr().out == f"already complete: {'; '.join(totals)}\n"
    assert " documents, " in totals[0] and " tokens" in totals[0]
    assert totals[-1] == f"ready: python train_gpt2.py --data-dir {tmp_path / 'data'}"
    for other in (("--seed", 7), ("--shard-tokens", 9000), ("--val-fraction", 0.02)):
        assert prepare(tmp_path / "data", *flags, *other) == 2
        assert "exists; name another" in capsys.readouterr().err
    assert {f: time for f, time in files().items() if f != tmp_path} == {
        f: time for f, time in before.items() if f != tmp_path
    }


@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_of_other_input_is_refused_and_kept(other, texts, tmp_path, capsys):
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *flags) == 0
    before = content(tmp_path / "data")
    OTHERS[other](texts)
    assert prepare(tmp_path / "data", *flags) == 2
    error = capsys.readouterr().err
    assert "exists; name another: it is of other input or other flags" in error
    assert before == content(tmp_path / "data") and error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["data", "texts"]


def test_a_folder_that_lost_a_shard_is_not_complete(texts, tmp_path, capsys):
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "data", *flags) == 0
    (tmp_path / "data" / "train_000001.bin").unlink()
    assert prepare(tmp_path / "data", *flags) == 2
    assert "train_000001.bin is not a whole token shard" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(texts, tmp_path, capsys):
    (tmp_path / "data").write_text("mine")
    assert prepare(tmp_path / "data", "--input", texts) == 2
    assert "data exists; name another" in capsys.readouterr().err
    assert (tmp_path / "data").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["data", "texts"]


ARGPARSES = [  # mistakes that argparse finds
    "--input", "--data-dir", "--shards x", "--shards 1.5", "--val-fraction 1e", "--tokenizer gpt4",
    "--download", "--download imagenet", "--verify=yes", "book.txt", "--inputs a", "--val-tokens x",
    "--seed", "-x", "--no-input",
]  # fmt: skip


@pytest.mark.parametrize("line", ARGPARSES)
def test_a_mistake_that_argparse_finds_is_one_line_without_usage(line, capsys):
    check_mistake(line.split(), capsys)
    assert prepare_data.main(line.split()) == 2
    error = capsys.readouterr().err
    assert "usage" not in error and ("see --help" in error or "did you mean" in error)


def test_an_existing_folder_is_refused_and_kept(texts, capsys):
    before = content(texts)
    assert prepare(texts, "--input", texts) == 2
    assert "exists; name another" in capsys.readouterr().err
    assert before == content(texts)


# --------------------------------------------------------------------------------------------------
# Shards


def test_the_manifest_says_what_the_shards_hold(texts, tmp_path):
    flags = ("--input", texts, "--shard-tokens", 1024, "--val-fraction", 0.3)
    assert prepare(tmp_path / "data", *flags) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    assert set(manifest) == {"tokenizer", "train", "val", "input", "crc32"}
    for split in (manifest["train"], manifest["val"]):
        tokens = []
        for entry in split["shards"]:
            shard = corpus.open_entry(tmp_path / "data", entry)  # checks tokens and CRCs
            ids = shard.read(0, shard.num_tokens).tolist()
            assert (entry["largest_id"], entry["bytes"]) == (max(ids), shard.path.stat().st_size)
            tokens += ids
        found = {"tokens": len(tokens), "documents": tokens.count(256)}
        found |= {"bytes": len(tokens) - tokens.count(256)}
        assert split == {"shards": split["shards"], **found}


def test_validation_is_drawn_by_document_and_by_seed(tmp_path):
    drawn, lines = set(), [b"%d" % n for n in range(1000)]
    for seed in range(5):
        args = prepare_data.parse_args(["--val-fraction", "0.5", "--seed", str(seed)])
        found = list(prepare_data.batches(([line] for line in lines), args, inputs.Tally()))
        texts = {split: [text for b in found if b.split == split for _, text in b.parts]
                 for split in ("train", "val")}  # fmt: skip
        assert sorted(texts["train"] + texts["val"]) == sorted(lines)  # so none is in both
        assert texts["train"][0] == b"0" and 437 < len(texts["val"]) < 563  # 500, 4 deviations
        drawn.add(tuple(texts["val"]))
    assert len(drawn) == 5


def test_of_a_single_document_the_last_tenth_is_validation(tmp_path):
    (tmp_path / "book.txt").write_bytes(bytes(range(97, 123)) * 100)
    assert prepare(tmp_path / "data", "--input", tmp_path / "book.txt") == 0
    data = open_folder(tmp_path / "data")
    assert (
        stream(data.train) + stream(data.val) == [256, *range(97, 123)] * 1 + [*range(97, 123)] * 99
    )
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    counts = [
        {k: manifest[s][k] for k in ("documents", "bytes", "tokens")} for s in ("train", "val")
    ]
    assert counts == [{"documents": 1, "bytes": 2340, "tokens": 2341},
                      {"documents": 0, "bytes": 260, "tokens": 260}]  # fmt: skip


@pytest.mark.parametrize(
    "size", [*range(1, 20), 1022, 1023, 1024, 2046, 2047, 2048, 2150, 2151, 3000]
)
def test_of_a_single_document_validation_is_enough_or_it_is_refused(size, tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes((bytes(range(97, 123)) * 200)[:size])
    flags = ("--input", tmp_path / "book.txt", "--shard-tokens", 1024)
    code = prepare(tmp_path / "data", *flags)
    if size < 19:  # of which a tenth is less than an input and its target
        assert code == 2 and "for validation: name more with --input" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["book.txt"]
        return
    data = open_folder(tmp_path / "data")
    num_val = sum(shard.num_tokens for shard in data.val)
    assert num_val >= min((size + 1) // 10, 102)
    assert stream(data.train) + stream(data.val) == [256, *(tmp_path / "book.txt").read_bytes()]
    assert prepare(tmp_path / "data", "--verify") == 0
    names = {shard.path.name for shard in data.train + data.val}
    assert set(os.listdir(tmp_path / "data")) == {"manifest.json", *names}
    manifest = prepare_data.read_manifest(tmp_path / "data")
    assert [manifest[s]["documents"] for s in ("train", "val")] == [1, 0]
    assert [manifest[s]["bytes"] for s in ("train", "val")] == [size - num_val, num_val]


def num_val_tokens(folder: Path) -> int:
    return sum(shard.num_tokens for shard in open_folder(folder).val)


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)])
def test_val_tokens_are_about_as_many(tokenizer, tmp_path):
    rng = np.random.default_rng(0)
    lines = [{"text": "word and " * rng.integers(2, 30)} for _ in range(20_000)]
    jsonl(tmp_path / "a.jsonl", *lines)
    flags = ("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--workers", 0)
    for count in (50_000, 100_000):
        assert prepare(tmp_path / f"{count}", *flags, "--val-tokens", count) == 0
        assert num_val_tokens(tmp_path / f"{count}") == pytest.approx(count, rel=0.15)
    assert prepare(tmp_path / "workers", *flags, "--val-tokens", count, "--workers", 2) == 0
    assert content(tmp_path / "workers") == content(tmp_path / f"{count}")


@pytest.mark.parametrize("count", [2, 1000, 5000, 10_000])
def test_of_a_single_document_val_tokens_are_the_last(count, tmp_path):
    book = (bytes(range(97, 123)) * 1000)[:20_100]
    (tmp_path / "book.txt").write_bytes(book)
    flags = ("--input", tmp_path / "book.txt", "--shard-tokens", 3000, "--val-tokens", count)
    assert prepare(tmp_path / "data", *flags) == 0
    data = open_folder(tmp_path / "data")
    assert stream(data.val) == [*book[-count:]]
    assert stream(data.train) == [256, *book[:-count]]
    assert prepare(tmp_path / "data", "--verify") == 0


def test_val_tokens_beyond_half_of_the_input_are_refused(tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(b"abc" * 1000)
    flags = ("--input", tmp_path / "book.txt", "--data-dir", tmp_path / "data", "--val-tokens")
    check_mistake([*map(str, flags), "1501"], capsys)
    assert prepare_data.main([*map(str, flags), "1501"]) == 2
    assert "1,501 are more than half of the input, which has about 3,000" in capsys.readouterr().err
    line = ["--val-tokens", "5", "--val-fraction", "0.01"]  # its default, but typed
    assert prepare_data.main(line) == 2
    assert "not allowed together: --val-fraction --val-tokens" in capsys.readouterr().err


def test_a_flipped_bit_is_found_by_verify_and_by_the_loader(texts, tmp_path, capsys):
    folder = tmp_path / "data"
    assert prepare(folder, "--input", texts, "--shard-tokens", 10_000) == 0
    assert prepare(folder, "--verify") == 0
    shard = bytearray((folder / "train_000001.bin").read_bytes())
    shard[5000] ^= 1
    (folder / "train_000001.bin").write_bytes(shard)
    capsys.readouterr()
    assert prepare(folder, "--verify") == 2
    out, err = capsys.readouterr()
    assert "train_000000.bin: good" in out and "train_000001.bin is damaged: its tokens 0 to" in out
    assert "1 of the 4 shards" in err
    loader = dataloader.ShardLoader(open_folder(folder).train, B=1, T=100)
    with pytest.raises(OSError, match="train_000001.bin is damaged"):
        [loader.next_batch() for _ in range(len(loader))]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst"])
def test_a_dry_run_writes_nothing_and_its_estimate_is_near(kind, texts, tmp_path, capsys):
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(500).hex().encode() for _ in range(20_000))
    (tmp_path / f"z{kind}").write_bytes(KINDS[kind](lines))  # 20 MB
    flags = ("--input", texts, tmp_path / f"z{kind}")
    assert prepare(tmp_path / "data", *flags, "--dry-run") == 0
    guess = capsys.readouterr().out
    assert not list(tmp_path.glob("data*"))
    assert prepare(tmp_path / "data", *flags) == 0
    tokens = sum(shard.num_tokens for shard in open_folder(tmp_path / "data").train)
    assert float(guess.split(" files, ")[1].split("M tokens")[0]) * 1e6 == pytest.approx(
        tokens, rel=0.3
    )


# --------------------------------------------------------------------------------------------------
# Killed and repeated


@pytest.mark.parametrize("val", ["fraction=0.3", "fraction=0", "tokens=9000", "tokens=100"])
def test_killed_at_any_write_the_same_command_goes_on(val, texts, tmp_path, monkeypatch, capsys):
    """Where validation is drawn, and where it is the end."""
    flags = ("--input", texts, "--shard-tokens", 1024, f"--val-{val}")
    monkeypatch.setattr(inputs, "PIECE", 350)
    assert prepare(tmp_path / "whole", *flags) == 0
    named = prepare_data.read_manifest(tmp_path / "whole")
    names = {shard["name"] for split in ("train", "val") for shard in named[split]["shards"]}
    assert set(os.listdir(tmp_path / "whole")) == {"manifest.json", *names}
    calls, kill_at = 0, 0

    def counting(function):
        def killer(*args):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise Killed
            return function(*args)

        return killer

    for module, name in (
        (os, "replace"),
        (os, "fsync"),
        (prepare_data, "describe"),
        (corpus, "describe"),
        (Path, "rename"),
    ):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    assert prepare(tmp_path / "counted", *flags) == 0
    most, kept = calls, 0
    for k in [*range(1, most - 9, 7), *range(most - 9, most + 1)]:  # the last renames the folder
        folder, calls, kill_at = tmp_path / f"killed{k}", 0, k
        with pytest.raises(Killed):
            prepare(folder, *flags)
        entries = prepare_data.read_manifest(folder.with_name(f"{folder.name}.unfinished"))
        kept += len(entries["train"]["shards"])
        kill_at = 0
        assert prepare(folder, *flags) == 0
        assert content(folder) == content(tmp_path / "whole")
    assert most > 100 and kept > 100
    assert "begins again" not in capsys.readouterr().err


def start(folder: Path, texts: Path, *flags) -> subprocess.Popen:
    flags = ["--input", texts, "--data-dir", folder, "--shard-tokens", "20000", *flags]
    with open(texts.with_name("errors"), "w") as errors:
        return subprocess.Popen([sys.executable, PROGRAM, *flags], stderr=errors)


def wait_for(path: Path, process: subprocess.Popen):
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.fixture
def much_text(tmp_path) -> Path:
    """8 MB of source code, which GPT-2's encoder takes a second or two for."""
    (tmp_path / "much").mkdir()
    size, files = 0, inputs.standard_library()
    for n, file in enumerate(files):
        if size < 8_000_000:
            (tmp_path / "much" / f"{n:05}.py").write_bytes(Path(file).read_bytes())
            size += os.path.getsize(file)
    return tmp_path / "much"


@NEEDS_GPT2
def test_a_killed_run_keeps_its_shards_and_a_second_run_is_refused(much_text, tmp_path, capsys):
    flags = ("--tokenizer", "gpt2", "--workers", "1")
    folder = tmp_path / "data.unfinished"
    process = start(tmp_path / "data", much_text, *flags)
    wait_for(folder / "train_000004.bin", process)
    again = start(tmp_path / "data", much_text, *flags)
    assert again.wait() == 2
    assert "is being written by process" in (tmp_path / "errors").read_text()
    process.kill()
    process.wait()
    first = (folder / "train_000000.bin").stat()
    assert start(tmp_path / "data", much_text, *flags, "--seed", "7").wait() == 2
    assert "was begun with other input or other flags" in (tmp_path / "errors").read_text()
    assert start(tmp_path / "data", much_text, *flags).wait() == 0
    kept = (tmp_path / "data" / "train_000000.bin").stat()
    assert (first.st_ino, first.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert start(tmp_path / "whole", much_text, *flags).wait() == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def damages(file: Path) -> list[bytes | None]:
    """What may become of a file: it is lost, emptied, cut or longer by a byte, or has another bit
    at its beginning, in its middle or at its end."""
    whole = file.read_bytes()
    found = [None, b"", whole[:-1], whole + b"\0"]
    places = {0, 8, 900, len(whole) // 3, HEADER_BYTES + 7, len(whole) // 2, len(whole) - 2}
    for at in places:  # 900: in the header, behind what a trainer reads
        flipped = bytearray(whole)
        flipped[min(at, len(whole) - 1)] ^= 1 << at % 8
        found.append(bytes(flipped))
    return found


@pytest.mark.parametrize("val_fraction", [0.3, 0], ids=["val drawn", "val from the end"])
def test_what_is_damaged_after_a_kill_is_made_again(
    val_fraction, texts, tmp_path, monkeypatch, capsys
):
    """Each file that a killed preparation left is lost, cut or changed."""
    flags = ("--input", texts, "--shard-tokens", 8000, "--val-fraction", val_fraction)
    monkeypatch.setattr(inputs, "PIECE", 350)
    folder, unfinished, left = (tmp_path / name for name in ("data", "data.unfinished", "left"))
    replace, num_saves = os.replace, 0

    def killer(*paths):  # right behind a manifest
        nonlocal num_saves
        replace(*paths)
        num_saves -= 1
        if not num_saves:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killer)
        assert prepare(tmp_path / "whole", *flags) == 0
    whole, most, num_again, num_cases = content(tmp_path / "whole"), -num_saves, 0, 0
    for saves in {1, most // 2, most - 2, most - 1, most}:
        num_saves = saves
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "replace", killer)
            prepare(folder, *flags)
        unfinished.rename(left)
        for name, damaged in [(f.name, d) for f in left.iterdir() for d in damages(f)]:
            shutil.copytree(left, unfinished)
            (unfinished / name).unlink()
            if damaged is not None:
                (unfinished / name).write_bytes(damaged)
            capsys.readouterr()
            assert prepare(folder, *flags) == 0
            assert content(folder) == whole, (saves, name)
            error = capsys.readouterr().err
            assert error.count("\n") == error.count(" is damaged") == error.count("begins again")
            num_again, num_cases = num_again + bool(error), num_cases + 1
            shutil.rmtree(folder)
        shutil.rmtree(left)
    assert num_cases > 150 and num_again > 80


def test_a_damaged_journal_under_other_flags_begins_again(texts, tmp_path, monkeypatch, capsys):
    flags = ("--input", texts, "--shard-tokens", 8000)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(Killed))
        prepare(tmp_path / "data", *flags)
    journal = tmp_path / "data.unfinished" / "manifest.json"
    assert prepare(tmp_path / "data", *flags, "--seed", 7) == 2
    assert "was begun with other input or other flags" in capsys.readouterr().err
    for text in (b"[" * 10**5, journal.read_bytes().replace(b'"tokens": ', b'"tokens": 9', 1)):
        journal.write_bytes(text)
        assert prepare(tmp_path / "data", *flags, "--shard-tokens", 30_000) == 0
        assert "manifest.json is damaged" in capsys.readouterr().err
        names = ["manifest.json", "train_000000.bin", "val_000000.bin"]
        assert sorted(content(tmp_path / "data")) == names
        (tmp_path / "data").rename(tmp_path / "data.unfinished")


def test_a_shard_that_changes_while_it_grows_is_not_certified(texts, tmp_path, monkeypatch, capsys):
    append = prepare_data.Split.append

    def damaging(split, *args):
        finished = append(split, *args)
        *whole, entry = split.shards
        if whole and entry["tokens"] < split.shard_tokens:
            with open(split.folder / entry["name"], "r+b") as f:
                f.seek(HEADER_BYTES + 2)
                f.write(b"\xff\xff")
        return finished

    flags = ("--input", texts, "--shard-tokens", 8000)
    monkeypatch.setattr(inputs, "PIECE", 350)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Split, "append", damaging)
        assert prepare(tmp_path / "data", *flags) == 2
    assert "train_000001.bin is damaged" in capsys.readouterr().err
    assert prepare(tmp_path / "data", *flags) == 0
    assert prepare(tmp_path / "whole", *flags) == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_files_that_are_not_its_own_are_kept(texts, tmp_path, capsys):
    (tmp_path / "data.unfinished").mkdir()
    (tmp_path / "data.unfinished" / "novel.txt").write_text("mine")
    assert prepare(tmp_path / "data", "--input", tmp_path / "nowhere") == 2
    assert prepare(tmp_path / "data", "--input", texts) == 2
    assert "novel.txt is in the way: move it" in capsys.readouterr().err
    assert content(tmp_path / "data.unfinished") == {"novel.txt": b"mine"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_is_exit_code_6(number, texts, tmp_path, monkeypatch, capsys):
    def fsync(file: int):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    assert prepare(tmp_path / "data", "--input", texts) == 6
    assert os.strerror(number) in capsys.readouterr().err


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["fsync", "replace", "open", "rename"])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    function, texts, tmp_path, monkeypatch, capsys
):
    """Also where a preparation goes on whose shards are read first."""
    flags = ("--input", texts, "--shard-tokens", 8000)
    assert prepare(tmp_path / "whole", *flags) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "data.unfinished")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full_disk)
            capsys.readouterr()
            assert prepare(tmp_path / "data", *flags) == 6
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("prepare_data.py: error: ")
        assert os.strerror(errno.ENOSPC) in error and "the same command goes on" in error
        names = set(os.listdir(tmp_path / "data.unfinished")) - {"lock"}
        assert names == set(os.listdir(tmp_path / "whole"))  # nothing is thrown away
    assert prepare(tmp_path / "data", *flags) == 0
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_a_disk_that_cannot_be_read_is_exit_code_6(texts, tmp_path, monkeypatch, capsys):
    def failing(text: bytes):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    jsonl(tmp_path / "a.jsonl.gz", {"text": "a"})
    monkeypatch.setattr(inputs.gzip, "open", failing)
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.jsonl.gz") == 6
    assert "a.jsonl.gz can't be read: " in capsys.readouterr().err


def test_a_full_disk_of_the_vocabulary_is_exit_code_6(texts, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tiktoken")
    prepare_data.gpt2_tokenizer.cache_clear()
    monkeypatch.setattr("tiktoken.get_encoding", full_disk)
    assert prepare(tmp_path / "data", "--input", texts, "--tokenizer", "gpt2") == 6
    assert "no network" not in capsys.readouterr().err


def test_a_full_disk_during_a_download_is_exit_code_6(server, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        assert download(tmp_path / "data", server) == 6
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    assert not list((tmp_path / "data").glob("*.bin"))
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server)


def test_a_killed_run_does_not_read_its_own_shards(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts)
    flags = ("--input", ".", "--shard-tokens", 1024)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(Path("zz"), *flags)
    assert prepare(Path("zz"), *flags) == 0
    assert prepare(Path("zz"), *flags) == 0  # nor once it is done
    monkeypatch.chdir(tmp_path)
    assert (
        prepare(tmp_path / "whole", "--input", texts.name + "/*.txt", "--shard-tokens", 1024) == 0
    )
    assert content(texts / "zz") == content(tmp_path / "whole")


def test_a_whole_folder_that_has_no_name_yet_is_not_taken_for_another(texts, tmp_path, capsys):
    assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 1024) == 0
    (tmp_path / "data").rename(tmp_path / "data.unfinished")
    assert prepare(tmp_path / "data", "--input", PROGRAM, "--shard-tokens", 1024) == 2
    assert "was begun with other input or other flags" in capsys.readouterr().err
    assert prepare(tmp_path / "data", "--input", texts, "--shard-tokens", 1024) == 0
    assert "ready: " in capsys.readouterr().out


@NEEDS_GPT2
@pytest.mark.slow
def test_killed_at_20_random_moments_the_folder_is_the_same(much_text, tmp_path):
    flags, rng = ("--tokenizer", "gpt2", "--workers", "2"), random.Random(0)
    begin = time.monotonic()
    assert start(tmp_path / "whole", much_text, *flags).wait() == 0
    longest = time.monotonic() - begin
    kills = rounds = 0
    while kills < 20:
        folder, rounds = tmp_path / f"killed{rounds}", rounds + 1
        while not folder.exists():
            process = start(folder, much_text, *flags)
            try:
                process.wait(rng.uniform(0.2, 1) * longest)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            assert process.wait() in (0, -9)
        assert content(folder) == content(tmp_path / "whole")


def test_workers_end_when_their_parent_is_killed(much_text, tmp_path):
    if not Path("/proc/self/task").exists() or missing_vocab():
        pytest.skip("needs /proc and GPT-2's vocabulary")
    process = start(tmp_path / "data", much_text, "--tokenizer", "gpt2", "--workers", "2")
    wait_for(tmp_path / "data.unfinished" / "train_000001.bin", process)
    children = read(Path(f"/proc/{process.pid}/task/{process.pid}/children")).split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(
        Path(f"/proc/{child}").exists() and time.monotonic() < deadline for child in children
    ):
        time.sleep(0.05)
    assert len(children) > 1 and time.monotonic() < deadline


# --------------------------------------------------------------------------------------------------
# Downloads


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files, each request with the next of server.faults."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, name = self.server, self.path.rpartition("/")[2]
        fault = server.faults.pop(0) if server.faults else ""
        body = server.files.get(name, b"")
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        begin = int(self.headers.get("Range", "bytes=0-")[6:-1])
        if self.headers.get("If-Range") != etag and not server.careless or "ignore" in fault:
            begin = 0
        server.begins.append(begin)
        if fault in ("404", "503") or name not in server.files:
            self.send_error(int(fault or 404))
            return
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        if not server.no_version:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body) - begin))
        self.end_headers()
        rest = body[begin:]
        self.wfile.write(rest[: len(rest) // 2] if fault in ("short", "stall") else rest)
        if fault == "stall":
            self.wfile.flush()
            server.released.wait(30)
        self.close_connection = True

    def log_message(self, *args):
        pass


def shard(seed: int) -> bytes:
    tokens = np.random.default_rng(seed).integers(0, 50257, 300_000)
    return dataloader.shard_header(len(tokens)) + tokens.astype("<u2").tobytes()


NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(files, "PAUSE_S", 0)
    monkeypatch.setattr(files, "TIMEOUT_S", 2)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {name: shard(seed) for seed, name in enumerate(NAMES)}
    server.faults, server.begins = [], []
    server.careless = server.no_version = False
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def download(folder: Path, server, shards: int = 1) -> int:
    mirror = f"http://127.0.0.1:{server.server_address[1]}/some/folder"
    return prepare(folder, "--download", "fineweb", "--shards", shards, "--mirror", mirror)


def is_good(folder: Path, server, shards: int = 1) -> bool:
    """Whether folder holds the server's shards and nothing else, and the trainer's loader and
    --verify find them whole."""
    files = content(folder)
    del files["manifest.json"]
    data = open_folder(folder)
    whole = (data.tokenizer, data.largest_id < 50257, prepare(folder, "--verify")) == (
        "gpt2",
        True,
        0,
    )
    return whole and files == {name: server.files[name] for name in NAMES[: shards + 1]}


@pytest.mark.parametrize("fault", ["short", "stall", "503"])
def test_a_download_that_breaks_is_gone_on_with(fault, server, tmp_path):
    server.faults = [fault, "", fault, fault]
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server)
    size, begins = len(server.files[NAMES[0]]), [0]
    for _ in range(2):  # half of the rest comes, in blocks of 64 KiB
        rest = 0 if fault == "503" else (size - begins[-1]) // 2
        begins.append(begins[-1] + rest // 65536 * 65536)
    assert server.begins == [*begins[:2], *begins]


def test_an_answer_of_an_error_costs_nothing_that_is_there(server, tmp_path):
    server.faults = ["short", "503", "404"]
    assert download(tmp_path / "data", server) == 2
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server)
    assert server.begins[0] == 0 and len({*server.begins[1:4]}) == 1 and server.begins[1] > 0


def test_a_download_without_a_network_is_not_silent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "PAUSE_S", 0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens
        mirror = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert prepare(tmp_path / "data", "--download", "fineweb", "--mirror", mirror) == 2
    *tries, last = capsys.readouterr().err.splitlines()
    why = rf"{NAMES[0]}: \[\w+ \d+\] [\w ]+"
    assert len(tries) == files.TRIES - 1
    assert all(re.fullmatch(rf"{why}; next try in \d+ s", told) for told in tries)
    assert re.fullmatch(rf"prepare_data.py: error: {mirror}/{why}", last)


def test_prepared_text_and_downloads_do_not_mix(server, tmp_path, capsys):
    assert prepare(tmp_path / "data", "--input", PROGRAM) == 0
    before = content(tmp_path / "data")
    assert download(tmp_path / "data", server) == 2
    assert "holds prepared text; name another" in capsys.readouterr().err
    assert content(tmp_path / "data").items() >= before.items() and server.begins == []


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    server.faults = ["short", "ignore"]
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server) and server.begins[:2] == [0, 0]


def test_without_a_version_nothing_is_joined(server, tmp_path):
    server.no_version = server.careless = True
    server.faults = ["short", "short"]
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server)


@pytest.mark.parametrize("careless", [True, False], ids=["ignores If-Range", "knows If-Range"])
def test_a_content_that_changes_halfway_is_fetched_anew(careless, server, tmp_path, capsys):
    server.careless, server.faults = careless, ["short"] * 6
    assert download(tmp_path / "data", server) == 2
    assert f"/some/folder/{NAMES[0]}: " in capsys.readouterr().err
    assert [file.suffix for file in (tmp_path / "data").iterdir()].count(".part") == 1
    server.files[NAMES[0]] = shard(9)
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server)


def test_a_content_that_changes_later_is_refused(server, tmp_path, capsys):
    assert download(tmp_path / "data", server) == 0
    (tmp_path / "data" / NAMES[1]).unlink()
    old, server.files[NAMES[1]] = server.files[NAMES[1]], shard(9)
    assert download(tmp_path / "data", server) == 2
    hashes = (hashlib.sha256(content).hexdigest() for content in (server.files[NAMES[1]], old))
    assert (
        "has changed: SHA-256 {}, at the first fetch {}".format(*hashes) in capsys.readouterr().err
    )
    assert not (tmp_path / "data" / NAMES[1]).exists()
    server.files[NAMES[1]] = old
    assert download(tmp_path / "data", server, 2) == 0  # and one more
    assert is_good(tmp_path / "data", server, 2)


PAGES = {
    "404": ({}, "404"),
    "page": (
        {NAMES[0]: b"<html>not found</html>" * 100},
        "is not a whole token shard: starts with",
    ),
    "cut": ({NAMES[0]: shard(0)[:-2]}, "holds 299,999 tokens, its header says 300,000"),
}


@pytest.mark.parametrize("page", PAGES)
def test_what_is_no_shard_is_refused_in_one_line_and_not_kept(page, server, tmp_path, capsys):
    server.files, why = PAGES[page]
    assert download(tmp_path / "data", server) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and len(server.begins) == 1
    assert os.listdir(tmp_path) == []


def test_a_download_that_fails_leaves_only_what_was_there_or_is_whole(server, tmp_path, capsys):
    folder = tmp_path / "new" / "deep" / "data"
    server.faults = ["404"]
    assert download(folder, server) == 2
    assert os.listdir(tmp_path) == []
    folder.mkdir(parents=True)
    server.faults = ["404"]
    assert download(folder, server) == 2
    assert content(folder) == {}  # it was there
    server.faults = ["", "404"]
    assert download(folder, server) == 2
    assert sorted(os.listdir(folder)) == [NAMES[0], "manifest.json"]
    before = content(folder)
    server.begins.clear()
    assert download(folder, server) == 0
    assert len(server.begins) == 1 and content(folder)[NAMES[0]] == before[NAMES[0]]


def test_a_download_that_is_done_says_so_and_asks_nobody(server, tmp_path, capsys):
    assert download(tmp_path / "data", server) == 0
    before, num_asked = content(tmp_path / "data"), len(server.begins)
    totals = capsys.readouterr().out.splitlines()
    assert download(tmp_path / "data", server) == 0
    assert capsys.readouterr().out == f"already complete: {'; '.join(totals)}\n"
    assert "300,000 tokens" in totals[0] and totals[-1].startswith("ready: python train_gpt2.py")
    assert content(tmp_path / "data") == before and len(server.begins) == num_asked
    flags = ("--download", "fineweb-edu", "--shards", 1, "--mirror", "x")
    assert prepare(tmp_path / "data", *flags) == 2
    assert f"holds {NAMES[0]}; name another" in capsys.readouterr().err
    assert content(tmp_path / "data") == before
    assert download(tmp_path / "data", server, 2) == 0  # more of the same
    assert capsys.readouterr().out.startswith("train: 600,000 tokens")
    (tmp_path / "data" / NAMES[1]).unlink()
    assert download(tmp_path / "data", server, 2) == 0
    assert capsys.readouterr().out.startswith("train: 600,000 tokens")


def test_a_shard_that_is_there_is_not_fetched_again(server, tmp_path):
    (tmp_path / "data").mkdir()
    for name in NAMES[:2]:
        (tmp_path / "data" / name).write_bytes(server.files[name])
    assert download(tmp_path / "data", server) == 0
    assert is_good(tmp_path / "data", server) and server.begins == []


@pytest.mark.parametrize("kind", ["--input", "--multiple-choice", "--verify", "--download"])
def test_a_path_that_is_none_is_one_line(kind, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before, source = os.listdir(), {"--input": ["texts"], "--download": ["fineweb"]}.get(kind, [])
    if kind == "--multiple-choice":
        source = [str(jsonl(tmp_path / "a.jsonl", HELLASWAG))]
        before.append("a.jsonl")
    for value in ("\0", "a\0b", "\ud800\0", "x" * 5000, "x/" * 3000, "\n\0\x1b[2J", "."):
        if value != "." or kind in ("--input", "--verify"):
            check_mistake([kind, *source, f"--data-dir={value}"], capsys)
        if kind in ("--input", "--multiple-choice") and value != ".":
            check_mistake([kind, value, "--data-dir", "data"], capsys)
    for flag in ("input", "data-dir", "download", "multiple-choice", "text-field", "mirror",
                 "tokenizer", "verify", "dry-run"):  # fmt: skip
        check_mistake([f"--{flag}=--"], capsys)
    assert sorted(os.listdir()) == sorted(before)


def test_records_under_another_name_are_told_with_the_flag(tmp_path, capsys):
    jsonl(tmp_path / "c.jsonl", {"content": "text"}, {"content": "more"})
    assert prepare(tmp_path / "data", "--input", tmp_path / "c.jsonl") == 2
    assert "2 skipped: no text under --text-field text in " in capsys.readouterr().err
