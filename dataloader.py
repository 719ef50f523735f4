"""Token shards on disk, and the loader that deals their sequences out to the ranks.

A shard is a file of uint16 tokens, little-endian, in one of three formats, told apart by content:
    .bin   256 int32 (20240520, 1, number of tokens, 0 ...), then the tokens: what prepare_data.py
           writes, and what others published for llm.c and modded-nanogpt
    .npy   a one-dimensional numpy array: build-nanogpt's
    .bin   the tokens alone, in files called train.bin and val.bin: nanoGPT's
"""

import warnings
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
TOKEN = np.dtype("<u2")
PREPARE = "prepare_data.py"
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}  # <|endoftext|> is the last id of both


class ShardError(ValueError):
    """A token shard is missing, incomplete, or does not fit: the user's mistake."""

    exit_code = 2


class DamagedShard(ShardError):
    """A shard is no longer what it was when it was opened: the disk's fault."""

    exit_code = 6


@dataclass(frozen=True)
class Shard:
    """Where the tokens of a file are."""

    path: Path
    offset: int  # bytes before the first token
    num_tokens: int
    max_id: int = 65535  # a larger id means that the shard is damaged

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start .. start + count, uint16 (count,). Raise DamagedShard if the file
        has changed: it may be overwritten while a run uses it, so every read is checked."""
        try:
            with open(self.path, "rb", buffering=0) as f:  # half the time of np.fromfile
                f.seek(self.offset + start * TOKEN.itemsize)
                content = f.read(count * TOKEN.itemsize)
        except OSError as error:
            raise DamagedShard(f"{self.path} can't be read: {error.strerror}") from error
        if len(content) < count * TOKEN.itemsize:
            raise DamagedShard(f"{self.path} is cut before token {start + count:,}: copy it again")
        tokens = np.frombuffer(content, TOKEN)
        largest = tokens.max(initial=0)  # 2 us
        if largest > self.max_id:
            cure = "prepare the data again, with the right --tokenizer"
            raise DamagedShard(f"{self.path} holds token {largest}, above {self.max_id}: {cure}")
        return tokens


def shard_header(num_tokens: int) -> bytes:
    """Return the first HEADER_BYTES of a shard of num_tokens."""
    return np.array([MAGIC, VERSION, num_tokens], "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def open_shard(path: Path) -> Shard:
    """Return the shard in path. Raise ShardError if there is none, or it is incomplete."""
    try:
        shard = recognize(path)
        on_disk = (path.stat().st_size - shard.offset) / TOKEN.itemsize
        if on_disk != shard.num_tokens or not on_disk:
            raise ValueError(f"holds {on_disk:,.10g} tokens, its header says {shard.num_tokens:,}")
        return shard
    except Exception as error:  # numpy parses a damaged .npy header with Python's own parser
        raise ShardError(
            f"{path} is not a complete shard: {error}; copy it again, or write it with {PREPARE}"
        ) from error


def recognize(path: Path) -> Shard:
    """Return a file as a shard, its format told by its content. Raise ValueError if it has none."""
    if not path.is_file():
        raise ValueError("no file")  # and reading a pipe would wait forever
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
    magic, version, num_tokens = (int(n) for n in np.frombuffer(head, "<i4", 3))
    if (magic, version) == (MAGIC, VERSION):
        return Shard(path, HEADER_BYTES, num_tokens)
    if head.startswith(b"\x93NUMPY"):
        with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
            array = np.load(path, mmap_mode="r")  # reads the header only
        if array.dtype != TOKEN or array.ndim != 1:
            raise ValueError(f"holds {array.dtype} of shape {array.shape}, not uint16 in a row")
        return Shard(path, array.offset, len(array))
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError(f"starts with {magic}, {version} instead of {MAGIC}, {VERSION}")
    # nanoGPT's format has no header: the first million tokens must look like some.
    tokens = np.fromfile(path, TOKEN, 1 << 20)
    if tokens.max() >= VOCAB_SIZES["gpt2"]:
        raise ValueError(f"has no header and holds {tokens.max()}, no token of GPT-2's 50,257")
    if (len(tokens) > 1 and not tokens[1::2].any()) or tokens.view(np.uint8).all():
        raise ValueError("has no header and holds text, or 32-bit numbers")
    return Shard(path, 0, path.stat().st_size // TOKEN.itemsize)


@lru_cache
def round_keys(seed: int, epoch: int) -> list[int]:
    return [int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)]


def shuffled(number: int, length: int, seed: int, epoch: int) -> int:
    """Return where a permutation of range(length), new in each epoch, takes number. It is computed,
    not stored: a Feistel network (Luby and Rackoff 1988) permutes the numbers of 2 * half bits,
    again until the result is below length (Black and Rogaway 2002): 4 times at most on average."""
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


@lru_cache(maxsize=4096)
def epoch_offset(seed: int, epoch: int, shard: int, T: int) -> int:
    """Return where in a shard the sequences of an epoch begin, below T; 0 in the first epoch. From
    the second epoch on the text is cut at new places. On 135 kB of text that took the best
    validation loss from 1.907 to 1.721."""
    if epoch == 0:
        return 0
    entropy = np.random.SeedSequence([seed, epoch, shard]).generate_state(1, np.uint64)[0]
    return int(entropy) % T


class ShardLoader:
    """Deals sequences of T tokens out to the ranks, B at a time. The sequences are numbered through
    all shards, and none spans two. Each call of next_batch takes the next B * num_ranks numbers, B
    for each rank. So position, one integer that is the same on every rank, is the whole state: a
    run resumes with any B and on any number of ranks. With a seed the order is shuffled anew in
    each epoch; without one it is the disk's."""

    def __init__(
        self, shards: list[Shard], B: int, T: int, rank=0, num_ranks=1, seed: int | None = None
    ):
        self.shards = shards
        self.B = B
        self.T = T
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        # The last target of a sequence is the token after it, hence the - 1.
        self.ends = list(accumulate((shard.num_tokens - 1) // T for shard in shards))
        if not len(self):
            longest = max(shard.num_tokens for shard in shards)
            cure = f"prepare more text, or try --seq-len {max(longest - 1, 1)}"
            raise ShardError(
                f"--seq-len {T} needs shards of {T + 1} tokens, the longest has {longest}: {cure}"
            )
        self.position = 0  # sequences dealt out so far, over all ranks
        self.ahead: dict[range, tuple] = {}  # the batch that read_ahead has read

    def __len__(self) -> int:  # in an epoch
        return self.ends[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        """Return sequence `number` of the run and the token after it: (T + 1,) uint16."""
        epoch, number = divmod(number, len(self))
        if self.seed is not None:
            number = shuffled(number, len(self), self.seed, epoch)
        shard_index = bisect_right(self.ends, number)
        shard = self.shards[shard_index]
        if shard_index:
            number -= self.ends[shard_index - 1]
        start = number * self.T
        if self.seed is not None:
            # The number of sequences stays the same, so the last one may overlap the one before.
            start += epoch_offset(self.seed, epoch, shard_index, self.T)
            start = min(start, shard.num_tokens - self.T - 1)
        return shard.read(start, self.T + 1)

    def batch(self, numbers: range) -> tuple:
        """Return inputs and targets of these sequences, (len(numbers), T) int64 each; pinned where
        there is a GPU, so that they can be copied to it while it computes."""
        import torch  # not at the top: prepare_data.py's workers do without its 200 MB

        rows = np.stack([self[n] for n in numbers])  # (len(numbers), T + 1)
        x = torch.from_numpy(rows[:, :-1].astype(np.int64))
        y = torch.from_numpy(rows[:, 1:].astype(np.int64))
        if torch.cuda.is_available():
            x, y = x.pin_memory(), y.pin_memory()
        return x, y

    def next_batch(self) -> tuple:
        """Return this rank's next inputs and targets, (B, T) int64 each."""
        numbers = self.next_numbers()
        self.position += self.num_ranks * self.B
        return self.ahead.pop(numbers, None) or self.batch(numbers)

    def next_numbers(self) -> range:
        first = self.position + self.rank * self.B
        return range(first, first + self.B)

    def read_ahead(self):
        """Read the next batch now, while a GPU is busy."""
        numbers = self.next_numbers()
        self.ahead = {numbers: self.batch(numbers)}
