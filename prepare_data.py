"""Turn text into token shards for train_gpt2.py.
python prepare_data.py                                           # Python's standard library
python prepare_data.py --input book.txt --data-dir data/book
python prepare_data.py --input notes/ 'web/*.jsonl.gz' --data-dir data/web --tokenizer bytes

Any text will do: .txt, .md, source code or whole folders. In .jsonl, .json, .csv, .tsv and .parquet
files, each record is a document, and --text-field names the field that holds its text. A summary
at the end lists everything that was skipped or assumed. The folder appears only when it is
complete, so an interrupted command starts over.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import sysconfig
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from dataloader import MAGIC, MANIFEST, TOKEN, VERSION
from support.cli import Parser, RunError, UserError, flag, program
from support.readers import PIECE, Reader, find_files
from support.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    gpt2_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

# Characters of a long text to train a tokenizer on: at most this many, and at least half. Twice as
# many took 1.5 s longer, and gave 0.15% fewer tokens for held-out Python (3 seeds).
SAMPLE = 12_000_000
STRETCH = 1 << 12  # characters that are drawn together
KEPT = 1 << 27  # bytes of text to keep in memory; a longer one is read twice
FREE = ("data_dir", "workers")  # a repeated command may change these
MIN_FOR_WORKERS = 1 << 22  # bytes of input, as starting a process takes time


@dataclass(frozen=True)
class PrepareConfig:
    data_dir: str = flag("", "folder to write (default: data/stdlib-TOKENIZER)")
    tokenizer: str = flag("bpe", "bpe (trained on the text), bytes, gpt2, or a folder with one")
    vocab_size: int = flag(4096, "bpe: the number of tokens", min=258, max=1 << 16)
    text_field: str = flag("text", "field of a record that holds its text")
    encoding: str = flag("", "encoding of all texts (default: found for each file)")
    shard_tokens: int = flag(100_000_000, "tokens per shard", min=2)
    val_fraction: float = flag(
        0.01, "validation's share of documents; of Python's source 0.025", min=1e-5, max=0.5
    )
    seed: int = flag(1337, "seed for the validation split")
    workers: int = flag(os.cpu_count() or 1, "tokenizer processes (default: one per core)", min=1)


def standard_library() -> list[str]:
    """Return the standard library's .py files: 30 MB that every machine has."""
    files: list[str] = []
    for folder, names, children in os.walk(sysconfig.get_path("stdlib")):
        names[:] = [name for name in names if not name.endswith("-packages")]  # installed by pip
        files += [os.path.join(folder, child) for child in children if child.endswith(".py")]
    return sorted(filter(os.path.isfile, files))


# ---- Text ----------------------------------------------------------------------------------------


def divide(reader: Reader, num_files: int, config: PrepareConfig) -> tuple[array, list, list]:
    """Read all text. Return how many characters at the start of each document are for training, a
    sample of these characters, and all pieces, or none if they are large. Validation gets the files
    after the first num_files. If there are none, it gets a share of the documents, drawn with the
    seed, or, if that share rounds to 0 documents, the last tenth of each document."""
    rng = random.Random(config.seed)
    num_train = array("Q")
    drawn: list[tuple] = []  # a random number, the document, the place in it, the text
    share, num_chars = 1.0, 0  # of all text to draw, and drawn
    kept: list[tuple[bool, str]] = []
    room = KEPT
    for begins, piece in reader.pieces():
        room -= sys.getsizeof(piece) + 64  # and its tuple
        if room > 0:
            kept.append((begins, piece))
        else:
            kept.clear()
        if begins:
            num_train.append(0)
        if reader.counts["files"] > num_files:
            continue
        for start in range(0, len(piece) if config.tokenizer == "bpe" else 0, STRETCH):
            if (draw := rng.random()) < share:
                text = piece[start : start + STRETCH]
                drawn.append((draw, len(num_train) - 1, num_train[-1] + start, text))
                num_chars += len(text)
        num_train[-1] += len(piece)
        if num_chars > SAMPLE:  # drop about every second, from now on, too
            share /= 2
            drawn = [stretch for stretch in drawn if stretch[0] < share]
            num_chars = sum(len(text) for *_, text in drawn)
    if num_files == len(reader.files):
        rng = random.Random(config.seed)
        num_val = round(config.val_fraction * len(num_train))
        for number in rng.sample(range(len(num_train)), num_val):
            num_train[number] = 0
        if not num_val:
            num_train = array("Q", (size * 9 // 10 for size in num_train))
    sample = [text[: max(0, num_train[n] - start)] for _, n, start, text in drawn]
    return num_train, sample, kept


def batches(
    reader: Reader, num_files: int, config: PrepareConfig, divided: tuple | None
) -> Iterator[list[tuple[str, bool, str]]]:
    """Yield batches of pieces, each with its split and whether a document begins with it. Pieces
    are batched because each round trip to a worker takes time."""
    num_train, _, kept = divided or divide(reader, num_files, config)  # while workers start
    batch: list[tuple[str, bool, str]] = []
    num_chars = 0
    of_documents = iter(num_train)
    for begins, piece in kept or reader.pieces():
        if begins:
            num_left = next(of_documents)
        cut = max(0, num_left)
        if cut:
            batch.append(("train", begins, piece[:cut]))
        if cut < len(piece):
            batch.append(("val", num_left >= 0, piece[cut:]))
        num_left -= len(piece)  # negative after the first piece for validation
        num_chars += len(piece)
        if num_chars >= 8 * PIECE:
            yield batch
            batch, num_chars = [], 0
    yield batch


# ---- Tokens --------------------------------------------------------------------------------------


def tokenize(batch: list[tuple[str, bool, str]], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return a batch's tokens by split, uint16; each document begins with <|endoftext|>."""
    tokens = {}
    for name in ("train", "val"):
        texts = [(begins, text) for split, begins, text in batch if split == name]
        if tokenizer.merges:
            begin, none = np.array([tokenizer.end_of_text], TOKEN), np.empty(0, TOKEN)
            parts = [none]
            for begins, text in texts:
                parts += [begin if begins else none, tokenizer.encode_array(text)]
            tokens[name] = np.concatenate(parts)
        else:  # all at once, with a byte for <|endoftext|> that UTF-8 never has
            content = b"".join(b"\xff" * begins + text.encode() for begins, text in texts)
            ids = np.append(tokenizer.ids[:0xFF], TOKEN.type(tokenizer.end_of_text))
            tokens[name] = ids[np.frombuffer(content, np.uint8)]
    return tokens


def work(folder: Path, parent: Connection):
    """Tokenize the batches that the parent process sends, until it ends; leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = read_tokenizer(folder)
    with suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            parent.send(tokenize(parent.recv(), tokenizer))  # type: ignore[arg-type]


def tokenized(
    todo: Iterator[list], tokenizer: Tokenizer, folder: Path, num_workers: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield each batch's tokens, in order. Workers load the tokenizer from folder."""
    if num_workers < 2:
        yield from (tokenize(batch, tokenizer) for batch in todo)
        return
    # Two threads take 1.1 to 2 times as long as two processes, although tiktoken releases the GIL.
    # A ProcessPoolExecutor hangs if a worker is killed while it sends a result, so each worker has
    # its own pipe, which closes when the worker ends, and a thread that waits for it.
    context = get_context("spawn")
    workers: list[Connection] = []  # those that have no batch
    # Workers inherit this. Until work() sets it, Ctrl-C would make each print a traceback.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(num_workers):
        worker, end_of_worker = context.Pipe()
        context.Process(target=work, args=(folder, end_of_worker), daemon=True).start()
        end_of_worker.close()  # the worker has a copy; this one would keep the pipe open
        workers.append(worker)
    signal.signal(signal.SIGINT, previous)

    def ask(batch: list) -> dict[str, np.ndarray]:
        worker = workers.pop()
        try:
            worker.send(batch)
            return worker.recv()
        except (EOFError, ConnectionError) as error:
            text = "a tokenizer process was killed, for lack of memory? Try fewer --workers"
            raise RunError(text) from error
        finally:
            workers.append(worker)

    threads = ThreadPoolExecutor(num_workers)
    running: deque = deque()
    try:
        for batch in todo:
            running.append(threads.submit(ask, batch))
            if len(running) > 4 * num_workers + 16:  # keep the workers busy during a write
                yield running.popleft().result()
        yield from (future.result() for future in running)
    finally:
        threads.shutdown(cancel_futures=True)


class Shards:
    """Writes the shards of one split."""

    def __init__(self, folder: Path, split: str, shard_tokens: int):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.entries: list[dict] = []  # of the manifest
        self.parts: list[np.ndarray] = []  # of the next shard
        self.num_tokens = 0  # in parts

    def add(self, tokens: np.ndarray):
        while len(tokens):
            part = tokens[: self.shard_tokens - self.num_tokens]
            self.parts.append(part)
            self.num_tokens += len(part)
            tokens = tokens[len(part) :]
            if self.num_tokens == self.shard_tokens:
                self.write()

    def write(self):
        """Write a shard of the tokens in parts."""
        header = np.array([MAGIC, VERSION, self.num_tokens] + [0] * 253, "<i4")
        path = self.folder / f"{self.split}_{len(self.entries):06d}.bin"
        write_synced(path, (part.tobytes() for part in [header, *self.parts]))
        largest = max(int(part.max()) for part in self.parts)
        entry = {"name": path.name, "tokens": self.num_tokens, "largest_id": largest}
        self.entries.append(entry | {"sha256": sha256(path)})
        self.parts, self.num_tokens = [], 0


# ---- The folder ----------------------------------------------------------------------------------


def sha256(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, contents: Iterable[bytes]):
    """Write a file that a power failure can't lose."""
    with open(path, "wb") as file:
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def existing_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer that --tokenizer names, or None for bpe, which is yet to be trained.
    Raise UserError if there is no such tokenizer."""
    if name == "bpe":
        return None
    if name == "bytes":
        return bytes_tokenizer()
    if name == "gpt2":
        return gpt2_tokenizer(may_download=True)
    checkpoints = sorted(Path(name).glob("step_*/vocab.json"))  # of a run
    tokenizer = read_tokenizer(checkpoints[-1].parent if checkpoints else Path(name))
    if not tokenizer:
        raise UserError(f"--tokenizer {name} holds no vocab.json and merges.txt")
    return tokenizer


def write_folder(folder: Path, reader: Reader, num_files: int, config: PrepareConfig) -> dict:
    """Write the tokenizer and shards into folder, and return their manifest entries. The first
    num_files files are for training, and also for validation if there are no others."""
    tokenizer, divided = existing_tokenizer(config.tokenizer), None
    if not tokenizer:
        divided = divide(reader, num_files, config)
        tokenizer = train_tokenizer(divided[1], config.vocab_size)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    num_bytes = sum(os.path.getsize(file) for file in reader.files if os.path.isfile(file))
    is_long = tokenizer.merges and num_bytes > MIN_FOR_WORKERS  # bytes take no time
    shards = {split: Shards(folder, split, config.shard_tokens) for split in ("train", "val")}
    todo = batches(reader, num_files, config, divided)
    done = tokenized(todo, tokenizer, folder, config.workers if is_long else 1)
    for batch in tqdm(done, unit="batch", leave=False, disable=None):
        for split, tokens in batch.items():
            shards[split].add(tokens)
    # A tokenizer trained on a small text may have fewer tokens than --vocab-size.
    account = [f"tokenizer: {tokenizer.name}, {tokenizer.size:,} tokens"]
    manifest: dict = {}
    for split, of_split in shards.items():
        if of_split.num_tokens:
            of_split.write()
        manifest[split] = {"shards": of_split.entries}
        num_tokens = sum(entry["tokens"] for entry in of_split.entries)
        account.append(f"{split}: {num_tokens:,} tokens; shards: {len(of_split.entries)}")
        if num_tokens < 2:  # an input and its target
            why = "; ".join(reader.account())
            raise UserError(f"--input has {num_tokens} tokens for {split}, too few: {why}")
    names = {"name": tokenizer.name, "sha256": tokenizer.sha256, "vocab_size": tokenizer.size}
    return manifest | {"tokenizer": names, "account": account + reader.account()}


def prepare(config: PrepareConfig, inputs: list[str], val_inputs: list[str]):
    """Write a folder of shards, unless it is complete. Raise UserError if that is impossible."""
    folder = Path(config.data_dir)
    unfinished = Path(f"{folder}.tmp")
    train, val = find_files(inputs or standard_library()), find_files(val_inputs)
    # Leave out what this program wrote, which --input . would include.
    own = tuple(os.path.realpath(path) + os.sep for path in (folder, unfinished))
    files = [file for path, file in train.items() if path not in val and not path.startswith(own)]
    num_files = len(files)
    files += val.values()
    contents = [f"{file} {sha256(file)}" for file in files if os.path.isfile(file)]
    flags = {name: value for name, value in asdict(config).items() if name not in FREE}
    flags["files"] = hashlib.sha256(repr(contents).encode(errors="replace")).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Several ranks or runs may begin at once without data: then one makes it, and the others wait.
    with FileLock(folder.parent / f".{folder.name}.lock", timeout=0 if inputs else -1):
        if (folder / MANIFEST).exists():
            manifest = json.loads((folder / MANIFEST).read_bytes())
            if manifest.get("flags") != flags:
                raise UserError(f"{folder} was made with other flags or from other text")
            print("already complete:")
        elif folder.exists():
            raise UserError(f"--data-dir {folder} is there already: name a new folder")
        else:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            try:
                unfinished.mkdir()
                reader = Reader(files, config.text_field, config.encoding)
                manifest = {"flags": flags} | write_folder(unfinished, reader, num_files, config)
                write_synced(unfinished / MANIFEST, [json.dumps(manifest, indent=1).encode()])
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    print(*manifest["account"], f"ready: python train_gpt2.py --data-dir {folder}", sep="\n")


def read_flags(argv: list[str]) -> tuple[PrepareConfig, list[str], list[str]]:
    """Return the flags, --input and --val-input. Raise UserError if they can't be combined."""
    parser = Parser(PrepareConfig, __doc__ or "")
    text = "files, folders, 'patterns'; none: Python's source"
    parser.add_argument("--input", nargs="+", help=text)
    text = "files for validation, instead of a share of --input"
    parser.add_argument("--val-input", nargs="+", help=text)
    typed = parser.parse(argv)
    inputs, val_inputs = typed.pop("input", []), typed.pop("val_input", [])
    if not inputs:  # 0.025 of Python's source is about as long as nano's validation
        name = Path(typed.get("tokenizer", "bpe")).name
        typed = {"data_dir": f"data/stdlib-{name}", "val_fraction": 0.025} | typed
    config = PrepareConfig(**typed)
    if "vocab_size" in typed and config.tokenizer != "bpe":
        raise UserError(f"--vocab-size {config.vocab_size} needs --tokenizer bpe")
    if config.tokenizer not in ("bpe", "bytes", "gpt2") and not Path(config.tokenizer).is_dir():
        raise UserError(f"--tokenizer {config.tokenizer} is not bpe, bytes, gpt2 or a folder")
    if inputs and not config.data_dir:
        raise UserError("--input needs --data-dir, for example --data-dir data/book")
    if not inputs and val_inputs:
        raise UserError("--val-input needs --input")
    try:
        "".encode(config.encoding or "utf-8")
    except (LookupError, UnicodeError) as error:
        raise UserError(f"--encoding {config.encoding}: {error}") from error
    return config, inputs, val_inputs


@program
def main(argv: list[str]):
    prepare(*read_flags(argv))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore  # some can't show every name
    sys.exit(main(sys.argv[1:]))
