"""Reads the documents in the files, folders and patterns of prepare_data.py --input.

A document is a text, or a record: an object or array element of JSON, or a row of a table. Only one
record, or a part of a text, is in memory at a time. An Account counts what was read, skipped and
assumed.
"""

import io
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prepare.cli import quoted
from prepare.ending import DISK_ERRNOS, UserError
from prepare.files import did_you_mean
from prepare.formats import PIECE, Source, blocks_of, field_in, records, sources

RECORDS_NAME = re.compile(r"\.(jsonl|ndjson|jl|csv|tsv|parquet|arrow)(\.gz|\.bz2|\.xz|\.zst)?$")
ABOUT_NAME = re.compile(  # what publishers put beside the records of a data set
    r"(readme|licen[cs]e|copying|notice|citation|datapackage|croissant|dataset[-_]metadata|"
    r"dataset_infos?|dataset_dict|state)(\.(md|txt|rst|json|ya?ml|cff))?$"
)


@dataclass
class Account:
    """Counts what became of the input. Each file is read or skipped. Each record becomes a document
    or is skipped; a text is one record."""

    files: int = 0
    files_skipped: int = 0
    records: int = 0
    records_skipped: int = 0
    documents: int = 0
    text_bytes: int = 0
    notes: dict[str, list] = field(default_factory=dict)  # what -> [count, first place]

    def note(self, what: str, where: str):
        self.notes.setdefault(what, [0, where])[0] += 1

    def skip_file(self, why: str, where: str):
        self.files += 1
        self.files_skipped += 1
        self.note(f"file skipped, {why}", where)

    def skip_record(self, why: str, where: str):
        self.records_skipped += 1
        self.note(f"record skipped, {why}", where)

    def lines(self) -> list[str]:
        return [f"{what}: {n:,}, the first: {where}" for what, (n, where) in self.notes.items()]


def standard_library() -> list[str]:
    """Return the standard library's .py files: 30 MB that every machine has."""
    files: list[str] = []
    for folder, names, children in os.walk(sysconfig.get_path("stdlib")):
        names[:] = [name for name in names if not name.endswith("-packages")]  # installed by pip
        files += [os.path.join(folder, child) for child in children if child.endswith(".py")]
    return sorted(filter(os.path.isfile, files))


def files_in(inputs: Iterable[str], account: Account) -> list[str]:
    """Return the files that inputs name, each once. Files in a folder or pattern are sorted. Count
    what is left out. Raise UserError if a name matches no file."""
    files: dict[str, str] = {}  # by real path, to drop duplicates
    for name in inputs:
        path = Path(name)
        tops = [path] if os.path.lexists(name) else []
        if name and not tops:
            with suppress(ValueError, OSError):  # an invalid pattern, or a name that is too long
                # Unlike glob.glob, Path.glob does not follow links, which may go in circles.
                tops = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        candidates: set[str] = set()
        for top in tops:
            if {part for part in top.parts if part[0] == "."} <= {*path.parts}:
                candidates.update(files_below(top, account) if os.path.isdir(top) else [str(top)])
        if not any(map(os.path.isfile, candidates)):
            what = "it holds no file" if tops else f"there is no such file{did_you_mean(name)}"
            raise UserError(f"--input {quoted(name)}: {what}")
        for file in sorted(candidates):
            if not os.path.isfile(file):
                account.skip_file("a broken link, pipe or device", file)
                continue
            first = files.setdefault(os.path.realpath(file), file)
            if first != file:
                account.skip_file("the same as another file", f"{file} (read as {first})")
    return list(files.values())


def files_below(top: Path, account: Account) -> list[str]:
    """Return the files in a folder and its subfolders. Leave out hidden ones, links to folders, and
    what lies beside records and is about them."""
    files: list[str] = []

    def skip(error: OSError):
        account.skip_file(f"the folder can't be read: {error.strerror}", str(error.filename))

    for folder, names, children in os.walk(top, onerror=skip):
        for name in sorted(names + children):
            path = os.path.join(folder, name)
            if name[0] == ".":  # .git has many files
                account.skip_file("hidden", path)
            elif name in children:
                files.append(path)
            elif os.path.islink(path):
                account.skip_file("a link to a folder", path)
        names[:] = sorted(name for name in names if name[0] != ".")
    if any(RECORDS_NAME.search(file.lower()) for file in files):
        for file in sorted(files):
            if ABOUT_NAME.match(os.path.basename(file).lower()):
                account.skip_file("about the records beside it (name it to read it)", file)
                files.remove(file)
    return files


def paragraphs(items: list) -> str | None:
    """Return a list of texts, or of a chat's messages, as one text, or None if it is neither."""
    texts: list[str] = []
    for item in items:
        parts = [item]
        if isinstance(item, dict):
            parts = [item.get("role", item.get("from")), item.get("content", item.get("value"))]
        if not all(isinstance(part, str) for part in parts):
            return None
        texts.append(": ".join(parts))
    return "\n\n".join(texts)


def shown(value: Any) -> str:
    """Return what a value is, for example "a list of {role, content}"."""
    if isinstance(value, list) and value:
        return f"a list of {shown(value[0])}"
    if isinstance(value, dict):
        return f"{{{', '.join(map(str, value))}}}"
    return "null" if value is None else type(value).__name__


@dataclass
class Reader:
    """Reads the documents in files, in order."""

    files: list[str]
    text_field: str = "text"
    encoding: str = ""  # "": find each file's
    account: Account = field(default_factory=Account)
    sources: dict[str, list[Source]] = field(default_factory=dict)  # examined so far, by file
    position: int = 0  # bytes read so far
    has_field: bool = False  # whether a record has the field for text

    def again(self) -> "Reader":
        """Return a reader of the same files that begins anew."""
        return replace(self, account=Account(), position=0, has_field=False)

    def check_flags(self):
        """Raise UserError if --encoding is unknown, or if no record has the field --text-field."""
        try:
            io.TextIOWrapper(io.BytesIO(), self.encoding or "utf-8")
        except (LookupError, ValueError) as error:
            raise UserError(f"--encoding {self.encoding}: {error}") from error
        reader = self.again()
        if self.text_field == "text" or any(reader.has_field for _ in reader.documents()):
            return
        if not reader.has_field:
            why = "; ".join([*reader.account.lines(), "leave it out if no file has records"])
            raise UserError(f"--text-field {self.text_field} has no effect: {why}")

    def documents(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield each document's size in bytes and its text in blocks of bytes. Raise UserError for
        a damaged file."""
        for path in self.files:
            start = self.position
            try:
                if path not in self.sources:
                    self.sources[path] = sources(path, self.text_field, self.encoding)
                for source in self.sources[path]:
                    for size, blocks in self.documents_in(source, start):
                        self.account.documents += size > 0
                        self.account.text_bytes += size
                        yield size, blocks
            except Exception as error:  # each library has its own exceptions
                if isinstance(error, ImportError) or getattr(error, "errno", None) in DISK_ERRNOS:
                    raise
                raise UserError(f"--input {path} can't be read: {error}") from error
            self.position = start + os.path.getsize(path)

    def documents_in(self, source: Source, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        for what in source.notes:
            self.account.note(what, str(source))
        if source.skipped:
            self.account.skip_file(source.skipped, str(source))
            if source.skipped == "empty":
                yield 0, iter(())  # it takes a number, so validation documents stay the same
            return
        self.account.files += 1
        num_before = self.account.records
        if source.kind == "text":
            self.account.records += 1
            yield source.size, source.blocks()
            return
        with source.opened() as (disk, stream):
            for record, where in records(source, stream, self.text_field):
                self.account.records += 1
                text = self.text_of(record, where)
                if text is not None:
                    content = text.encode()
                    yield len(content), blocks_of(io.BytesIO(content))
                self.position = start + disk.tell()
        if self.account.records == num_before:
            self.account.note("holds no record", str(source))

    def text_of(self, record: Any, where: str) -> str | None:
        """Return the text of a record, or None if it has none. Note any problem with it."""
        if isinstance(record, ValueError):
            self.account.skip_record(str(record), where)
            return None
        value, no_text = record, f"no text in the field {self.text_field}"
        if isinstance(record, dict):
            name = field_in(record, self.text_field)
            if name is None:
                where += f" (its fields: {', '.join(map(str, record))}; name one with --text-field)"
                self.account.skip_record(no_text, where)
                return None
            self.has_field = True
            value, no_text = record[name], f"no text in the field {name}"
        if isinstance(value, list) and (text := paragraphs(value)):
            self.account.note("assumed a list to be paragraphs", f"{where}, {shown(value)}")
            value = text
        if not isinstance(value, str) or not value:
            self.account.skip_record(no_text, f"{where}, which holds {shown(value)}")
            return "" if value == "" else None  # an empty text takes a number
        whole = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if whole != value:
            self.account.note("kept, with half a surrogate pair as U+FFFD", where)
        return whole


# GPT-2's pattern always begins a token at white space after a visible character, and at the last of
# several white-space characters before a visible one. We exclude bytes that end or begin multi-byte
# white space, such as U+00A0, although those bytes occur in other characters too.
BOUNDARY = re.compile(rb"(?<![\s\x80-\x8a\x9f\xa0\xa8\xa9\xaf])\s|(?<=\s)\s(?=[^\s\xc2\xe1-\xe3])")


def pieces(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a document in pieces of about PIECE bytes, to take little memory. No token spans a cut,
    so the pieces have the same tokens as the whole document."""
    text = bytearray()
    for block in blocks:
        start = max(PIECE, len(text) - 1)  # BOUNDARY looks one byte ahead
        text += block
        while cut := BOUNDARY.search(text, start):
            yield bytes(text[: cut.start()])
            del text[: cut.start()]
            start = PIECE
    if text:
        yield bytes(text)
