"""Token shards, folders of shards, and the loader that deals sequences out to the ranks.

A shard is a file of little-endian uint16 tokens in one of three formats, recognized by content:
    .bin   256 int32 (20240520, 1, number of tokens, 0 ...), then the tokens; prepare_data.py
           writes this format, and data sets for llm.c and modded-nanogpt use it
    .npy   a one-dimensional numpy array, as in build-nanogpt
    .bin   only the tokens, in files named train.bin and val.bin, as in nanoGPT"""

import hashlib
import json
import os
import re
import subprocess
import warnings
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
TOKEN = np.dtype("<u2")
PREPARE = "prepare_data.py"
MANIFEST = "manifest.json"  # prepare_data.py's record of the shards in the same folder
UNFINISHED = "manifest.unfinished.json"  # its name until all shards are there
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}  # the last id of each is <|endoftext|>


class ShardError(ValueError):
    exit_code = 2  # the user's mistake: shards are missing, incomplete or unsuitable


class DamagedShard(ShardError):
    exit_code = 6  # the disk's fault: a shard has changed since we opened it


@dataclass(frozen=True)
class Shard:
    """The location of the tokens in a file."""

    path: Path
    offset: int  # bytes before the first token
    num_tokens: int
    max_id: int = 65535  # a larger id means that the shard is damaged

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from `start` on: (count,) uint16. Raise DamagedShard if a token is
        missing or invalid. Check every read, because a file may be overwritten during a run."""
        return self.read_parts([start], count)

    def read_parts(self, starts: list[int], count: int) -> np.ndarray:
        """Return `count` tokens from each start on: (len(starts) * count,) uint16."""
        parts = []
        try:
            with open(self.path, "rb", buffering=0) as f:  # twice as fast as np.fromfile
                for start in starts:
                    f.seek(self.offset + start * TOKEN.itemsize)
                    parts.append(f.read(count * TOKEN.itemsize))
        except OSError as error:
            raise DamagedShard(f"{self.path} can't be read: {error.strerror}") from error
        content = b"".join(parts)
        if len(content) < len(starts) * count * TOKEN.itemsize:
            end = starts[-1] + count
            raise DamagedShard(f"{self.path} ends before token {end:,}: copy it again")
        tokens = np.frombuffer(content, TOKEN)
        largest = tokens.max(initial=0)  # takes 2 us
        if largest > self.max_id:
            cure = "prepare the data again, with the right --tokenizer"
            raise DamagedShard(f"{self.path} holds token {largest}, above {self.max_id}: {cure}")
        return tokens

    def samples(self) -> bytes:
        """Return 64 short samples from across the shard, which identify it."""
        size = min(512, self.num_tokens)
        starts = [i * (self.num_tokens - size) // 63 for i in range(64)]
        return self.read_parts(starts, size).tobytes()


def shard_header(num_tokens: int) -> bytes:
    """Return the header of a shard with num_tokens tokens. It has HEADER_BYTES bytes."""
    return np.array([MAGIC, VERSION, num_tokens], "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def open_shard(path: Path) -> Shard:
    """Return the shard in a file. Raise ShardError if the file is missing or incomplete."""
    try:
        shard = recognize(path)
        on_disk = (path.stat().st_size - shard.offset) / TOKEN.itemsize
        if on_disk != shard.num_tokens or not on_disk:
            raise ValueError(f"holds {on_disk:,.10g} tokens; its header says {shard.num_tokens:,}")
        return shard
    except Exception as error:  # numpy parses .npy headers as Python, which may fail in any way
        cure = f"copy it again, or write it with {PREPARE}"
        raise ShardError(f"{path} is not a complete shard: {error}; {cure}") from error


def recognize(path: Path) -> Shard:
    """Detect a file's format from its content and return the shard, or raise ValueError."""
    if not path.is_file():
        raise ValueError("no file")  # reading a pipe would wait forever
    with open(path, "rb") as f:
        head = f.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")
    magic, version, num_tokens = (int(n) for n in np.frombuffer(head, "<i4", 3))
    if (magic, version) == (MAGIC, VERSION):
        return Shard(path, HEADER_BYTES, num_tokens)
    if head.startswith(b"\x93NUMPY"):
        with warnings.catch_warnings(action="ignore"), open(path, "rb") as f:
            np.lib.format.read_magic(f)
            # numpy.save writes version 1.0 for numbers. numpy warns about the headers of Python 2.
            shape, _, dtype = np.lib.format.read_array_header_1_0(f)
            offset = f.tell()
        if dtype != TOKEN or len(shape) != 1:
            raise ValueError(f"holds {dtype} of shape {shape}, not a row of uint16")
        return Shard(path, offset, shape[0])
    if path.name not in ("train.bin", "val.bin"):
        raise ValueError(f"starts with {magic}, {version} instead of {MAGIC}, {VERSION}")
    # nanoGPT's format has no header, so check that the first million values look like tokens.
    tokens = np.fromfile(path, TOKEN, 1 << 20)
    if tokens.max() >= VOCAB_SIZES["gpt2"]:
        raise ValueError(f"has no header, and {tokens.max()} is not a GPT-2 token")
    if (len(tokens) > 1 and not tokens[1::2].any()) or tokens.view(np.uint8).all():
        raise ValueError("has no header, and holds text or 32-bit numbers")
    return Shard(path, 0, path.stat().st_size // TOKEN.itemsize)


@dataclass(frozen=True)
class TokenFolder:
    folder: Path
    train: list[Shard]
    val: list[Shard]
    tokenizer: str  # its name, or "unknown"
    vocab_size: int  # ids are below it
    fingerprint: str  # of the tokens and their order, not of file names
    notes: list[str]  # what was left out or assumed


def open_folder(path: Path, tokenizer: str = "", vocab_size: int = 1 << 16) -> TokenFolder:
    """Return a folder's shards. Those of another program, which come without a manifest, are
    assumed to hold tokens of `tokenizer` (GPT-2's if there is no name). Raise ShardError if a split
    has no shards."""
    text, new = "YOUR_TEXT", path.with_suffix("") if path.suffix else path
    if os.path.isfile(path):
        text, new = str(path), Path("data", path.stem)
    cure = f"{prepare_command(text, new)} makes one"
    if not os.path.isdir(path):
        raise ShardError(f"--data-dir {path} is not a folder of tokens: {cure}")
    if (path / MANIFEST).is_file():  # reading a pipe would wait forever
        data = open_prepared(path)
    elif (path / UNFINISHED).exists():
        cure = f"repeat the {PREPARE} command that began it"
        raise ShardError(f"--data-dir {path} is unfinished: {cure}")
    elif tokenizer:
        data = open_others(path, tokenizer, vocab_size)
    elif (path / "meta.pkl").exists():  # nanoGPT's data by character, in an unknown alphabet
        data = open_others(path, "unknown", 1 << 16)
    else:
        data = open_others(path, "gpt2", VOCAB_SIZES["gpt2"])
    if data.train and data.val:
        return data
    problem = f"has no {'val' if data.train else 'train'} shards"
    if not data.train and not data.val:
        problem = "holds no shards of tokens"
        tokens = Path("data", f"{path.resolve().name}-tokens")
        cure = f"to make some from its text: {prepare_command(str(path), tokens)}"
        if (path / "prepare.py").exists():  # as in nanoGPT's folders
            program = subprocess.list2cmdline(["python", str(path / "prepare.py")])
            cure = f"to make some: {program}, if that is nanoGPT's; {cure}"
        below = [str(manifest.parent) for manifest in sorted(path.glob(f"*/{MANIFEST}"))]
        cure = f"name {' or '.join(below)}" if below else cure
    raise ShardError("; ".join([f"--data-dir {path} {problem}: {cure}", *data.notes]))


def prepare_command(text: str, folder: Path) -> str:
    program = Path(__file__).with_name(PREPARE)
    with suppress(ValueError, OSError):  # on another drive of Windows, or the folder is gone
        program = Path(os.path.relpath(program))
    words = ["python", str(program), "--input", text, "--data-dir", str(folder)]
    return subprocess.list2cmdline(words)  # with quotes, if need be, that most shells understand


def open_prepared(path: Path) -> TokenFolder:
    """Return the shards that a folder's manifest lists."""
    manifest = read_manifest(path / MANIFEST)
    splits: dict[str, list[Shard]] = {"train": [], "val": []}
    digest = hashlib.sha256()
    for split, shards in splits.items():
        for entry in manifest[split]["shards"]:
            shard = open_shard(path / entry["name"])
            if shard.num_tokens != entry["tokens"]:
                raise ShardError(f"{shard.path} is not the shard that {MANIFEST} describes")
            shards.append(replace(shard, max_id=entry["largest_id"]))
            digest.update(f"{split} {entry['sha256']} ".encode())
    name, size = manifest["tokenizer"]["name"], manifest["tokenizer"]["vocab_size"]
    fingerprint = digest.hexdigest()[:16]
    return TokenFolder(path, splits["train"], splits["val"], name, size, fingerprint, [])


def open_others(path: Path, tokenizer: str, vocab_size: int) -> TokenFolder:
    """Return the shards in a folder whose names say train or val, and note the others."""
    splits: dict[str, list[Shard]] = {"train": [], "val": []}
    seen: dict[bytes, str] = {}  # content -> file name
    notes = []
    for file in sorted(path.iterdir()):
        if file.suffix not in (".bin", ".npy"):
            continue
        split = split_of(file.name)
        if not split:
            notes.append(f"left out: {file.name}, whose name must say either train or val")
            continue
        shard = replace(open_shard(file), max_id=vocab_size - 1)
        content = f"{split} {shard.num_tokens} ".encode() + shard.samples()
        if content in seen:
            notes.append(f"left out: {file.name}, a copy of {seen[content]}")
            continue
        seen[content] = file.name
        splits[split].append(shard)
    fingerprint = hashlib.sha256(b"".join(seen)).hexdigest()[:16]
    if tokenizer == "unknown":
        text = f"{path}/meta.pkl holds no ASCII alphabet: no samples and no bits per byte"
        notes.append(f"{text}; to have both, prepare the text itself with {PREPARE}")
    elif tokenizer.startswith("alphabet"):
        notes.append(f"{path}: {vocab_size} characters, by meta.pkl")
    else:
        notes.append(f"{path} has no {MANIFEST}: assumed {tokenizer} tokens")
    return TokenFolder(
        path, splits["train"], splits["val"], tokenizer, vocab_size, fingerprint, notes
    )


def split_of(name: str) -> str:
    """Return the split that a file's name says: "train", "val", or "" if it says neither or both.
    Whole words count more than parts of words: medieval_train.bin is for training."""
    for pattern in ("(?<![a-z])(train|val)(?:ing|id|idation)?(?![a-z])", "(train|val)"):
        found = {match[1] for match in re.finditer(pattern, name.lower())}
        if found:
            return found.pop() if len(found) == 1 else ""
    return ""


def read_manifest(path: Path) -> dict:
    """Return a folder's manifest. Raise ShardError if it lacks anything that we need."""
    try:
        manifest = json.loads(path.read_bytes())
        tokenizer = manifest["tokenizer"]
        tokenizer["name"] = str(tokenizer["name"])
        # Older manifests have only a name.
        size = tokenizer.get("vocab_size", VOCAB_SIZES.get(tokenizer["name"], 1 << 16))
        tokenizer["vocab_size"] = int(size)
        for entry in manifest["train"]["shards"] + manifest["val"]["shards"]:
            entry["name"] = Path(str(entry["name"])).name  # never a path to another folder
            entry["sha256"] = str(entry["sha256"])
            entry["tokens"] = int(entry["tokens"])
            entry["largest_id"] = int(entry["largest_id"])
        return manifest
    except Exception as error:  # a damaged file may hold anything
        raise ShardError(f"{path} is damaged: {error!r:.99}; prepare it again") from None


@lru_cache
def feistel_keys(seed: int, epoch: int) -> list[int]:
    return [int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)]


def permuted(number: int, length: int, seed: int, epoch: int) -> int:
    """Map number by a permutation of range(length) that differs in each epoch. The permutation is
    computed, not stored: a Feistel network (Luby and Rackoff 1988) permutes the numbers of 2 * half
    bits, and is applied until the result is below length (Black and Rogaway 2002)."""
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:  # at most 4 times on average
        left, right = number >> half, number & mask
        for key in feistel_keys(seed, epoch):
            mixed = (right + key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF  # 2^64 / golden ratio
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32 & mask)
        number = left << half | right
        if number < length:
            return number


@lru_cache(maxsize=4096)
def epoch_offset(seed: int, epoch: int, shard: int, T: int) -> int:
    """Return where in a shard an epoch's first sequence starts (below T). Later epochs cut the text
    at new places, which improved the best validation loss on 135 kB from 1.907 to 1.721."""
    if epoch == 0:
        return 0
    entropy = np.random.SeedSequence([seed, epoch, shard]).generate_state(1, np.uint64)[0]
    return int(entropy) % T


@dataclass(eq=False)
class ShardLoader:
    """Deals sequences of T tokens out to the ranks, B at a time. Sequences are numbered across all
    shards, and none spans two shards. next_batch takes the next B * num_ranks numbers, B per rank.
    The only state is position, the same on every rank, so a run can resume with any B and number of
    ranks. With a seed, each epoch has a new order; without one, each has the order on disk."""

    shards: list[Shard]
    B: int
    T: int
    rank: int = 0
    num_ranks: int = 1
    seed: int | None = None
    position: int = 0  # sequences dealt out so far, over all ranks
    prefetched: dict[range, tuple] = field(default_factory=dict)  # the batch that prefetch read

    def __post_init__(self):
        T = self.T
        # The number of each shard's first sequence. The - 1 is for the target of the last token.
        self.firsts = [0, *accumulate((shard.num_tokens - 1) // T for shard in self.shards)]
        if not len(self):
            longest = max(shard.num_tokens for shard in self.shards)
            text = f"--seq-len {T} needs shards of {T + 1} tokens, but the longest has {longest}"
            cure = f"prepare more text, or try --seq-len {max(longest - 1, 1)}"
            raise ShardError(f"{text}: {cure}")

    def __len__(self) -> int:  # sequences in an epoch
        return self.firsts[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        """Return sequence `number` of the run and the token after it: (T + 1,) uint16."""
        epoch, number = divmod(number, len(self))
        if self.seed is not None:
            number = permuted(number, len(self), self.seed, epoch)
        shard_index = bisect_right(self.firsts, number) - 1
        shard = self.shards[shard_index]
        start = (number - self.firsts[shard_index]) * self.T
        if self.seed is not None:
            # The offset drops no sequence, so a shard's last two may overlap.
            start += epoch_offset(self.seed, epoch, shard_index, self.T)
            start = min(start, shard.num_tokens - self.T - 1)
        return shard.read(start, self.T + 1)

    def batch(self, numbers: range) -> tuple:
        """Return the inputs and targets of these sequences, (len(numbers), T) int64 each."""
        import torch  # here, since prepare_data.py imports this module but needs no torch (200 MB)

        rows = np.stack([self[n] for n in numbers])  # (len(numbers), T + 1)
        x = torch.from_numpy(rows[:, :-1].astype(np.int64))
        y = torch.from_numpy(rows[:, 1:].astype(np.int64))
        if torch.cuda.is_initialized():
            x, y = x.pin_memory(), y.pin_memory()  # the GPU copies them while it computes
        return x, y

    def next_batch(self) -> tuple:
        """Return this rank's next inputs and targets, (B, T) int64 each."""
        numbers = self.next_numbers()
        self.position += self.num_ranks * self.B
        return self.prefetched.pop(numbers, None) or self.batch(numbers)

    def next_numbers(self) -> range:
        first = self.position + self.rank * self.B
        return range(first, first + self.B)

    def prefetch(self):
        """Read the next batch now, while the GPU is busy."""
        numbers = self.next_numbers()
        self.prefetched = {numbers: self.batch(numbers)}
