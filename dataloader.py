"""Token shards on disk, and the loader that deals their sequences out to the ranks.

A shard is a file of uint16 tokens, little-endian, in one of three layouts, told by its content:
    .bin   256 int32 (20240520, 1, number of tokens, 0 ...), then the tokens: what prepare_data.py
           writes, and what others published for llm.c and modded-nanogpt
    .npy   a numpy array of one dimension: build-nanogpt's
    .bin   the tokens alone, in files called train.bin and val.bin: nanoGPT's

A folder of shards may hold manifest.json: what prepare_data.py knew when it wrote them, and the
CRC-32 of each 32 KiB of tokens, which every reading is checked against. It holds a CRC-32 of its
own, "crc32": whoever changes a manifest by hand takes that out.
"""

import hashlib
import json
import os
import re
import reprlib
import tempfile
import warnings
import zlib
from base64 import b64decode
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
EVAL_MAGIC = 20240522  # of a file of questions, which lies beside shards: support/questions.py
HEADER_BYTES = 1024
TOKEN = np.dtype("<u2")
CHUNK = 16384  # tokens with one CRC-32: 6 us to check, 33 kB in the manifest for 100M tokens
SAMPLES = 64  # of a shard without CRCs
MANIFEST = "manifest.json"
PREPARE = "prepare_data.py"
VOCAB_URLS = [  # GPT-2's vocabulary, where tiktoken gets it from
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
]
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}  # <|endoftext|> is the last id of both


def vocab_files() -> list[Path]:
    """Where tiktoken keeps GPT-2's two vocabulary files: under the SHA-1 of their address."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    return [Path(cache, hashlib.sha1(url.encode()).hexdigest()) for url in VOCAB_URLS]


def missing_vocab() -> list[Path]:
    """Those that tiktoken would have to download. Asked before tiktoken is, which waits for a
    network."""
    return [path for path in vocab_files() if not path.exists()]


# --------------------------------------------------------------------------------------------------
# Shards


@dataclass(frozen=True)
class Shard:
    """Where the tokens of a file are."""

    path: Path
    offset: int  # bytes before the first token
    num_tokens: int
    crcs: bytes = b""  # the CRC-32 of each CHUNK of tokens, uint32, where they are known
    most: int = 65535  # no id is larger

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count, uint16 (count,); OSError if the file is not what it was.
        Where there are CRCs, whole chunks are read and checked: each time, since a file may be
        written over while a run uses it."""
        first, end = start, start + count
        if self.crcs:
            first, end = start // CHUNK * CHUNK, min(-(-end // CHUNK) * CHUNK, self.num_tokens)
        with open(self.path, "rb", buffering=0) as f:  # half the time of np.fromfile
            f.seek(self.offset + first * TOKEN.itemsize)
            content = f.read((end - first) * TOKEN.itemsize)
        tokens = np.frombuffer(content, TOKEN, len(content) // TOKEN.itemsize)
        crcs = np.frombuffer(self.crcs, "<u4")[first // CHUNK :]
        chunks = zip(range(0, len(tokens), CHUNK), crcs, strict=False)
        damaged = any(zlib.crc32(tokens[i : i + CHUNK]) != crc for i, crc in chunks)
        if damaged or len(tokens) < end - first:
            raise OSError(f"{self.path} is damaged: its tokens {first:,} to {end:,} are not whole")
        tokens = tokens[start - first : start - first + count]
        if (largest := tokens.max(initial=0)) > self.most:  # 2 us
            why = f"holds token {largest}, {MANIFEST} says that {self.most} is the largest"
            raise OSError(f"{self.path} {why}; prepare the data again")
        return tokens

    def largest_id(self) -> int:
        """By reading the whole shard, 2 MiB at a time."""
        starts = range(0, self.num_tokens, 1 << 20)
        return max(int(self.read(s, min(1 << 20, self.num_tokens - s)).max()) for s in starts)

    def sample(self) -> bytes:
        """SAMPLES reads spread evenly from the first token to the last, 1 ms in all."""
        size = min(512, self.num_tokens)
        starts = {i * (self.num_tokens - size) // (SAMPLES - 1) for i in range(SAMPLES)}
        return b"".join(self.read(start, size).tobytes() for start in sorted(starts))


def shard_header(num_tokens: int) -> bytes:
    """The first HEADER_BYTES of a shard of num_tokens."""
    return np.array([MAGIC, VERSION, num_tokens], "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def open_shard(path: Path) -> Shard:
    """The shard in path; ValueError if there is none, or none that is whole."""
    try:
        return recognise(path, path.stat().st_size)
    except Exception as error:  # numpy reads a bad header with Python's parser
        why = f"{path} is not a whole token shard: {error}"
    raise ValueError(f"{why}; copy it again, or write it with {PREPARE}")


def recognise(path: Path, size: int) -> Shard:
    """The layout of a file of size bytes, told by its content; ValueError: what speaks against."""
    if not path.is_file():
        raise ValueError("no file")  # and reading a pipe would wait for ever
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
    magic, version, num_tokens = (int(n) for n in np.frombuffer(head, "<i4", 3))
    if head.startswith(b"\x93NUMPY"):
        shard = open_npy(path)
    elif (magic, version) == (MAGIC, VERSION):
        shard = Shard(path, HEADER_BYTES, num_tokens)
    elif path.name in ("train.bin", "val.bin"):
        shard = open_raw(path, size)
    else:
        raise ValueError(f"starts with {magic}, {version} instead of {MAGIC}, {VERSION}")
    on_disk = (size - shard.offset) / TOKEN.itemsize
    if on_disk != shard.num_tokens or not on_disk:
        raise ValueError(f"holds {on_disk:,.10g} tokens, its header says {shard.num_tokens:,}")
    return shard


def open_npy(path: Path) -> Shard:
    with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
        array = np.load(path, mmap_mode="r")  # reads the header only
    if array.dtype != TOKEN or array.ndim != 1:
        raise ValueError(f"holds {array.dtype} of shape {array.shape}, not uint16 in a row")
    return Shard(path, array.offset, len(array))


def open_raw(path: Path, size: int) -> Shard:
    """nanoGPT's layout has no header: what its tokens can't be is told by their values."""
    tokens = np.fromfile(path, TOKEN, 1 << 20)
    if size % TOKEN.itemsize or not size:
        raise ValueError(f"holds {size:,} bytes, not a number of 2-byte tokens")
    if tokens.max() >= VOCAB_SIZES["gpt2"]:
        raise ValueError(f"has no header and holds {tokens.max()}, no token of GPT-2's 50,257")
    if len(tokens) > 1 and not tokens[1::2].any():
        raise ValueError("has no header and holds 32-bit numbers or zeros")
    if tokens.view(np.uint8).all():
        raise ValueError("has no header and holds text")
    return Shard(path, 0, size // TOKEN.itemsize)


def holds_examples(path: Path) -> bool:
    """Whether path is a file of questions, told by its content: hellaswag_val.bin is no shard."""
    return path.is_file() and np.fromfile(path, "<i4", 1).tolist() == [EVAL_MAGIC]


# --------------------------------------------------------------------------------------------------
# Folders of shards


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

    def old_fingerprint(self) -> str:
        """What checkpoints held before, without a colon: of the beginnings of training shards."""
        begins = [(s.num_tokens, s.read(0, min(512, s.num_tokens)).tobytes()) for s in self.train]
        return hashlib.sha256(repr(begins).encode()).hexdigest()[:16]


# What a manifest must hold: a range of whole numbers, a pattern of text, any number of [these], or
# fields by name; one with ? may be missing.
CRC32, COUNT = range(1 << 32), range(1 << 53)
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,255}")
BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
ENTRY = {"name": NAME, "bytes": COUNT, "tokens": range(1, 1 << 31), "largest_id": range(1 << 16)}
ENTRY |= {"chunk_crc32": BASE64, "sha256?": NAME}
SPLIT = {"shards": [ENTRY], "tokens?": COUNT, "documents?": COUNT, "bytes?": COUNT, "crc32?": CRC32}
FIELDS = {"tokenizer": {"name": NAME, "sha256?": NAME}, "train": SPLIT, "val": SPLIT}
FIELDS |= {"input?": [COUNT], "crc32?": CRC32}


def check_fields(value, wanted: range | re.Pattern | list | dict, where: str = ""):
    """ValueError, with the place, unless value is as wanted."""
    if isinstance(wanted, range):
        fits = type(value) is int and value in wanted
    elif isinstance(wanted, re.Pattern):
        fits = isinstance(value, str) and wanted.fullmatch(value)
    else:
        fits = isinstance(value, type(wanted))
    if not fits:
        found = f"{value:,}" if type(value) is int else reprlib.repr(value)
        raise ValueError(f"{where or 'its content'} is {found}")
    if isinstance(wanted, list):
        for i, item in enumerate(value):
            check_fields(item, wanted[0], f"{where}[{i}]")
    elif isinstance(wanted, dict):
        for key, inner in wanted.items():
            name = key.rstrip("?")
            if name == key or name in value:
                check_fields(value.get(name), inner, f"{where}.{name}".lstrip("."))


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
        crc32 = manifest.pop("crc32", None)
        if crc32 not in (None, content_crc32(manifest)):
            raise ValueError("its content does not have its crc32")
        for name in ("train", "val"):
            check_count(manifest[name], name)
        return manifest
    except (ValueError, RecursionError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged ({why}); prepare the data again")


def check_count(split: dict, name: str):
    """ValueError if the shards of a split do not hold its tokens; of one that grows they hold less,
    and crc32 is of the others."""
    in_shards = sum(entry["tokens"] for entry in split["shards"])
    more = split.setdefault("tokens", in_shards) - in_shards
    if more < 0 or (more > 0) != ("crc32" in split):
        raise ValueError(f"{name}.tokens is {split['tokens']:,}, its shards have {in_shards:,}")


def open_folder(path: Path) -> TokenFolder:
    """The shards in path, each checked by its header; OSError or ValueError if one is amiss."""
    if not path.is_dir():
        raise FileNotFoundError(f"--data-dir {path} is not a folder; write it with {PREPARE}")
    if not os.path.lexists(path / MANIFEST):
        tokenizer = "unknown" if (path / "meta.pkl").exists() else "gpt2"  # nanoGPT's alphabets
        return TokenFolder(find(path, "train"), find(path, "val"), tokenizer, None)
    return open_prepared(path, read_manifest(path))


def open_prepared(path: Path, manifest: dict) -> TokenFolder:
    """A folder that prepare_data.py wrote, where only what the manifest names counts."""
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


def find(path: Path, split: str) -> list[Shard]:
    """The shards of a folder without a manifest, by their names."""
    files = sorted(f for f in path.glob(f"*{split}*") if f.suffix in (".bin", ".npy"))
    files = [file for file in files if not holds_examples(file)]
    if not files or any("train" in f.name and "val" in f.name for f in files):
        raise FileNotFoundError(f"--data-dir {path} has no {split} shards of its own: {PREPARE}")
    return [open_shard(file) for file in files]


# --------------------------------------------------------------------------------------------------
# Who reads what


@lru_cache
def round_keys(seed: int, epoch: int) -> list[int]:
    return [int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)]


def shuffled(number: int, length: int, seed: int, epoch: int) -> int:
    """Where a permutation of range(length), new in each epoch, takes number. It is computed, not
    stored: a Feistel network (Luby and Rackoff 1988) permutes the numbers of 2 * half bits, and is
    walked until it lands below length (Black and Rogaway 2002), four times on average at most."""
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for key in round_keys(seed, epoch):
            mixed = (right + key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF  # 2^64 / golden ratio
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32 & mask)
        number = left << half | right
        if number < length:
            return number


class ShardLoader:
    """Deals sequences of T tokens out to the ranks, B at a time.

    The sequences are numbered through all shards, and none spans two. Each call of next_batch takes
    the next B * num_ranks numbers, B for each rank, so position, one integer that is the same on
    every rank, is the whole state: a run resumes with any B and on any number of ranks.
    """

    def __init__(
        self, shards: list[Shard], B: int, T: int, rank=0, num_ranks=1, seed: int | None = None
    ):
        self.shards, self.B, self.T = shards, B, T
        self.rank, self.num_ranks, self.seed = rank, num_ranks, seed
        # the last target of a sequence is the token after it, hence the - 1
        self.ends = list(accumulate((shard.num_tokens - 1) // T for shard in shards))
        if not len(self):
            longest = max(shard.num_tokens for shard in shards)
            why = f"--seq-len {T} needs shards of {T + 1} tokens, the longest has {longest}"
            cure = f"try --seq-len {longest - 1}" if longest > 1 else "prepare more text"
            raise ValueError(f"{why}: {cure}")
        self.position = 0  # sequences dealt out so far, over all ranks
        self.ahead = {}

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return self.ends[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        """Sequence number of the run and the token after it: (T + 1,) uint16."""
        epoch, number = divmod(number, len(self))
        if self.seed is not None:
            number = shuffled(number, len(self), self.seed, epoch)
        shard = bisect_right(self.ends, number)
        first = self.ends[shard - 1] if shard else 0
        return self.shards[shard].read((number - first) * self.T, self.T + 1)

    def batch(self, numbers: range) -> tuple:
        """Inputs and targets of these sequences of the run, (len(numbers), T) int64 each; pinned
        where there is a GPU, so that they can be copied to it while it computes."""
        import torch  # not at the top: prepare_data.py's workers do without its 200 MB

        rows = np.stack([self[n] for n in numbers])  # (len(numbers), T + 1)
        x, y = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
        return (x.pin_memory(), y.pin_memory()) if torch.cuda.is_available() else (x, y)

    def next_batch(self) -> tuple:
        """This rank's next inputs and targets, (B, T) int64 each."""
        numbers = self.next_numbers()
        self.position += self.num_ranks * self.B
        return self.ahead.pop(numbers, None) or self.batch(numbers)

    def next_numbers(self) -> range:
        first = self.position + self.rank * self.B
        return range(first, first + self.B)

    def read_ahead(self):
        """Read the next batch already, while a GPU is busy. What is wrong with it next_batch says,
        which reads it again then."""
        with suppress(OSError, ValueError):
            self.ahead = {self.next_numbers(): self.batch(self.next_numbers())}
