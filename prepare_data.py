"""Turn text into token shards that train_gpt2.py reads.

    python prepare_data.py                                           # Python's own source, as bytes
    python prepare_data.py --input book.txt --data-dir data/book
    python prepare_data.py --input texts/ more.jsonl --data-dir data/mine --tokenizer gpt2

A document is a file, or a line of a .jsonl file ({"text": ...}). Each begins with <|endoftext|>.
The same input gives the same bytes on disk. A folder is written whole or not at all.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import sysconfig
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataloader import MANIFEST, TOKEN, VOCAB_SIZES, missing_vocab, whole_file, write_shard

# --------------------------------------------------------------------------------------------------
# Documents


def standard_library() -> list[Path]:
    """The source of the Python that runs this: the corpus that every machine has, about 30 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(f for f in root.rglob("*.py") if not others & set(f.relative_to(root).parts))


def files_in(inputs: list[Path]) -> list[Path]:
    """The inputs, with the files of a folder in its place, sorted; hidden ones are left out."""
    files = []
    for path in inputs:
        if not path.exists():
            raise FileNotFoundError(f"--input {path} does not exist")
        inside = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        files += [
            f for f in inside if not any(p.startswith(".") for p in f.relative_to(path).parts)
        ]
    return files


def documents(files: list[Path]) -> Iterator[bytes]:
    """The text of each document, as UTF-8; an empty one is left out."""
    for file in tqdm(files, unit="file", disable=None):
        if file.suffix == ".jsonl":
            yield from filter(None, json_lines(file))
        elif text := file.read_bytes():
            yield text


def json_lines(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)["text"].encode()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f'{file}, line {number} is not {{"text": "..."}}: {line[:40]!r}'
                ) from None


# --------------------------------------------------------------------------------------------------
# Tokenizers


@dataclass(frozen=True)
class Tokenizer:
    name: str
    encode: Callable[[bytes], np.ndarray]  # a document to its tokens, <|endoftext|> first
    sha256: str  # of the vocabulary


def bytes_tokenizer() -> Tokenizer:
    """Each byte is a token, 256 is <|endoftext|>: any text, and nothing to download."""
    end_of_text = bytes([0, 1])  # 256, little-endian

    def encode(text: bytes) -> np.ndarray:
        codes = np.frombuffer(text, np.uint8).astype(TOKEN)
        return np.concatenate([np.frombuffer(end_of_text, TOKEN), codes])

    return Tokenizer("bytes", encode, hashlib.sha256(bytes(range(256))).hexdigest())


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's byte-pair encoding. tiktoken downloads its vocabulary once and checks its SHA-256."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as error:  # what requests raises without a network, in a hundred ways
        files = " and ".join(path.name for path in missing_vocab())
        raise OSError(
            "--tokenizer gpt2: no network to fetch vocab.bpe and encoder.json from"
            " openaipublic.blob.core.windows.net/gpt-2/encodings/main/; fetch them elsewhere, name"
            f" them {files}, and set TIKTOKEN_CACHE_DIR to their folder, or use --tokenizer bytes"
        ) from error

    def encode(text: bytes) -> np.ndarray:
        # special text in a document is ordinary text
        ids = encoding.encode_ordinary(text.decode("utf-8", errors="replace"))
        return np.array([encoding.eot_token, *ids], TOKEN)

    vocabulary = b"".join(encoding.token_byte_values())
    return Tokenizer("gpt2", encode, hashlib.sha256(vocabulary).hexdigest())


TOKENIZERS = {"bytes": bytes_tokenizer, "gpt2": gpt2_tokenizer}

# --------------------------------------------------------------------------------------------------
# Shards


@dataclass
class Split:
    """One stream of tokens, cut into shards as it grows, and the manifest's account of it."""

    folder: Path
    name: str
    shard_tokens: int
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    shards: list[dict] = field(default_factory=list)
    pending: list[np.ndarray] = field(default_factory=list)
    num_pending: int = 0

    def add(self, text: bytes, tokens: np.ndarray):
        self.documents += 1
        self.bytes += len(text)
        self.pending.append(tokens)
        self.num_pending += len(tokens)
        if self.num_pending >= self.shard_tokens:
            self.write_pending(keep_rest=True)

    def write_pending(self, keep_rest: bool = False):
        """Write the tokens not yet on disk; with keep_rest, only what fills whole shards."""
        tokens = np.concatenate(self.pending) if self.pending else np.empty(0, TOKEN)
        end = len(tokens) // self.shard_tokens * self.shard_tokens if keep_rest else len(tokens)
        for start in range(0, end, self.shard_tokens):
            self.write(tokens[start : min(start + self.shard_tokens, end)])
        self.pending, self.num_pending = [tokens[end:]], len(tokens) - end

    def write(self, tokens: np.ndarray):
        path = self.folder / f"{self.name}_{len(self.shards):06d}.bin"
        write_shard(path, tokens)
        self.tokens += len(tokens)
        self.shards.append({
            "name": path.name,
            "tokens": len(tokens),
            "bytes": path.stat().st_size,
            "largest_id": int(tokens.max()),
            "crc32": zlib.crc32(path.read_bytes()),
        })  # fmt: skip

    def summary(self) -> dict:
        keys = ("documents", "bytes", "tokens", "shards")
        return {key: getattr(self, key) for key in keys}


def deal(texts: Iterable[bytes], val_fraction: float, seed: int) -> Iterator[tuple[str, bytes]]:
    """Each document with its split, drawn one by one; the first is always for training. Where none
    was drawn for validation, as from a single book, the last tenth of the last document is."""
    rng, held, val_drawn = random.Random(seed), None, False
    for text in texts:
        if held:
            yield held
        to_val = rng.random() < val_fraction and held is not None
        held, val_drawn = ("val" if to_val else "train", text), val_drawn or to_val
    if held is None:
        raise ValueError("the input holds no text; name files with --input")
    if not val_drawn:
        text = held[1]
        end = len(text) * 9 // 10
        cut = text.rfind(b"\n", end * 9 // 10, end) + 1 or end  # at a line's end, if one is near
        yield "train", text[:cut]
        held = "val", text[cut:]
    yield held


def write_folder(folder: Path, texts: Iterable[bytes], tokenizer: Tokenizer, args: Namespace):
    """Write the documents' shards and their manifest into folder."""
    splits = {name: Split(folder, name, args.shard_tokens) for name in ("train", "val")}
    for name, text in deal(texts, args.val_fraction, args.seed):
        splits[name].add(text, tokenizer.encode(text))
    manifest = {"tokenizer": {"name": tokenizer.name, "vocab_size": VOCAB_SIZES[tokenizer.name],
                              "sha256": tokenizer.sha256}}  # fmt: skip
    for name, split in splits.items():
        split.write_pending()
        manifest[name] = split.summary()
        print(
            f"{name}: {split.documents:,} documents, {split.bytes:,} bytes,"
            f" {split.tokens:,} tokens, {len(split.shards)} shards"
        )
    with whole_file(folder / MANIFEST) as f:
        f.write(json.dumps(manifest, indent=1).encode())


def parse_args(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, help="files and folders; none: Python's standard library")
    add("--data-dir", type=Path, default=Path("data/stdlib-bytes"), help="folder to write")
    add("--tokenizer", default="bytes", choices=list(TOKENIZERS), help="GPT-2's, or bytes")
    add("--shard-tokens", type=int, default=100_000_000, help="tokens per shard")
    add("--val-fraction", type=float, default=0.01, help="documents for validation, 0 to 0.5")
    add("--seed", type=int, default=1337, help="seed of which documents these are")
    args = parser.parse_args(argv)
    if args.shard_tokens < 1024:
        parser.error(f"--shard-tokens {args.shard_tokens} must be at least 1,024")
    if not 0 <= args.val_fraction <= 0.5:
        parser.error(f"--val-fraction {args.val_fraction} must be 0 to 0.5")
    return args


def prepare(args: Namespace):
    """Write args.data_dir, under another name until it is whole."""
    if args.data_dir.exists():
        raise FileExistsError(f"--data-dir {args.data_dir} exists; name another, or remove it")
    files = files_in(args.input) if args.input else standard_library()
    tokenizer = TOKENIZERS[args.tokenizer]()
    unfinished = args.data_dir.with_name(f".{args.data_dir.name}.{os.getpid()}.tmp")
    unfinished.mkdir(parents=True)
    try:
        write_folder(unfinished, documents(files), tokenizer, args)
        unfinished.rename(args.data_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        prepare(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"prepare_data.py: error: {error}", file=sys.stderr)
        return 2
    print(f"ready: python train_gpt2.py --data-dir {args.data_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
