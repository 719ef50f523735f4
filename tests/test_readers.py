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
TEXTS = {  # of languages and the encodings that their old files have
    "French": ("Les élèves étaient à l'école, où l'été commence.\n", "cp1252"),
    "Russian": ("Все счастливые семьи похожи друг на друга.\n", "cp1251 koi8-r"),
    "Czech": ("Všechny šťastné rodiny jsou si podobné.\n", "cp1250 iso8859-2"),
    "Hungarian": ("Az őszi éjszakák hűvösek, és a tűz mellett ülünk; minden fűszál.\n", "cp1250"),
    "Greek": ("Όλες οι ευτυχισμένες οικογένειες μοιάζουν, η δυστυχισμένη έχει.\n", "cp1253"),
    "Turkish": ("Bütün mutlu aileler birbirine benzer, her mutsuz ailenin.\n", "cp1254"),
    "Japanese": ("吾輩は猫である。名前はまだ無い。どこで生れたか。\n", "cp932 euc_jp"),
    "Chinese": ("道可道，非常道。名可名，非常名。无名天地之始。\n", "gb18030"),
    "Korean": ("모든 행복한 가정은 서로 닮았고, 불행한 가정은.\n", "cp949"),
}


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


def test_folders_and_patterns_are_read_sorted_once_and_without_hidden_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "b/c/3.txt", "b/.hidden", "b/.git/x", "a [1].txt", "d.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert find_files(["b"]) == ["b/1.txt", "b/2.txt", "b/c/3.txt"]
    assert find_files(["b/2.txt", "b", "a [1].txt"])[:2] == ["b/2.txt", "b/1.txt"]
    assert find_files(["*.md", "b/**/3.txt", "d.md"]) == ["d.md", "b/c/3.txt"]
    for name in ("nothing", "*.csv", "", "b/.git/y"):
        with pytest.raises(UserError, match="there is no such file"):
            find_files([name])


@NEEDS_POSIX
def test_what_can_not_be_read_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("a")
    os.symlink("nowhere", tmp_path / "folder/broken")
    os.mkfifo(tmp_path / "folder/pipe")
    texts, reader = read(*map(Path, find_files([str(tmp_path / "folder")])))
    assert texts == ["a"] and reader.counts["file skipped, a broken link, a pipe or a device"] == 2
    (tmp_path / "folder/a.txt").unlink()
    with pytest.raises(UserError, match="a.txt can't be read"):
        documents(reader) or reader.examined.clear() or documents(reader)


# ---- Records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JL", "a.json"])
def test_each_object_in_lines_is_a_document(name, tmp_path):
    lines = ['{"text": "a"}', "", '{"x": [1], "text": "b\\nc"}', " ", '{"text": "d"}']
    assert of(tmp_path, name, "\n".join(lines)) == (["a", "b\nc", "d"], "")


def test_a_json_file_is_an_array_an_object_or_lines(tmp_path):
    array = json.dumps([{"text": "a"}, {"no": 1}, {"text": "b"}], indent=2)
    texts, account = of(tmp_path, "a.json", array)
    assert texts == ["a", "b"] and "element 2, whose fields are no" in account
    assert of(tmp_path, "b.json", '{\n"text":\n"a"}') == (["a"], "")
    texts, account = of(tmp_path, "c.json", '{"text": "a"\n{"text": "b"}\n[')
    assert texts == ["b"] and "no valid JSON" in account and ": 2," in account


def test_records_without_text_are_counted_with_the_first_place(tmp_path):
    lines = [
        "broken",
        "5",
        "null",
        '{"text": null}',
        '{"text": ""}',
        '{"text": [1]}',
        '{"body": "x"}',
        '{"text": "a", "text": "b"}',
        "[" * 5000,
        '{"text": "good"}',
    ]
    texts, account = of(tmp_path, "a.jsonl", "\n".join(lines))
    assert texts == ["good"]
    assert "twice: 3, the first" in account and "a.jsonl, line 1" in account
    assert "in the field text: 6, the first" in account
    assert of(tmp_path, "a.jsonl", lines[6], field="body")[0] == ["x"]


def test_a_chat_is_a_text(tmp_path):
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    lines = [json.dumps({"messages": CHAT}), json.dumps({"conversations": other})]
    lines += [json.dumps({"messages": [{"role": "user", "content": None}]})]
    texts, account = of(tmp_path, "a.jsonl", "\n".join(lines))
    assert (
        texts == ["user: Hi\n\nassistant: Hello", "human: Hi\n\ngpt: Yes"] and "line 3" in account
    )


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_a_table_is_read_as_csv_reads_it_or_its_row_is_counted(tmp_path, suffix, delimiter):
    rows = [
        "id,text,label",
        '1,"a, quoted\nof two lines",x',
        "2,plain,y",
        "",
        "3,short",
        "4,a,b,c",
        '5,"Hello," he said,z',
        '6,"He said ""so""",z',
    ]
    texts, account = of(tmp_path, f"a.{suffix}", "\n".join(rows).replace(",", delimiter))
    quoted = "a, quoted\nof two lines".replace(",", delimiter)
    assert texts == [quoted, "plain", 'He said "so"']
    assert "as many cells as the header: 2, the first" in account and "line 6" in account
    assert "no valid row of a table: 1" in account


def test_a_cell_of_20_mb_is_one_document(tmp_path):
    cell = "some words,\nand a line\n" * 1_000_000
    assert of(tmp_path, "a.csv", f'text,n\n"{cell}",1\n') == ([cell], "")


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"a.csv .*two of its columns"):
        of(tmp_path, "a.csv", "text,text\na,b\n")


def test_rows_of_parquet_are_documents(tmp_path):
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
def test_a_packed_file_is_read_whole_or_refused(tmp_path, suffix):
    pack, one, two = PACKINGS[suffix], b"first\n" * 50_000, b"second\n" * 50_000
    content = pack(one) + pack(two)
    assert of(tmp_path, f"a.txt{suffix}", content) == ([(one + two).decode()], "")
    assert of(tmp_path, f"a.txt{suffix}", content + bytes(8))[0] == [(one + two).decode()]
    if suffix != ".gz":
        between = pack(one) + bytes(4) + pack(two)
        assert of(tmp_path, f"a.txt{suffix}", between)[0] == [(one + two).decode()]
    flipped = bytearray(content)
    flipped[len(pack(one)) + 1] ^= 1  # in the second header
    for damaged in (content[:-9], content + b"junk", bytes(flipped)):
        for encoding in ("", "utf-8"):  # if one is named, only the documents are read to their end
            with pytest.raises(UserError, match=f"a.txt{suffix} can't be read"):
                of(tmp_path, f"a.txt{suffix}", damaged, encoding=encoding)


def test_zstd_and_records_in_packed_files(tmp_path):
    pa = pytest.importorskip("pyarrow")
    content = b'{"text": "a"}\n' * 1000
    packed = pa.compress(content, codec="zstd", asbytes=True)
    assert len(of(tmp_path, "a.jsonl.zst", packed)[0]) == 1000
    assert len(of(tmp_path, "a.jsonl.gz", gzip.compress(content))[0]) == 1000


# ---- Encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marks_are_no_text(tmp_path, encoding):
    texts, account = of(tmp_path, "a.txt", "größe\r\n".encode(encoding))
    assert texts == ["größe\r\n"] and ("assumed" in account) == encoding.startswith(
        ("utf-16", "utf-32")
    )


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("repeats", [5, 500])
def test_the_encoding_of_old_files_is_found_and_said(tmp_path, language, repeats):
    text, encodings = TEXTS[language]
    for encoding in encodings.split():
        texts, account = of(tmp_path, "a.txt", (text * repeats).encode(encoding))
        assert texts == [text * repeats] and "assumed the encoding" in account


def test_damaged_utf8_stays_utf8_and_is_counted(tmp_path):
    for damaged in ("größe ".encode() * 40_000 + b"\xff", "größe".encode() * 9 + b"\xc3"):
        texts, account = of(tmp_path, "a.txt", damaged)
        assert texts == [damaged.decode(errors="replace")] and "U+FFFD: 1" in account
    texts, account = of(tmp_path, "a.jsonl", r'{"text": "half \ud83d of a pair \ud83d\ude00"}')
    assert texts == ["half \ufffd of a pair \U0001f600"] and "U+FFFD: 1" in account


def test_a_named_encoding_is_taken(tmp_path):
    assert of(tmp_path, "a.txt", "é".encode("cp437"), encoding="cp437") == (["é"], "")
    assert of(tmp_path, "a.csv", "text\nü\n".encode("utf-16-le"), encoding="utf-16-le") == (
        ["ü"],
        "",
    )


@pytest.mark.parametrize(
    ("content", "why"),
    {
        "binary": (b"\0\1\2", "binary"), "PDF": (b"%PDF-1.7\n", "a PDF"),
        "Word": (b"PK\3\4\0", "Office"), "empty": (b"", "empty"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    }.values(),
)  # fmt: skip
def test_what_is_no_text_is_skipped_by_name(tmp_path, content, why):
    texts, account = of(tmp_path, "a.txt", content)
    assert texts == [] and "file skipped" in account and why in account


def test_markup_is_read_as_text_and_said(tmp_path):
    assert of(tmp_path, "a.html", "<p>x")[0] == ["<p>x"]
    assert "markup" in of(tmp_path, "a.html", "<p>x")[1]


# ---- Any damage ----------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=30)
edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "quote", "line"])), max_size=4
)


def edited(content: bytes, edits: list) -> bytes:
    for where, how in edits:
        at = int(where * len(content))
        new = {"flip": bytes(b ^ 1 for b in content[at : at + 1]), "quote": b'"', "line": b"\n"}
        content = (
            content[:at]
            if how == "cut"
            else content[:at] + new[how] + content[at + (how == "flip") :]
        )
    return content


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(texts, max_size=5),
    edits,
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt", "b.txt.gz"]),
)
def test_each_document_is_a_field_of_the_damaged_file(tmp_path, texts, edits, name):
    if name == "a.csv":
        stream = io.StringIO(newline="")
        csv.writer(stream).writerows([["n", "text"], *([i, text] for i, text in enumerate(texts))])
        content = stream.getvalue().encode()
    elif name == "a.json":
        content = json.dumps([{"text": text} for text in texts]).encode()
    elif name == "a.jsonl":
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    else:
        content = "\n".join(texts).encode()
    content = edited(gzip.compress(content) if name.endswith("gz") else content, edits)
    path = tmp_path / name
    path.write_bytes(content)
    try:
        found, reader = read(path)
    except UserError:
        return  # it is named
    if found and name.startswith("a"):
        decoded = content.decode(reader.examined[str(path)][0], errors="replace")
        assert all(text in strings(decoded, name) for text in found)


def strings(decoded: str, name: str) -> list[str] | str:
    """What a document of this text may be: a part of it, or a value as json reads it."""
    if name == "a.csv":
        return decoded + decoded.replace('""', '"')
    if name == "a.txt":
        return decoded
    values = []
    for part in [decoded, *decoded.splitlines(), *decoded.split("\n")]:
        with suppress(ValueError):
            value = json.loads(part)
            records = value if isinstance(value, list) else [value]
            values += [one.get("text") if isinstance(one, dict) else one for one in records]
    strings = [value for value in values if isinstance(value, str)]
    return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in strings]
