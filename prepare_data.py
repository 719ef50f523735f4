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
gets its name when it is whole; the same command then says so and changes nothing.
"""

import hashlib
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from tqdm import tqdm

import dataloader
from dataloader import TOKEN, VOCAB_SIZES, open_shard
from support import corpus, inputs
from support.corpus import MANIFEST, NO_TOKENS, check_shard, describe, longer, save_manifest
from support.files import DISK_ERRORS, fetch, locked, own_file, sha256_of, vocab_cure
from support.flags import check_flags, flag, make_parser, parse, spell
from support.questions import write_questions

CORPORA = {  # where others published their shards, how these are called, how many for training
    "fineweb-edu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb", 1001),
    "fineweb": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
}

# --------------------------------------------------------------------------------------------------
# Flags


@dataclass(frozen=True)
class PrepareConfig:
    """What to make of what, and where."""

    input: tuple = flag((), "files, folders, 'patterns'; none: Python's standard library",
                        group="what to write, one of")  # fmt: skip
    download: str = flag("", "fetch tokens that others published instead", choices=CORPORA)
    multiple_choice: tuple = flag((), "files of questions in JSON lines, for --hellaswag")
    verify: bool = flag(False, "compare the shards with their manifest instead")
    data_dir: str = flag("", "folder to write; a download, or no input: data/CORPUS", group="how")
    tokenizer: str = flag("bytes", "GPT-2's, or bytes", choices=VOCAB_SIZES)
    text_field: str = flag("text", "where a line or row has its text")
    shard_tokens: int = flag(100_000_000, "tokens per shard", 1024)
    val_fraction: float = flag(0.01, "documents for validation", 0, 0.5)
    val_tokens: int = flag(0, "instead of --val-fraction: about so many tokens", 0)
    seed: int = flag(1337, "seed of which documents these are", -(2**63), 2**64 - 1)
    workers: int = flag(0, "worker processes; none: one per core, for bytes 0", 0, 61)
    dry_run: bool = flag(False, "--input: say what it takes, from a sample")
    shards: int = flag(100, "--download: training shards, of 100M tokens", 1)
    mirror: str = flag("", "--download: address of the folder that holds them")

    @property
    def folder(self) -> Path:
        return Path(self.data_dir or f"data/{self.download or f'stdlib-{self.tokenizer}'}")


def parse_args(argv: list[str]) -> PrepareConfig:
    given = parse(make_parser(PrepareConfig, __doc__ or "", recipes={}), argv)
    if given.get("tokenizer", "bytes") != "bytes":
        given = {"workers": min(os.cpu_count() or 1, 61)} | given
    if {"val_fraction", "val_tokens"} <= given.keys():
        raise ValueError("not allowed together: --val-fraction --val-tokens; see --help")
    check(config := PrepareConfig(**given))
    return config


def check(config: PrepareConfig):
    """ValueError if flags are beyond what they may be, or do not go together."""
    check_flags(config)
    kinds = ("input", "download", "multiple_choice", "verify")
    sources = [spell(name) for name in kinds if getattr(config, name)]
    if len(sources) > 1:
        raise ValueError(f"not allowed together: {' '.join(sources)}; see --help")
    if config.dry_run and sources not in ([], ["--input"]):
        raise ValueError(f"--dry-run is for --input, not for {sources[0]}; see --help")
    if not config.data_dir and sources not in ([], ["--download"]):
        raise ValueError(f"{sources[0]} needs --data-dir; see --help")
    if config.download and config.shards > (most := CORPORA[config.download][2]):
        why = f"must be a number of at least 1 and at most {most}"
        raise ValueError(f"--shards {config.shards} {why}: {config.download} has no more")


# --------------------------------------------------------------------------------------------------
# Documents


@dataclass
class Batch:
    """About 2 * PIECE bytes of text, of one document or many, for one split."""

    split: str
    crc32: int = 0  # of the flags and of all documents read so far
    size: int = 0  # bytes
    parts: list[tuple[bool, bytes]] = field(default_factory=list)  # does a document begin?, text


def batches(
    texts: Iterable[Iterable], config: PrepareConfig, tally: inputs.Tally
) -> Iterator[Batch]:
    """The documents, in order. Each one's split is drawn; the first is for training."""
    names = ("tokenizer", "shard_tokens", "val_fraction", "val_tokens", "seed", "text_field")
    flags = repr([getattr(config, name) for name in names])
    rng, crc, split = random.Random(config.seed), zlib.crc32(flags.encode()), None
    growing = {"train": Batch("train"), "val": Batch("val")}
    for blocks in texts:
        split = "val" if split and rng.random() < config.val_fraction else "train"
        crc, begins, not_utf8 = zlib.crc32(split.encode(), crc), True, 0
        for piece in inputs.pieces(blocks):
            batch, crc = growing[split], zlib.crc32(piece, crc)
            batch.parts.append((begins, piece))
            batch.crc32, batch.size, begins = crc, batch.size + len(piece), False
            not_utf8 += inputs.count_not_utf8(piece)
            if batch.size >= 2 * inputs.PIECE:
                yield batch
                growing[split] = Batch(split)
        if begins:
            tally.skipped["empty"] += 1
        if not_utf8:
            tally.not_utf8.update(bytes=not_utf8, documents=1)
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
        if error.errno in DISK_ERRORS:
            raise
        why = f"--tokenizer gpt2: no network; {vocab_cure()}, or use --tokenizer bytes"
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


def read_manifest(folder: Path) -> dict:
    """What folder's manifest says; of one that has none, that nothing is there."""
    try:
        return corpus.read_manifest(folder)
    except FileNotFoundError:
        return {"train": {"shards": []}, "val": {"shards": []}}


ACCOUNT = ("documents", "bytes", "tokens", "shards")


@dataclass
class Split:
    """A stream of tokens that goes into shards as it comes, and the manifest's account of it. The
    last shard may grow: what its file holds behind its tokens counts for nothing."""

    folder: Path
    name: str
    shard_tokens: int
    documents: int = 0
    bytes: int = 0  # of text
    tokens: int = 0
    shards: list[dict] = field(default_factory=list)

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}_{number:06d}.bin"

    def account(self) -> dict:
        """What the manifest says, once all of it is on the disk."""
        for entry in self.shards[-1:]:
            with open(self.folder / entry["name"], "r+b") as f:
                os.fsync(f.fileno())
        return {name: getattr(self, name) for name in ACCOUNT}

    def check(self):
        """ValueError if a shard is not what its entry says."""
        for entry in self.shards:
            try:
                if entry is self.shards[-1]:
                    self.seal()
                else:
                    check_shard(self.folder, entry)
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) in DISK_ERRORS:  # the shard may be good
                    raise
                raise ValueError(f"{self.folder / entry['name']} is damaged") from None

    def append(self, tokens: np.ndarray, documents: int, size: int) -> bool:
        """Write tokens behind those that count, over what a killed run may have left there. True
        if that filled a shard."""
        self.documents, self.bytes = self.documents + documents, self.bytes + size
        num_whole = self.tokens // self.shard_tokens
        while len(tokens):
            if self.tokens == len(self.shards) * self.shard_tokens:
                self.shards.append(NO_TOKENS | {"name": self.path(len(self.shards)).name})
            entry, path = self.shards[-1], self.path(len(self.shards) - 1)
            part, tokens = np.split(tokens, [self.shard_tokens - entry["tokens"]])
            with open(path, "r+b" if path.exists() else "wb", opener=own_file) as f:
                f.seek(entry["bytes"])
                f.write(part.data)
            self.shards[-1], self.tokens = longer(entry, part), self.tokens + len(part)
            if self.tokens % self.shard_tokens == 0:
                self.seal()
        return self.tokens // self.shard_tokens > num_whole

    def seal(self):
        """Give the last shard its header, and nothing behind its tokens; OSError or ValueError if
        they are not what was written."""
        for entry in self.shards[-1:]:
            with open(self.folder / entry["name"], "r+b", opener=own_file) as f:
                f.write(dataloader.shard_header(entry["tokens"]))
                f.truncate(entry["bytes"])
                os.fsync(f.fileno())
            check_shard(self.folder, entry)
        self.path(len(self.shards)).unlink(missing_ok=True)  # give_end gave it

    def give_end(self, other: "Split", lengths: np.ndarray, count: int):
        """Hand the last count tokens over to other; 0: the growing shard, and if it is the only
        one, or less than a tenth of one, the last tenth of the shard before it."""
        num_whole, fill = divmod(self.tokens, self.shard_tokens)
        tenth = min(self.tokens, self.shard_tokens) // 10
        end = tenth if not num_whole else fill if fill >= tenth else fill + tenth
        keep = self.tokens - (min(count, self.tokens // 2) or end)
        self.seal()
        ends = []
        while self.tokens > keep:
            shard = corpus.open_entry(self.folder, self.shards.pop())
            stays = max(0, keep - self.tokens + shard.num_tokens)
            ends.insert(0, shard.read(stays, shard.num_tokens - stays))
            self.shards += [describe(shard, stays)] if stays else []
            self.tokens -= len(ends[0])
        for tokens in ends:
            documents, size = int((lengths[tokens] == 0).sum()), int(lengths[tokens].sum())
            self.documents, self.bytes = self.documents - documents, self.bytes - size
            other.append(tokens, documents, size)


def go_on(folder: Path, shard_tokens: int) -> tuple[Split, Split, list[int]]:
    """What folder has of each split, and of how much of the input; if any of it is damaged, or an
    older version's, all is made again."""
    try:
        return kept(folder, shard_tokens)
    except ValueError as error:
        complain(f"{error}; begins again")
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink()
    return kept(folder, shard_tokens)


def kept(folder: Path, shard_tokens: int) -> tuple[Split, Split, list[int]]:
    manifest, splits = read_manifest(folder), []
    for name in ("train", "val"):
        account = {key: value for key, value in manifest[name].items() if key in ACCOUNT}
        splits.append(Split(folder, name, shard_tokens, **account))
        splits[-1].check()
    return *splits, manifest.get("input", [0, 0])


def same_so_far(todo: Iterator[Batch], done: int, crc32: int, bar: tqdm) -> bool:
    """Read again the batches that are done: whether they are what they were."""
    batch = Batch("")
    for batch in islice(todo, done):
        bar.update(batch.size)
    return batch.crc32 == crc32


def show(bar: tqdm, size: int, train: Split, val: Split):
    bar.update(size)
    documents, tokens = train.documents + val.documents, train.tokens + val.tokens
    rate = (bar.format_dict["rate"] or 0) * tokens / max(train.bytes + val.bytes, 1)
    text = f"{documents:,} documents, {tokens / 1e6:,.1f}M tokens, {rate / 1e6:.1f}M tokens/s"
    bar.set_postfix_str(text, refresh=False)


def write_folder(
    folder: Path, todo: Iterator[Batch], config: PrepareConfig, bar: tqdm, skipped: Counter
):
    """Write into folder what is not there yet of the shards of todo, and the manifest, whose input
    says how much of the text they hold."""
    tokenizer = TOKENIZERS[config.tokenizer]()
    train, val, (done, crc32) = go_on(folder, config.shard_tokens)

    def save():
        account = {"train": train.account(), "val": val.account(), "input": (done, crc32)}
        about = {"name": tokenizer.name, "sha256": tokenizer.sha256}
        save_manifest(folder, {"tokenizer": about, **account})

    if not same_so_far(todo, done, crc32, bar):
        why = f"{folder} was begun with other input or other flags"
        raise ValueError(f"{why}: repeat those, or remove the folder")
    for batch, tokens in in_order(todo, config.tokenizer, config.workers):
        split = train if batch.split == "train" else val
        done, crc32 = done + 1, batch.crc32
        if split.append(tokens, sum(begins for begins, _ in batch.parts), batch.size):
            save()
        show(bar, batch.size, train, val)
    if not val.tokens and train.tokens:
        train.give_end(val, tokenizer.lengths, config.val_tokens)
    if min(train.tokens, val.tokens) < 2:  # an input and its target
        why = f"{train.tokens} tokens for training and {val.tokens} for validation"
        why += "".join(f", {count:,} skipped: {cause}" for cause, count in skipped.most_common(1))
        raise ValueError(f"the input has {why}: name more with --input, or more for validation")
    save()  # before the shards that counted more are cut
    train.seal()
    val.seal()


def check_same(folder: Path, todo: Iterator[Batch], bar: tqdm):
    """FileExistsError unless folder is whole, and of the same input and flags as todo."""
    manifest = read_manifest(folder) if folder.is_dir() else {}
    done, crc32 = manifest.get("input", (0, -1))
    if not same_so_far(todo, done, crc32, bar):
        why = f"--data-dir {folder} exists; name another"
        raise FileExistsError(f"{why}: it is of other input or other flags")
    corpus.open_folder(folder)  # raises


# --------------------------------------------------------------------------------------------------
# Commands


def prepare_questions(config: PrepareConfig):
    def encode(text: str) -> np.ndarray:
        return TOKENIZERS[config.tokenizer]().encode(inputs.utf8(text)).astype(TOKEN)

    print(write_questions(config.multiple_choice, config.folder, encode, config.tokenizer))


def num_tokens_of(size: int, some: bytes, config: PrepareConfig) -> float:
    """About how many tokens size bytes of text are, of which some is a sample."""
    return len(TOKENIZERS[config.tokenizer]().encode(some)) * size / max(len(some), 1)


def dry_run(files: list[str], config: PrepareConfig):
    """Print what preparing the files will take."""
    size, some = inputs.sample(files, config.text_field)
    num_tokens_of(0, b"", config)  # loads the tokenizer
    start = time.perf_counter()
    num_tokens = num_tokens_of(size, some, config)
    seconds = (time.perf_counter() - start) * size / max(len(some), 1) / max(config.workers, 1)
    print(
        f"about {size / 1e6:,.1f} MB of text in {len(files):,} files, {num_tokens / 1e6:,.1f}M"
        f" tokens, {num_tokens * TOKEN.itemsize / 1e6:,.1f} MB of disk, {seconds:,.0f} s"
    )


def prepare(config: PrepareConfig):
    """Write config.folder, under another name until it is whole."""
    files = inputs.files_in(config.input) if config.input else inputs.standard_library()
    if config.dry_run:
        return dry_run(files, config)
    folder = config.folder.with_name(f"{config.folder.name}.unfinished")
    own = {folder.absolute(), config.folder.absolute()}
    files = [f for f in files if own.isdisjoint(Path(f).absolute().parents)]
    size, some = inputs.sample(files, config.text_field)
    if config.val_tokens:
        config = with_val_fraction(config, num_tokens_of(size, some, config))
    tally = inputs.Tally()
    todo = batches(inputs.read(files, config.text_field, tally.skipped), config, tally)
    check_own(folder)
    with working_in(folder), tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar:
        try:
            if is_complete := config.folder.exists():
                check_same(config.folder, todo, bar)
            else:
                write_folder(folder, todo, config, bar, tally.skipped)
        finally:
            if not (folder / MANIFEST).exists():  # no shard is whole: nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)
    if not is_complete:
        folder.rename(config.folder)
    report(config.folder, inputs.Tally() if is_complete else tally, is_complete)


def with_val_fraction(config: PrepareConfig, num_tokens: float) -> PrepareConfig:
    """config with the fraction that its --val-tokens are of about num_tokens."""
    if config.val_tokens > num_tokens / 2:
        why = f"--val-tokens {config.val_tokens:,} are more than half of the input, which has about"
        raise ValueError(f"{why} {num_tokens:,.0f} tokens: lower it")
    return replace(config, val_fraction=config.val_tokens / num_tokens)


@contextmanager
def working_in(folder: Path) -> Iterator:
    """Make folder and keep other processes out of it. What is empty at the end goes again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with locked(folder):
        try:
            yield
        finally:
            for path in (folder / "lock", *made):
                with suppress(OSError):  # a folder that holds something; Windows: an open file
                    path.rmdir() if path.is_dir() else path.unlink()


def check_own(folder: Path):
    """FileExistsError if folder holds what this program did not write: it is not to be lost."""
    own = re.compile(r"lock|manifest\.json(\.tmp)?|(train|val)_\d{6,}\.bin")
    for name in os.listdir(folder) if folder.is_dir() else ():
        if not own.fullmatch(name):
            raise FileExistsError(f"{folder / name} is in the way: move it, or name another folder")


def report(folder: Path, tally: inputs.Tally, is_complete: bool):
    """Print what folder holds, on one line if it was complete before."""
    lines, manifest = [], read_manifest(folder)
    for name in ("train", "val"):
        account = manifest[name]
        num_shards, text = len(account.pop("shards")), account.get("bytes", 0)
        counts = ", ".join(f"{value:,} {key}" for key, value in account.items())
        ratio = f" ({text / account['tokens']:.2f} bytes per token)" if text and num_shards else ""
        lines.append(f"{name}: {counts}{ratio}, {num_shards} shards")
    lines += [f"skipped: {n:,} documents, {shown(why)}" for why, n in tally.skipped.items()]
    if bad := tally.not_utf8:
        fate = "kept" if manifest["tokenizer"]["name"] == "bytes" else "replaced by U+FFFD"
        counts = f"{bad['bytes']:,} bytes in {bad['documents']:,} documents"
        lines.append(f"not UTF-8: {counts}, {fate}")
    lines.append(f"ready: python train_gpt2.py --data-dir {shlex.quote(str(folder))}")
    print(f"already complete: {'; '.join(lines)}" if is_complete else "\n".join(lines))


def verify(config: PrepareConfig):
    """Read every shard again and compare it with the manifest; ValueError if one is amiss."""
    manifest, num_damaged = read_manifest(config.folder), 0
    entries = manifest["train"]["shards"] + manifest["val"]["shards"]
    for entry in entries:
        verdict = "good"
        try:
            check_shard(config.folder, entry)
        except (OSError, ValueError) as error:
            num_damaged, verdict = num_damaged + 1, error
        print(f"{entry['name']}: {shown(verdict)}")
    if not entries:
        raise ValueError(f"{config.folder / MANIFEST} is missing: name a folder prepared here")
    if num_damaged:
        which = f"{num_damaged} of the {len(entries)} shards that {config.folder / MANIFEST} names"
        raise ValueError(f"{which} are damaged: move them away, and prepare or download them again")


def check_download(sha256: str | None, path: Path):
    """ValueError if path is no shard, or not the one that was fetched at first."""
    open_shard(path)
    if sha256 and sha256 != (found := sha256_of(path)):
        raise ValueError(f"it has changed: SHA-256 {found}, at the first fetch {sha256}")


def download(config: PrepareConfig):
    """Fetch those shards of a published corpus that config.folder does not have yet."""
    repository, stem, _ = CORPORA[config.download]
    address = config.mirror or f"https://huggingface.co/datasets/{repository}/resolve/main"
    address = address.rstrip("/")
    names = [("val", f"{stem}_val_000000.bin")]
    names += [("train", f"{stem}_train_{n:06d}.bin") for n in range(1, config.shards + 1)]
    num_new = 0
    with working_in(config.folder):
        manifest, tokenizer = read_manifest(config.folder), {"name": "gpt2"}
        if manifest.setdefault("tokenizer", tokenizer) != tokenizer:
            raise FileExistsError(f"--data-dir {config.folder} holds prepared text; name another")
        for entry in manifest["val"]["shards"] + manifest["train"]["shards"]:
            if not entry["name"].startswith(f"{stem}_"):
                why = f"--data-dir {config.folder} holds {entry['name']}; name another"
                raise FileExistsError(why)
        for split, name in names:
            path, shards = config.folder / name, manifest[split]["shards"]
            known = next((shard for shard in shards if shard["name"] == name), {})
            num_new += not (known and path.exists())
            if not path.exists():
                fetch(f"{address}/{name}", path, partial(check_download, known.get("sha256")))
            if not known:
                shards.append(describe(open_shard(path)) | {"sha256": sha256_of(path)})
                manifest[split]["tokens"] = sum(shard["tokens"] for shard in shards)
                save_manifest(config.folder, manifest)
    report(config.folder, inputs.Tally(), is_complete=not num_new)


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
        config = parse_args(sys.argv[1:] if argv is None else argv)
        run = verify if config.verify else download if config.download else prepare
        (prepare_questions if config.multiple_choice else run)(config)
    except KeyboardInterrupt:
        complain("stopped; the same command goes on")
        return 130
    except (OSError, ValueError, LookupError, ImportError, BrokenExecutor) as error:
        numbers = {getattr(e, "errno", None) for e in (error, error.__cause__)}
        if numbers.isdisjoint(DISK_ERRORS):
            complain(f"error: {error}")
            return 2
        complain(f"error: {error}: see to the disk; the same command goes on")
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main())
