"""Turn text into token shards for train_gpt2.py, or download published shards.
python prepare_data.py                                           # the standard library, as bytes
python prepare_data.py --input book.txt --data-dir data/book
python prepare_data.py --input notes/ 'web/*.jsonl.gz' --data-dir data/web --tokenizer gpt2
python prepare_data.py --download fineweb-edu --shards 10        # or hellaswag
python prepare_data.py --verify --data-dir data/web

Any text will do: .txt, .md, source code or whole folders. In .jsonl, .json, .csv, .tsv and .parquet
files, each record is a document, and --text-field names the field that holds its text. To continue
a preparation or download that was killed, repeat the command.
"""

import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from filelock import Timeout
from tqdm import tqdm

from dataloader import (
    MANIFEST,
    TOKEN,
    UNFINISHED,
    VOCAB_SIZES,
    ShardError,
    open_shard,
    read_manifest,
    shard_header,
)
from support import ending
from support.cli import flag, parse, quoted, spell
from support.ending import DISK_ERRNOS, DiskError, UserError, print_error
from support.files import LOCK, FolderLock, rename, sync, whole_file
from support.inputs import PIECE, RECORDS, Reader, files_in, pieces, standard_library
from support.log import is_terminal, show
from support.tokenizer import Tokenizer, require_tokenizer

DATASETS = {  # name -> repository on the Hugging Face hub, and the prefix of its shards' names
    "fineweb-edu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb"),  # 1,001 shards
    "fineweb": ("kjj0/fineweb10B-gpt2", "fineweb"),  # 103
}
SYNONYMS = {"--out": "--data-dir", "--val-tokens": "--val-fraction"}
TEXT_FLAGS = ("tokenizer", "text_field", "shard_tokens", "val_fraction", "seed")


@dataclass(frozen=True)
class PrepareConfig:
    input: tuple = flag((), "files, folders, 'patterns'; none: Python's source", group="source")
    download: str = flag("", "data set to fetch instead", choices=(*DATASETS, "hellaswag"))
    verify: bool = flag(False, "only compare shards with the SHA-256 in their manifest")
    data_dir: str = flag("", "folder to write (default: data/NAME; --input needs one)", group="how")
    tokenizer: str = flag("bytes", "GPT-2's tokens, or bytes as tokens", choices=(*VOCAB_SIZES,))
    text_field: str = flag("text", "field of a record that holds its text")
    shard_tokens: int = flag(100_000_000, "tokens per shard", min=1024)
    val_fraction: float = flag(0.01, "share of documents for validation", min=1e-5, max=0.5)
    seed: int = flag(1337, "seed for the validation split", min=0)
    workers: int = flag(os.cpu_count() or 1, "gpt2: tokenizer threads (default: one per core)")
    shards: int = flag(100, "training shards of 100M tokens", min=1)

    @property
    def folder(self) -> Path:
        return Path(self.data_dir or f"data/{self.download or f'stdlib-{self.tokenizer}'}")


def parse_args(argv: list[str]) -> PrepareConfig:
    """Return the flags of a command line. Raise UserError if they can't be combined."""
    if argv and not argv[0].startswith("-"):
        raise UserError(f"did you mean --input {quoted(*argv)}?")
    typed = parse(PrepareConfig, __doc__ or "", {}, SYNONYMS, argv)
    if "shards" in typed and "download" not in typed:
        raise UserError(f"--shards {typed['shards']} needs --download: name what to fetch")
    names = [name for name in ("input", "download", "verify") if typed.get(name)]
    if names in (["download"], ["verify"]):
        names += [name for name in (*TEXT_FLAGS, "workers") if name in typed]
    if len(names) > 1:
        raise UserError(f"{' and '.join(map(spell, names))} conflict: leave one out")
    config = PrepareConfig(**typed)
    if not config.data_dir and (config.input or config.verify):
        raise UserError(f"--{names[0]} needs --data-dir, for example --data-dir data/book")
    return config


class Batch(NamedTuple):
    """About 512 KiB of text from one split, which a thread tokenizes in one call."""

    number: int  # from 1
    split: str
    parts: list[tuple[bool, bytes]]  # whether the text begins a document, and the text


def documents(reader: Reader, config: PrepareConfig) -> Iterator[tuple[bool, int, BinaryIO]]:
    """Yield each document: whether it is for validation, its size in bytes, and its text. The seed
    and the document's number decide the split. The first document is always for training."""
    rng = random.Random(config.seed)
    for number, (size, text) in enumerate(reader.documents()):
        is_val = number > 0 and rng.random() < config.val_fraction
        yield is_val, size, text


def batches(reader: Reader, config: PrepareConfig) -> Iterator[Batch]:
    """Yield all text. If no document is drawn for validation, use the last tenth of each one."""
    peek = Reader(reader.files, reader.text_field)
    cuts_each = not any(is_val and size for is_val, size, _ in documents(peek, config))
    numbers = count(1)
    parts: dict[str, list] = {"train": [], "val": []}  # each split's next batch
    sizes = {"train": 0, "val": 0}  # bytes in parts
    for is_val, size, text in documents(reader, config):
        val_start = 0 if is_val else sys.maxsize  # bytes before validation begins
        if cuts_each:
            val_start = size * 9 // 10
        for i, (split, piece) in enumerate(divided(text, val_start)):
            parts[split].append((i == 0, piece))
            sizes[split] += len(piece)
            if sizes[split] >= 2 * PIECE:
                yield Batch(next(numbers), split, parts[split])
                parts[split] = []
                sizes[split] = 0
    for split in parts:
        yield Batch(next(numbers), split, parts[split])


def divided(stream: BinaryIO, val_start: int) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of a document, each with its split. Validation begins at byte val_start."""
    for piece in pieces(stream):
        at = min(max(val_start, 0), len(piece))
        while 0 < at < len(piece) and piece[at] & 0xC0 == 0x80:  # inside a character
            at -= 1
        if at > 0:
            yield "train", piece[:at]
        if at < len(piece):
            yield "val", piece[at:]
        val_start -= len(piece)


def tokenize(tokenizer: Tokenizer, parts: list[tuple[bool, bytes]]) -> np.ndarray:
    """Return a batch's tokens as uint16; each document begins with <|endoftext|>."""
    tokens = [np.empty(0, TOKEN)]  # the last batch may have no parts
    for begins, text in parts:
        if begins:
            tokens.append(np.array([tokenizer.end_of_text], TOKEN))
        tokens.append(tokenizer.encode_bytes(text))
    return np.concatenate(tokens, dtype=TOKEN, casting="unsafe")


def tokenized(todo: Iterator[Batch], config: PrepareConfig) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its tokens, in order. Threads help, since tiktoken releases the GIL."""
    tokenizer = require_tokenizer(config.tokenizer, may_download=True)
    with ThreadPoolExecutor(config.workers or 1) as pool:
        running: list = []
        for batch in todo:
            running.append((batch, pool.submit(tokenize, tokenizer, batch.parts)))
            if len(running) > 4 * config.workers + 8:  # keep threads busy during a write
                batch, future = running.pop(0)
                yield batch, future.result()
        for batch, future in running:
            yield batch, future.result()


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

    def add(self, batch: Batch, tokens: np.ndarray):
        """Add the tokens of a batch, except those already in shards. Write each shard once full."""
        start = self.end[1] if self.end[0] == batch.number else 0
        while start < len(tokens):
            part = tokens[start : start + self.shard_tokens - self.num_tokens]
            self.parts.append(part)
            self.num_tokens += len(part)
            start += len(part)
            self.end = [batch.number, start]
            if self.num_tokens == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self):
        path = self.folder / f"{self.name}_{len(self.shards):06d}.bin"
        write_shard(path, self.parts, self.name, self.manifest, self.end)
        self.parts = []
        self.num_tokens = 0


def write_shard(path: Path, parts: list, split: str, manifest: dict, end: list | None = None):
    """Write a shard of the arrays in `parts`, and the manifest with the shard's entry."""
    num_tokens = sum(map(len, parts))
    digest = hashlib.sha256()
    with whole_file(path) as file:
        for part in (shard_header(num_tokens), *parts):
            file.write(part)
            digest.update(part)
    end_of_text = VOCAB_SIZES[manifest["tokenizer"]["name"]] - 1
    entry = {
        "name": path.name,
        "tokens": num_tokens,
        "documents": sum(int(np.count_nonzero(part == end_of_text)) for part in parts),
        "largest_id": max(int(part.max()) for part in parts),
        "sha256": digest.hexdigest(),
    }
    if end:
        entry["end"] = end
    shards = manifest[split]["shards"]
    others = [old for old in shards if old["name"] != path.name]  # drops a damaged shard's entry
    shards[:] = sorted([*others, entry], key=lambda shard: shard["name"])
    # A download, which has no ends, can be used before it is complete.
    write_manifest(path.with_name(UNFINISHED if end else MANIFEST), manifest)


def write_manifest(path: Path, manifest: dict):
    with whole_file(path) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def sha256_of(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def saved_manifest(path: Path, tokenizer: str) -> dict:
    """Return the manifest at path, or a new one without shards."""
    if path.exists():
        return read_manifest(path)
    return {"tokenizer": {"name": tokenizer}, "train": {"shards": []}, "val": {"shards": []}}


def open_manifest(path: Path, config: PrepareConfig, files: list[str]) -> dict:
    """Return the manifest at path, or a new one. Raise UserError if its flags or text differ."""
    folder = path.parent
    flags = {name: getattr(config, name) for name in TEXT_FLAGS}
    # Identify files by content, because a copy of the same text has other modification times.
    digest = hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
    manifest = saved_manifest(path, config.tokenizer)
    shards = manifest["train"]["shards"] + manifest["val"]["shards"]
    if not shards:
        manifest |= {"tokenizer": {"name": config.tokenizer}, "input": config.input}
        return manifest | {"flags": flags, "files": digest}
    old = manifest.get("flags", {})
    reasons = []
    for name, value in flags.items():
        if old.get(name) != value:
            reasons.append(f"with {spell(name)} {old.get(name)}, not {value}")
    if manifest.get("files") != digest:
        reasons.append("from other text")
    if reasons:
        raise UserError(f"{folder} was made {reasons[0]}: remove it, or name another --data-dir")
    for entry in shards:
        open_shard(folder / entry["name"])  # raises if damaged
    return manifest


def write_shards(folder: Path, manifest: dict, reader: Reader, config: PrepareConfig):
    """Write the shards that are not in folder yet, and the manifest."""
    # Without a manifest, check_no_shards would take a shard for another program's.
    write_manifest(folder / UNFINISHED, manifest)
    splits = {name: Split(folder, name, manifest) for name in ("train", "val")}
    ends = {name: split.end[0] for name, split in splits.items()}
    # Batches that are already in shards are read, because a document's number decides its split,
    # but not tokenized. Of the last one, only a part may be in a shard.
    todo = (batch for batch in batches(reader, config) if batch.number >= ends[batch.split])
    total = sum(map(os.path.getsize, reader.files))
    with tqdm(total=total, unit="B", unit_scale=True, disable=not is_terminal(sys.stderr)) as bar:
        for batch, tokens in tokenized(todo, config):
            splits[batch.split].add(batch, tokens)
            bar.update(reader.position - bar.n)
    for name, split in splits.items():
        if not split.shards and split.num_tokens < 2:  # 2: an input and its target
            why = "; ".join(notes(reader)) or "add more text"
            raise UserError(f"--input has {split.num_tokens} tokens for {name}, too few: {why}")
    for split in splits.values():
        if split.num_tokens:
            split.finish_shard()


def prepare(config: PrepareConfig):
    """Write the shards of config.folder, and its manifest, which is called UNFINISHED until all
    shards are there."""
    folder = config.folder
    files = files_in(config.input) if config.input else standard_library()
    # Leave out what this program wrote, which --input . would include.
    files = [file for file in files if not is_ours(Path(file), folder)]
    has_records = any(RECORDS.search(file.lower()) for file in files)
    if config.text_field != "text" and not has_records:
        kinds = ".jsonl, .json, .csv, .tsv and .parquet"
        raise UserError(f"--text-field is for {kinds}: leave it out, or save a table as .csv")
    reader = Reader(files, config.text_field)
    lock = FolderLock(folder)
    if not (folder / MANIFEST).exists():
        check_no_shards(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        # Another process that prepares the default data writes the same shards, so wait for it.
        lock.acquire(wait=not config.input)
    try:
        if (folder / MANIFEST).exists():  # maybe since we waited for the lock
            manifest = open_manifest(folder / MANIFEST, config, files)
            show("already complete:")
        else:
            manifest = open_manifest(folder / UNFINISHED, config, files)
            write_shards(folder, manifest, reader, config)
            lock.check()
            rename(folder / UNFINISHED, folder / MANIFEST)
            sync(folder)
    except UserError:
        if lock.locked and not any(folder.glob("*.bin")):  # leave nothing behind
            (folder / UNFINISHED).unlink(missing_ok=True)
            lock.release()  # Windows can't remove an open file
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds other files
                folder.rmdir()
        raise
    finally:
        lock.release()
    report(folder, manifest, notes(reader))


def is_ours(path: Path, folder: Path) -> bool:
    """Return whether this program writes a file with this name into folder."""
    name = r"((train|val)_\d{6}\.bin|manifest(\.unfinished)?\.json)(\.tmp)?"
    in_folder = os.path.abspath(path.parent) == os.path.abspath(folder)
    return in_folder and bool(re.fullmatch(name, path.name))


def check_no_shards(folder: Path):
    """Raise UserError if folder holds shards of another program."""
    others = {path.name for path in folder.glob("*.*") if path.suffix in (".bin", ".npy")}
    if others and not (folder / UNFINISHED).exists():
        text = f"--data-dir {folder} holds {min(others)} but no {MANIFEST}"
        raise UserError(f"{text}: choose another")


def notes(reader: Reader) -> list[str]:
    return [f"{what}: {n:,}, the first: {where}" for what, (n, where) in reader.notes.items()]


def report(folder: Path, manifest: dict, lines: list[str]):
    """Print a summary of folder, then these lines."""
    for split in ("train", "val"):
        shards = manifest[split]["shards"]
        tokens = sum(entry["tokens"] for entry in shards)
        num_documents = sum(entry.get("documents", 1) for entry in shards)
        documents = num_documents or "the last tenth of each, since there are too few to draw one"
        show(f"{split}: {tokens:,} tokens; shards: {len(shards)}; documents: {documents}")
    for line in [*lines, f"ready: python train_gpt2.py --data-dir {quoted(str(folder))}"]:
        show(line.replace("\n", " "))


def verify(config: PrepareConfig):
    """Compare every shard with its SHA-256 in the manifest. Raise UserError if one differs."""
    manifest = read_manifest(config.folder / MANIFEST)
    num_damaged = 0
    for entry in manifest["train"]["shards"] + manifest["val"]["shards"]:
        path = config.folder / entry["name"]
        is_good = path.is_file() and sha256_of(path) == entry["sha256"]
        num_damaged += not is_good
        show(f"{entry['name']}: {'good' if is_good else 'DAMAGED'}")
    if num_damaged:
        cure = "remove them and repeat the download, or remove the folder and prepare it again"
        raise UserError(f"{num_damaged} shards of {config.folder} are damaged or missing: {cure}")


def fetch(repository: str, name: str, folder: Path) -> Path:
    """Download a file from the hub, or the missing part of it, and return its path."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset", local_dir=folder))
    except Exception as error:  # the library and httpx raise many kinds of errors
        if getattr(error, "errno", None) in DISK_ERRNOS:
            raise
        raise UserError(f"{repository}/{name}: {error}; repeat the command to continue") from error


def download(config: PrepareConfig):
    """Fetch a published data set's shards, except those already in config.folder."""
    repository, stem = DATASETS[config.download]
    folder = config.folder
    manifest = saved_manifest(folder / MANIFEST, "gpt2")
    for entry in manifest["train"]["shards"] + manifest["val"]["shards"]:
        if not entry["name"].startswith(f"{stem}_"):
            raise UserError(f"--data-dir {folder} holds {entry['name']}: choose another")
    for number in range(config.shards + 1):
        split = "train" if number else "val"
        name = f"{stem}_{split}_{number:06d}.bin"
        names = [entry["name"] for entry in manifest[split]["shards"]]
        if name in names and (folder / name).exists():
            continue
        path = fetch(repository, name, folder / ".download")
        try:
            shard = replace(open_shard(path), max_id=VOCAB_SIZES["gpt2"] - 1)
            tokens = shard.read(0, shard.num_tokens)  # raises if an id is too large
            write_shard(folder / name, [tokens], split, manifest)
        finally:
            path.unlink()  # a damaged file would otherwise not be fetched again
    lines = []
    try:  # download it now: a run needs it for samples, questions and bits per byte
        require_tokenizer("gpt2", may_download=True)
    except UserError as error:
        lines = [f"GPT-2's vocabulary is missing: {error}"]
    report(folder, manifest, lines)


def download_questions(config: PrepareConfig):
    """Fetch HellaSwag's validation split, and write it as JSON lines."""
    import pyarrow.parquet

    folder = config.folder / ".download"
    path = fetch("Rowan/hellaswag", "data/validation-00000-of-00001.parquet", folder)
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        path.unlink()
        raise UserError(f"{path} is an incomplete parquet file: {error}") from error
    target = config.folder / "hellaswag_val.jsonl"
    with whole_file(target) as file:
        for row in rows:
            file.write(json.dumps(row).encode() + b"\n")
    show(f"ready: python train_gpt2.py --hellaswag {quoted(str(target))}")


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code: 0, 2, 6 or 130."""
    ending.program = "prepare_data.py"
    if hasattr(sys.stdout, "reconfigure"):  # some terminals can't show every name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv)
        if config.verify:
            verify(config)
        elif config.download:
            config.folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(config.folder)
            lock.acquire()  # until main returns
            if config.download == "hellaswag":
                download_questions(config)
            else:
                download(config)
            shutil.rmtree(config.folder / ".download", ignore_errors=True)
        else:
            prepare(config)
        return ending.DONE
    except KeyboardInterrupt:
        print_error("stopped; repeat the command to continue")
        return ending.INTERRUPTED
    except ImportError as error:
        print_error(f"error: {error.name} is missing: pip install {error.name}")
    except Timeout as error:
        print_error(f"error: another process is writing to {Path(error.lock_file).parent}")
    except (UserError, ShardError, OSError) as error:
        if getattr(error, "errno", None) in DISK_ERRNOS:
            print_error(f"error: {error}; repeat the command to continue")
            return DiskError.exit_code
        print_error(f"error: {error}")
    return UserError.exit_code


if __name__ == "__main__":
    ending.open_standard_streams()
    sys.exit(main())
