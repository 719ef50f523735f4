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

import pytest
from conftest import NEEDS_POSIX, prepare

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
