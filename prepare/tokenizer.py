"""Byte-level BPE tokenizers in GPT-2's format, each made from the files of a folder.

Data folders and checkpoints hold vocab.json and merges.txt, so neither needs another place. A
tokenizer's name is "bytes", "gpt2", or "bpe-" or "alphabet-" (nanoGPT's data by character) with the
first digits of the SHA-256 of its vocabulary, merges and end token.
"""

import hashlib
import io
import json
import os
import pickle
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from prepare.ending import DISK_ERRNOS, UserError
from prepare.files import read_small

FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
END_OF_TEXT = "<|endoftext|>"  # it precedes each document; the last id of bytes and of GPT-2
OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
URLS = {"vocab.json": OPENAI + "encoder.json", "merges.txt": OPENAI + "vocab.bpe"}
SHA256 = {  # as in tiktoken_ext/openai_public.py
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# GPT-2's pattern for the words that are encoded one by one, as rewritten in tiktoken for speed.
WORD = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# vocab.json is text, so each byte is written as a printable character: the one with the same number
# or, if it is not printable, one from 256 on (https://github.com/openai/gpt-2, src/encoder.py).
UNPRINTABLE = [*range(33), *range(127, 161), 173]
ALPHABET = [chr(byte) for byte in range(256)]  # the character of each byte
for i, byte in enumerate(UNPRINTABLE):
    ALPHABET[byte] = chr(256 + i)
BYTES = {char: byte for byte, char in enumerate(ALPHABET)}


def as_json(value: dict) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


class Tokenizer:
    """A byte-level BPE, encoded by tiktoken. Without merges, each byte of UTF-8 is a token."""

    def __init__(self, vocab: dict[str, int], merges: list[str], end: str | None = END_OF_TEXT):
        """Take the contents of vocab.json and merges.txt. Raise ValueError or KeyError if they
        aren't a byte-level BPE. Without an end of text, the vocabulary is an alphabet of some
        bytes, as nanoGPT's data by character has."""
        self.vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        self.merges = merges
        self.end = end
        if end not in vocab and (merges or end is not None):
            raise ValueError("no end of text")
        self.end_of_text = vocab[end] if end else None
        self.size = max(vocab.values()) + 1  # ids are below it
        if min(vocab.values()) < 0 or self.size > 1 << 16:
            raise ValueError(f"has ids up to {self.size - 1}; shards hold 0 to {(1 << 16) - 1}")
        self.tokens = [b""] * self.size
        # tiktoken merges in the order of ranks and returns ranks. Other ids have another order.
        ranks: dict[bytes, int] = {}
        ids: list[int] = []
        byte_of = BYTES.__getitem__
        alphabet = ALPHABET if end else [char for char in ALPHABET if char in vocab]
        merged = [*alphabet, *(merge.replace(" ", "", 1) for merge in merges)]
        for token in merged:
            content = self.tokens[vocab[token]] = bytes(map(byte_of, token))
            if ranks.setdefault(content, len(ranks)) == len(ids):
                ids.append(vocab[token])
        self.ids = np.array(ids, np.uint16)  # by rank
        for token in vocab.keys() - {*merged}:  # special ones, which may hold other characters
            is_bytes = BYTES.keys() >= {*token}
            self.tokens[vocab[token]] = bytes(map(byte_of, token)) if is_bytes else token.encode()
        # The number of bytes in each token, int64 (65536,), with 0 for the end of text.
        self.lengths = np.zeros(1 << 16, np.int64)
        self.lengths[: self.size] = [len(token) for token in self.tokens]
        if end:
            self.lengths[vocab[end]] = 0
        identity = json.dumps([self.vocab, merges, end]).encode()
        self.sha256 = hashlib.sha256(identity).hexdigest()
        self.name = NAMES.get(self.sha256, f"{'bpe' if end else 'alphabet'}-{self.sha256[:12]}")
        if merges and end:
            import tiktoken  # not at the top, because it takes 0.1 s

            # Without any special token, tiktoken would look for an empty one at each character.
            self.encoding = tiktoken.Encoding(
                self.name, pat_str=WORD, mergeable_ranks=ranks, special_tokens={end: len(ranks)}
            )

    def encode_bytes(self, text: bytes) -> np.ndarray:
        """Return the tokens of text, uint16. Bytes that are not UTF-8 become U+FFFD if there are
        merges. An end of text inside a text is ordinary text."""
        if not self.end:
            for char in text.decode(errors="replace"):
                if not char.isascii() or ALPHABET[ord(char)] not in self.vocab:
                    raise UserError(f"the alphabet of this network has no {char!r}")
            return np.array([self.vocab[ALPHABET[byte]] for byte in text], np.uint16)
        if not self.merges:
            return self.ids[np.frombuffer(text, np.uint8)]
        ranks = self.encoding.encode_to_numpy(text.decode(errors="replace"), disallowed_special=())
        return self.ids[ranks]

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode()).tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that do not form a whole character become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token. Padding ids beyond the last token have no bytes."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def files(self, seq_len: int | None = None) -> dict[str, bytes]:
        """Return the files that transformers.AutoTokenizer loads, by name."""
        merges = "".join(f"{merge}\n" for merge in ["#version: 0.2", *self.merges])
        config: dict = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": seq_len}
        if self.name != "gpt2":
            # Treat <|endoftext|> inside a text as ordinary text. OpenAI's GPT-2 does not.
            config |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
        if self.end != END_OF_TEXT:  # null if there is none
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), self.end)
        return {
            "vocab.json": json.dumps(self.vocab).encode(),  # with an indent it takes 0.2 s
            "merges.txt": merges.encode(),
            "tokenizer_config.json": as_json(config),
        }


NAMES = {  # of SHA-256
    "5b5388827ac5e6cf479d22946ec0669ddd6bf3e967c7b798eac297010b921632": "bytes",
    "9003f2b5e3eea78405bbab764305ed7dab3547f71605c0f321f55c4293d8d389": "gpt2",
}
BYTE_TOKENS = Tokenizer({char: byte for byte, char in enumerate([*ALPHABET, END_OF_TEXT])}, [])
TOKENIZERS = {"bytes": BYTE_TOKENS}  # loaded so far, by name


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer in folder, if any. Raise UserError if it is of another kind."""
    try:
        # Path.exists raises an error if the name is too long. AutoTokenizer prefers tokenizer.json.
        if os.path.exists(folder / "tokenizer.json"):
            vocab, merges = from_tokenizer_json(read_json(folder / "tokenizer.json"))
        elif all(os.path.exists(folder / name) for name in ("vocab.json", "merges.txt")):
            vocab = read_json(folder / "vocab.json")
            merges = read_small(folder / "merges.txt").decode().splitlines()
            if merges and merges[0].startswith("#version"):
                del merges[0]
            vocab |= read_json(folder / "added_tokens.json")
        elif os.path.exists(folder / "meta.pkl"):
            return read_alphabet(folder / "meta.pkl")
        else:
            return None
        merges = [merge for merge in merges if merge]
        settings = read_json(folder / "tokenizer_config.json")
        if settings.get("add_prefix_space"):
            raise ValueError("add_prefix_space")
        ends = [
            s.get("eos_token") for s in (settings, read_json(folder / "special_tokens_map.json"))
        ]
        ends = [end["content"] if isinstance(end, dict) else end for end in ends]
        end = next((end for end in ends if end in vocab), END_OF_TEXT)
        if not merges and settings.get("eos_token", "") is None:  # an alphabet has none
            end = None
        tokenizer = Tokenizer(vocab, merges, end)
    except Exception as error:  # the files may hold anything
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise UserError(f"the tokenizer in {folder} is not a byte-level BPE ({reason})") from error
    return TOKENIZERS.setdefault(tokenizer.name, tokenizer)


def from_tokenizer_json(content: dict) -> tuple[dict[str, int], list[str]]:
    """Return vocabulary and merges of the file that Hugging Face's tokenizers write. Raise
    ValueError if it has a setting that changes the tokens of a text."""
    model, split = content["model"], content["pre_tokenizer"]
    added = content.get("added_tokens", [])
    keys = "normalizer", "dropout", "ignore_merges", "end_of_word_suffix", "add_prefix_space"
    wrong = [key for key in keys if (content | model | split).get(key)]
    wrong += [f"added token {token['content']!r}" for token in added if not token.get("special")]
    if (model["type"], split["type"], split.get("use_regex", True)) != ("BPE", "ByteLevel", True):
        wrong += [f"{model['type']} and {split['type']}"]
    if wrong:
        raise ValueError(", ".join(wrong))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return model["vocab"] | {token["content"]: token["id"] for token in added}, merges


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dicts, and refuses what could run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_alphabet(path: Path) -> Tokenizer | None:
    """Load the alphabet of nanoGPT's data by character. Return None if the file holds none, or one
    with other characters than ASCII's, which are more than one byte."""
    with suppress(Exception):  # it may hold anything
        ids = PlainUnpickler(io.BytesIO(read_small(path))).load()["stoi"]
        vocab = {ALPHABET[ord(char)]: int(ids[char]) for char in ids}
        if "".join(ids).isascii() and len({*vocab.values()}) == len(vocab):
            alphabet = Tokenizer(vocab, [], None)
            return TOKENIZERS.setdefault(alphabet.name, alphabet)
    return None


def read_json(path: Path) -> dict:
    return json.loads(read_small(path)) if path.exists() else {}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a BPE with up to vocab_size tokens on texts. The same texts give the same tokenizer."""
    from tokenizers import ByteLevelBPETokenizer  # splits words by GPT-2's pattern

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size - 1, min_frequency=0, show_progress=False)
    vocab, merges = from_tokenizer_json(json.loads(bpe.to_str()))
    return Tokenizer(vocab | {END_OF_TEXT: len(vocab)}, merges)


def missing_vocab() -> list[Path]:
    """Return the files of GPT-2 that tiktoken's cache, which names them by SHA-1, lacks."""
    folder = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", folder)
    paths = [Path(folder, hashlib.sha1(url.encode()).hexdigest()) for url in URLS.values()]
    return [path for path in paths if not path.exists()]


def load_tokenizer(name: str, may_download: bool = False) -> Tokenizer | None:
    """Return a tokenizer, or None if it has not been read and is not in tiktoken's cache."""
    if name == "gpt2" and name not in TOKENIZERS and (may_download or not missing_vocab()):
        files = openai_files()
        merges = files["merges.txt"].decode().splitlines()[1:]
        TOKENIZERS[name] = Tokenizer(json.loads(files["vocab.json"]), merges)
    return TOKENIZERS.get(name)


def openai_files() -> dict[str, bytes]:
    """Return GPT-2's files from tiktoken's cache, or download them."""
    from tiktoken.load import read_file_cached

    try:
        return {name: read_file_cached(url, SHA256[name]) for name, url in URLS.items()}
    except ValueError as error:  # what came has another SHA-256
        reason = "the download is not GPT-2's vocabulary (maybe a proxy's page)"
        raise UserError(f"{reason}: {vocab_cure()}") from error
    except OSError as error:  # offline, `requests` raises many kinds of errors
        if error.errno in DISK_ERRNOS:
            raise
        reason = f"{error.filename} can't be written" if error.filename else "no network"
        raise UserError(f"{reason}: {vocab_cure()}") from error


def require_tokenizer(name: str, may_download: bool = False) -> Tokenizer:
    """Return a tokenizer. Raise UserError if it is unknown or not on this machine."""
    tokenizer = load_tokenizer(name, may_download)
    if tokenizer is None:
        problem = f"there is no tokenizer called {name} on this machine"
        if name == "unknown":
            problem = "these weights come without their tokenizer"
        raise UserError(f"{problem}: {how_to_get(name)}")
    return tokenizer


def how_to_get(name: str) -> str:
    """Return how a user gets a tokenizer that is not on this machine."""
    if name == "gpt2":
        return vocab_cure()
    if name == "unknown":  # weights of nanoGPT, or of transformers without a tokenizer
        cure = "put nanoGPT's meta.pkl beside them if their tokens are characters, all ASCII"
        return f"{cure}, or train from them (--init-from) on tokens that they know (--data-dir)"
    files = "vocab.json and merges.txt (or nanoGPT's meta.pkl)"
    return f"copy {files} of its data, or of a checkpoint, beside the weights"


def vocab_cure() -> str:
    """Return instructions for getting GPT-2's files, online or offline."""
    code = "import tiktoken; tiktoken.get_encoding('gpt2')"
    files = " and ".join(f"{url} as {name}" for name, url in URLS.items())
    place = "a folder for --tokenizer, or the folder of the data"
    return f'run python -c "{code}", or save {files} in {place}'
