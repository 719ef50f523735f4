"""The documents in the files of prepare_data.py --input: texts, and the records of .jsonl, .json,
.csv, .tsv and .parquet files. A Reader counts documents, and skipped records and files by reason:
documents + skipped records == records, and files read + skipped files == files."""

import bz2
import codecs
import csv
import glob
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import Any

from support.cli import UserError

BLOCK = 1 << 16  # bytes or characters to read at a time
SAMPLE = 1 << 18  # bytes from which to detect an encoding
PIECE = 1 << 16  # characters of a long text to yield at a time, up to the next white space
LONGEST_PIECE = 1 << 20
# GPT-2's pattern begins a token at white space that follows a visible character.
BOUNDARY = re.compile(r"[ \t\r\n](?<=\S\s)")  # with the lookbehind first, it is slow
PACKED: dict[str, Any] = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor, ".zst": None}
PACKED[".gz"] = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)  # with gzip's header
MARKUP = (".html", ".htm", ".xml", ".ipynb", ".mbox", ".eml", ".rtf", ".srt", ".vtt")
# Python's codecs remove these marks. UTF-16's begins one of UTF-32's.
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_TEXT = {  # how files begin, and what they are
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS: run git lfs pull",
    b"%PDF-": "a PDF: save it as text",
    b"PK\3\4": "an archive or an Office document: unpack it, or save it as text",
    b"\xd0\xcf\x11\xe0": "an Office document: save it as text",
}
REPLACED = "text that can't be decoded, replaced by U+FFFD"


class Bad(str):
    """Stands for a record without text, and says why."""


def find_files(inputs: list[str]) -> dict[str, str]:
    """Return the files that inputs (files, folders and patterns) name, by real path, except hidden
    files in folders. Raise UserError if an input names none, or if a folder can't be read."""
    found: dict[str, str] = {}
    for name in inputs:
        pattern = glob.escape(name) if os.path.lexists(name) else name
        paths = sorted(glob.glob(pattern, recursive=True))
        for folder in filter(os.path.isdir, paths[:]):
            paths += sorted(glob.glob(f"{glob.escape(folder)}/**", recursive=True))
        for path in paths:
            if not os.path.isdir(path):
                found.setdefault(os.path.realpath(path), path)
            elif not os.access(path, os.R_OK | os.X_OK):  # glob leaves out what is in it
                raise UserError(f"--input {path} can't be read")
        if all(map(os.path.isdir, paths)):
            raise UserError(f"--input {name}: there is no such file")
    return found


class Reader:
    """Reads the documents in files, in order, as often as asked."""

    def __init__(self, files: list[str], text_field: str, encoding: str):
        self.files = files
        self.fields = [text_field]  # the first of these in a record holds its text
        if text_field == "text":
            self.fields += ["messages", "conversations"]
        self.encoding = encoding  # of all files; "": find each one's
        self.examine = cache(examine)

    def pieces(self) -> Iterator[tuple[bool, str]]:
        """Yield the text of all documents in pieces, and whether a document begins there. Raise
        UserError for a file that can't be read."""
        self.counts = Counter(files=0, records=0, documents=0)
        self.notes: dict[str, str] = {}  # what was skipped or assumed, and its first occurrence
        for path in self.files:
            self.counts["files"] += 1
            try:
                for place, text in self.documents(path):
                    for number, piece in enumerate(pieces(text)):
                        try:
                            piece.encode()
                        except UnicodeEncodeError:  # half a surrogate pair in JSON: no text
                            pair = piece.encode("utf-16", "surrogatepass")
                            piece = pair.decode("utf-16", "replace")
                        if "\ufffd" in piece:
                            self.note(REPLACED, f"{path}, {place}")
                        yield number == 0, piece
            except (OSError, EOFError, ValueError, csv.Error, zlib.error, lzma.LZMAError) as error:
                raise UserError(f"--input {path} can't be read: {error}") from error

    def documents(self, path: str) -> Iterator[tuple[str, str | io.TextIOBase]]:
        """Yield a file's texts and their places."""
        encoding, reason = self.examine(path, self.encoding)
        if reason:
            self.note(f"file skipped, {reason}", path)
            return
        if encoding not in ("utf-8", "utf-8-sig", self.encoding):
            self.note(f"assumed the encoding {encoding}", path)
        if kind_of(path) in MARKUP:
            self.note("read as text with its markup", path)
        for place, record in records(path, encoding, self.fields):
            self.counts["records"] += 1
            text = text_of(record, self.fields)
            if isinstance(text, Bad):
                has = f", whose fields are {', '.join(record)}" if isinstance(record, dict) else ""
                self.note(f"record skipped, {text}", f"{path}, {place}{has}")
            else:
                self.counts["documents"] += 1
                yield place, text

    def note(self, what: str, place: str):
        self.counts[what] += 1
        self.notes.setdefault(what, place)

    def account(self) -> list[str]:
        """Return the counts of the last reading as text, with a line for each reason."""
        totals = [f"{self.counts[name]:,} {name}" for name in ("files", "records", "documents")]
        notes = self.notes.items()
        lines = [f"{what}: {self.counts[what]:,}, the first: {place}" for what, place in notes]
        return ["; ".join(totals), *lines]


def pieces(text: str | io.TextIOBase) -> Iterator[str]:
    """Yield a text in pieces that can be tokenized separately, to save memory. No token spans a cut
    unless a million characters have no white space. Only a record longer than that is cut."""
    if isinstance(text, str) and len(text) <= LONGEST_PIECE:
        yield text
        return
    stream = io.StringIO(text, newline="") if isinstance(text, str) else text
    rest, begin = "", PIECE  # and where in it to look for a place to cut
    while block := stream.read(BLOCK):
        rest += block
        while len(rest) > begin:
            found = BOUNDARY.search(rest, begin, LONGEST_PIECE)
            if not found and len(rest) < LONGEST_PIECE:
                begin = len(rest)
                break
            end = found.start() if found else LONGEST_PIECE
            yield rest[:end]
            rest, begin = rest[end:], PIECE
    if rest:
        yield rest


# ---- Files and encodings -------------------------------------------------------------------------


def kind_of(path: str) -> str:
    """Return the suffix of a file's name, without that of its packing."""
    name, suffix = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if suffix in PACKED else suffix


def opened(path: str) -> Any:
    """Open a file, and decompress it if its name says that it is compressed."""
    suffix = os.path.splitext(path.lower())[1]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    if suffix in PACKED:
        return Unpacked(path, PACKED[suffix])
    return open(path, "rb")


class Unpacked(io.BufferedIOBase):
    """The content of a compressed file: streams, followed by nothing but zeros. Python's own
    classes for .bz2 and .xz stop without an error at anything else that follows a stream."""

    def __init__(self, path: str, new_stream: Callable):
        self.blocks = self.unpack(path, new_stream)

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        """Return the next block, whatever its size: TextIOWrapper accepts any."""
        return next(self.blocks, b"")

    def unpack(self, path: str, new_stream: Callable) -> Iterator[bytes]:
        stream: Any = None
        with open(path, "rb") as file:
            while data := file.read(4096):  # which may hold far more
                if not stream:
                    data = data.lstrip(b"\0")
                while data:
                    stream = stream or new_stream()
                    if block := stream.decompress(data):
                        yield block
                    data = b""
                    if stream.eof:
                        stream, data = None, stream.unused_data.lstrip(b"\0")
        if stream:
            raise EOFError("its end is missing")


def examine(path: str, encoding: str) -> tuple[str, str]:
    """Return a text's encoding, or why to skip a file."""
    if not os.path.isfile(path):
        return "", "a broken link, a pipe or a device"
    if kind_of(path) == ".parquet":
        return "utf-8", ""
    with opened(path) as file:
        head = file.read1(BLOCK)
        what = next((what for start, what in NO_TEXT.items() if head.startswith(start)), "")
        if what or not head or (head in MARKS and not file.read1()):
            return "", what or "empty"
        found = encoding or next((MARKS[mark] for mark in MARKS if head.startswith(mark)), "")
        if b"\0" in head and not found.lower().startswith(("utf-16", "utf-32")):
            return "", "binary, or UTF-16 without a mark (name its --encoding)"
        return found or likely_encoding(head, file), ""


def likely_encoding(block: bytes, file: Any) -> str:
    """Return the likely encoding of a text that begins with block: UTF-8 if its first non-ASCII
    lines are entirely or mostly valid UTF-8, else what chardet detects in them."""
    sample = b""
    while block and len(sample) < SAMPLE:
        if not block.isascii():
            sample += b"".join(x for x in block.splitlines(keepends=True) if not x.isascii())
        block = file.read1(BLOCK)
    num_wrong = len(sample) - len(sample.decode("utf-8", "ignore").encode())
    num_bytes = sum(byte > 0x7F for byte in sample)
    if 2 * num_wrong <= num_bytes:  # or there are none
        return "utf-8"
    if num_bytes < 10:
        return "cp1252"  # too few to tell
    import chardet

    return chardet.detect(sample, compat_names=False)["encoding"] or "cp1252"


# ---- Records -------------------------------------------------------------------------------------


def records(path: str, encoding: str, fields: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield a file's records and their places. The record of a text file is its stream."""
    kind = kind_of(path)
    if kind == ".parquet":
        yield from parquet_rows(path, fields)
        return
    with io.TextIOWrapper(opened(path), encoding, errors="replace", newline="") as stream:
        if kind in (".jsonl", ".ndjson", ".jl"):
            yield from json_lines(stream, fields)
        elif kind == ".json":
            yield from json_values(stream, fields)
        elif kind in (".csv", ".tsv"):
            yield from table_rows(stream, kind, fields)
        else:
            yield "text", stream


def text_of(record: Any, fields: list[str]) -> str | io.TextIOBase:
    """Return the text of a record, which may be a chat: a list of messages."""
    value = record
    if isinstance(record, dict):
        value = next((record[name] for name in fields if name in record), None)
    if isinstance(value, list):
        with suppress(AttributeError, TypeError):  # it is no chat
            value = "\n\n".join(
                m.get("role", m.get("from")) + ": " + m.get("content", m.get("value"))
                for m in value
            )
    if value and isinstance(value, (str, io.TextIOBase)):
        return value
    return Bad(f"no text in the field {fields[0]}")


def parsed(text: str, fields: list[str]) -> Any:
    # The hook takes half as long as json itself, so it is for texts in which a field may be twice.
    hook = unique_keys if any(text.count(f'"{name}"') > 1 for name in fields) else None
    try:
        return json.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        return Bad("no valid JSON, or a key that is there twice")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Return an object of JSON. Raise ValueError if it has a key twice: json would drop one."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError
    return record


def json_lines(lines: Iterable[str], fields: list[str]) -> Iterator[tuple[str, Any]]:
    return ((f"line {n}", parsed(x, fields)) for n, x in enumerate(lines, 1) if not x.isspace())


def json_values(stream: io.TextIOWrapper, fields: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield one object per line, an array's elements, or one object. An array is read whole."""
    text = stream.readline()
    value = parsed(text, fields)
    if isinstance(value, dict):
        return json_lines(chain([text], stream), fields)
    if rest := stream.read():
        text += rest
        value = parsed(text, fields)
    if isinstance(value, Bad):
        return json_lines(io.StringIO(text, newline=""), fields)
    values = value if isinstance(value, list) else [value]
    return ((f"element {number}", element) for number, element in enumerate(values, 1))


def table_rows(stream: io.TextIOWrapper, kind: str, fields: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table. A row that csv can't parse, or that has fewer or more cells than
    the header, is Bad, as its meaning can only be guessed."""
    csv.field_size_limit(1 << 30)
    line = stream.readline()
    delimiter = "\t" if kind == ".tsv" else ";" if line.count(";") > line.count(",") else ","
    # Without strict, "Hello," he said would lose its quotes.
    reader = csv.reader(chain([line], stream), delimiter=delimiter, strict=True)
    header = next(reader)
    columns = [i for name in fields for i, cell in enumerate(header) if cell == name]
    if any(header.count(name) > 1 for name in fields):
        raise ValueError(f"two of its columns have the name {fields[0]}")
    row: list[str] | None = header
    while row is not None:
        place = f"line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error:
            yield place, Bad("no valid row of a table")
            continue
        if row and len(row) != len(header):
            yield place, Bad("it has not as many cells as the header")
        elif row:  # an empty line is no record
            yield place, row[columns[0]] if columns else dict.fromkeys(header)


def parquet_rows(path: str, fields: list[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    columns = [name for name in fields if name in file.schema_arrow.names][:1]
    batches = file.iter_batches(64, columns=columns)
    no_text = dict.fromkeys(file.schema_arrow.names)
    rows = chain.from_iterable(b.to_pylist() if columns else [no_text] * len(b) for b in batches)
    return ((f"row {number}", record) for number, record in enumerate(rows, 1))
