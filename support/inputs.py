"""From files, folders and patterns to documents, in pieces that a tokenizer can take alone: what
prepare_data.py --input reads. A document is a file, a line of .jsonl or a row of .parquet. Files
that hold no text are known by their first bytes, and left out."""

import gzip
import io
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from glob import escape, glob
from itertools import chain
from typing import BinaryIO

PIECE = 1 << 18  # bytes of text that are read at a time; one to two of them are encoded at a time
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # files of many documents

# --------------------------------------------------------------------------------------------------
# Files


def standard_library() -> list[str]:
    """The source of the Python that runs this: the corpus that every machine has, about 30 MB."""
    root = sysconfig.get_path("stdlib")
    return [f for f in files_in([root]) if f.endswith(".py") and "-packages" not in f[len(root) :]]


def files_in(inputs: list[str]) -> list[str]:
    """What files, folders and patterns name, each once; a folder's sorted, without hidden ones."""
    files = []
    for name in inputs:
        found = sorted(matches(name)) or glob(escape(name))
        if not found:
            raise FileNotFoundError(f"--input {name} does not exist")
        for path in found:
            files += sorted(matches(f"{escape(path)}/**")) if os.path.isdir(path) else [path]
    return list({os.path.realpath(file): file for file in files if os.path.isfile(file)}.values())


def matches(pattern: str) -> list[str]:
    """What glob finds, which would follow links that go in circles for ever: ** here enters each
    folder once."""
    head, *rest = re.split(r"(?<![^/])\*\*(?:/|$)", pattern.replace(os.sep, "/"), maxsplit=1)
    if not rest:
        return glob(pattern)
    found = (folder for top in glob(head or ".") for folder in folders(top))
    within = [f"{escape(folder.rstrip('/'))}/{rest[0] or '*'}" for folder in found]
    return [path for pattern in within for path in matches(pattern)]


def folders(top: str) -> Iterator[str]:
    """A folder and those in it, at any depth, without hidden ones, each once whatever links there
    are to it."""
    seen = set()
    for folder, names, _ in os.walk(top, followlinks=True):
        if (real := os.path.realpath(folder)) not in seen:
            yield folder
        names[:] = sorted(name for name in names if name[0] != "." and real not in seen)
        seen.add(real)


# --------------------------------------------------------------------------------------------------
# Their documents


@dataclass
class Tally:
    """What is told at the end of a whole input."""

    skipped: Counter = field(default_factory=Counter)  # documents, by reason
    not_utf8: Counter = field(default_factory=Counter)  # bytes, and the documents they are in


HEAD_BYTES = 8000  # in which git, too, looks for a NUL byte
MAGIC_BYTES = {  # of files in which a NUL may come later, or that need another word
    b"%PDF-": "PDF", b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF",
    b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"BZh91AY&SY": "bzip2",
    b"\x93NUMPY": "npy", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip


def no_text(begin: bytes) -> str:
    """What a file that begins so holds instead of text in UTF-8; none: it may be text."""
    kinds = (kind for magic, kind in MAGIC_BYTES.items() if begin.startswith(magic))
    has_nul = b"\0" in begin[:HEAD_BYTES]
    return next(kinds, "binary or UTF-16 (a NUL byte)" if has_nul else "")


def count_not_utf8(text: bytes) -> int:
    """How many bytes of text are not UTF-8."""
    try:
        text.decode()
        return 0
    except UnicodeDecodeError:
        return len(text) - len(text.decode(errors="ignore").encode())


def utf8(text) -> bytes | None:
    """What a record has under --text-field; None if that is no text. Half a surrogate pair becomes
    U+FFFD, as in tiktoken."""
    if not isinstance(text, str):
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def json_text(line: bytes, text_field: str) -> bytes | None:
    try:
        return utf8(json.loads(line)[text_field])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def texts_in(raw: BinaryIO, text_field: str) -> Iterator[bytes | None]:
    """The text of each line or row of an open file, or the file itself, in blocks."""
    stream = raw
    try:
        if raw.name.endswith(".gz"):
            stream = gzip.open(raw)
        if raw.name.endswith(".zst"):
            import pyarrow

            stream = io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
        if raw.name.endswith(".parquet"):
            import pyarrow.parquet

            table = pyarrow.parquet.ParquetFile(raw, buffer_size=PIECE)
            for rows in table.iter_batches(64, columns=[text_field]):
                yield from map(utf8, rows.column(text_field).to_pylist())
        elif raw.name.endswith(RECORDS):
            yield from (json_text(line, text_field) for line in stream)
        else:
            yield from iter(partial(stream.read, PIECE), b"")
    except Exception as error:  # each library has its own
        cure = f": pip install {error.name}" if isinstance(error, ImportError) else ""
        raise ValueError(f"--input {raw.name} can't be read: {error}{cure}") from error


def read(files: list[str], text_field: str, skipped: Counter) -> Iterator[Iterable[bytes]]:
    """Each document as blocks of UTF-8. Records without text are counted in skipped, with the
    number of a file's first, and files without, with the first of their kind."""
    firsts = {}
    for file in files:
        with open(file, "rb") as raw:
            texts = texts_in(raw, text_field)
            if file.endswith(RECORDS):
                why = f"no text under --text-field {text_field} in {file}"
                yield from each_alone(texts, why, skipped)
            elif kind := no_text(begin := next(texts, b"")):
                skipped[firsts.setdefault(kind, f"{kind} instead of UTF-8 text, first {file}")] += 1
            else:
                yield chain([begin], texts)


def each_alone(texts: Iterable[bytes | None], why: str, skipped: Counter) -> Iterator[list[bytes]]:
    first = None
    for n, text in enumerate(texts, 1):
        if text is None:
            first = first or f"{why}, first in line {n:,}"
            skipped[first] += 1
        else:
            yield [text]


# Where GPT-2's pattern begins a token, whatever comes before and after: at a space or line end that
# follows something visible, and at the last one of several before something visible. Left out are
# the bytes that end or begin a space of several bytes, such as U+00A0, but other letters too.
BOUNDARY = re.compile(rb"(?<![\s\x80-\x8a\x9f\xa0\xa8\xa9\xaf])\s|(?<=\s)\s(?=[^\s\xc2\xe1-\xe3])")


def pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """A document in pieces of about PIECE bytes, cut where no token spans the cut: their tokens
    are the document's, and a document of any length takes little memory."""
    text, enough = bytearray(), 2 * PIECE
    for block in blocks:
        text += block
        while len(text) >= enough:
            if cut := BOUNDARY.search(text, PIECE):
                yield bytes(text[: cut.start()])
                del text[: cut.start()]
            enough = 2 * PIECE if cut else 2 * len(text)
    if text:
        yield bytes(text)


def sample(files: list[str], text_field: str) -> tuple[int, bytes]:
    """About how many bytes of text the files hold, and some of it."""
    sizes = {file: os.path.getsize(file) for file in files}
    size, text, some = 0, 0.0, b""
    for file in sorted(files, key=sizes.get)[:: -1 - len(files) // 16]:  # the largest among them
        begin, num_read = beginning(file, text_field)
        begin = b"" if no_text(begin) and not file.endswith(RECORDS) else begin
        size, text = size + sizes[file], text + len(begin) * sizes[file] / max(num_read, 1)
        some += begin[: 1 << 15]
    return int(text * sum(sizes.values()) / max(size, 1)), some


def beginning(file: str, text_field: str) -> tuple[bytes, int]:
    """Much more text than a decompressor reads ahead, and how many bytes of the file it is."""
    begin = bytearray()
    with open(file, "rb") as raw:
        for text in texts_in(raw, text_field):
            begin += text or b""
            if len(begin) > 16 * PIECE:
                return bytes(begin), raw.tell()
    return bytes(begin), os.path.getsize(file)
