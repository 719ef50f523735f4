"""Tests ../prepare/inputs.py: what prepare_data.py --input reads."""

import csv
import gzip
import io
import json
import os
import random
import sys
from pathlib import Path

import pytest
from conftest import NEEDS_POSIX, prepare
from data_helpers import error_of, start, stream, write_texts

from prepare import formats, inputs
from prepare.ending import UserError
from prepare.inputs import Account, Reader


def test_the_standard_library_is_this_pythons_source():
    files = inputs.standard_library()
    assert {json.__file__, random.__file__} <= set(files)
    assert all(file.endswith(".py") for file in files) and "site-packages" not in "".join(files)
    assert sum(map(os.path.getsize, files)) > 5_000_000


# ---- Files ---------------------------------------------------------------------------------------


def files_in(names: list[str]) -> list[str]:
    return inputs.files_in(names, Account())


def test_folders_and_patterns_are_read_sorted_once_and_without_hidden_files(tmp_path):
    texts = write_texts(tmp_path / "texts")
    (texts / ".git").mkdir()
    for name in (".hidden.txt", ".git/config", "[1].txt"):
        (texts / name).touch()
    expected = [str(texts / f"{n:02}.txt") for n in range(40)]
    assert files_in([str(texts)]) == [*expected, str(texts / "[1].txt")]
    assert files_in([str(texts / "[0-9]*"), str(texts / "0*")]) == expected
    assert files_in([str(texts / "[1].txt")]) == [str(texts / "[1].txt")]
    assert files_in([str(tmp_path / "**" / "*.txt")]) == [*expected, str(texts / "[1].txt")]
    assert files_in([str(texts / ".git" / "c*")]) == [str(texts / ".git" / "config")]


def test_patterns_may_be_relative(tmp_path, monkeypatch):
    write_texts(tmp_path / "texts")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = [Path(file).as_posix() for file in files_in(["../texts/0*.txt"])]
    assert found == [f"../texts/0{n}.txt" for n in range(10)]


@NEEDS_POSIX
def test_links_that_go_in_circles_end(tmp_path):
    (tmp_path / "z").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path)
        (tmp_path / "z" / name).symlink_to("..")
    (tmp_path / "z" / "deep.txt").write_text("deep")
    (tmp_path / "itself").symlink_to("itself")
    assert files_in([str(tmp_path)]) == [str(tmp_path / "z" / "deep.txt")]
    assert files_in([str(tmp_path / "**" / "*.txt")]) == [str(tmp_path / "z" / "deep.txt")]


@NEEDS_POSIX
@pytest.mark.parametrize(
    "name", ["nowhere", "no*", "pipe", "empty", "dead", "\0", "a**b", "x" * 5000]
)
def test_a_name_of_no_file_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dead").symlink_to("nowhere")
    why = "it holds no file" if name in ("pipe", "empty", "dead") else "there is no such file"
    with pytest.raises(UserError, match=f"^--input .*: {why}$"):
        files_in([str(tmp_path / name)])


# ---- Records -------------------------------------------------------------------------------------


def read_all(*files: Path, field: str = "text") -> tuple[list[bytes], dict]:
    reader = Reader([str(file) for file in files], field)
    texts = []
    for size, blocks in reader.documents():
        texts.append(b"".join(blocks))
        assert size == len(texts[-1])
    assert reader.position == sum(file.stat().st_size for file in files)
    account = reader.account
    assert account.records == account.documents + account.records_skipped
    return texts, {what: count for what, (count, _) in account.notes.items()}


RECORDS = [{"text": "a\nb", "id": 1}, {"text": "\u00e9 \"quoted\", with commas", "id": 2},
           {"text": "<|endoftext|>", "id": 3}]  # fmt: skip
TEXTS = [record["text"].encode() for record in RECORDS]


def lines(records: list) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def array(records: list) -> bytes:
    return json.dumps(records, indent=1).encode()


def table(records: list, delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def tabs(records: list) -> bytes:
    return table(records, "\t")


def parquet(records: list) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    codec = pytest.importorskip("pyarrow").Codec("zstd")
    frames = codec.compress(content[:20]), codec.compress(content[20:])  # as pzstd writes
    return b"".join(frame.to_pybytes() for frame in frames)


def bytes_of(kind: str, records: list) -> bytes:
    """Return a file of these records, whose kind is its name's end."""
    writers = {"jsonl": lines, "json": array, "csv": table, "tsv": tabs, "parquet": parquet}
    name, _, packing = kind.partition(".")
    content = writers[name](records)
    return {"": bytes, "gz": gzip.compress, "zst": zstd}[packing](content)


KINDS = ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "jsonl.zst", "json.zst", "csv.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_record_is_a_document(kind, tmp_path):
    (tmp_path / f"a.{kind}").write_bytes(bytes_of(kind, RECORDS))
    (tmp_path / f"B.{kind.upper()}").write_bytes(bytes_of(kind, RECORDS[:1]))
    assert read_all(tmp_path / f"a.{kind}", tmp_path / f"B.{kind.upper()}") == (
        TEXTS + TEXTS[:1],
        {},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_not_there_is_told_with_those_that_are(kind, tmp_path, capsys):
    records = [{"id": 7, "text": "a"}] * 2
    (tmp_path / f"a.{kind}").write_bytes(bytes_of(kind, records))
    flags = ("--input", tmp_path / f"a.{kind}", "--text-field", "body")
    assert prepare(tmp_path / "data", *flags) == 2
    error = error_of(capsys)
    assert "no text in the field body" in error
    assert "its fields: id, text" in error
    assert os.listdir(tmp_path) == [f"a.{kind}"]


@pytest.mark.parametrize("kind", KINDS[4:])
def test_a_damaged_file_is_named_and_leaves_nothing(kind, tmp_path, capsys):
    (tmp_path / f"a.{kind}").write_bytes(bytes_of(kind, RECORDS * 9)[:-9] + b"\xff")
    assert prepare(tmp_path / "data", "--input", tmp_path / f"a.{kind}") == 2
    assert f"a.{kind} can't be read: " in error_of(capsys)
    assert os.listdir(tmp_path) == [f"a.{kind}"]


def test_a_record_without_text_is_skipped_and_counted(tmp_path):
    bad = [b"text", b'["text"]', b'{"text": 1}', b'{"text": null}', b'{"text": "\xff"}',
           b"[" * 10**5, b'{"text":' * 10**5, b'{"text": ["a"]}', b'{"text": ""}']  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS) + b"\n".join(bad))
    assert read_all(tmp_path / "a.jsonl") == (
        [*TEXTS, "\u00ff".encode(), b"a", b""],
        {
            "assumed cp1252": 1,
            "assumed a list to be paragraphs": 1,
            "record skipped, no text in the field text": 3,
            "record skipped, no valid JSON; the rest of its line is lost": 3,
        },
    )


def test_elements_of_an_array_may_be_texts_themselves(tmp_path):
    content = [*RECORDS, "plain", 5, None, [1], {"x": 1}, {"text": {"a": 1}}, "\u4f60" * 99_999]
    for indent in (None, 1):
        (tmp_path / "a.json").write_bytes(
            b"\xef\xbb\xbf \n" + json.dumps(content, indent=indent).encode()
        )
        texts, notes = read_all(tmp_path / "a.json")
        assert texts == [*TEXTS, b"plain", ("\u4f60" * 99_999).encode()]
        assert notes == {"record skipped, no text in the field text": 5}


@pytest.mark.parametrize("content", [b'[{"text": "a"}', b'["a", "b', b'["a" oops]', b'["a"] oops'])
def test_an_array_that_is_cut_or_followed_by_rubbish_gives_what_is_whole(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    found, notes = read_all(tmp_path / "a.json")
    assert found == [b"a"] and sum(notes.values()) == 1


def test_an_array_larger_than_what_is_read_at_a_time(tmp_path):
    rng = random.Random(0)
    texts = ["x" * rng.randrange(40_000) + "]},\n" for _ in range(200)]
    (tmp_path / "a.json").write_text(json.dumps([{"n": 1.5, "text": text} for text in texts]))
    assert read_all(tmp_path / "a.json")[0] == [text.encode() for text in texts]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_wherever_its_elements_begin_and_end(indent, tmp_path):
    """One of them ends where what is read at a time does, and a number goes on behind it."""
    for size in (*range(16_340, 16_390), *range(32_700, 32_770)):
        content = ["x" * size, "b", 12345678, "c"]
        (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
        texts, notes = read_all(tmp_path / "a.json")
        assert texts == [content[0].encode(), b"b", b"c"] and len(notes) == 1, size
        assert next(iter(notes.values())) == 1, size
    content = [str(i) * (i % 7 + 1) for i in range(30_000)]
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    assert read_all(tmp_path / "a.json")[0] == [text.encode() for text in content]


def test_json_that_is_no_array_is_a_text(tmp_path):
    (tmp_path / "package.json").write_bytes(b'{"name": "x"}')
    assert read_all(tmp_path / "package.json") == (
        [b'{"name": "x"}'],
        {"read as text with its markup (.json)": 1},
    )


def test_ragged_rows_and_fields_of_several_lines(tmp_path):
    rows = b'\xef\xbb\xbfid,text\r\n1,"a\r\nb"\r\n2\r\n3,c,more,fields\r\n4,\r\n5,"d ""e"""\r\n'
    (tmp_path / "a.csv").write_bytes(rows)
    texts, notes = read_all(tmp_path / "a.csv")
    # The row with too many cells may be "c,more,fields" without quotes, so it is not cut to "c".
    assert texts == [b"a\r\nb", b"", b'd "e"']
    assert notes.pop("record skipped, its number of cells differs from the header's") == 2
    assert notes.pop("record skipped, no text in the field text") == 1  # line 6
    assert list(notes.values()) == [1]  # what is assumed of quotes


def test_rows_that_end_in_a_comma_have_no_more_cells_than_the_header(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,a,\n2,b,,\n")
    assert read_all(tmp_path / "a.csv") == ([b"a", b"b"], {})


def test_empty_lines_between_records_are_no_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n \n{"text": "b"}\n\n')
    assert read_all(tmp_path / "a.jsonl") == ([b"a", b"b"], {})


def test_a_table_may_have_semicolons(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id;text\n1;"a, b; c"\n2;d\n')
    assert read_all(tmp_path / "a.csv") == ([b"a, b; c", b"d"], {})


def test_a_quote_that_never_closes_swallows_no_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,a\n2,"b\n' + b"3,c\n" * 10)
    texts, notes = read_all(tmp_path / "a.csv")
    assert texts == [b"a", b'"b', *[b"c"] * 10] and notes == {"assumed no quotes": 1}


def test_columns_of_nulls_lists_and_structs(tmp_path):
    records = [
        {"text": None, "list": [1], "inner": {"a": 1}},
        {"text": "a", "list": None, "inner": None},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(records))
    for field, texts in (("text", [b"a"]), ("list", []), ("inner", [])):
        found, notes = read_all(tmp_path / "a.parquet", field=field)
        assert found == texts and sum(notes.values()) == 2 - len(texts)


def test_half_a_surrogate_pair_is_what_tiktoken_makes_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud800 \\ud83d\\ude00"}\n')
    assert read_all(tmp_path / "a.jsonl")[0] == ["\ufffd \N{GRINNING FACE}".encode()]


def test_an_extra_that_is_missing_is_named_with_its_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    assert prepare(tmp_path / "data", "--input", tmp_path / "a.jsonl.zst") == 2
    assert "pip install pyarrow" in error_of(capsys)


# ---- Text, and what is none ----------------------------------------------------------------------

NO_TEXTS = {
    "scan": b"%PDF-1.7\nwithout a NUL\n", "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "nul": b"\0",
    "jpg": b"\xff\xd8\xff\xe1abc", "gif": b"GIF89a\x10\0", "docx": b"PK\3\4\x14\0",
    "late": b"a" * 7999 + b"\0",
    "tar.gz": gzip.compress(b"name\0text"), "no mark": "text".encode("utf-16-le"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_a_file_of_no_text_is_skipped_and_counted_and_alone_refused(kind, tmp_path, capsys):
    texts = write_texts(tmp_path / "texts")
    assert prepare(tmp_path / "texts only", "--input", texts) == 0
    (texts / f"50.{kind}").write_bytes(NO_TEXTS[kind])
    capsys.readouterr()
    assert prepare(tmp_path / "data", "--input", texts) == 0
    out = capsys.readouterr().out
    skipped = "file skipped, not plain text (save it as .txt; if it is UTF-16, name its --encoding)"
    assert f"{skipped}: 1, the first: {texts}" in out
    for split in ("train", "val"):
        assert stream(tmp_path / "data", split) == stream(tmp_path / "texts only", split)
    assert prepare(tmp_path / "alone", "--input", texts / f"50.{kind}") == 2
    assert "0 tokens for train, too few: file skipped, not plain text" in error_of(capsys)
    assert not (tmp_path / "alone").exists()


def test_what_is_text_is_read_whatever_its_name_and_where_its_nul_is(tmp_path):
    kept = {"a.png": b"text", "b.pdf": b"a %PDF-1.7", "c": b"a" * 8000 + b"\0", "d": b"a\r\nb\r"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert read_all(*(tmp_path / name for name in kept)) == ([*kept.values()], {})


def test_windows_mark_goes_and_latin_1_is_noted(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfa\r\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait, caf\xe9 noir")
    (tmp_path / "empty.txt").touch()
    texts, notes = read_all(*(tmp_path / name for name in ("bom.txt", "latin.txt", "empty.txt")))
    assert texts == [b"a\r\n", "caf\xe9 au lait, caf\xe9 noir".encode(), b""]
    assert notes == {"assumed cp1252": 1, "file skipped, empty": 1}


@NEEDS_POSIX
def test_a_name_that_is_no_utf8_ends_nothing(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff\n\x1b[2J.jsonl"
    with open(name, "wb") as f:
        f.write(lines(RECORDS) + b"5")
    process = start(tmp_path / "data", "--input", os.fsdecode(name))
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert "\x1b" not in out and r"\udcff \x1b[2J.jsonl, record 4" in out


@pytest.mark.parametrize("text", [b"x", "\u00a0".encode(), b"no cut:\xa0"], ids=ascii)
def test_a_long_text_without_spaces_is_read_in_linear_time(text, monkeypatch):
    """80 MB took 41 s: each block was joined to all before it, and searched."""
    sizes, boundary = [], inputs.BOUNDARY

    class Counted:
        @staticmethod
        def search(text, start):
            sizes.append(len(text) - start)
            return boundary.search(text, start)

    monkeypatch.setattr(formats, "BLOCK", 1000)
    monkeypatch.setattr(inputs, "PIECE", 1000)
    monkeypatch.setattr(inputs, "BOUNDARY", Counted)
    whole = text.replace(b" ", b"_") * 100_000
    assert b"".join(inputs.pieces(formats.blocks_of(io.BytesIO(whole)))) == whole
    assert sum(sizes) < 3 * len(whole)
