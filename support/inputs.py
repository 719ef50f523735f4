"""Reads the documents in the files, folders and patterns of prepare_data.py --input.

A document is a text file, a line of .jsonl, an element of a .json array, or a row of .csv, .tsv or
.parquet. Only one record, or 512 KiB of a text file, is in memory at a time.
"""

import csv
import gzip
import io
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from support.ending import DISK_ERRNOS, UserError

PIECE = 1 << 18  # bytes of text to read at a time
RECORDS = re.compile(r"\.(jsonl|json|csv|tsv|parquet)(\.gz|\.zst)?$")
NOT_TEXT = (b"%PDF-", b"\x1f\x8b", b"(\xb5/\xfd", b"\xff\xd8\xff", b"\xff\xfe", b"\xfe\xff")
EXTRA_CELLS = "\0cells"  # the key for cells beyond the header; no field has this name
BOM = b"\xef\xbb\xbf"  # Windows puts these bytes in front of UTF-8 text


def standard_library() -> list[str]:
    """Return the standard library's .py files: 30 MB that every machine has."""
    files: list[str] = []
    for folder, names, children in os.walk(sysconfig.get_path("stdlib")):
        names[:] = [name for name in names if not name.endswith("-packages")]  # installed by pip
        files += [os.path.join(folder, child) for child in children if child.endswith(".py")]
    return sorted(filter(os.path.isfile, files))


def files_in(inputs: Iterable[str]) -> list[str]:
    """Return the files that inputs name, each once. Files in a folder or pattern are sorted; hidden
    files and links to folders are left out. Raise UserError if a name matches no file."""
    files: dict[str, str] = {}  # by real path, to drop duplicates
    for name in inputs:
        path = Path(name)
        tops = [path]
        if not os.path.exists(name):
            with suppress(ValueError, OSError):  # an invalid pattern, or a name that is too long
                # Unlike glob.glob, Path.glob does not follow links, which may go in circles.
                tops = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        tops = [top for top in tops if {p for p in top.parts if p[0] == "."} <= {*path.parts}]
        candidates = [str(top) for top in tops]
        for top in tops:
            for folder, names, children in os.walk(str(top)):
                names[:] = [child for child in names if child[0] != "."]  # .git has many files
                candidates += [os.path.join(folder, child) for child in children if child[0] != "."]
        found = [file for file in sorted(candidates) if os.path.isfile(file)]  # no pipes or devices
        if not found:
            raise UserError(f"--input {name}: there is no such file")
        for file in found:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


@dataclass
class Reader:
    """Reads the documents in files, in order, and counts problems with them."""

    files: list[str]
    text_field: str
    position: int = 0  # bytes read so far
    notes: dict[str, list] = field(default_factory=dict)  # problem -> [count, first place]

    def note(self, problem: str, where: str):
        self.notes.setdefault(problem, [0, where])[0] += 1

    def documents(self) -> Iterator[tuple[int, BinaryIO]]:
        """Yield each document's size in bytes and open text. Raise UserError for a damaged file."""
        for file in self.files:
            start = self.position
            try:
                with open(file, "rb", buffering=1 << 16) as raw:
                    for document in self.documents_in(raw):
                        yield document
                        self.position = start + raw.tell()
            except Exception as error:  # each library has its own exceptions
                if isinstance(error, ImportError) or getattr(error, "errno", None) in DISK_ERRNOS:
                    raise
                raise UserError(f"--input {file} can't be read: {error}") from error

    def documents_in(self, raw: BinaryIO) -> Iterator[tuple[int, BinaryIO]]:
        match = RECORDS.search(raw.name.lower())
        kind, packing = match.groups() if match else ("", None)
        stream: Any = raw
        if packing == ".gz":
            stream = gzip.GzipFile(fileobj=raw)
        elif packing == ".zst":
            import pyarrow

            stream = io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
        head = stream.peek(8000)[:8000].removeprefix(BOM)
        if kind == "json" and not head.lstrip().startswith(b"["):
            kind = ""  # one document, like package.json
        num_bad = head.decode(errors="replace").count("\ufffd")
        is_text = not (head.startswith(NOT_TEXT) or b"\0" in head or 2 * num_bad > len(head))
        if kind != "parquet" and not is_text:
            self.note("skipped, not UTF-8 text", raw.name)
        elif kind:
            for number, record in enumerate(records(stream, kind, self.text_field), 1):
                text = self.text_of(record, f"{raw.name}, record {number}")
                if text is not None:
                    yield len(text), io.BytesIO(text)
        else:
            if not head:
                self.note("skipped, empty", raw.name)
            if num_bad > 1:  # one may be a character cut off at the end
                self.note("kept, with bytes that are not UTF-8", raw.name)
            stream.read(len(BOM) if stream.peek().startswith(BOM) else 0)
            yield os.path.getsize(raw.name), stream

    def text_of(self, record, where: str) -> bytes | None:
        """Return the text of a record, or None if it has no text. Note any problem with it."""
        text = record
        if isinstance(record, dict):
            text = record.get(self.text_field)
            # An empty extra cell comes from a comma at the end of a row. Any other may be the rest
            # of unquoted text with commas, which we would otherwise cut short.
            if any(record.pop(EXTRA_CELLS, [])):
                header = f"{where} (the header: {', '.join(record)})"
                self.note("skipped, more cells than the header (quotes missing?)", header)
                return None
            if self.text_field not in record:
                names = ", ".join(map(str, record))
                where += f" (its fields: {names}; name one with --text-field)"
        if not text or not isinstance(text, str):
            self.note(f"skipped, no text in the field {self.text_field}", where)
        elif "\ufffd" in text:
            self.note("kept, with bytes that are not UTF-8", where)
        if not isinstance(text, str):
            return None
        # Half a surrogate pair becomes U+FFFD, as in tiktoken.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def records(stream: io.BufferedReader, kind: str, text_field: str) -> Iterator:
    """Yield the lines, elements or rows of a file, which need not be dicts."""
    if kind == "jsonl":
        for line in stream:
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if not line.isspace():
                yield record
    elif kind == "parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.ParquetFile(stream, buffer_size=PIECE)
        if text_field not in table.schema_arrow.names:
            yield dict.fromkeys(table.schema_arrow.names)
            return
        for rows in table.iter_batches(64, columns=[text_field]):
            yield from rows.to_pylist()
    else:
        header = stream.peek(8000)[:8000].partition(b"\n")[0]
        # Where the decimal point is a comma, spreadsheets separate cells with semicolons.
        has_semicolons = header.count(b";") > header.count(b",")
        delimiter = "\t" if kind == "tsv" else ";" if has_semicolons else ","
        with io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="") as text:
            yield from elements(text) if kind == "json" else table_rows(text, delimiter)


def table_rows(text: io.TextIOWrapper, delimiter: str) -> Iterator:
    """Yield the rows of a table, and None for a row whose quotes are wrong. Raise ValueError if a
    quote in the last row is never closed, since that row may have swallowed most of the file."""
    csv.field_size_limit(1 << 28)
    table = csv.DictReader(text, restkey=EXTRA_CELLS, delimiter=delimiter, strict=True)
    while True:
        before = table.line_num
        try:
            yield next(table)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise ValueError(f"a quote after line {before} is never closed") from error
            yield None


def elements(stream: io.TextIOWrapper) -> Iterator:
    """Yield the elements of a JSON array, which may be larger than memory."""
    decode = json.JSONDecoder().raw_decode
    text, block = "", stream.read(1 << 14).lstrip()[1:]
    while block and len(text) < 1 << 28:
        text = (text + block).lstrip(" \t\r\n,")
        with suppress(ValueError):  # the last element of text may be incomplete
            while not text.startswith("]"):
                value, end = decode(text)
                if end == len(text):
                    break  # a number may continue in the next block
                yield value
                text = text[end:].lstrip(" \t\r\n,")
        # Keep blocks small, since removing an element copies the rest of the text.
        block = stream.read(max(1 << 14, len(text)))
    if not text.startswith("]"):
        raise ValueError("its array never ends, or holds invalid JSON")


# GPT-2's pattern always begins a token at white space after a visible character, and at the last of
# several white-space characters before a visible one. We exclude bytes that end or begin multi-byte
# white space, such as U+00A0, although those bytes occur in other characters too.
BOUNDARY = re.compile(rb"(?<![\s\x80-\x8a\x9f\xa0\xa8\xa9\xaf])\s|(?<=\s)\s(?=[^\s\xc2\xe1-\xe3])")


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a document in pieces of about PIECE bytes, so that a long one takes little memory. No
    token spans a cut, so the pieces have the same tokens as the whole document."""
    parts: list[bytes] = []  # of the piece, before `text`
    size = 0  # of parts
    text = block = stream.read(PIECE)
    while block:
        block = stream.read(PIECE)
        text += block
        cut = BOUNDARY.search(text, max(PIECE - size, len(text) - len(block) - 1))
        at = cut.start() if cut else max(0, len(text) - 2)  # BOUNDARY looks at two bytes
        parts.append(text[:at])
        size += at
        text = text[at:]
        if cut:
            yield b"".join(parts)
            parts, size = [], 0
    if parts or text:
        yield b"".join(parts) + text
