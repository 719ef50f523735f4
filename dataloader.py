"""Token shards on disk, and the loader that deals their sequences out to the ranks.

A shard is a file of uint16 tokens, little-endian, in one of three layouts, told by its content:
    .bin   256 int32 (20240520, 1, number of tokens, 0 ...), then the tokens: what prepare_data.py
           writes, and what others published for llm.c and modded-nanogpt
    .npy   a numpy array of one dimension: build-nanogpt's
    .bin   the tokens alone, in files called train.bin and val.bin: nanoGPT's
"""

import warnings
import zlib
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
EVAL_MAGIC = 20240522  # of a file of questions, which lies beside shards: support/questions.py
HEADER_BYTES = 1024
TOKEN = np.dtype("<u2")
CHUNK = 16384  # tokens with one CRC-32: 6 us to check, 33 kB in the manifest for 100M tokens
SAMPLES = 64  # of a shard without CRCs
PREPARE = "prepare_data.py"
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}  # <|endoftext|> is the last id of both


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
        crcs = np.frombuffer(self.crcs, "<u4")[first // CHUNK :]
        chunks = zip(range(0, len(content), CHUNK * TOKEN.itemsize), crcs, strict=False)
        damaged = any(zlib.crc32(content[i : i + CHUNK * TOKEN.itemsize]) != c for i, c in chunks)
        if damaged or len(content) < (end - first) * TOKEN.itemsize:
            raise OSError(f"{self.path} is damaged: its tokens {first:,} to {end:,} are not whole")
        tokens = np.frombuffer(content, TOKEN)
        tokens = tokens[start - first : start - first + count]
        if (largest := tokens.max(initial=0)) > self.most:  # 2 us
            why = f"holds token {largest}, manifest.json says that {self.most} is the largest"
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
