"""Nothing of the input is lost without a word: each file and record is read, or named with why.

Each case is a file as people have it, with the documents and the line that it must give.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import tracemalloc
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import NEEDS_POSIX, prepare
from data_helpers import error_of, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepare import formats
from prepare.ending import UserError
from prepare.inputs import Account, Reader, files_in

A, B, C = b'{"text": "a"}', b'{"text": "b"}', b'{"text": "c"}'
FRENCH = "Les élèves étaient à l'école, où l'été commence.\n"
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая несчастлива по-своему.\n"
CZECH = "Všechny šťastné rodiny jsou si podobné, každá nešťastná je nešťastná po svém způsobu.\n"
GREEK = "Όλες οι ευτυχισμένες οικογένειες μοιάζουν, η δυστυχισμένη έχει τη δική της Άνοιξη.\n"
POLISH = "Wczoraj była bardzo piękna pogoda. Oni mają łódkę nad jeziorem, którą kupili w lecie.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
ENGLISH = b"Some words, and a line of them.\n"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
NO_TEXT = "record skipped, no text in the field text"
NO_JSON = "record skipped, no valid JSON"
CELLS = "record skipped, its number of cells differs from the header's"
MARKUP = "read as text with its markup"
BINARY = "file skipped, not plain text"
PARAGRAPHS = "assumed a list to be paragraphs"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def zipped(**members: bytes) -> bytes:
    """Return a .zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return file.getvalue()


def arrow(kind: str, records: list) -> bytes:
    """Return an Arrow file ("file"), or what Hugging Face's save_to_disk writes ("stream")."""
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(records)
    sink = pa.BufferOutputStream()
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_file() -> bytes:
    return arrow("file", [{"text": "a"}, {"text": "b"}])


def arrow_stream() -> bytes:
    return arrow("stream", [{"text": "a"}, {"text": "b"}])


def arrow_without_text() -> bytes:
    return arrow("stream", [{"body": "a"}] * 100)


def zstd() -> bytes:
    return pytest.importorskip("pyarrow").Codec("zstd").compress(ENGLISH).to_pybytes()


# What the file is: its name, its content, its documents, and lines of the account with their counts
CASES = {
    "JSON Lines": ("a.json", A + b"\n" + B + b"\n", ["a", "b"], {}),
    "JSON Lines of another name": ("a.ndjson", A + b"\n" + B, ["a", "b"], {}),
    "JSON Lines of a third name": ("a.jl", A + b"\n" + B, ["a", "b"], {}),
    "JSON Lines as text": ("a.txt", A + b"\n" + B, ["a", "b"], {"assumed JSON Lines": 1}),
    "JSON Lines without a name": ("a", A + b"\n\n" + B, ["a", "b"], {"assumed JSON Lines": 1}),
    "a line of JSON in a text": ("a.txt", A + b"\n", [A + b"\n"], {}),
    "a text that begins with JSON": ("a.txt", A + b"\n" + ENGLISH, [A + b"\n" + ENGLISH], {}),
    "one object with a text": ("a.json", A, ["a"], {}),
    "one object of several lines": ("a.json", b'{\n "text":\n "a"\n}\n', ["a"], {}),
    "one object without a text": ("a.json", b'{"a": 1}', ['{"a": 1}'], {MARKUP: 1}),
    "JSON with comments": ("a.json", b"{ // no\n}\n", [b"{ // no\n}\n"], {MARKUP: 1}),
    "objects of several lines": ("a.json", b'{\n"text": "a"\n}\n{\n"text": "b"\n}', ["a", "b"], {}),
    "arrays in a row": ("a.json", b"[" + A + b"]\n[" + B + b"][" + C + b"]", ["a", "b", "c"], {}),
    "an array, then lines": ("a.json", b"[" + A + b"]\n" + B, ["a", "b"], {}),
    "an array, then rubbish": ("a.json", b"[" + A + b"]\n<html>", ["a"], {NO_JSON: 1}),
    "an array that is cut": ("a.json", b"[" + A + b', {"te', ["a"], {NO_JSON: 1}),
    "a broken element": (
        "a.json", b"[\n" + A + b',\n{"text": b"},\n' + C + b"\n]", ["a", "c"], {NO_JSON: 1}
    ),
    "an array of texts": ("a.json", b'["a", "b"]', ["a", "b"], {}),
    "an array called .jsonl": ("a.jsonl", b"[" + A + b",\n" + B + b"]", ["a", "b"], {}),
    "an array without elements": ("a.json", b"[]", [], {"holds no record": 1}),
    "a header alone": ("a.csv", b"id,text\n", [], {"holds no record": 1}),
    "a broken element in one line": (
        "a.json", b"[" + A + b', {"text": "b\t"}, ' + C + b"]", ["a"],
        {"record skipped, no valid JSON; the rest of its line is lost": 1},
    ),
    "a line that is cut": ("a.jsonl", A + b'\n{"text": "b\n' + C, ["a", "c"], {NO_JSON: 1}),
    "a last line that is cut": ("a.jsonl", A + b'\n{"text": "b', ["a"], {NO_JSON: 1}),
    "half a surrogate pair": (
        "a.jsonl", b'{"text": "a \\ud83d"}', ["a \ufffd"], {"kept, with half a surrogate pair": 1}
    ),
    "another field": ("a.jsonl", b'{"body": "a"}', [], {NO_TEXT: 1}),
    "a number as text": ("a.jsonl", b'{"text": 1}\n' + B, ["b"], {NO_TEXT: 1}),
    "a chat": (
        "a.jsonl", json.dumps({"messages": CHAT}), ["user: Hi\n\nassistant: Hello"], {PARAGRAPHS: 1}
    ),
    "a chat of ShareGPT": (
        "a.jsonl", b'{"conversations": [{"from": "human", "value": "Hi"}]}', ["human: Hi"],
        {PARAGRAPHS: 1},
    ),
    "a list of texts": ("a.jsonl", b'{"text": ["a", "b"]}', ["a\n\nb"], {PARAGRAPHS: 1}),
    "a list of other things": ("a.jsonl", b'{"text": [{"x": 1}]}', [], {NO_TEXT: 1}),
    "JSON Lines in cp1252": (
        "a.jsonl", json.dumps({"text": FRENCH}, ensure_ascii=False).encode("cp1252"), [FRENCH],
        {"assumed cp1252": 1},
    ),
    "a quote in .tsv": (
        "a.tsv", b'id\ttext\n1\t"a\n2\tb\n3\t"c" d\n', ['"a', "b", '"c" d'],
        {"assumed no quotes": 1},
    ),
    "quotes in .tsv that swallow rows": (
        "a.tsv", b'id\ttext\n1\t"a\n2\tb\n3\tc"\n', ['"a', "b", 'c"'], {"assumed no quotes": 1}
    ),
    "quotes in .tsv": ("a.tsv", b'id\ttext\n1\t"a\nb"\n', ["a\nb"], {}),
    "a quote in .csv": ("a.csv", b'id,text\n1,"a\n2,b\n', ['"a', "b"], {"assumed no quotes": 1}),
    "quotes with backslashes": (
        "a.csv", b'id,text\n1,"a \\"b\\", c\\d"\n2,e\n', ['a "b", c\\d', "e"], {"assumed quotes": 1}
    ),
    "a row of wrong quotes": (
        "a.csv", b'id,text\n1,"a, b"\n2,"c" d\n3,"e, f"\n', ["a, b", '"c" d', "e, f"],
        {"assumed quotes": 1},
    ),
    "rows that don't fit": (
        "a.csv", b'id,text\n1,a\n2\n3,b,c\n4,"d, e"\n', ["a", "d, e"], {CELLS: 2, "assumed": 1}
    ),
    "a quote that never closes": (
        "a.csv", b'id,text\n1,"a, b"\n2,"c\n3,d\n4,"e, f"\n', ["a, b", '"c', "d", "e, f"],
        {"assumed quotes": 1},
    ),
    "semicolons": ("a.csv", b'id;text\n1;"a; b"\n', ["a; b"], {}),
    "a table with one column": ("a.csv", b"text\na\nb\n", ["a", "b"], {}),
    "a table of a spreadsheet": (
        "a.tsv", "id\ttext\n1\ta\n".encode("utf-16"), ["a"], {"assumed utf-16": 1}
    ),
    "a table without the field": ("a.csv", b"id,body\n1,a\n2,b\n", [], {NO_TEXT: 2}),
    "Arrow": ("a.arrow", arrow_file, ["a", "b"], {}),
    "Arrow of save_to_disk": ("a.arrow", arrow_stream, ["a", "b"], {}),
    "Arrow without the field": ("a.arrow", arrow_without_text, [], {NO_TEXT: 100}),
    "cp1252": ("a.txt", FRENCH.encode("cp1252"), [FRENCH], {"assumed cp1252": 1}),
    "cp1251": ("a.txt", RUSSIAN.encode("cp1251"), [RUSSIAN], {"assumed cp1251": 1}),
    "KOI8-R": ("a.txt", RUSSIAN.encode("koi8_r"), [RUSSIAN], {"assumed koi8_r": 1}),
    "cp1250": ("a.txt", CZECH.encode("cp1250"), [CZECH], {"assumed cp1250": 1}),
    "ISO 8859-2": ("a.txt", CZECH.encode("iso8859_2"), [CZECH], {"assumed iso8859_2": 1}),
    "ISO 8859-7": ("a.txt", GREEK.encode("iso8859_7"), [GREEK], {"assumed iso8859_7": 1}),
    "Polish, cp1250": ("a.txt", POLISH.encode("cp1250"), [POLISH], {"assumed cp1250": 1}),
    "Greek, cp1253": ("a.txt", GREEK.encode("cp1253"), [GREEK], {"assumed cp1253": 1}),
    "UTF-8 that ends in a character, and has few others": (
        "a.txt", ENGLISH * 99 + "café\n—".encode()[:-1], [ENGLISH * 99 + "café\n—".encode()[:-1]],
        {"kept, with bytes that are not UTF-8": 1},
    ),
    "a mark of UTF-8 before another encoding": (
        "a.csv", b"\xef\xbb\xbftext,n\ncaf\xe9 noir, caf\xe9 au lait\n", ["caf\u00e9 noir"],
        {"assumed cp1252": 1},
    ),
    "Shift JIS": ("a.txt", JAPANESE.encode("cp932"), [JAPANESE], {"assumed cp932": 1}),
    "UTF-16": ("a.txt", FRENCH.encode("utf-16"), [FRENCH], {"assumed utf-16": 1}),
    "big-endian UTF-16": (
        "a.txt", b"\xfe\xff" + FRENCH.encode("utf-16-be"), [FRENCH], {"assumed utf-16": 1}
    ),
    "an accent after 8,000 bytes": (
        "a.txt", ENGLISH * 9999 + FRENCH.encode("cp1252"), [ENGLISH.decode() * 9999 + FRENCH],
        {"assumed cp1252": 1},
    ),
    "UTF-8 with a wrong byte": (
        "a.txt", FRENCH.encode() * 9 + b"\xff", [FRENCH.encode() * 9 + b"\xff"],
        {"kept, with bytes that are not UTF-8": 1},
    ),
    "one wrong byte, and characters of several bytes far behind it": (
        "a.txt", b"a\x92\n" + b"b\n" * 200_000 + JAPANESE.encode() * 9,
        [b"a\x92\n" + b"b\n" * 200_000 + JAPANESE.encode() * 9],
        {"kept, with bytes that are not UTF-8": 1},
    ),
    "a replacement character of its own": (
        "a.txt", "a\ufffd".encode() * 300_000, ["a\ufffd".encode() * 300_000], {}
    ),
    "UTF-16 without text": ("a.txt", b"\xff\xfe", [""], {"file skipped, empty": 1, "assumed": 1}),
    "UTF-32": ("a.txt", FRENCH.encode("utf-32"), [FRENCH], {"assumed utf-32": 1}),
    "an empty .zip": ("a.zip", zipped(), [], {"file skipped, an archive without files": 1}),
    "UTF-8 that ends in a character": (
        "a.txt", FRENCH.encode() + b"\xc3", [FRENCH.encode() + b"\xc3"],
        {"kept, with bytes that are not UTF-8": 1},
    ),
    "UTF-8 with a mark": ("a.txt", FRENCH.encode("utf-8-sig"), [FRENCH], {}),
    "cp932 with a wrong byte": (
        "a.txt", JAPANESE.encode("cp932") * 9 + b"\x81", [JAPANESE * 9 + "\ufffd"],
        {"assumed cp932": 1, "kept, with bytes that are not cp932": 1},
    ),
    ".gz": ("a.txt.gz", gzip.compress(ENGLISH), [ENGLISH], {}),
    ".bz2": ("a.txt.bz2", bz2.compress(ENGLISH), [ENGLISH], {}),
    ".xz": ("a.txt.xz", lzma.compress(ENGLISH), [ENGLISH], {}),
    ".zst": ("a.txt.zst", zstd, [ENGLISH], {}),
    "a packed array": ("a.json.gz", gzip.compress(b"[" + A + b"]"), ["a"], {}),
    "packed without a name": ("a", gzip.compress(ENGLISH), [ENGLISH], {}),
    "not packed": ("a.gz", ENGLISH, [ENGLISH], {}),
    ".zip": (
        "a.zip", zipped(a__txt=ENGLISH, b__jsonl=A + b"\n" + B, c__png=b"\x89PNG\0"),
        [ENGLISH, "a", "b"], {BINARY: 1},
    ),
    "a tar file": ("a.tar.gz", gzip.compress(b"name\0\0\0"), [], {BINARY: 1}),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n\0", [], {BINARY: 1}),
    "a pointer of Git LFS": ("a.parquet", POINTER, [], {"file skipped, a pointer of Git LFS": 1}),
    "an empty file": ("a.csv", b"", [""], {"file skipped, empty": 1}),
    "a notebook": ("a.ipynb", b'{\n "cells": []\n}', [b'{\n "cells": []\n}'], {MARKUP: 1}),
    "Telegram's export": (
        "result.json", b'{\n "messages": [{"text": "a"}]\n}', None, {MARKUP: 1},
    ),
    "HTML": ("a.html", b"<p>a</p>", [b"<p>a</p>"], {MARKUP: 1}),
    "HTML of another name": ("a.txt", b"<!DOCTYPE html>", [b"<!DOCTYPE html>"], {MARKUP: 1}),
    "XML": ("a.xml", b"<a>b</a>", [b"<a>b</a>"], {MARKUP: 1}),
    "subtitles": ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\na\n", None, {MARKUP: 1}),
}  # fmt: skip


def read(*files: Path, **options) -> tuple[list[bytes], Account]:
    """Return the documents in files, and the account, which must add up."""
    reader = Reader([str(file) for file in files], **options)
    documents = []
    for size, blocks in reader.documents():
        documents.append(b"".join(blocks))
        assert size == len(documents[-1])
    account = reader.account
    assert account.documents + account.records_skipped == account.records
    assert account.documents == sum(bool(text) for text in documents)
    assert account.text_bytes == sum(map(len, documents))
    assert reader.position == sum(file.stat().st_size for file in files)
    return documents, account


def test_an_encoding_does_not_make_text_of_a_picture(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    documents, account = read(tmp_path / "a.png", encoding="latin-1")
    assert documents == [] and account.files_skipped == 1


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_its_documents_and_what_was_skipped_or_assumed(case, tmp_path):
    name, content, expected, lines = CASES[case]
    content = content() if callable(content) else content
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(content)
    documents, account = read(tmp_path / name)
    expected = [content] if expected is None else expected
    assert documents == [text.encode() if isinstance(text, str) else text for text in expected]
    assert len(account.notes) == len(lines), account.lines()
    for line, count in lines.items():
        assert [n for what, (n, _) in account.notes.items() if what.startswith(line)] == [count]
    assert all(str(tmp_path / name) in where for _, where in account.notes.values())


# ---- Damage --------------------------------------------------------------------------------------

BYTES = st.sampled_from(b'",\n\t{}[]\\;:\r1a\xff\xe9\xc3\xa9')
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["insert", "replace", "delete"]), BYTES), max_size=4
)
TEXTS = st.lists(st.text(st.sampled_from("ab \",\n\\;':{}[]\u4f60"), max_size=12), max_size=6)
each_case = settings(
    max_examples=int(os.environ.get("ACCOUNT_CASES", "60")),
    suppress_health_check=list(HealthCheck),
    **{"deadline": None, "derandomize": True, "database": None},
)


def damaged(content: bytes, edits: list, spare: int = 0) -> tuple[bytes, set[int]]:
    """Return content with edits behind its first bytes, and their places in what it was before."""
    places = set()
    size = len(content)
    for where, how, byte in sorted(edits, reverse=True):  # so that places stay where they are
        at = min(size - 1, spare + int(where * (size - spare)))
        if at >= spare and at not in places:
            places.add(at)
            new = b"" if how == "delete" else bytes([byte])
            content = content[:at] + new + content[at + (how != "insert") :]
    return content, places


def marked(texts: list[str]) -> list[str]:
    """Return texts that each have a word of their own at both ends."""
    return [f"<{chr(65 + n)}>{text}<{chr(65 + n)}>" for n, text in enumerate(texts)]


def check_neighbours(parts: list[bytes], start: int, places: set[int], documents: list[bytes]):
    """Check that each part that no edit touched is a document, in which no other part is."""
    for n, part in enumerate(parts):
        # The line's end is the next part's business, too.
        if not any(start - 1 <= place <= start + len(part) for place in places):
            found = [text for text in documents if b"<%c>" % (65 + n) in text]
            assert len(found) == 1 or b"\n" in part.strip(), (n, documents)
            assert found, (n, documents)
            others = set(range(len(parts))) - {n}
            assert not any(b"<%c>" % (65 + other) in found[0] for other in others), (n, documents)
        start += len(part)


def read_damaged(path: Path, content: bytes) -> tuple[list[bytes], Account]:
    path.write_bytes(content)
    return read(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@each_case
@given(TEXTS, EDITS, st.sampled_from([b"", b"[\n"]))
def test_damage_in_json_costs_no_neighbour(folder, texts, edits, begin):
    ends = (b",\n", b"\n]\n") if begin else (b"\n", b"\n")
    parts = [json.dumps({"text": text}).encode() + ends[0] for text in marked(texts)]
    if parts:
        parts[-1] = parts[-1].removesuffix(ends[0]) + ends[1]
    content, places = damaged(begin + b"".join(parts), edits, len(begin))
    documents, account = read_damaged(folder / "a.jsonl", content)
    check_neighbours(parts, len(begin), places, documents)
    read_damaged(folder / "a.json", content)  # of only one object, it may be a text
    read_damaged(folder / "a.txt", content)


@each_case
@given(TEXTS, EDITS, st.sampled_from([",", ";", "\t"]), st.sampled_from([0, 1]))
def test_damage_in_a_table_costs_no_neighbour(folder, texts, edits, delimiter, quoting):
    parts = []
    for n, text in enumerate(marked(texts)):
        row = io.StringIO(newline="")
        csv.writer(row, delimiter=delimiter, quoting=quoting).writerow([n, text])
        parts.append(row.getvalue().encode())
    header = f"id{delimiter}text\r\n".encode()
    content, places = damaged(header + b"".join(parts), edits, len(header))
    name = "a.tsv" if delimiter == "\t" else "a.csv"
    documents, account = read_damaged(folder / name, content)
    check_neighbours(parts, len(header), places, documents)


@each_case
@given(TEXTS, EDITS | st.lists(st.tuples(st.floats(0, 1), st.just("insert"), st.integers(0, 255))))
def test_a_damaged_text_is_kept_or_named(folder, texts, edits):
    content, _ = damaged("".join(texts).encode() + b"\xc3\xa9", edits)
    documents, account = read_damaged(folder / "a.txt", content)
    encodings = [what[8:] for what in account.notes if what.startswith("assumed ")]
    for encoding in encodings:
        content = content.decode(encoding, "replace").encode()
    assert documents == [content.removeprefix(b"\xef\xbb\xbf")] or account.files_skipped == 1


def packed_files() -> dict[str, bytes]:
    records = [{"text": text} for text in "abc"]
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    files = {
        "a.jsonl.gz": gzip.compress(lines), "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines), "a.zip": zipped(a__jsonl=lines, b__txt=ENGLISH),
    }  # fmt: skip
    if find_spec("pyarrow"):
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), sink)
        files |= {"a.parquet": sink.getvalue().to_pybytes(), "a.txt.zst": zstd()}
        files |= {"a.arrow": arrow_stream(), "b.arrow": arrow_file()}
    return files


PACKED = packed_files()


@each_case
@given(st.sampled_from(sorted(PACKED)), EDITS, st.floats(0, 1))
def test_a_damaged_packed_file_is_read_or_named(folder, name, edits, end):
    content, _ = damaged(PACKED[name][: int(len(PACKED[name]) * end) or None], edits)
    try:
        read_damaged(folder / name, content)
    except UserError as error:
        assert str(error).startswith(f"--input {folder / name} can't be read: ")


@pytest.mark.slow
def test_much_more_damage():
    env = os.environ | {"ACCOUNT_CASES": "1500"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        __file__,
        "-k",
        "damage",
        "-m",
        "not slow",
    ]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def test_damage_takes_little_memory(tmp_path, monkeypatch):
    """A quote that never closes, a string that never ends, and a file without a line's end."""
    monkeypatch.setattr(formats, "LONGEST", 1 << 16)
    line = "some words of no meaning " * 40 + "\n"
    files = {
        "a.csv": 'id,text\n1,"a, b"\n2,"' + line * 1000, "b.csv": "id,text\n" + "a" * 4_000_000,
        "a.jsonl": '{"text": "' + line * 1000, "b.json": '[{"text": "' + "a" * 1_000_000,
        "c.json": "[" * 200_000, "d.jsonl": '{"text": "a"}' * 20_000,
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        tracemalloc.start()
        reader = Reader([str(tmp_path / name)])
        for _ in reader.documents():
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_500_000, (name, peak)
        assert reader.account.records == reader.account.documents + reader.account.records_skipped


# ---- Files ---------------------------------------------------------------------------------------


@NEEDS_POSIX
def test_each_name_in_a_folder_is_read_or_named(tmp_path, monkeypatch):
    for name in ("a.txt", ".hidden", "sub/b.txt", "locked/c.txt", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "broken").symlink_to("x" * 300)  # too long a name to look for
    (tmp_path / "link").symlink_to("sub")
    (tmp_path / "z.txt").symlink_to("a.txt")
    os.mkfifo(tmp_path / "pipe")
    scandir = os.scandir

    def failing(path):  # root may read any folder
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    account = Account()
    assert files_in([str(tmp_path)], account) == [
        str(tmp_path / "a.txt"),
        str(tmp_path / "sub/b.txt"),
    ]
    assert len(files_in([str(tmp_path / "*")], Account())) == 2
    assert account.files_skipped == 7
    assert sorted(account.lines()) == sorted([
        f"file skipped, hidden: 2, the first: {tmp_path / '.git'}",
        f"file skipped, a link to a folder: 1, the first: {tmp_path / 'link'}",
        f"file skipped, the same as another file: 1, the first: {tmp_path / 'z.txt'} "
        f"(read as {tmp_path / 'a.txt'})",
        f"file skipped, a broken link, pipe or device: 2, the first: {tmp_path / 'broken'}",
        "file skipped, the folder can't be read: Permission denied: 1, "
        f"the first: {tmp_path / 'locked'}",
    ])  # fmt: skip


def test_what_is_about_a_data_set_is_left_out_beside_records_only(tmp_path):
    names = ["README.md", "LICENSE", "dataset_infos.json", "state.json"]
    for name in [*names, "data.txt"]:
        (tmp_path / name).write_text("x")
    account = Account()
    assert len(files_in([str(tmp_path)], account)) == 5 and account.files_skipped == 0
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_bytes(A)
    files = files_in([str(tmp_path)], account)
    assert files == [str(tmp_path / "data.txt"), str(tmp_path / "data/train.jsonl")]
    assert account.files_skipped == 4
    assert files_in([str(tmp_path / "README.md")], account) == [str(tmp_path / "README.md")]


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(ENGLISH)
    assert prepare(tmp_path / "data", "--input", name) == 2
    assert "there is no such file" in error_of(capsys)


# ---- The account of a preparation ----------------------------------------------------------------


def test_the_preparation_ends_with_the_account_and_repeats_it(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_bytes(A + b"\n5\n" + B)
    (texts / "b.txt").write_bytes(FRENCH.encode("cp1252"))
    (texts / "c.png").write_bytes(b"\x89PNG\0")
    size = sum(file.stat().st_size for file in texts.iterdir())
    expected = [
        f"input: 2 files read, 1 skipped; 4 records, 1 skipped; 3 documents; {size} bytes, "
        f"{2 + len(FRENCH.encode())} bytes of text",
        f"{NO_TEXT}: 1, the first: {texts / 'a.jsonl'}, record 2, which holds int",
        f"assumed cp1252: 1, the first: {texts / 'b.txt'}",
        f"{BINARY} (save it as .txt; if it is UTF-16, name its --encoding): 1, the first: "
        f"{texts / 'c.png'}",
    ]
    for _ in range(2):
        assert prepare(tmp_path / "data", "--input", texts) == 0
        assert capsys.readouterr().out.splitlines()[-5:-1] == expected


@pytest.mark.parametrize("packing", [gzip.compress, bz2.compress, lzma.compress])
def test_the_last_tenth_of_a_packed_text_is_validation(packing, tmp_path):
    book = random.Random(0).randbytes(5000).hex().encode()
    (tmp_path / "book.txt").write_bytes(book)
    (tmp_path / "book.packed").write_bytes(packing(book))
    for name in ("book.txt", "book.packed"):
        assert prepare(tmp_path / name[5:], "--input", tmp_path / name) == 0
    for split in ("train", "val"):
        assert stream(tmp_path / "packed", split) == stream(tmp_path / "txt", split)


def test_a_named_encoding_is_used_for_each_file_and_an_unknown_one_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode("cp866"))
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16-le"))
    assert read(tmp_path / "a.txt", encoding="cp866")[0] == [RUSSIAN.encode()]
    assert read(tmp_path / "b.txt", encoding="utf-16-le")[0] == [b"text"]
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.txt", "--encoding", "x") == 2
    assert "--encoding x: unknown encoding: x" in error_of(capsys)


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("utf-8", "utf-8-sig"), ("utf8", "utf-8-sig"), ("utf-16-le", "utf-16"), ("utf16", "utf-16")],
)
def test_a_mark_is_no_text_if_its_encoding_is_named(encoding, written, tmp_path):
    if written == "utf-16" and sys.byteorder == "big":
        pytest.skip("writes big-endian")
    (tmp_path / "a.csv").write_bytes(f"text,n\n{FRENCH.strip()},1\n".encode(written))
    (tmp_path / "b.jsonl").write_bytes((A + b"\n" + B).decode().encode(written))
    (tmp_path / "c.txt").write_bytes(FRENCH.encode(written))
    files = [tmp_path / name for name in ("a.csv", "b.jsonl", "c.txt")]
    documents, account = read(*files, encoding=encoding)
    # A comma in the first record would make cells of it.
    assert documents == [b"a", b"b", FRENCH.encode()] and account.records_skipped == 1


def test_a_text_field_that_nothing_uses_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(ENGLISH * 99)
    (tmp_path / "b.jsonl").write_bytes(A)
    flags = ("--input", tmp_path / "a.txt", tmp_path / "b.jsonl", "--text-field", "body")
    assert prepare(tmp_path / "data", *flags) == 2
    assert "--text-field body has no effect" in error_of(capsys)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.jsonl"]
