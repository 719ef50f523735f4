"""The byte tokenizer and GPT-2's, each made from two files. Checkpoints hold their own copies."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from support.ending import DISK_ERRNOS, UserError
from support.files import read_small

END_OF_TEXT = "<|endoftext|>"  # both tokenizers' last id; it precedes each document
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
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


def as_json(value: dict) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


class Tokenizer:
    """A BPE without merges: each byte of UTF-8 is a token, and the last token is <|endoftext|>."""

    # Treat <|endoftext|> inside a text as ordinary text.
    hf_options = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    vocab_files = {
        "vocab.json": as_json(BYTES | {END_OF_TEXT: 256}),
        "merges.txt": b"#version: 0.2\n",
    }

    def __init__(self):
        ids = json.loads(self.vocab_files["vocab.json"])
        self.tokens = [bytes(map(BYTES.__getitem__, token)) for token in sorted(ids, key=ids.get)]
        self.end_of_text = len(ids) - 1
        # The number of bytes in each token, int64 (65536,), with 0 for <|endoftext|>.
        self.lengths = np.zeros(1 << 16, np.int64)
        self.lengths[: self.end_of_text] = [len(token) for token in self.tokens[:-1]]

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode()).tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that do not form a whole character become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token. Padding ids beyond the last token have no bytes."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def files(self, seq_len: int) -> dict[str, bytes]:
        """Return the files that transformers.AutoTokenizer loads, by name."""
        config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": seq_len}
        return self.vocab_files | {"tokenizer_config.json": as_json(config | self.hf_options)}


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, as implemented by tiktoken."""

    hf_options: dict = {}  # none, like OpenAI's: <|endoftext|> in a text becomes the end token

    def __init__(self, vocab_files: dict[str, bytes]):
        import tiktoken  # not at the top, because it takes 0.1 s

        self.vocab_files = vocab_files
        super().__init__()
        ranks = {token: rank for rank, token in enumerate(self.tokens[:-1])}
        special = {END_OF_TEXT: self.end_of_text}
        self.encoding = tiktoken.Encoding(
            "gpt2", pat_str=WORD, mergeable_ranks=ranks, special_tokens=special
        )

    def encode_bytes(self, text: bytes) -> np.ndarray:  # bytes that are not UTF-8 become U+FFFD
        return self.encoding.encode_to_numpy(text.decode(errors="replace"), disallowed_special=())


TOKENIZERS: dict[str, Tokenizer] = {"bytes": Tokenizer()}  # loaded so far, by name


def cached_files() -> dict[str, Path]:
    """Return the paths of GPT-2's files in tiktoken's cache, named by the SHA-1 of their URLs."""
    folder = os.environ.get("DATA_GYM_CACHE_DIR", Path(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", folder)
    return {name: Path(folder, hashlib.sha1(URLS[name].encode()).hexdigest()) for name in URLS}


def missing_vocab() -> list[Path]:
    return [path for path in cached_files().values() if not path.exists()]


def load_gpt2(folder: Path):
    """Load GPT-2's tokenizer from a folder, such as a checkpoint, if it holds OpenAI's files."""
    with suppress(OSError):  # the files are not there
        files = {name: read_small(folder / name) for name in SHA256}
        if {name: hashlib.sha256(files[name]).hexdigest() for name in files} == SHA256:
            TOKENIZERS.setdefault("gpt2", Gpt2Tokenizer(files))


def load_tokenizer(name: str, may_download: bool = False) -> Tokenizer | None:
    """Return a tokenizer, or None if it is unknown or not on this machine."""
    if name == "gpt2" and name not in TOKENIZERS and (may_download or not missing_vocab()):
        from tiktoken.load import read_file_cached

        try:
            files = {name: read_file_cached(url, SHA256[name]) for name, url in URLS.items()}
        except OSError as error:  # offline, `requests` raises many kinds of errors
            if error.errno in DISK_ERRNOS:
                raise
            raise UserError(f"no network: {vocab_cure()}, or use --tokenizer bytes") from error
        TOKENIZERS[name] = Gpt2Tokenizer(files)
    return TOKENIZERS.get(name)


def require_tokenizer(name: str, may_download: bool = False) -> Tokenizer:
    """Return a tokenizer. Raise UserError if it is unknown or not on this machine."""
    tokenizer = load_tokenizer(name, may_download)
    if tokenizer is None:
        cure = f": {vocab_cure()}" if name == "gpt2" else ""
        raise UserError(f"there is no tokenizer called {name} on this machine{cure}")
    return tokenizer


def vocab_cure() -> str:
    """Return instructions for getting GPT-2's files, online or offline."""
    code = "import tiktoken; tiktoken.get_encoding('gpt2')"
    files = " and ".join(f"{URLS[name]} as {path.name}" for name, path in cached_files().items())
    cure = f"download {files} elsewhere, copy both here, and set TIKTOKEN_CACHE_DIR to their folder"
    return f'run python -c "{code}", or, if offline, {cure}'
