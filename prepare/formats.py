"""The formats of files that prepare_data.py reads: text, JSON, tables, .parquet and .arrow.

The content of a file decides its format, and examine() reads it to its end to find out. Files may
be packed (.gz, .bz2, .xz, .zst, .zip), and text may have another encoding than UTF-8.
"""

import codecs
import csv
import io
import json
import os
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import chain, islice
from typing import Any, BinaryIO

PIECE = 1 << 18  # bytes of text to tokenize at a time
BLOCK = 1 << 16  # bytes or characters to read, or to parse, at a time
HEAD = 8000  # bytes that show what a file is
LONGEST = 1 << 28  # characters of a record
JSON_NAMES = (".json", ".jsonl", ".ndjson", ".jl")
MARKUP_SUFFIX = re.compile(r"\.(json|ipynb|xml|x?html?|svg|srt|vtt|rtf)$")
MARKUP = re.compile(r"\s*(<!doctype|<html|<\?xml|(\d+\s+)?\d\d:\d\d:\d\d[,.]\d+ --> )", re.I)
PACKED_NAME = re.compile(r"\.(gz|bz2|xz|zst)$")
PACKINGS = {b"\x1f\x8b\x08": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma"}  # Python's modules
NO_JSON = "no valid JSON; the rest of its line is lost"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NOT_TEXT = (b"%PDF-", b"\xff\xd8\xff", b"PK\3\4")
UNICODE_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32"}  # before utf-16's
UNICODE_MARKS |= {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# For many texts, charset_normalizer finds several of these equally likely. We take the first one.
ENCODINGS = ["cp1252", "cp1250", "cp1251", "koi8_r", "cp866", "cp932", "euc_jp", "gb18030", "big5"]
ENCODINGS += ["cp949", "cp1253", "cp1254", "cp1255", "cp1256", "iso8859_2"]
ISO = {"cp1250": "iso8859_2", "cp1253": "iso8859_7"}  # nearly the same characters


@dataclass
class Source:
    """A file, or a member of a .zip archive, and what examine() found out about it."""

    path: str
    member: str = ""
    kind: str = "text"  # or json, table, parquet, arrow
    encoding: str = ""  # "" for UTF-8
    quotes: tuple = ()  # of a table
    size: int = 0  # of a text, in bytes of UTF-8
    skipped: str = ""  # why it can't be read
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else self.path

    @property
    def suffix(self) -> str:
        return os.path.splitext(PACKED_NAME.sub("", str(self).lower()))[1]

    @contextmanager
    def opened(self) -> Iterator[tuple[BinaryIO, io.TextIOWrapper]]:
        """Open the source. Yield the file on the disk, and the unpacked text, in which bytes that
        are not in its encoding become U+FFFD."""
        with open(self.path, "rb", buffering=BLOCK) as raw:
            stream = unpacked(archive(self.path).open(self.member) if self.member else raw)
            encoding = self.encoding or "utf-8"
            # Windows writes a mark in front of a text, U+FEFF. Some encodings don't have it.
            for mark in (codecs.BOM_UTF8, "\ufeff".encode(encoding, "ignore")):
                if stream.peek(len(mark)).startswith(mark):
                    stream.read(len(mark))
            with io.TextIOWrapper(stream, encoding, "replace", newline="") as text:
                yield raw, text

    def blocks(self) -> Iterator[bytes]:
        """Yield a text as UTF-8. Damaged bytes stay as they are, or in a text of another encoding
        become U+FFFD. A block may end inside a character."""
        with self.opened() as (_, text):
            if self.encoding:
                yield from map(str.encode, blocks_of(text))
            else:  # not decoded, which would take as long as all other reading
                yield from blocks_of(text.buffer)


def blocks_of(stream: Any) -> Iterator[Any]:
    while block := stream.read(BLOCK):
        yield block


@lru_cache(1)  # the next member comes from the same archive
def archive(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def sources(path: str, text_field: str, encoding: str) -> list[Source]:
    """Return what a file holds: itself, or the members of a .zip archive."""
    found = [Source(path)]
    if path.lower().endswith(".zip"):
        archive.cache_clear()
        found = [Source(path, name) for name in archive(path).namelist() if name[-1] != "/"]
    for source in found:
        examine(source, text_field, encoding)
    return found or [Source(path, skipped="an archive without files")]


def unpacked(stream: Any) -> Any:
    """Return what a packed stream holds, or the stream itself if it isn't packed."""
    head = stream.peek(8)
    for magic, module in PACKINGS.items():
        if head.startswith(magic):
            return import_module(module).open(stream)
    if head.startswith(b"(\xb5/\xfd"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(stream, compression="zstd"))
    return stream


def examine(source: Source, text_field: str, encoding: str):
    """Find the format of a source. If encoding is "", find the encoding, too."""
    with source.opened() as (_, text):
        head = bytes(text.buffer.read(HEAD))
    if head.startswith(LFS_POINTER):
        source.skipped = "a pointer of Git LFS, not the data: run git lfs pull"
    elif head.startswith(b"PAR1"):
        source.kind = "parquet"
    elif head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) and source.suffix == ".arrow":
        source.kind = "arrow"
    else:
        find_encoding(source, head, encoding)
        if not source.skipped:
            find_kind(source, text_field)


def find_encoding(source: Source, head: bytes, encoding: str):
    """Set the encoding of a text and its size, or the reason to skip it."""
    marked = (name for mark, name in UNICODE_MARKS.items() if head.startswith(mark))
    source.encoding = encoding or next(marked, "")
    has_nul_bytes = codecs.lookup(source.encoding or "utf-8").name.startswith(("utf-16", "utf-32"))
    if (head.startswith(NOT_TEXT) or b"\0" in head) and not has_nul_bytes:
        source.skipped = "not plain text (save it as .txt; if it is UTF-16, name its --encoding)"
        return
    source.size, damaged, is_utf8 = scan(source)
    if damaged and not is_utf8 and not source.encoding:
        likely = likely_encoding(damaged)
        if likely is None:
            source.skipped = "not text, or in an unknown --encoding"
            return
        source.encoding = likely
        source.size, damaged, _ = scan(source)
    if source.encoding and not encoding:
        source.notes.append(f"assumed {source.encoding}")
    if damaged:
        other = "if it has another encoding, name it with --encoding"
        source.notes.append(f"kept, with bytes that are not {source.encoding or 'UTF-8'} ({other})")
    if not source.size:
        source.skipped = "empty"


def scan(source: Source) -> tuple[int, bytes, bool]:
    """Return the size of a text as UTF-8, the first piece with bytes that are not in its encoding,
    and whether more bytes continue a character of UTF-8 than characters are damaged."""
    size = num_bad = num_more = 0  # num_more: bytes of a character beyond its first
    sample = b""
    for piece in codecs.iterdecode(source.blocks(), "utf-8", "surrogateescape"):
        content = piece.encode(errors="surrogateescape")
        size += len(content)
        if piece.isascii():
            continue
        decoded = content.decode(errors="replace")
        num_more += len(content) - len(decoded)
        bad = decoded.count("\ufffd")
        if not source.encoding:
            bad -= piece.count("\ufffd")  # the text's own
        num_bad += bad
        sample = sample or (content if bad else b"")
    return size, sample, num_more > num_bad


def likely_encoding(sample: bytes) -> str | None:
    """Return the encoding of a text with bytes that are not UTF-8: "" if these are probably damage,
    or None if it is unknown."""
    import charset_normalizer

    num_bad = sample.decode(errors="replace").count("\ufffd")
    lines = [line for line in sample.splitlines(True) if not line.isascii()]
    # The last line may end inside a character.
    matches = charset_normalizer.from_bytes(b"".join(lines[:-1] or lines), cp_isolation=ENCODINGS)
    if not matches:
        return "" if 8 * num_bad < len(sample) else None
    # Among those with as little chaos as the best, letters decide: how well they suit a language.
    least = min(match.chaos for match in matches) + 0.01
    calm = [match for match in matches if match.chaos <= least]
    coherence = max(match.coherence for match in calm)
    best = [match for match in calm if match.coherence == coherence]
    names = chain.from_iterable(match.could_be_from_charset for match in best)
    name = min(names, key=ENCODINGS.index)

    def num_letters(name: str) -> int:
        return sum(map(str.isalpha, sample.decode(name, "replace")))

    # Where Windows' encoding differs from ISO's, the wrong one has a sign in place of a letter.
    return max(name, ISO.get(name, name), key=num_letters)


def find_kind(source: Source, text_field: str):
    """Set the kind of a text, and note what is assumed."""
    with source.opened() as (_, text):
        head = text.read(HEAD)
    if source.suffix in (".csv", ".tsv"):
        source.kind = "table"
        source.quotes = quotes_of(source)
        if source.quotes != (QUOTED,):
            source.notes.append(f"assumed {' or '.join(source.quotes)}")
    elif source.suffix in JSON_NAMES:
        with source.opened() as (_, text):
            values = list(islice(json_values(text), 9))
        is_text = bool(values) and all(isinstance(value, ValueError) for value in values)
        if len(values) == 1 and isinstance(values[0], dict):  # one object, as in package.json
            is_text = not isinstance(values[0].get(text_field), str)
        if source.suffix != ".json" or not is_text:
            source.kind = "json"
    elif head.lstrip().startswith("{") and has_objects(source):
        source.kind = "json"
        source.notes.append("assumed JSON Lines")
    if source.kind == "text" and (MARKUP.match(head) or MARKUP_SUFFIX.match(source.suffix)):
        source.notes.append(f"read as text with its markup ({source.suffix})")


def has_objects(source: Source) -> bool:
    """Return whether a text is JSON objects and nothing else, and at least two of them."""
    with source.opened() as (_, text):
        values = json_values(text)
        first = list(islice(values, 2))
        return len(first) == 2 and all(isinstance(value, dict) for value in chain(first, values))


def json_values(stream: io.TextIOWrapper) -> Iterator[Any]:
    """Yield the values in JSON text, or for arrays their elements. Where the text is broken, yield
    a ValueError, and go on with the next line that begins an object."""
    decode = json.JSONDecoder().raw_decode
    text, at = "", 0  # what is read, and where its next value begins
    depth = 0  # of arrays
    is_end = is_broken = False
    while True:
        while at < len(text) and text[at] in " \t\r\n,[]":
            depth = max(0, depth + (text[at] == "[") - (text[at] == "]"))
            at += 1
        value: Any = ValueError(NO_JSON)
        try:
            value, end = decode(text, at)
            is_cut = end + 32 > len(text)  # a number may go on
        except json.JSONDecodeError as error:
            is_cut = error.pos + 32 > len(text) or error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):  # a number of 5,000 digits, or thousands of brackets
            is_cut = False
        if is_cut and not is_end and len(text) - at < LONGEST:
            block = stream.read(max(BLOCK, len(text) - at))
            is_end = not block
            text, at = text[at:] + block, 0
            continue
        if at == len(text):
            if depth:
                yield ValueError("no end of its array")
            return
        if isinstance(value, ValueError):
            is_broken, depth = True, 0
            end = text.find("\n", at)
            while end < 0 and not is_end:
                text = stream.read(BLOCK)
                is_end = not text
                end = text.find("\n")
            end = end + 1 or len(text)
        elif is_broken and not isinstance(value, dict):  # it may be a part of what is broken
            value = ValueError(NO_JSON)
        yield value
        at = end


QUOTED, ESCAPED, PLAIN = "quotes", 'quotes with \\" in them', "no quotes"


def table_rows(text: Any, suffix: str, kinds: tuple) -> Iterator[tuple[int, Any]]:
    """Yield the number of each row's first line, and the row, read with the first of these kinds of
    quotes that suits it, or a ValueError for a line that none suits."""
    csv.field_size_limit(min(LONGEST, 1 << 24))  # a quote that never closes would fill the memory
    ahead: deque[str] = deque()  # the lines read so far, from the current row's first one on

    def lines() -> Iterator[str]:
        yield from ahead
        while line := text.readline(LONGEST):
            ahead.append(line)
            yield line

    first = next(lines(), "")
    # Where the decimal point is a comma, spreadsheets separate cells with semicolons.
    delimiter = ";" if first.count(";") > first.count(",") else ","
    delimiter = "\t" if suffix == ".tsv" else delimiter
    # Made once: for each row, they would take longer than reading it.
    quoted = csv.reader([], delimiter=delimiter, strict=True).dialect
    plain = csv.reader([], delimiter=delimiter, quoting=csv.QUOTE_NONE).dialect
    header: list[str] = []
    number = 1
    while next(lines(), ""):
        record: Any = ValueError("its number of cells differs from the header's")
        num_lines = 1
        for quotes in kinds:
            rest = lines()
            if quotes == ESCAPED:
                rest = (line.replace('\\"', '""') for line in rest)
            reader = csv.reader(rest, plain if quotes == PLAIN else quoted)
            with suppress(csv.Error):
                row = next(reader)
                if has_header_cells(row, header, delimiter):
                    record = dict(zip(header, row, strict=False))
                    header = header or row
                    num_lines = reader.line_num
                    break
        if record:  # {} for the header and for an empty line
            yield number, record
        number += num_lines
        for _ in range(num_lines):
            ahead.popleft()


def has_header_cells(row: list[str], header: list[str], delimiter: str) -> bool:
    """Return whether a row is empty, or has the header's cells and no more, except empty ones."""
    if delimiter == "\t":
        # A cell that holds whole rows: a quote began it, and another row's quote ended it.
        for cell in row:
            if 0 < cell.count("\n") * (len(header) - 1) == cell.count("\t"):
                return False
    return not row or (len(row) >= len(header) and not any(row[len(header) :])) or not header


def quotes_of(source: Source) -> tuple:
    """Return the first kind of quotes that suits each row of a table, or all kinds."""
    kinds = QUOTED, ESCAPED, PLAIN
    for quotes in kinds:
        with source.opened() as (_, text):
            rows = table_rows(text, source.suffix, (quotes,))
            if not any(isinstance(row, ValueError) for _, row in rows):
                return (quotes,)
    return kinds


def column_rows(stream: Any, kind: str, text_field: str) -> Iterator[dict]:
    """Yield the rows of a .parquet or .arrow file, each with only its text."""
    import pyarrow.parquet

    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(stream, buffer_size=PIECE)
        names = table.schema_arrow.names
        name = field_in(names, text_field)
        batches = table.iter_batches(64, columns=[name] if name else [])
    elif stream.peek(6).startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(stream)
        names = table.schema.names
        batches = map(table.get_batch, range(table.num_record_batches))
    else:  # save_to_disk of Hugging Face's datasets
        batches = pyarrow.ipc.open_stream(stream)
        names = batches.schema.names
    name = field_in(names, text_field)
    for batch in batches:
        batch.validate(full=True)  # damage would crash pyarrow
        if name is None:
            yield from [dict.fromkeys(names)] * batch.num_rows
        else:
            yield from ({name: value.as_py()} for value in batch.column(name))


def records(source: Source, text: Any, text_field: str) -> Iterator[tuple[Any, str]]:
    """Yield each record, and its place. A part that is damaged is a ValueError."""
    unit = "line" if source.kind == "table" else "record"
    if source.kind == "table":
        rows = table_rows(text, source.suffix, source.quotes)
    elif source.kind == "json":
        rows = enumerate(json_values(text), 1)
    else:
        rows = enumerate(column_rows(text.buffer, source.kind, text_field), 1)
    for number, record in rows:
        yield record, f"{source}, {unit} {number}"


def field_in(names: Iterable[str], text_field: str) -> str | None:
    """Return which of these fields holds the text: --text-field, or by default also a chat."""
    wanted = ("text", "messages", "conversations") if text_field == "text" else (text_field,)
    return next((name for name in wanted if name in names), None)
