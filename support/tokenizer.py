"""The two tokenizers: bytes, and GPT-2's by tiktoken, with their files for Hugging Face's tools."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from dataloader import VOCAB_SIZES
from support.ending import DISK_ERRNOS, UserError
from support.files import whole_file

VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
VOCAB_URLS = [VOCAB_URL + "vocab.bpe", VOCAB_URL + "encoder.json"]
VOCAB_SHA256 = (  # as in tiktoken_ext/openai_public.py
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
END_OF_TEXT = "<|endoftext|>"  # the last id of both, before each document


class ByteTokenizer:
    """Each byte of UTF-8 is a token; 256 is <|endoftext|>."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are no whole character become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def encode_bytes(self, text: bytes) -> np.ndarray:  # of any bytes, uint8
        return np.frombuffer(text, np.uint8)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        return bytes([token]) if token < 256 else END_OF_TEXT.encode()

    def files(self, seq_len: int) -> dict[str, bytes]:
        """Return the files that transformers.AutoTokenizer loads, by name: BPE without merges."""
        # BPE's vocabulary is text, so each byte needs a printable character of its own: itself
        # where it is one, else one from 256 on (https://github.com/openai/gpt-2, src/encoder.py).
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        vocab = {chr(byte): byte for byte in printable}
        vocab |= {chr(256 + i): byte for i, byte in enumerate(others)}
        vocab[END_OF_TEXT] = 256
        options = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{"id": 256, "content": END_OF_TEXT, "special": True} | options],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": seq_len,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "split_special_tokens": True,  # <|endoftext|> inside a text is ordinary text
            "clean_up_tokenization_spaces": False,
        }
        return {"tokenizer.json": as_json(tokenizer), "tokenizer_config.json": as_json(config)}


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken; 50256 is <|endoftext|>."""

    def __init__(self):
        import tiktoken  # not at the top: it takes 0.1 s

        try:
            self.encoding = tiktoken.get_encoding("gpt2")  # downloads the vocabulary once
        except OSError as error:  # which tiktoken raises without a network, in many ways
            if error.errno in DISK_ERRNOS:
                raise
            raise UserError(f"no network: {offline_cure()}, or use --tokenizer bytes") from error

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def encode_bytes(self, text: bytes) -> np.ndarray:
        """Return the tokens of UTF-8, uint32; <|endoftext|> is text, other bytes become U+FFFD."""
        return self.encoding.encode_to_numpy(text.decode(errors="replace"), disallowed_special=())

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token. Ids beyond GPT-2's, which pad some weights, have none."""
        return self.encoding.decode_bytes([token]) if token < VOCAB_SIZES["gpt2"] else b""

    def files(self, seq_len: int) -> dict[str, bytes]:
        """Return the same: the two files that tiktoken has downloaded, and a config."""
        merges, vocab = vocab_files()
        config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": seq_len}
        return {
            "merges.txt": merges.read_bytes(),
            "vocab.json": vocab.read_bytes(),
            "tokenizer_config.json": as_json(config),
        }


Tokenizer = ByteTokenizer | Gpt2Tokenizer


def vocab_files() -> list[Path]:
    """Return where tiktoken keeps GPT-2's two files: under the SHA-1 of their address."""
    folder = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", folder)
    return [Path(folder, hashlib.sha1(url.encode()).hexdigest()) for url in VOCAB_URLS]


def missing_vocab() -> list[Path]:
    return [path for path in vocab_files() if not path.exists()]


def provide_vocab(weights: Path):
    """Copy GPT-2's vocabulary from a checkpoint, or from beside a file of weights, to where
    tiktoken looks for it, if it is missing there."""
    folder = weights if weights.is_dir() else weights.parent
    with suppress(OSError):  # such as a cache that can't be written: then it stays missing
        contents = [(folder / name).read_bytes() for name in ("merges.txt", "vocab.json")]
        if tuple(hashlib.sha256(content).hexdigest() for content in contents) != VOCAB_SHA256:
            return  # of another vocabulary
        for path, content in zip(vocab_files(), contents, strict=True):
            if (
                not path.exists() and path.parent != Path()
            ):  # an empty name: tiktoken's cache is off
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path) as f:
                    f.write(content)
        load_tokenizer.cache_clear()
        token_lengths.cache_clear()


def vocab_cure() -> str:
    code = "import tiktoken; tiktoken.get_encoding('gpt2')"
    return f'run python -c "{code}", or without a network {offline_cure()}'


def offline_cure() -> str:
    pairs = [f"{url} as {path.name}" for url, path in zip(VOCAB_URLS, vocab_files(), strict=True)]
    return f"download {' and '.join(pairs)} elsewhere, and set TIKTOKEN_CACHE_DIR to their folder"


@lru_cache
def load_tokenizer(name: str, may_download: bool = False) -> Tokenizer | None:
    """Return a tokenizer; None if its name is unknown, or it is not here and may not be fetched."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2" and (may_download or not missing_vocab()):
        return Gpt2Tokenizer()
    return None


def require_tokenizer(name: str, may_download: bool = False) -> Tokenizer:
    """Return a tokenizer. Raise UserError if it is unknown or not here."""
    tokenizer = load_tokenizer(name, may_download)
    if tokenizer is None:
        cure = f": {vocab_cure()}" if name == "gpt2" else ""
        raise UserError(f"the tokenizer of the data, {name}, is not here{cure}")
    return tokenizer


@lru_cache
def token_lengths(name: str) -> np.ndarray | None:
    """Return the bytes per id, int64 (65536,), 0 for <|endoftext|>; None without a tokenizer."""
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        return None
    lengths = np.zeros(1 << 16, np.int64)
    for token in range(VOCAB_SIZES[name] - 1):
        lengths[token] = len(tokenizer.token_bytes(token))
    return lengths


def as_json(value: dict) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()
