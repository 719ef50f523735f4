"""Tests ../support/readers.py: no text of the input is lost, cut or altered without a word."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import NEEDS_POSIX
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.cli import UserError
from support.readers import Reader, find_files

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def read(*files: Path, field: str = "text", encoding: str = "") -> tuple[list[str], Reader]:
    """Return the documents in files, and the reader, whose account must be complete."""
    reader = Reader([str(file) for file in files], field, encoding)
    texts = documents(reader)
    check(reader, texts)
    assert texts == documents(reader)  # as often as asked
    return texts, reader


def documents(reader: Reader) -> list[str]:
    texts: list[str] = []
    for begins, piece in reader.pieces():
        texts += [""] if begins else []
        texts[-1] += piece
    return texts


def check(reader: Reader, texts: list[str]):
    counts = reader.counts
    skipped = sum(n for what, n in counts.items() if what.startswith("record skipped"))
    assert counts["documents"] == len(texts) == counts["records"] - skipped
    assert counts["files"] == len(reader.files) and all(texts)


def of(folder: Path, name: str, content: bytes | str, **flags) -> tuple[list[str], str]:
    """Return the documents of one file, and its account."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    texts, reader = read(path, **flags)
    return texts, "\n".join(reader.account()[1:])


# ---- Which files ---------------------------------------------------------------------------------


def test_folders_and_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "b/c/3.txt", "b/.hidden", "b/.git/x", "a [1].txt", "d.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert [*find_files(["b"]).values()] == ["b/1.txt", "b/2.txt", "b/c/3.txt"]
    assert [*find_files(["b/2.txt", "b", "a [1].txt"]).values()][:2] == ["b/2.txt", "b/1.txt"]
    assert [*find_files(["*.md", "b/**/3.txt", "./d.md"]).values()] == ["d.md", "b/c/3.txt"]
    for name in ("nothing", "*.csv", "", "b/.git/y"):
        with pytest.raises(UserError, match="there is no such file"):
            find_files([name])


@NEEDS_POSIX
def test_unreadable_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("a")
    os.symlink("nowhere", tmp_path / "folder/broken")
    os.mkfifo(tmp_path / "folder/pipe")
    texts, reader = read(*map(Path, find_files([str(tmp_path / "folder")]).values()))
    counts = reader.counts
    assert texts == ["a"] and counts["file skipped, a broken link, a pipe or a device"] == 2
    (tmp_path / "folder/a.txt").unlink()
    with pytest.raises(UserError, match="a.txt can't be read"):
        documents(reader)


# ---- Records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JL", "a.json"])
def test_json_lines(name, tmp_path):
    lines = ['{"text": "a"}', "", '{"x": [1], "text": "b\\nc"}', " ", '{"text": "d"}']
    assert of(tmp_path, name, "\n".join(lines)) == (["a", "b\nc", "d"], "")


def test_json(tmp_path):
    array = json.dumps([{"text": "a"}, {"no": 1}, {"text": "b"}], indent=2)
    texts, account = of(tmp_path, "a.json", array)
    assert texts == ["a", "b"] and "element 2, whose fields are no" in account
    assert of(tmp_path, "b.json", '{\n"text":\n"a"}') == (["a"], "")
    texts, account = of(tmp_path, "c.json", '{"text": "a"\n{"text": "b"}\n[')
    assert texts == ["b"] and "no valid JSON" in account and ": 2," in account
    texts, account = of(tmp_path, "d.json", 'null\n{"text": "a"}\n[{"text": "b"}]')
    assert texts == ["a"] and "in the field text: 2, the first" in account


def test_records_without_text(tmp_path):
    lines = ["broken", "5", "null", '{"text": ""}', '{"text": [1]}', '{"body": "x"}']
    lines += ['{"text": "a", "text": "b"}', "[" * 5000, '{"text": "good"}']
    texts, account = of(tmp_path, "a.jsonl", "\n".join(lines))
    assert texts == ["good"]
    assert "twice: 3, the first" in account and "a.jsonl, line 1" in account
    assert "in the field text: 5, the first" in account
    assert of(tmp_path, "a.jsonl", lines[5], field="body")[0] == ["x"]


def test_chats(tmp_path):
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    lines = [json.dumps({"messages": CHAT}), json.dumps({"conversations": other})]
    lines += [json.dumps({"messages": [{"role": "user", "content": None}]})]
    texts, account = of(tmp_path, "a.jsonl", "\n".join(lines))
    assert texts == ["user: Hi\n\nassistant: Hello", "human: Hi\n\ngpt: Yes"]
    assert "line 3" in account


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_tables(tmp_path, suffix, delimiter):
    rows = ["id,text,label", '1,"a, quoted\nof two lines",x', "2,plain,y", "", "3,short"]
    rows += ["4,a,b,c", '5,"Hello," he said,z', '6,"He said ""so""",z']
    texts, account = of(tmp_path, f"a.{suffix}", "\n".join(rows).replace(",", delimiter))
    quoted = "a, quoted\nof two lines".replace(",", delimiter)
    assert texts == [quoted, "plain", 'He said "so"']
    assert "as many cells as the header: 2, the first" in account and "line 6" in account
    assert "no valid row of a table: 1" in account


def test_large_cell(tmp_path):
    """Python's csv reads 128 kB, unless it is told otherwise."""
    cell = "some words,\nand a line\n" * 10_000
    assert of(tmp_path, "a.csv", f'text,n\n"{cell}",1\n') == ([cell], "")


def test_two_columns_of_one_name(tmp_path):
    with pytest.raises(UserError, match=r"a.csv .*two of its columns"):
        of(tmp_path, "a.csv", "text,text\na,b\n")


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for name, field in (("text", "text"), ("messages", "text"), ("body", "body"), ("body", "text")):
        column = [CHAT, None, CHAT] if name == "messages" else ["a", None, "b"]
        pq.write_table(pa.table({"n": [1, 2, 3], name: column}), tmp_path / "a.parquet")
        texts, reader = read(tmp_path / "a.parquet", field=field)
        expected = ["user: Hi\n\nassistant: Hello"] * 2 if name == "messages" else ["a", "b"]
        assert texts == ([] if (name, field) == ("body", "text") else expected)
        assert reader.counts["records"] == 3


# ---- Packed files --------------------------------------------------------------------------------

PACKINGS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKINGS)
def test_packed_files(tmp_path, suffix):
    pack, one, two = PACKINGS[suffix], b"first\n" * 50_000, b"second\n" * 50_000
    content = pack(one) + pack(two)
    assert of(tmp_path, f"a.txt{suffix}", content) == ([(one + two).decode()], "")
    assert of(tmp_path, f"a.txt{suffix}", content + bytes(8))[0] == [(one + two).decode()]
    for zeros in (4, 9000):
        between = pack(one) + bytes(zeros) + pack(two)
        assert of(tmp_path, f"a.txt{suffix}", between)[0] == [(one + two).decode()]
    assert of(tmp_path, f"a.txt{suffix}", pack(b"\xef\xbb\xbf") + pack(one))[0] == [one.decode()]
    flipped = bytearray(content)
    flipped[len(pack(one)) + 1] ^= 1  # in the second header
    for damaged in (content[:-9], content + b"junk", bytes(flipped)):
        for encoding in ("", "utf-8"):  # if one is named, only the documents are read to their end
            with pytest.raises(UserError, match=f"a.txt{suffix} can't be read"):
                of(tmp_path, f"a.txt{suffix}", damaged, encoding=encoding)


def test_zstd(tmp_path):
    pa = pytest.importorskip("pyarrow")
    content = b'{"text": "a"}\n' * 1000
    packed = pa.compress(content, codec="zstd", asbytes=True)
    assert len(of(tmp_path, "a.jsonl.zst", packed)[0]) == 1000
    assert len(of(tmp_path, "a.jsonl.gz", gzip.compress(content))[0]) == 1000


# ---- Encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks(tmp_path, encoding):
    texts, account = of(tmp_path, "a.txt", "größe\r\n".encode(encoding))
    assert texts == ["größe\r\n"] and ("assumed" in account) == ("8" not in encoding)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Les élèves étaient à l'école, où l'été commence.\n", "cp1252"),
        ("Все счастливые семьи похожи друг на друга.\n", "koi8-r"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたか。\n", "cp932"),
    ],
)
@pytest.mark.parametrize("repeats", [5, 500])
def test_old_encodings(tmp_path, text, encoding, repeats):
    texts, account = of(tmp_path, "a.txt", (text * repeats).encode(encoding))
    assert texts == [text * repeats] and "assumed the encoding" in account


def test_damaged_utf8(tmp_path):
    for damaged in ("größe ".encode() * 40_000 + b"\xff", b"\xc3\xb6\xc3", b"\xef\xbf\xbd"):
        texts, account = of(tmp_path, "a.txt", damaged)
        assert texts == [damaged.decode(errors="replace")] and "U+FFFD: 1" in account
    texts, account = of(tmp_path, "a.jsonl", r'{"text": "half \ud83d of a pair \ud83d\ude00"}')
    assert texts == ["half \ufffd of a pair \U0001f600"] and "U+FFFD: 1" in account


def test_named_encoding(tmp_path):
    assert of(tmp_path, "a.txt", "é".encode("cp437"), encoding="cp437") == (["é"], "")
    content = "text\nü\n".encode("utf-16-le")
    assert of(tmp_path, "a.csv", content, encoding="utf-16-le") == (["ü"], "")


@pytest.mark.parametrize(
    ("content", "why"),
    {
        "binary": (b"\0\1\2", "binary"), "PDF": (b"%PDF-1.7\n", "a PDF"),
        "Word": (b"PK\3\4\0", "Office"), "empty": (b"", "empty"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    }.values(),
)  # fmt: skip
def test_no_text(tmp_path, content, why):
    texts, account = of(tmp_path, "a.txt", content)
    assert texts == [] and "file skipped" in account and why in account


def test_markup(tmp_path):
    assert of(tmp_path, "a.html", "<p>x")[0] == ["<p>x"]
    assert "markup" in of(tmp_path, "a.html", "<p>x")[1]


# ---- Any damage ----------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=30)
edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", '"', "\n"])), max_size=4
)


def written(texts: list[str], name: str) -> bytes:
    if name == "a.csv":
        stream = io.StringIO(newline="")
        csv.writer(stream).writerows([["n", "text"], *([i, text] for i, text in enumerate(texts))])
        return stream.getvalue().encode()
    if name == "a.json":
        return json.dumps([{"text": text} for text in texts]).encode()
    if name == "a.jsonl":
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    content = "\n".join(texts).encode()
    return gzip.compress(content) if name.endswith("gz") else content


@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(
    st.lists(texts, max_size=5),
    edits,
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt", "a.txt.gz"]),
)
def test_any_damage(tmp_path, texts, edits, name):
    """The account is complete, or the file is named."""
    content = written(texts, name)
    for where, how in edits:
        at = int(where * len(content))
        before, after = content[:at], content[at:]
        if how == "flip" and after:
            after = bytes([after[0] ^ 1]) + after[1:]
        content = before if how == "cut" else before + (how != "flip") * how.encode() + after
    path = tmp_path / name
    path.write_bytes(content)
    with suppress(UserError):
        read(path)
