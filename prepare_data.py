"""Turn text into token shards for train_gpt2.py.
python prepare_data.py                                           # Python's standard library
python prepare_data.py --input book.txt --data-dir data/book
python prepare_data.py --input notes/ 'web/*.jsonl.gz' --data-dir data/web --tokenizer bytes

Any text will do: .txt, .md, source code or whole folders. In .jsonl, .json, .csv, .tsv, .parquet
and .arrow files, each record is a document, and --text-field names the field that holds its text.
What is skipped or assumed is said at the end. To continue a preparation that was killed, or to
check the shards of a complete one, repeat the command.
"""

# `uv run prepare_data.py` reads this and needs nothing else installed.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "tiktoken==0.14.0", "tqdm==4.70.1",
#     "tokenizers==0.23.3", "filelock",
# ]
# ///

import sys

from prepare import ending

if __name__ == "__main__":
    ending.program = "prepare_data.py"
    sys.excepthook = ending.explain_import_error

import hashlib
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from filelock import Timeout
from tqdm import tqdm

from prepare.cli import PathName, PathNames, command, flag, parse, quoted, spell
from prepare.cores import num_cores
from prepare.ending import DiskError, RunError, UserError, print_error
from prepare.files import LOCK, FolderLock, rename, sync, whole_file
from prepare.inputs import PIECE, Account, Reader, files_in, pieces, standard_library
from prepare.log import is_terminal, show
from prepare.run_folder import checkpoints
from prepare.shards import (
    MANIFEST,
    TOKEN,
    UNFINISHED,
    VOCAB_SIZES,
    ShardError,
    open_shard,
    read_manifest,
    shard_header,
)
from prepare.tokenizer import FILES, TOKENIZERS, read_tokenizer, require_tokenizer, train_tokenizer

SYNONYMS = {"--out": "--data-dir", "--val-tokens": "--val-fraction"}
SYNONYMS |= {"--verify": "the command that made the shards, repeated"}
FORMAT = 4  # of manifests; a change of what a batch holds needs a new number
FREE_FLAGS = "input", "data_dir", "workers"  # a repeated command may change these
MIN_FOR_WORKERS = 1 << 22  # bytes of input
SAMPLE_BYTES = 1 << 24  # of text to train a tokenizer on


@dataclass(frozen=True)
class PrepareConfig:
    input: PathNames = flag((), "files, folders, 'patterns'; none: Python's source")
    data_dir: PathName = flag(
        "", "folder to write (default: data/stdlib-TOKENIZER; --input needs one)"
    )
    tokenizer: PathName = flag("bpe", "bpe (trained on the text), bytes, gpt2 or a folder with one")
    vocab_size: int = flag(4096, "bpe: the number of tokens", min=258, max=1 << 16)
    text_field: str = flag("text", "field of a record that holds its text")
    encoding: str = flag("", "encoding of all texts (default: found for each file)")
    shard_tokens: int = flag(100_000_000, "tokens per shard", min=1024)
    val_fraction: float = flag(0.01, "share of documents for validation", min=1e-5, max=0.5)
    seed: int = flag(1337, "seed for the validation split", min=0)
    workers: int = flag(num_cores(), "tokenizer processes (default: one per core)")


def parse_args(argv: list[str]) -> PrepareConfig:
    """Return the flags of a command line. Raise UserError if they can't be combined."""
    if argv and not argv[0].startswith("-"):
        raise UserError(f"did you mean --input {quoted(*argv)}?")
    typed = parse(PrepareConfig, __doc__ or "", {}, SYNONYMS, argv)
    config = PrepareConfig(**typed)
    name = config.tokenizer
    if "vocab_size" in typed and name != "bpe":
        raise UserError(f"--vocab-size {config.vocab_size} needs --tokenizer bpe")
    if name not in (*VOCAB_SIZES, "bpe"):
        folder = Path(name)
        tokenizer = read_tokenizer(next(iter(checkpoints(folder)), folder))
        if not tokenizer:
            kinds = "bpe, bytes, gpt2, a run, or a folder with vocab.json and merges.txt"
            raise UserError(f"--tokenizer {name} is none of {kinds}")
        if not tokenizer.end:
            text = "has no end of text, which separates documents"
            raise UserError(f"--tokenizer {name} {text}: use bytes or bpe")
        config = replace(config, tokenizer=tokenizer.name)
    if config.input and not config.data_dir:
        raise UserError("--input needs --data-dir, for example --data-dir data/book")
    if config.input:
        return config
    if "val_fraction" not in typed and sum(map(os.path.getsize, standard_library())) < 20e6:
        # Debian's Python comes without its tests. A hundredth of it would be three files.
        config = replace(config, val_fraction=0.05)
    return replace(config, data_dir=config.data_dir or f"data/stdlib-{Path(name).name}")


def documents(reader: Reader, config: PrepareConfig) -> Iterator[tuple[bool, int, Iterator[bytes]]]:
    """Yield each document: whether it is for validation, its size in bytes, and its text in blocks.
    The seed and the document's number decide the split. The first document is for training."""
    rng = random.Random(config.seed)
    for number, (size, blocks) in enumerate(reader.documents()):
        is_val = number > 0 and rng.random() < config.val_fraction
        yield is_val, size, blocks


def batches(reader: Reader, config: PrepareConfig) -> Iterator[tuple[str, list]]:
    """Yield all text in batches: the split, and about 512 KiB of text in parts, each with whether
    it begins a document. If no document is drawn for validation, use the last tenth of each one."""
    drawn = documents(reader.again(), config)
    cuts_each = not any(is_val and size for is_val, size, _ in drawn)
    parts: dict[str, list[tuple[bool, bytes]]] = {"train": [], "val": []}
    sizes = {"train": 0, "val": 0}  # bytes in parts
    for is_val, size, blocks in documents(reader, config):
        val_start = 0 if is_val else sys.maxsize  # bytes before validation begins
        if cuts_each:
            val_start = size * 9 // 10
        for i, (split, piece) in enumerate(divided(blocks, val_start)):
            parts[split].append((i == 0, piece))
            sizes[split] += len(piece)
            if sizes[split] >= 2 * PIECE:
                yield split, parts[split]
                parts[split] = []
                sizes[split] = 0
    yield from parts.items()


def divided(blocks: Iterator[bytes], val_start: int) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of a document, each with its split. Validation begins at byte val_start."""
    for piece in pieces(blocks):
        at = min(max(val_start, 0), len(piece))
        while 0 < at < len(piece) and piece[at] & 0xC0 == 0x80:  # inside a character
            at -= 1
        if at > 0:
            yield "train", piece[:at]
        if at < len(piece):
            yield "val", piece[at:]
        val_start -= len(piece)


def tokenize(name: str, parts: list[tuple[bool, bytes]]) -> np.ndarray:
    """Return a batch's tokens as uint16; each document begins with <|endoftext|>."""
    tokenizer = TOKENIZERS[name]
    tokens = [np.empty(0, TOKEN)]  # the last batch may have no parts
    for begins, text in parts:
        if begins:
            tokens.append(np.array([tokenizer.end_of_text], TOKEN))
        tokens.append(tokenizer.encode_bytes(text))
    return np.concatenate(tokens, dtype=TOKEN)


def start_worker(folder: Path):
    """Load the tokenizer in a new process, which leaves Ctrl-C to its parent and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    read_tokenizer(folder)


def end_with_parent():
    parent_process().join()  # returns even if the parent is killed
    os._exit(1)


def tokenized(
    todo: Iterator[tuple[int, str, list]], name: str, folder: Path, workers: int
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield each batch's number, split and tokens, in order. Workers load folder's tokenizer."""
    if workers < 2:
        for number, split, parts in todo:
            yield number, split, tokenize(name, parts)
        return
    # Two threads take 1.1 to 2 times as long as two processes, although tiktoken releases the GIL.
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (folder,)) as pool:
        pool.map(int, range(workers))  # starts them while the first file's encoding is found
        running: list = []
        for number, split, parts in todo:
            running.append((number, split, pool.submit(tokenize, name, parts)))
            if len(running) > 4 * workers + 16:  # keep the workers busy during a write
                number, split, future = running.pop(0)
                yield number, split, future.result()
        for number, split, future in running:
            yield number, split, future.result()


class Split:
    """The shards of one split, and the tokens collected for its next shard."""

    def __init__(self, folder: Path, name: str, manifest: dict):
        self.folder = folder
        self.name = name
        self.manifest = manifest
        self.shards = manifest[name]["shards"]
        self.shard_tokens = manifest["flags"]["shard_tokens"]
        self.parts: list[np.ndarray] = []  # of the next shard
        self.num_tokens = 0  # in parts
        # The number of the last batch added, and how many of its tokens are in shards or parts.
        self.end = self.shards[-1]["end"] if self.shards else [0, 0]

    def add(self, number: int, tokens: np.ndarray):
        """Add a batch's tokens, except those already in shards. Write each shard once full."""
        start = self.end[1] if self.end[0] == number else 0
        while start < len(tokens):
            part = tokens[start : start + self.shard_tokens - self.num_tokens]
            self.parts.append(part)
            self.num_tokens += len(part)
            start += len(part)
            self.end = [number, start]
            if self.num_tokens == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self):
        """Write a shard of the tokens in parts, and the manifest with the shard's entry."""
        path = self.folder / f"{self.name}_{len(self.shards):06d}.bin"
        digest = hashlib.sha256()
        with whole_file(path) as file:
            for part in (shard_header(self.num_tokens), *self.parts):
                file.write(part)
                digest.update(part)
        end_of_text = self.manifest["tokenizer"]["end_of_text"]
        entry = {
            "name": path.name,
            "tokens": self.num_tokens,
            "documents": sum(int(np.count_nonzero(part == end_of_text)) for part in self.parts),
            "largest_id": max(int(part.max()) for part in self.parts),
            "sha256": digest.hexdigest(),
            "end": self.end,
        }
        self.shards.append(entry)
        write_manifest(self.folder / UNFINISHED, self.manifest)
        self.parts = []
        self.num_tokens = 0


def write_manifest(path: Path, manifest: dict):
    with whole_file(path) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def sha256_of(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_manifest(path: Path, config: PrepareConfig, digest: str) -> dict:
    """Return the manifest at path, or a new one. Raise UserError if its flags or text differ."""
    folder = path.parent
    flags = {name: value for name, value in vars(config).items() if name not in FREE_FLAGS}
    manifest = read_manifest(path) if path.exists() else {}
    shards = manifest["train"]["shards"] + manifest["val"]["shards"] if manifest else []
    if not shards:
        manifest = {"format": FORMAT, "input": config.input, "flags": flags, "files": digest}
        return manifest | {"train": {"shards": []}, "val": {"shards": []}}
    cure = "remove it, or name another --data-dir"
    for name, value in flags.items():
        # Older manifests lack some flags.
        before = manifest.get("flags", {}).get(name, getattr(PrepareConfig, name))
        if before != value:
            text = f"{folder} was made with {spell(name)} {before}, not {value}"
            raise UserError(f"{text}: use that, {cure}")
    if manifest.get("files") != digest:
        raise UserError(f"{folder} was made from other text: {cure}")
    if path.name == UNFINISHED and manifest.get("format") != FORMAT:
        raise UserError(f"{folder} was made in part by an older version of this code: {cure}")
    for entry in shards:
        shard = open_shard(folder / entry["name"])  # raises if it is cut
        if sha256_of(shard.path) != entry["sha256"]:
            raise UserError(f"{shard.path} is damaged: remove {folder}, and repeat the command")
    return manifest


def training_text(reader: Reader, config: PrepareConfig) -> Iterator[str]:
    """Yield up to SAMPLE_BYTES of the training split, drawn from all of it if it is larger."""
    rng = random.Random(config.seed)
    share = SAMPLE_BYTES / (1 + sum(size for size, _ in reader.again().documents()))
    num_bytes = 0
    for split, parts in batches(reader.again(), config):
        if split == "train" and rng.random() < share:
            for _, text in parts:
                yield text.decode(errors="replace")
                num_bytes += len(text)
        if num_bytes >= SAMPLE_BYTES:
            return


def write_shards(folder: Path, manifest: dict, reader: Reader, config: PrepareConfig):
    """Write the tokenizer, the shards that are not in folder yet, and the manifest."""
    begun = manifest.get("tokenizer")  # open_manifest keeps it only if a shard was written
    tokenizer = read_tokenizer(folder) if begun else None
    if not tokenizer and config.tokenizer == "bpe":
        tokenizer = train_tokenizer(training_text(reader, config), config.vocab_size)
    tokenizer = tokenizer or require_tokenizer(config.tokenizer, may_download=True)
    TOKENIZERS[tokenizer.name] = tokenizer
    if begun and begun["name"] != tokenizer.name:
        text = f"{folder} was begun with {begun['name']} tokens, not {tokenizer.name}"
        raise UserError(f"{text}: remove it, or name another --data-dir")
    manifest["tokenizer"] = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.size,
        "end_of_text": tokenizer.end_of_text,
    }
    # Without a manifest, a repeated command would take the other files for another program's.
    write_manifest(folder / UNFINISHED, manifest)
    for name, content in tokenizer.files().items():
        with whole_file(folder / name) as file:
            file.write(content)
    splits = {name: Split(folder, name, manifest) for name in ("train", "val")}
    # Batches that are already in shards are read, because a document's number decides its split,
    # but not tokenized. Of the last one, only a part may be in a shard.
    numbered = enumerate(batches(reader, config), 1)
    todo = ((n, name, parts) for n, (name, parts) in numbered if n >= splits[name].end[0])
    total = sum(map(os.path.getsize, reader.files))
    # Bytes take no time, and a small text takes less time than starting a process. On Windows, a
    # pool can't have more than 61 processes.
    workers = min(config.workers, 61) if tokenizer.merges and total > MIN_FOR_WORKERS else 1
    with tqdm(total=total, unit="B", unit_scale=True, disable=not is_terminal(sys.stderr)) as bar:
        for number, name, tokens in tokenized(todo, tokenizer.name, folder, workers):
            splits[name].add(number, tokens)
            bar.update(reader.position - bar.n)
    for name, split in splits.items():
        if not split.shards and split.num_tokens < 2:  # 2: an input and its target
            why = reader.account.lines()
            if not reader.account.files_skipped and not reader.account.records_skipped:
                why.append("add more text")
            text = f"--input has {split.num_tokens} tokens for {name}, too few"
            raise UserError(f"{text}: {'; '.join(why)}")
    for split in splits.values():
        if split.num_tokens:
            split.finish_shard()


def prepare(config: PrepareConfig):
    """Write shards and their manifest, which is called UNFINISHED until all shards are there."""
    folder = Path(config.data_dir)
    account = Account()
    files = files_in(config.input, account) if config.input else standard_library()
    # Leave out what this program wrote, which --input . would include.
    files = [file for file in files if not is_ours(Path(file), folder)]
    reader = Reader(files, config.text_field, config.encoding, account)
    reader.check_flags()
    # Identify files by content, because a copy of the same text has other modification times.
    digest = hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
    lock = FolderLock(folder)
    if not (folder / MANIFEST).exists():
        others = [p.name for p in folder.glob("*.*") if p.suffix in (".bin", ".npy")]
        others += [name for name in FILES if (folder / name).exists()]
        if others and not (folder / UNFINISHED).exists():
            text = f"--data-dir {folder} holds {min(others)} but no {MANIFEST}"
            raise UserError(f"{text}: choose another")
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        # Another process that prepares the default data writes the same shards, so wait for it.
        lock.acquire(wait=not config.input)
    try:
        if (folder / MANIFEST).exists():  # maybe since we waited for the lock
            manifest = open_manifest(folder / MANIFEST, config, digest)
            show("already complete:")
        else:
            manifest = open_manifest(folder / UNFINISHED, config, digest)
            write_shards(folder, manifest, reader, config)
            manifest["account"] = [summary(reader), *reader.account.lines()]
            write_manifest(folder / UNFINISHED, manifest)
            lock.check()
            rename(folder / UNFINISHED, folder / MANIFEST)
            sync(folder)
    except UserError:
        if lock.locked and not any(folder.glob("*.bin")):  # leave nothing behind
            lock.release()  # Windows can't remove an open file
            for name in (UNFINISHED, LOCK, *FILES):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds other files
                folder.rmdir()
        raise
    finally:
        lock.release()
    report(folder, manifest)


def is_ours(path: Path, folder: Path) -> bool:
    """Return whether this program writes a file with this name into folder."""
    name = path.name.removesuffix(".tmp")
    ours = name in (*FILES, MANIFEST, UNFINISHED) or re.fullmatch(r"(train|val)_\d{6}\.bin", name)
    return bool(ours) and os.path.abspath(path.parent) == os.path.abspath(folder)


def summary(reader: Reader) -> str:
    """Return one line about all of the input. Documents and skipped records make up its records."""
    a = reader.account
    files = f"{a.files - a.files_skipped:,} files read, {a.files_skipped:,} skipped"
    records = f"{a.records:,} records, {a.records_skipped:,} skipped; {a.documents:,} documents"
    return f"input: {files}; {records}; {reader.position:,} bytes, {a.text_bytes:,} bytes of text"


def report(folder: Path, manifest: dict):
    """Print what folder holds, and what became of the input."""
    tokenizer = manifest["tokenizer"]  # a small text has fewer tokens than --vocab-size
    show(f"tokenizer: {tokenizer['name']}, {tokenizer['vocab_size']:,} tokens")
    share = manifest.get("flags", {}).get("val_fraction", PrepareConfig.val_fraction)
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        tokens = sum(entry["tokens"] for entry in shards)
        num_documents = sum(entry.get("documents", 1) for entry in shards)
        documents = num_documents or "the last tenth of each, since there are too few to draw one"
        show(f"{split}: {tokens:,} tokens; shards: {len(shards)}; documents: {documents}")
        if split == "val" and num_documents and tokens < 2000 and share < 0.1:
            text = f"{tokens:,} validation tokens are too few to tell how good a network is"
            show(f"{text}: prepare with --val-fraction 0.1 and another --data-dir")
    ready = f"ready: {command('train_gpt2.py', '--data-dir', str(folder))}"
    for line in [*manifest.get("account", []), ready]:
        show(line.replace("\n", " "))


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code: 0, 2, 6 or 130."""
    ending.program = "prepare_data.py"
    if hasattr(sys.stdout, "reconfigure"):  # some terminals can't show every name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        prepare(parse_args(sys.argv[1:] if argv is None else argv))
        return ending.DONE
    except KeyboardInterrupt:
        print_error("stopped; repeat the command to continue")
        return ending.INTERRUPTED
    except BrokenProcessPool:
        cure = "for lack of memory? Repeat the command, with fewer --workers"
        text = f"a tokenizer process was killed, {cure}"
    except ImportError as error:
        is_pythons = str(error.name).startswith("_")  # _lzma, for example
        cure = "use a Python that was built with it" if is_pythons else f"pip install {error.name}"
        text = f"{error.name} is missing: {cure}"
    except Timeout as error:
        text = f"another process is writing to {Path(error.lock_file).parent}"
    except (RunError, ShardError, OSError) as error:
        if ending.exit_code_of(error) == DiskError.exit_code:
            print_error(f"error: {error}; repeat the command to continue")
            return DiskError.exit_code
        text = str(error)
    print_error(f"error: {text}")
    return UserError.exit_code


if __name__ == "__main__":
    ending.open_standard_streams()
    sys.exit(main())
