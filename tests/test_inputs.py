"""Tests ../support/inputs.py: what prepare_data.py --input reads."""

import glob
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, NEEDS_POSIX, prepare, write_shard

import prepare_data
from support import inputs

PROGRAM = prepare_data.__file__


def test_the_standard_library_is_this_pythons_source():
    files = inputs.standard_library()
    assert {json.__file__, random.__file__} <= set(files)
    assert all(file.endswith(".py") for file in files) and "site-packages" not in "".join(files)
    assert sum(map(os.path.getsize, files)) > 5_000_000


def read_all(*files: Path, field: str = "text") -> tuple[list[bytes], Counter]:
    skipped = Counter()
    found = inputs.read(list(map(str, files)), field, skipped)
    return [b"".join(blocks) for blocks in found], skipped


LINES = b'{"text": "a\\nb"}\n{"id": 7, "text": "\\u00e9"}\n{"text": "<|endoftext|>"}\n'
TEXTS = [b"a\nb", b"\xc3\xa9", b"<|endoftext|>"]


def zstd(data: bytes) -> bytes:
    codec = pytest.importorskip("pyarrow").Codec("zstd")
    frames = codec.compress(data[:20]), codec.compress(data[20:])  # as parallel compressors write
    return b"".join(frame.to_pybytes() for frame in frames)


def parquet(data: bytes) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [1, 2, 3], "text": [t.decode() for t in TEXTS]}), sink)
    return sink.getvalue().to_pybytes()


KINDS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstd, ".parquet": parquet}


@pytest.mark.parametrize("kind", KINDS)
def test_each_line_or_row_is_a_document(kind, tmp_path):
    (tmp_path / f"a{kind}").write_bytes(KINDS[kind](LINES))
    assert read_all(tmp_path / f"a{kind}") == (TEXTS, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named(kind, tmp_path, capsys):
    (tmp_path / f"a{kind}").write_bytes(KINDS[kind](LINES * 9)[:-9] + b"\xff")
    if kind != ".jsonl":  # of which a line would be skipped
        assert prepare(tmp_path / "data", "--input", tmp_path / f"a{kind}") == 2
        assert f"a{kind} can't be read: " in capsys.readouterr().err
        assert os.listdir(tmp_path) == [f"a{kind}"]


def test_a_record_without_text_is_skipped_counted_and_named(tmp_path, capsys):
    bad = [
        b"text",
        b'["text"]',
        b'{"txt": ""}',
        b'{"text": 1}',
        b'{"text": null}',
        b'{"text": "\xff"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*LINES.splitlines(), *bad, b'{"text": ""}']))
    assert read_all(tmp_path / "a.jsonl")[0] == [*TEXTS, b""]
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.jsonl") == 0
    printed = capsys.readouterr().out
    assert f"skipped: 6 documents, no text under --text-field text in {tmp_path}" in printed
    assert "skipped: 1 documents, empty" in printed


def test_half_a_surrogate_pair_is_what_tiktoken_makes_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud800 \\ud83d\\ude00"}\n')
    assert read_all(tmp_path / "a.jsonl")[0] == ["\ufffd \N{GRINNING FACE}".encode()]


def test_the_text_field_is_what_it_is_called(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES.replace(b'text"', b'content"'))
    assert read_all(tmp_path / "a.jsonl", field="content") == (TEXTS, {})


def test_folders_and_patterns_are_read_sorted_once_and_without_hidden_files(texts):
    (texts / ".git").mkdir()
    for name in (".hidden.txt", ".git/config", "[1].txt"):
        (texts / name).touch()
    expected = [str(texts / f"{n:02}.txt") for n in range(40)]
    assert inputs.files_in([str(texts)]) == [*expected, str(texts / "[1].txt")]
    assert inputs.files_in([str(texts / "[0-9]*"), str(texts / "0*")]) == expected
    assert inputs.files_in([str(texts / "[1].txt")]) == [str(texts / "[1].txt")]


@NEEDS_POSIX
def test_links_that_go_in_circles_are_followed_once(texts, tmp_path):
    (texts / "z").mkdir()
    for name in ("a", "b"):
        (texts / name).symlink_to(texts)
        (texts / "z" / name).symlink_to("..")
    (texts / "z" / "deep.txt").write_text("deep")
    (texts / "itself").symlink_to("itself")
    names = [f"{n:02}.txt" for n in range(40)]
    expected = [str(texts / name) for name in [*names, "z/deep.txt"]]
    assert inputs.files_in([str(texts)]) == expected
    assert sorted(inputs.files_in([str(texts / "**" / "*.txt")])) == expected


def test_folders_and_patterns_find_what_glob_finds(tmp_path, monkeypatch):
    rng = random.Random(0)
    for _ in range(150):
        parts = rng.choices(["a", "b", "a-b", ".c", "[d]"], k=rng.randint(0, 4))
        tmp_path.joinpath(*parts).mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(*parts, rng.choice(["x", "e f", ".h"])).touch()
    monkeypatch.chdir(tmp_path)
    patterns = ["**", "**/*", "a/**", "**/x", "*/**/b/*", "a/**/[[]d]/**", "**/**/e f", "a**/x"]
    for pattern in [*patterns, f"{tmp_path}/**", f"{tmp_path}/**/a-b/*"]:
        found, wanted = (
            {os.path.normpath(name) for name in names if os.path.isfile(name)}
            for names in (inputs.matches(pattern), glob.glob(pattern, recursive=True))
        )
        assert found == wanted and found, pattern


def test_a_line_nested_too_deeply_is_skipped_and_counted_with_its_number(tmp_path, capsys):
    deep = b"[" * 10**5, b'{"text":' * 10**5, b'{"text": "a", "b": ' + b"[" * 10**5 + b"]" * 10**5
    lines = [*LINES.splitlines() * 9, *deep]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert read_all(tmp_path / "a.jsonl")[0] == TEXTS * 9
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.jsonl") == 0
    why = f"no text under --text-field text in {tmp_path / 'a.jsonl'}, first in line 28"
    assert f"skipped: 3 documents, {why}\n" in capsys.readouterr().out


@NEEDS_POSIX
def test_a_name_that_is_no_utf8_ends_nothing(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff\n\x1b[2J.jsonl"
    with open(name, "wb") as f:
        f.write(LINES * 9 + b"[]")
    folder = os.fsencode(tmp_path) + b"/\xfe"
    line = [sys.executable, PROGRAM, "--input", name, "--data-dir", folder]
    done = subprocess.run(line, capture_output=True)
    assert done.returncode == 0 and b"\x1b" not in done.stdout
    assert rb"\udcff \x1b[2J.jsonl, first in line 28" in done.stdout


def test_an_extra_that_is_missing_is_named_with_its_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").touch()
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.jsonl.zst") == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def array(path: Path):
    with open(path, "wb") as f:
        np.save(f, np.full(99, 0x4141, np.uint16))


NO_TEXTS = {  # what some file begins with, or who writes one, and what that is called
    "scan": (b"%PDF-1.7\nwithout a NUL\n", "PDF"), "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "PNG"),
    "jpg": (b"\xff\xd8\xff\xe1abc", "JPEG"), "gif": (b"GIF89aaaaa", "GIF"),
    "docx": (b"PK\3\4aaaa", "zip"), "packed": (gzip.compress(b"text"), "gzip"),
    "npy": (array, "npy"), "nul": (b"\0", "binary or"),
    "bin": (lambda path: write_shard(path, np.full(99, 0x4141)), "binary or"),
    "late": (b"a" * 7999 + b"\0", "binary or UTF-16 (a NUL byte)"),
    "utf16": ("\u4f60\u597d".encode("utf-16"), "UTF-16"), "be": (b"\xfe\xff\x4f\x60", "UTF-16"),
    "no mark": ("text".encode("utf-16-le"), "binary or UTF-16 (a NUL byte)"),
    "tar.gz": (gzip.compress(b"name\0\0\0\0"), "binary or UTF-16 (a NUL byte)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_a_file_of_no_text_is_skipped_and_counted_and_alone_refused(kind, texts, tmp_path, capsys):
    content, called = NO_TEXTS[kind]
    for n in (1, 2):
        path = texts / f"50{n}.txt{'.gz' if kind == 'tar.gz' else ''}"  # its name says nothing
        content(path) if callable(content) else path.write_bytes(content)
    flags = ("--shard-tokens", 8000)
    assert prepare(tmp_path / "data", "--input", texts, *flags) == 0
    first = texts / path.name.replace("502", "501")
    why = f"{called} instead of UTF-8 text, first {first}\n"
    why = why if called != "binary or" else called
    assert f"skipped: 2 documents, {why}" in capsys.readouterr().out
    assert prepare(tmp_path / "alone", "--input", path, *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"1 skipped: {called}" in error and path.name in error
    for n in (1, 2):
        (texts / path.name.replace("502", f"50{n}")).unlink()
    assert prepare(tmp_path / "texts only", "--input", texts, *flags) == 0
    shards = [sorted((tmp_path / name).glob("*.bin")) for name in ("data", "texts only")]
    assert [f.read_bytes() for f in shards[0]] == [f.read_bytes() for f in shards[1]]
    assert not (tmp_path / "alone").exists()


def test_what_is_text_is_read_whatever_its_name_and_where_its_nul_is(tmp_path):
    kept = {"a.png": b"text", "b.pdf": b"a %PDF-1.7", "c": b"a" * 8000 + b"\0", "d": b"\xff\xd8"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert read_all(*(tmp_path / name for name in kept)) == ([*kept.values()], {})


def test_a_dry_run_leaves_out_what_is_no_text(texts, tmp_path, capsys):
    (texts / "zz.bin").write_bytes(b"\0" * 10**6)
    assert prepare(tmp_path / "data", "--input", texts, "--dry-run") == 0
    guess = float(capsys.readouterr().out.split(" MB of text")[0].removeprefix("about "))
    assert guess < 0.2


def test_bytes_that_are_no_utf8_are_counted():
    rng, letters = random.Random(0), "aé\u4f60\N{GRINNING FACE}\ufffd "
    for _ in range(300):
        parts = [rng.choice(letters).encode() for _ in range(9)]
        assert inputs.count_not_utf8(b"".join(parts)) == 0
        parts[rng.randrange(9)] = b"\xff\xfe\x80"
        assert inputs.count_not_utf8(b"".join(parts)) == 3
    assert inputs.count_not_utf8(b"\xe2\x80 caf\xe9") == 3


@NEEDS_GPT2
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_count_of_bytes_that_are_no_utf8_is_told(tokenizer, texts, tmp_path, capsys):
    (texts / "20.txt").write_bytes(b"caf\xe9 \xff\n" * 200_000)  # in several pieces
    (texts / "21.txt").write_bytes(b"\xe2\x80")
    flags = ("--input", texts, "--tokenizer", tokenizer, "--workers", 0)
    assert prepare(tmp_path / "data", *flags) == 0
    told = "not UTF-8: 400,002 bytes in 2 documents, "
    told += "kept" if tokenizer == "bytes" else "replaced by U+FFFD"
    assert told + "\n" in capsys.readouterr().out
