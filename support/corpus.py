"""A data set: its folder of shards, opened and checked, and what makes it this one and no other.

The folder may hold manifest.json: what prepare_data.py knew when it wrote the shards, and the
CRC-32 of each 32 KiB of tokens, which every reading is checked against. It holds a CRC-32 of its
own, "crc32": whoever changes a manifest by hand takes that out.
"""

import hashlib
import json
import os
import re
import reprlib
import shlex
import subprocess
import sys
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dataloader import (
    CHUNK,
    EVAL_MAGIC,
    HEADER_BYTES,
    PREPARE,
    VOCAB_SIZES,
    Shard,
    ShardLoader,
    open_shard,
    shard_header,
)
from support.files import missing_vocab, sha256_of, whole_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TokenFolder:
    """The shards of a data set, and what its manifest says of them, where it has one."""

    train: list[Shard]
    val: list[Shard]
    tokenizer: str  # "bytes", "gpt2" or "unknown"
    largest_id: int | None  # None: not known without reading everything

    @cached_property
    def fingerprint(self) -> str:
        """Differs for data of other lengths, order or tokens, as the manifest's CRCs or else a
        sample of each shard tell; a name may change."""
        splits, all_crcs = hashlib.sha256(), all(s.crcs for s in self.train + self.val)
        for shards in (self.train, self.val):
            splits.update(len(shards).to_bytes(8, "little"))
            for shard in shards:
                splits.update(shard.num_tokens.to_bytes(8, "little"))
                splits.update(shard.crcs if all_crcs else shard.sample())
        return f"{'crc32' if all_crcs else 'sample'}:{splits.hexdigest()[:16]}"


# What a manifest must hold: a range of whole numbers, a pattern of text, any number of [these], or
# fields by name; one with ? may be missing.
COUNT = range(1 << 53)
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,255}")
BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
ENTRY = {"name": NAME, "bytes": COUNT, "tokens": range(1, 1 << 31), "largest_id": range(1 << 16)}
ENTRY |= {"chunk_crc32": BASE64, "sha256?": NAME}
SPLIT = {"shards": [ENTRY], "tokens?": COUNT, "documents?": COUNT, "bytes?": COUNT}
FIELDS = {"tokenizer": {"name": NAME, "sha256?": NAME}, "train": SPLIT, "val": SPLIT}
FIELDS |= {"input?": [COUNT], "crc32?": COUNT}


def check_fields(value, wanted: range | re.Pattern | list | dict, where: str = "its content"):
    """ValueError, with the place, unless value is as wanted."""
    kind = {range: int, re.Pattern: str}.get(type(wanted), type(wanted))
    fits = type(value) is kind  # True is no number
    if fits and kind is list:
        for i, item in enumerate(value):
            check_fields(item, wanted[0], f"{where}[{i}]")
    elif fits and kind is dict:
        for key, inner in wanted.items():
            name = key.rstrip("?")
            if name == key or name in value:
                check_fields(value.get(name), inner, f"{where}.{name}")
    elif not fits or not (value in wanted if kind is int else wanted.fullmatch(value)):
        found = f"{value:,}" if type(value) is int else reprlib.repr(value)
        raise ValueError(f"{where} is {found}")


def content_crc32(manifest: dict) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def read_manifest(folder: Path) -> dict:
    """What folder's manifest says, each field of its type and in its range; ValueError if one is
    not, FileNotFoundError if there is no manifest."""
    path = folder / MANIFEST
    try:
        if not path.stat().st_size < 1 << 28 or not path.is_file():
            raise ValueError("no file of less than 256 MiB")  # and a pipe would wait for ever
        check_fields(manifest := json.loads(path.read_bytes()), FIELDS)
        if manifest.pop("crc32", None) not in (None, content_crc32(manifest)):
            raise ValueError("its content does not have its crc32")
        for split in (manifest["train"], manifest["val"]):
            in_shards = sum(entry["tokens"] for entry in split["shards"])
            if split.setdefault("tokens", in_shards) != in_shards:
                raise ValueError(f"of its {split['tokens']:,} tokens {in_shards:,} are in shards")
        return manifest
    except (ValueError, RecursionError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged ({why}); prepare the data again")


def save_manifest(folder: Path, content: dict):
    content = content | {"crc32": content_crc32(content)}
    with whole_file(folder / MANIFEST) as f:
        f.write(json.dumps(content, indent=1).encode())


def open_folder(path: Path) -> TokenFolder:
    """The shards in path, each checked by its header; OSError or ValueError if one is amiss. Where
    there is a manifest, only what it names counts."""
    if path.is_file():
        own = shlex.join(["--input", str(path), "--data-dir", f"data/{path.stem}"])
        cure = f"name its folder if it holds tokens; if text: python {PREPARE} {own}"
        raise NotADirectoryError(f"--data-dir {path} is a file: {cure}")
    if not path.is_dir():
        is_published = path.name in ("fineweb", "fineweb-edu")
        how = f"--download {path.name}" if is_published else "--input YOUR_TEXT"
        cure = f"python {PREPARE} {how} --data-dir {shlex.quote(str(path))} writes it"
        raise FileNotFoundError(f"--data-dir {path} is not a folder: {cure}")
    if not os.path.lexists(path / MANIFEST):
        tokenizer = "unknown" if (path / "meta.pkl").exists() else "gpt2"  # nanoGPT's alphabets
        return TokenFolder(find(path, "train"), find(path, "val"), tokenizer, None)
    manifest = read_manifest(path)
    splits = [manifest[split]["shards"] for split in ("train", "val")]
    if not all(splits):
        raise ValueError(f"{path / MANIFEST} names no shards of one split: see {PREPARE}")
    train, val = ([open_entry(path, entry) for entry in entries] for entries in splits)
    largest_id = max(shard.most for shard in train + val)
    return TokenFolder(train, val, manifest["tokenizer"]["name"], largest_id)


def open_entry(path: Path, entry: dict) -> Shard:
    """The shard in the folder path that this entry of its manifest is about."""
    shard, crcs = open_shard(path / Path(entry["name"]).name), b64decode(entry["chunk_crc32"])
    if shard.num_tokens != entry["tokens"] or len(crcs) != -(-shard.num_tokens // CHUNK) * 4:
        why = f"{entry['tokens']:,}, with {len(crcs) // 4:,} CRCs; prepare the data again"
        raise ValueError(f"{shard.path} holds {shard.num_tokens:,} tokens, {MANIFEST} says {why}")
    return replace(shard, crcs=crcs, most=entry["largest_id"])


NO_TOKENS = {"name": "", "bytes": HEADER_BYTES, "tokens": 0, "largest_id": 0, "chunk_crc32": ""}


def longer(entry: dict, tokens: np.ndarray) -> dict:
    """What the manifest says of a shard, once tokens stand behind those of entry."""
    n, crcs = entry["tokens"], np.frombuffer(b64decode(entry["chunk_crc32"]), "<u4").tolist()
    for part in np.split(tokens, range(CHUNK - n % CHUNK, len(tokens), CHUNK)):
        begun = crcs.pop() if n % CHUNK else 0
        crcs.append(zlib.crc32(part.data, begun))
        n += len(part)
    largest_id = max(entry["largest_id"], int(tokens.max()))
    found = {"bytes": entry["bytes"] + tokens.nbytes, "tokens": n, "largest_id": largest_id}
    return entry | found | {"chunk_crc32": b64encode(np.array(crcs, "<u4")).decode()}


def describe(shard: Shard, num_tokens: int | None = None) -> dict:
    """What the manifest says of a shard, or of its first num_tokens, found by reading it."""
    entry = NO_TOKENS | {"name": shard.path.name, "bytes": shard.offset}
    for start in range(0, end := num_tokens or shard.num_tokens, 64 * CHUNK):
        entry = longer(entry, shard.read(start, min(64 * CHUNK, end - start)))
    return entry


def check_shard(folder: Path, entry: dict):
    """OSError or ValueError unless the shard in folder is, to the byte, what entry says: its tokens
    by their CRCs, and its header, of which a trainer reads three numbers alone."""
    found = describe(shard := open_entry(folder, entry))  # reading checks the CRCs
    with open(shard.path, "rb") as f:
        own_header = f.read(HEADER_BYTES) == shard_header(shard.num_tokens)
    if "sha256" in entry:  # a download's
        found["sha256"] = sha256_of(shard.path)
    elif not own_header:
        raise ValueError(f"{shard.path} has another header than it was written with")
    if wrong := [f"{k} is {v}, not {entry[k]}" for k, v in found.items() if v != entry[k]]:
        raise ValueError(", ".join(wrong))


def find(path: Path, split: str) -> list[Shard]:
    """The shards of a folder without a manifest, by their names."""
    files = sorted(f for f in path.glob(f"*{split}*") if f.suffix in (".bin", ".npy"))
    files = [file for file in files if not holds_examples(file)]
    if not files or any("train" in f.name and "val" in f.name for f in files):
        raise FileNotFoundError(f"--data-dir {path} has no {split} shards of its own: {PREPARE}")
    return [open_shard(file) for file in files]


def holds_examples(path: Path) -> bool:
    """Whether path is a file of questions, told by its content: hellaswag_val.bin is no shard."""
    return path.is_file() and np.fromfile(path, "<i4", 1).tolist() == [EVAL_MAGIC]


def choose(
    data_dir: str, seq_len: int, vocab_size: int, weights: tuple[str, int] | None
) -> tuple[TokenFolder, int]:
    """The data in data_dir, or without one Python's own source, and how many tokens a network over
    it knows: vocab_size, 0 for as many as the data, or weights', of which their tokenizer and that
    number are given. ValueError if an id is beyond it."""
    tokenizer, known = weights or ("", vocab_size)
    has_gpt2 = own_folder("gpt2").exists() or not missing_vocab()
    as_bytes = tokenizer == "bytes" if weights else not (vocab_size and has_gpt2)
    data = open_folder(Path(data_dir or own_source("bytes" if as_bytes else "gpt2")))
    known = known or VOCAB_SIZES.get(data.tokenizer, VOCAB_SIZES["gpt2"])
    check_data(data, seq_len, tokenizer, known)
    return data, known


def check_data(data: TokenFolder, seq_len: int, tokenizer: str, vocab_size: int):
    """ValueError if no shard holds a sequence, or if the data has other tokens than the network
    knows, as tokenizer and vocab_size tell."""
    for shards in (data.train, data.val):
        ShardLoader(shards, 1, seq_len)  # raises
    if {data.tokenizer, tokenizer} == {"bytes", "gpt2"}:
        path = data.train[0].path.parent
        why = f"--data-dir {path} holds {data.tokenizer} tokens, the weights know {tokenizer}"
        raise ValueError(f"{why}: prepare the data with --tokenizer {tokenizer}")
    if data.largest_id is None or data.largest_id >= vocab_size:
        for shard in data.train + data.val:
            if (largest := shard.largest_id()) >= vocab_size:
                why = f"{shard.path} holds token {largest}, the network knows 0 to {vocab_size - 1}"
                raise ValueError(f"{why}: prepare the data again with its --tokenizer")


def fingerprint_here(folder: Path) -> str:
    """Of the data as this rank's machine has it, or why it can't be read there."""
    try:
        return open_folder(folder).fingerprint
    except (OSError, ValueError) as error:
        return str(error)


def own_folder(tokenizer: str) -> Path:
    return Path("data", f"stdlib-{tokenizer}")


def own_source(tokenizer: str) -> Path:
    """The folder of the corpus that needs no download: written now, if it is not there yet."""
    path = own_folder(tokenizer)
    if not path.exists():
        print(f"no --data-dir: preparing Python's own source in {path}", flush=True)
        program = [sys.executable, Path(__file__).parent.with_name("prepare_data.py")]
        subprocess.run([*program, "--data-dir", path, "--tokenizer", tokenizer])
    return path  # whoever wrote it: another run may have been faster
