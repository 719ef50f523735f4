"""Turn text into token shards that train_gpt2.py reads, or download such shards.

    python prepare_data.py                                           # Python's own source, as bytes
    python prepare_data.py --input book.txt --data-dir data/book
    python prepare_data.py --input notes/ 'web/*.jsonl.gz' --data-dir data/web --tokenizer gpt2
    python prepare_data.py --download fineweb-edu --shards 10
    python prepare_data.py --multiple-choice arc.jsonl --data-dir data/arc --tokenizer gpt2
    python prepare_data.py --verify --data-dir data/web

A document is a file, a line of .jsonl or a row of .parquet; each begins with <|endoftext|>. The
same input gives the same bytes on disk, with any number of workers, and however often the command
was killed and repeated: the shards grow in DATA_DIR.unfinished, whose manifest says how far they
are; what it counts is checked before they grow on; if it is damaged, all is made again. The folder
gets its name when it is whole.
"""

import gzip
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import zlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from glob import escape, glob
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

import numpy as np
from tqdm import tqdm

import dataloader
from dataloader import CHUNK, HEADER_BYTES, MANIFEST, TOKEN, Shard, open_shard
from support.files import DISK_ERRORS, locked, own_file, whole_file
from support.questions import check_absent, examples_of, write_examples

PIECE = 1 << 18  # bytes of text that are read at a time; one to two of them are encoded at a time
RANGES = {"shard-tokens": (1024, 2**31 - 1), "val-fraction": (0, 0.5), "workers": (0, 61)}
RANGES |= {"seed": (-(2**63), 2**64 - 1)}
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # files of many documents
BAR = {"unit": "B", "unit_scale": True, "disable": None}  # shown where there is a terminal
TRIES, PAUSE_S, TIMEOUT_S = 6, 1, 30  # of a download; the pause doubles with each try
CORPORA = {  # where others published their shards, how these are called, how many for training
    "fineweb-edu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb", 1001),
    "fineweb": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
}

# --------------------------------------------------------------------------------------------------
# Documents


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
    return [
        path
        for folder in found
        for path in matches(f"{escape(folder.rstrip('/'))}/{rest[0] or '*'}")
    ]


def folders(top: str) -> Iterator[str]:
    """A folder and those in it, at any depth, without hidden ones, each once whatever links there
    are to it."""
    todo, seen = [top], set()
    while todo:
        folder = todo.pop()
        if (real := os.path.realpath(folder)) not in seen and os.access(folder, os.R_OK | os.X_OK):
            seen.add(real)
            yield folder
            names = sorted(f"{entry.name}/" for entry in os.scandir(folder) if os.path.isdir(entry))
            todo += [os.path.join(folder, n[:-1]) for n in names[::-1] if n[0] != "."]


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


def documents(files: list[str], text_field: str, skipped: Counter) -> Iterator[Iterable[bytes]]:
    """Each document as blocks of UTF-8; a record without text is counted in skipped."""
    for file in files:
        with open(file, "rb") as raw:
            texts = texts_in(raw, text_field)
            if file.endswith(RECORDS):
                why = f"no text under --text-field {text_field} in {file}"
                yield from each_alone(texts, why, skipped)
            else:
                yield texts


def each_alone(texts: Iterable[bytes | None], why: str, skipped: Counter) -> Iterator[list[bytes]]:
    """Those that are text; the others are counted, with the number of the first."""
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


@dataclass
class Batch:
    """About 2 * PIECE bytes of text, of one document or many, for one split."""

    split: str
    crc32: int = 0  # of all text read so far
    size: int = 0  # bytes
    parts: list[tuple[bool, bytes]] = field(default_factory=list)  # does a document begin?, text


def batches(texts: Iterable[Iterable], args: Namespace, skipped: Counter) -> Iterator[Batch]:
    """The documents, in order. Each one's split is drawn; the first is for training."""
    flags = args.tokenizer, args.shard_tokens, args.val_fraction, args.seed, args.text_field
    rng, crc, split = random.Random(args.seed), zlib.crc32(repr(flags).encode()), None
    growing = {"train": Batch("train"), "val": Batch("val")}
    for blocks in texts:
        split = "val" if split and rng.random() < args.val_fraction else "train"
        begins = True
        for piece in pieces(blocks):
            batch, crc = growing[split], zlib.crc32(piece, crc)
            batch.parts.append((begins, piece))
            batch.crc32, batch.size, begins = crc, batch.size + len(piece), False
            if batch.size >= 2 * PIECE:
                yield batch
                growing[split] = Batch(split)
        if begins:
            skipped["empty"] += 1
    for batch in growing.values():
        batch.crc32 = crc
        yield batch


# --------------------------------------------------------------------------------------------------
# Tokenizers


@dataclass(frozen=True)
class Tokenizer:
    name: str
    encode: Callable[[bytes], np.ndarray]  # text to its tokens
    lengths: np.ndarray  # bytes of each token; 0 for <|endoftext|>, the last
    sha256: str  # of the vocabulary


@lru_cache
def bytes_tokenizer() -> Tokenizer:
    """Each byte is a token, 256 is <|endoftext|>: any text, and nothing to download."""
    encode = partial(np.frombuffer, dtype=np.uint8)
    sha256 = hashlib.sha256(bytes(range(256))).hexdigest()
    return Tokenizer("bytes", encode, np.array([1] * 256 + [0], np.uint8), sha256)


@lru_cache
def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's byte-pair encoding. tiktoken downloads its vocabulary once and checks its SHA-256."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as error:  # what requests raises without a network, in a hundred ways
        urls = " and ".join(dataloader.VOCAB_URLS)
        names = " and ".join(path.name for path in dataloader.missing_vocab())
        cure = (
            f"fetch them elsewhere, name them {names}, and set TIKTOKEN_CACHE_DIR to their folder"
        )
        why = f"--tokenizer gpt2: no network to fetch {urls}; {cure}, or use --tokenizer bytes"
        raise OSError(why) from error

    def encode(text: bytes) -> np.ndarray:
        # special text in a document is ordinary text
        return encoding.encode_to_numpy(text.decode(errors="replace"), disallowed_special=())

    vocabulary = [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)]
    sha256 = hashlib.sha256(b"".join(vocabulary)).hexdigest()
    return Tokenizer("gpt2", encode, np.array([*map(len, vocabulary), 0], np.uint8), sha256)


TOKENIZERS = {"bytes": bytes_tokenizer, "gpt2": gpt2_tokenizer}


def encode(tokenizer: str, batch: Batch) -> np.ndarray:
    """The tokens of a batch, uint16."""
    encode, tokens = TOKENIZERS[tokenizer]().encode, [np.empty(0, TOKEN)]
    end_of_text = np.array([dataloader.VOCAB_SIZES[tokenizer] - 1], TOKEN)
    for begins, text in batch.parts:
        tokens += [end_of_text] * begins + [encode(text)]
    return np.concatenate(tokens, dtype=TOKEN, casting="unsafe")


def follow_parent():
    """Leave Ctrl-C to the parent, and end when it ends, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def in_order(todo: Iterator[Batch], tokenizer: str, workers: int) -> Iterator[tuple]:
    """Each batch with its tokens. A few more are on their way than there are workers, so that none
    of them waits; 0 workers: this process does the work."""
    if not workers:
        yield from ((batch, encode(tokenizer, batch)) for batch in todo)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), follow_parent) as pool:
        started = deque()
        for batch in todo:
            started.append((batch, pool.submit(encode, tokenizer, batch)))
            if len(started) > 4 * workers:
                batch, tokens = started.popleft()
                yield batch, tokens.result()
        yield from ((batch, tokens.result()) for batch, tokens in started)


# --------------------------------------------------------------------------------------------------
# Shards


def describe(shard: Shard) -> dict:
    """What the manifest says of a shard, found by reading it."""
    n, size, largest_id = shard.num_tokens, shard.path.stat().st_size, shard.largest_id()
    crcs = [zlib.crc32(shard.read(i, min(CHUNK, n - i))) for i in range(0, n, CHUNK)]
    entry = {"name": shard.path.name, "bytes": size, "tokens": n, "largest_id": largest_id}
    return entry | {"chunk_crc32": b64encode(np.array(crcs, "<u4")).decode()}


def check_shard(folder: Path, entry: dict):
    """OSError or ValueError unless the shard in folder is, to the byte, what entry says: its tokens
    by their CRCs, and its header, of which a trainer reads three numbers alone."""
    found = describe(shard := dataloader.open_entry(folder, entry))  # reading checks the CRCs
    with open(shard.path, "rb") as f:
        own_header = f.read(HEADER_BYTES) == dataloader.shard_header(shard.num_tokens)
    if "sha256" in entry:  # a download's
        found["sha256"] = sha256_of(shard.path)
    elif not own_header:
        raise ValueError(f"{shard.path} has another header than it was written with")
    if wrong := [f"{k} is {v}, not {entry[k]}" for k, v in found.items() if v != entry[k]]:
        raise ValueError(", ".join(wrong))


def read_manifest(folder: Path) -> dict:
    """What folder's manifest says; of one that has none, that nothing is there."""
    try:
        return dataloader.read_manifest(folder)
    except FileNotFoundError:
        return {"train": {"shards": []}, "val": {"shards": []}}


def save_manifest(folder: Path, content: dict):
    content = content | {"crc32": dataloader.content_crc32(content)}
    with whole_file(folder / MANIFEST) as f:
        f.write(json.dumps(content, indent=1).encode())


def crc32_of(path: Path, num_tokens: int) -> int:
    """Of the first num_tokens of a shard, or of those that are there."""
    crc32, left = 0, num_tokens * TOKEN.itemsize
    with open(path, "rb") as f:
        f.seek(HEADER_BYTES)
        while block := f.read(min(left, 1 << 20)):
            crc32, left = zlib.crc32(block, crc32), left - len(block)
    return crc32


ACCOUNT = ("documents", "bytes", "tokens", "shards", "crc32")  # the last of a growing split only


@dataclass
class Split:
    """A stream of tokens that goes into shards as it comes, and the manifest's account of it."""

    folder: Path
    name: str
    shard_tokens: int
    documents: int = 0
    bytes: int = 0  # of text
    tokens: int = 0
    shards: list[dict] = field(default_factory=list)  # the finished ones
    crc32: int = 0  # of the tokens of the growing one

    def account(self) -> dict:
        """What the manifest says, once all of it is on the disk."""
        path, fill = self.growing()
        if fill > 0:
            with open(path, "r+b") as f:
                os.fsync(f.fileno())
        return {name: getattr(self, name) for name in ACCOUNT[: 5 if fill else 4]}

    def growing(self) -> tuple[Path, int]:
        """The shard that is not finished, and the tokens in it."""
        path = self.folder / f"{self.name}_{len(self.shards):06d}.bin"
        return path, self.tokens - sum(entry["tokens"] for entry in self.shards)

    def check(self):
        """ValueError if a finished shard is not what its entry says."""
        for entry in self.shards:
            try:
                check_shard(self.folder, entry)
            except (OSError, ValueError):
                raise ValueError(f"{self.folder / entry['name']} is damaged") from None
        self.check_growing()

    def check_growing(self):
        """ValueError if the growing shard does not hold what was written into it."""
        path, fill = self.growing()
        if fill and not (path.is_file() and crc32_of(path, fill) == self.crc32):
            raise ValueError(f"{path} is damaged")

    def append(self, tokens: np.ndarray, documents: int, size: int) -> bool:
        """Write tokens behind those that count, over what a killed run may have left there. True
        if that finished a shard."""
        self.documents, self.bytes = self.documents + documents, self.bytes + size
        num_finished = len(self.shards)
        while len(tokens):
            path, fill = self.growing()
            part, tokens = np.split(tokens, [self.shard_tokens - fill])
            mode = "r+b" if path.exists() else "wb"
            with open(path, mode, opener=own_file) as f:
                f.seek(HEADER_BYTES + fill * TOKEN.itemsize)
                f.write(part.data)
            self.tokens, self.crc32 = self.tokens + len(part), zlib.crc32(part.data, self.crc32)
            if fill + len(part) == self.shard_tokens:
                self.finish()
        return len(self.shards) > num_finished

    def finish(self):
        """Give the growing shard, if it holds anything, its header and its entry."""
        path, fill = self.growing()
        if fill:
            self.check_growing()
            with open(path, "r+b") as f:
                f.write(dataloader.shard_header(fill))
                f.truncate(HEADER_BYTES + fill * TOKEN.itemsize)
                os.fsync(f.fileno())
            self.shards.append(describe(open_shard(path)))
            self.crc32 = 0
        self.growing()[0].unlink(missing_ok=True)  # give_end gave it

    def give_end(self, other: "Split", lengths: np.ndarray):
        """Hand the growing shard over to other; if it is the only one, or less than a tenth of one,
        with the last tenth of the shard before it."""
        self.check_growing()
        tenth = self.shard_tokens // 10
        ends = [self.cut(0 if self.shards else self.tokens - self.tokens // 10)]
        if self.shards and len(ends[0]) < tenth:
            self.shards.pop()
            ends.insert(0, self.cut(self.shard_tokens - tenth))
        for tokens in ends:
            documents, size = int((lengths[tokens] == 0).sum()), int(lengths[tokens].sum())
            self.documents, self.bytes = self.documents - documents, self.bytes - size
            other.append(tokens, documents, size)

    def cut(self, keep: int) -> np.ndarray:
        """The tokens of the growing shard behind the first keep, which count no longer."""
        path, fill = self.growing()
        if not fill:
            return np.empty(0, TOKEN)
        tokens = Shard(path, HEADER_BYTES, fill).read(keep, fill - keep)
        self.tokens, self.crc32 = self.tokens - len(tokens), crc32_of(path, keep)
        return tokens


def kept(folder: Path, shard_tokens: int) -> tuple[Split, Split, list[int]]:
    """What folder has of each split, and of how much of the input; ValueError if it is damaged."""
    manifest, splits = read_manifest(folder), []
    for name in ("train", "val"):
        account = {key: value for key, value in manifest[name].items() if key in ACCOUNT}
        splits.append(Split(folder, name, shard_tokens, **account))
        splits[-1].check()
    return *splits, manifest.get("input", [0, 0])


def go_on(folder: Path, shard_tokens: int) -> tuple[Split, Split, list[int]]:
    """As kept; if any of it is damaged, or an older version's, all is made again."""
    try:
        return kept(folder, shard_tokens)
    except ValueError as error:
        complain(f"{error}; begins again")
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink()
    return kept(folder, shard_tokens)


def skip_done(todo: Iterator[Batch], done: int, crc32: int, folder: Path, bar: tqdm):
    """Read again the batches that are done; ValueError if they are not what they were."""
    batch = Batch("", crc32)
    for batch in islice(todo, done):
        bar.update(batch.size)
    if batch.crc32 != crc32:
        why = f"{folder} was begun with other input or other flags"
        raise ValueError(f"{why}: repeat those, or remove the folder")


def show(bar: tqdm, size: int, train: Split, val: Split):
    bar.update(size)
    documents, tokens = train.documents + val.documents, train.tokens + val.tokens
    rate = (bar.format_dict["rate"] or 0) * tokens / max(train.bytes + val.bytes, 1)
    text = f"{documents:,} documents, {tokens / 1e6:,.1f}M tokens, {rate / 1e6:.1f}M tokens/s"
    bar.set_postfix_str(text, refresh=False)


def write_folder(folder: Path, files: list[str], args: Namespace, bar: tqdm) -> Counter:
    """Write into folder what is not there yet of the files' shards, and the manifest, whose input
    says how much of the text they hold. Returns how many documents were skipped, by reason."""
    tokenizer, skipped = TOKENIZERS[args.tokenizer](), Counter()
    train, val, (done, crc32) = go_on(folder, args.shard_tokens)

    def save():
        account = {"train": train.account(), "val": val.account(), "input": (done, crc32)}
        about = {"name": tokenizer.name, "sha256": tokenizer.sha256}
        save_manifest(folder, {"tokenizer": about, **account})

    todo = batches(documents(files, args.text_field, skipped), args, skipped)
    skip_done(todo, done, crc32, folder, bar)
    for batch, tokens in in_order(todo, args.tokenizer, args.workers):
        split = train if batch.split == "train" else val
        done, crc32 = done + 1, batch.crc32
        if split.append(tokens, sum(begins for begins, _ in batch.parts), batch.size):
            save()
        show(bar, batch.size, train, val)
    if not val.tokens and train.tokens:
        train.give_end(val, tokenizer.lengths)
    if min(train.tokens, val.tokens) < 2:  # an input and its target
        why = f"{train.tokens} tokens for training and {val.tokens} for validation"
        why += "".join(f", {count:,} skipped: {cause}" for cause, count in skipped.most_common(1))
        raise ValueError(f"the input has {why}: name more with --input, or a higher --val-fraction")
    save()  # before the shards that counted more are cut
    train.finish()
    val.finish()
    save()
    return skipped


def prepare_questions(args: Namespace):
    """Write the questions of all files into one in args.data_dir, under the first one's name. llm.c
    reads it if each has 4 choices, train_gpt2.py any number from 2."""
    path = args.data_dir / f"{Path(args.multiple_choice[0]).stem}.bin"
    check_absent(path)
    tokenizer = TOKENIZERS[args.tokenizer]()
    encode = lambda text: tokenizer.encode(utf8(text)).astype(TOKEN)  # noqa: E731
    examples, rows = examples_of(args.multiple_choice, encode)
    write_examples(path, rows)
    tokens = sum(len(text) for e in examples for text in (e.context, *e.choices))
    longest = max(len(e.context) + max(map(len, e.choices)) for e in examples)
    choices = " or ".join(str(n) for n in sorted({len(e.choices) for e in examples}))
    print(
        f"{len(rows):,} examples of {choices} choices, {tokens:,} tokens ({tokenizer.name}), the"
        f" longest {longest:,}: python train_gpt2.py ... --hellaswag {shlex.quote(str(path))}"
    )


# --------------------------------------------------------------------------------------------------
# Commands


def beginning(texts: Iterable[bytes | None]) -> bytes:
    """Much more text than a decompressor reads ahead."""
    begin = bytearray()
    for text in texts:
        begin += text or b""
        if len(begin) > 16 * PIECE:
            break
    return bytes(begin)


def sample(files: list[str], text_field: str) -> tuple[int, bytes]:
    """About how many bytes of text the files hold, and some of it."""
    sizes = {file: os.path.getsize(file) for file in files}
    size, text, some = 0, 0.0, b""
    for file in sorted(files, key=sizes.get)[:: -1 - len(files) // 16]:  # the largest among them
        with open(file, "rb") as raw:
            texts = texts_in(raw, text_field)
            begin = beginning(texts)
            read = sizes[file] if raw.closed else raw.tell()  # a reader closes it at the end
            texts.close()
        size, text = size + sizes[file], text + len(begin) * sizes[file] / max(read, 1)
        some += begin[: 1 << 15]
    return int(text * sum(sizes.values()) / max(size, 1)), some


def dry_run(files: list[str], args: Namespace):
    """Print what preparing the files will take."""
    size, some = sample(files, args.text_field)
    tokenizer = TOKENIZERS[args.tokenizer]()
    start = time.perf_counter()
    num_tokens = len(tokenizer.encode(some)) * size / max(len(some), 1)
    seconds = (time.perf_counter() - start) * size / max(len(some), 1) / max(args.workers, 1)
    print(
        f"about {size / 1e6:,.1f} MB of text in {len(files):,} files, {num_tokens / 1e6:,.1f}M"
        f" tokens, {num_tokens * TOKEN.itemsize / 1e6:,.1f} MB of disk, {seconds:,.0f} s"
    )


def prepare(args: Namespace):
    """Write args.data_dir, under another name until it is whole."""
    files = files_in(args.input) if args.input else standard_library()
    if args.dry_run:
        return dry_run(files, args)
    folder = args.data_dir.with_name(f"{args.data_dir.name}.unfinished")
    files = [f for f in files if folder.absolute() not in Path(f).absolute().parents]
    size, _ = sample(files, args.text_field)
    check_own(folder)
    with locked(folder), tqdm(total=size, **BAR) as bar:
        try:
            if args.data_dir.exists():
                raise FileExistsError(f"--data-dir {args.data_dir} exists; name another")
            skipped = write_folder(folder, files, args, bar)
        finally:
            if not (folder / MANIFEST).exists():  # no shard is whole: nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
    folder.rename(args.data_dir)
    (args.data_dir / "lock").unlink()
    report(args.data_dir, skipped)


def check_own(folder: Path):
    """FileExistsError if folder holds what this program did not write: it is not to be lost."""
    own = re.compile(r"lock|manifest\.json(\.tmp)?|(train|val)_\d{6,}\.bin")
    for name in os.listdir(folder) if folder.is_dir() else ():
        if not own.fullmatch(name):
            raise FileExistsError(f"{folder / name} is in the way: move it, or name another folder")


def report(folder: Path, skipped: Counter):
    for name in ("train", "val"):
        account = read_manifest(folder)[name]
        num_shards, text = len(account.pop("shards")), account.get("bytes", 0)
        counts = ", ".join(f"{value:,} {key}" for key, value in account.items())
        ratio = f" ({text / account['tokens']:.2f} bytes per token)" if text and num_shards else ""
        print(f"{name}: {counts}{ratio}, {num_shards} shards")
    for why, count in skipped.items():
        print(f"skipped: {count:,} documents, {shown(why)}")
    print(f"ready: python train_gpt2.py --data-dir {shlex.quote(str(folder))}")


def verify(args: Namespace):
    """Read every shard again and compare it with the manifest; ValueError if one is amiss."""
    manifest, num_damaged = read_manifest(args.data_dir), 0
    entries = manifest["train"]["shards"] + manifest["val"]["shards"]
    if not entries:
        raise ValueError(f"{args.data_dir / MANIFEST} is missing: name a folder prepared here")
    for entry in entries:
        verdict = "good"
        try:
            check_shard(args.data_dir, entry)
        except (OSError, ValueError, LookupError) as error:
            num_damaged, verdict = num_damaged + 1, error
        print(f"{entry['name']}: {shown(verdict)}")
    if num_damaged:
        which = f"{num_damaged} of the {len(entries)} shards that {args.data_dir / MANIFEST} names"
        raise ValueError(f"{which} are damaged: move them away, and prepare or download them again")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_rest(url: str, path: Path) -> Path:
    """Download what is missing of path.VERSION.part, or all if url has another version by now."""
    import requests  # tiktoken brings it

    parts, headers = list(path.parent.glob(f"{path.name}.*.part")), {"Accept-Encoding": "identity"}
    for part in parts:
        version = unquote(part.name.removeprefix(f"{path.name}.").removesuffix(".part"))
        headers |= {"Range": f"bytes={part.stat().st_size}-", "If-Range": version}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        part = path.with_name(f"{path.name}.{quote(version or 'unknown', safe='')}.part")
        begin = answer.headers.get("Content-Range", "").split("-")[0]
        if answer.status_code != 416:  # past the end: of another version
            answer.raise_for_status()
        goes_on = version and parts == [part] and begin == f"bytes {part.stat().st_size}"
        for old in parts if not goes_on else []:
            old.unlink()
        if answer.status_code in (206, 416) and not goes_on:
            raise requests.ConnectionError("the server has another version than before")
        file = open(part, "ab", opener=own_file)
        with file as f, tqdm(desc=path.name, initial=f.tell(), **BAR) as bar:
            bar.total = f.tell() + int(answer.headers.get("Content-Length", 0))
            for block in answer.iter_content(1 << 16):
                bar.update(f.write(block))
            f.flush()
            os.fsync(f.fileno())
    return part


def fetch(url: str, path: Path, sha256: str | None):
    """Download the shard at url to path, whole or not at all. A transfer that breaks is gone on
    with, here and when the command is repeated. OSError if it can't be had, ValueError if it is no
    shard, or not the one with this SHA-256."""
    import requests

    for tries_left in reversed(range(TRIES)):
        try:
            part = fetch_rest(url, path)
            break
        except requests.RequestException as error:
            refused = error.response is not None and 400 <= error.response.status_code < 429
            if isinstance(error, ValueError) or refused or not tries_left:
                raise OSError(f"{url}: {error}") from None
            time.sleep(PAUSE_S * 2 ** (TRIES - tries_left))
    try:
        open_shard(part)
        if sha256 and sha256 != (found := sha256_of(part)):
            raise ValueError(f"it has changed: SHA-256 {found}, at the first fetch {sha256}")
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{url}: {error}") from None
    part.rename(path)


def download(args: Namespace):
    """Fetch those shards of a published corpus that args.data_dir does not have yet."""
    repository, stem, _ = CORPORA[args.download]
    address = args.mirror or f"https://huggingface.co/datasets/{repository}/resolve/main"
    address = address.rstrip("/")
    names = [("val", f"{stem}_val_000000.bin")]
    names += [("train", f"{stem}_train_{n:06d}.bin") for n in range(1, args.shards + 1)]
    with locked(args.data_dir):
        manifest, tokenizer = read_manifest(args.data_dir), {"name": "gpt2"}
        if manifest.setdefault("tokenizer", tokenizer) != tokenizer:
            raise FileExistsError(f"--data-dir {args.data_dir} holds prepared text; name another")
        for split, name in names:
            path, shards = args.data_dir / name, manifest[split]["shards"]
            known = next((shard for shard in shards if shard["name"] == name), {})
            if not path.exists():
                fetch(f"{address}/{name}", path, known.get("sha256"))
            if not known:
                shards.append(describe(open_shard(path)) | {"sha256": sha256_of(path)})
                manifest[split]["tokens"] = sum(shard["tokens"] for shard in shards)
                save_manifest(args.data_dir, manifest)
    report(args.data_dir, Counter())


class OneLineParser(ArgumentParser):
    """Reports a mistake as every other one of this program is: ValueError, one line, the cure."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")


def parse_args(argv: list[str]) -> Namespace:
    for flag in argv:
        if re.fullmatch("--[a-z-]+=--", flag):  # which argparse takes for no value
            raise ValueError(f"{flag} has no value; see --help")
    parser = OneLineParser(formatter_class=ArgumentDefaultsHelpFormatter)
    parser.description = (__doc__ or "").partition("\n")[0]
    add, source = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    source("--input", nargs="+", help="files, folders, 'patterns'; none: Python's standard library")
    source("--download", choices=list(CORPORA), help="fetch tokens that others published instead")
    source("--multiple-choice", nargs="+", metavar="JSONL", help="questions, for --hellaswag")
    source("--verify", action="store_true", help="compare the shards with their manifest instead")
    add("--data-dir", type=Path, help="folder to write; none: data/CORPUS")
    add("--tokenizer", default="bytes", choices=list(TOKENIZERS), help="GPT-2's, or bytes")
    add("--text-field", default="text", help="where a line or row has its text")
    add("--shard-tokens", type=int, default=100_000_000, help="tokens per shard")
    add("--val-fraction", type=float, default=0.01, help="documents for validation")
    add("--seed", type=int, default=1337, help="seed of which documents these are")
    add("--workers", type=int, help="worker processes; none: one per core, for bytes 0")
    add("--dry-run", action="store_true", help="--input: say what it takes, from a sample")
    add("--shards", type=int, default=100, help="--download: training shards, of 100M tokens")
    add("--mirror", help="--download: address of the folder that holds them")
    args = parser.parse_args(argv)
    if args.workers is None:
        args.workers = 0 if args.tokenizer == "bytes" else min(os.cpu_count() or 1, 61)
    check(args, parser)
    args.data_dir = args.data_dir or Path("data", args.download or f"stdlib-{args.tokenizer}")
    return args


def check(args: Namespace, parser: ArgumentParser):
    if (args.input or args.verify or args.multiple_choice) and not args.data_dir:
        parser.error("--input, --multiple-choice and --verify need --data-dir")
    if args.dry_run and (args.download or args.verify or args.multiple_choice):
        parser.error("--dry-run is for text, not for --download, --multiple-choice or --verify")
    ranges = RANGES | {"shards": (1, CORPORA[args.download or "fineweb-edu"][2])}
    for name, (least, most) in ranges.items():
        if not least <= (value := getattr(args, name.replace("-", "_"))) <= most:
            parser.error(f"--{name} {value} must be {least:,} to {most:,}")


def shown(text) -> str:
    """Text on one line, what a terminal can't show escaped."""
    words = " ".join(str(text)[:1000].split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def complain(why: str):
    print("prepare_data.py:", shown(why), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    if hasattr(sys.stdout, "reconfigure"):  # a folder's name may be what a terminal can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        run = verify if args.verify else download if args.download else prepare
        (prepare_questions if args.multiple_choice else run)(args)
    except KeyboardInterrupt:
        complain("stopped; the same command goes on")
        return 130
    except (OSError, ValueError, LookupError, ImportError, BrokenExecutor) as error:
        complain(f"error: {error}")
        return 6 if getattr(error, "errno", None) in DISK_ERRORS else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
