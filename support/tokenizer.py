"""Byte-level BPE tokenizers in GPT-2's format, each made from the files of a folder.

Data folders and checkpoints hold vocab.json and merges.txt, so both are self-contained. A
tokenizer's name is "bytes", "gpt2", or "bpe-" with the first digits of the SHA-256 of its
vocabulary, merges and end token."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import read_file_cached
from tokenizers import ByteLevelBPETokenizer

from support.cli import UserError

END_OF_TEXT = "<|endoftext|>"  # it precedes each document; the last id of bytes and of GPT-2
OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2 = {  # its vocab.json and merges.txt, with their SHA-256, as in tiktoken_ext/openai_public.py
    OPENAI + "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    OPENAI + "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# GPT-2's pattern for the words that are encoded one by one, as rewritten in tiktoken for speed.
WORD = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# vocab.json is text, so each byte is written as a printable character: the one with the same number
# or, if it is not printable, one from 256 on (https://github.com/openai/gpt-2, src/encoder.py).
ALPHABET = [chr(byte) for byte in range(256)]  # the character of each byte
for i, byte in enumerate([*range(33), *range(127, 161), 173]):
    ALPHABET[byte] = chr(256 + i)
BYTES = {char: bytes([byte]) for byte, char in enumerate(ALPHABET)}
CONTINUATION = bytes(range(0x80, 0xC0))  # in UTF-8, the bytes of a character after its first
NAMES = {"bpe-5b5388827ac5": "bytes", "bpe-9003f2b5e3ee": "gpt2"}


class Tokenizer:
    """A byte-level BPE, encoded by tiktoken. Without merges, each byte of UTF-8 is a token."""

    def __init__(self, vocab: dict[str, int], merges: list[str], end: str = END_OF_TEXT):
        """Take what vocab.json and merges.txt hold. Raise an error if it is no byte-level BPE."""
        self.vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        self.merges = merges
        self.end = end
        self.end_of_text = vocab[end]
        used = {*vocab.values()}
        if len(used) < len(vocab) or not 0 <= min(used) <= max(used) < 1 << 16:
            raise ValueError("the tokens must have different ids from 0 to 65535")
        self.size = max(used) + 1  # ids are below it
        self.tokens = [b""] * (1 << 16)  # by id; none for padding ids, which are beyond the last
        for token, i in vocab.items():  # special ones may hold characters that stand for no byte
            self.tokens[i] = b"".join(BYTES.get(char, char.encode()) for char in token)
        # The bytes and characters in each token, int64 (65536, 2), with 0 for the end of text. A
        # character that is split over tokens counts in the one with its first byte.
        firsts = [token.translate(None, CONTINUATION) for token in self.tokens]
        sizes = [[len(token) for token in tokens] for tokens in (self.tokens, firsts)]
        self.sizes = np.array(sizes, np.int64).T
        self.sizes[self.end_of_text] = 0
        self.sha256 = hashlib.sha256(json.dumps([self.vocab, merges, end]).encode()).hexdigest()
        name = f"bpe-{self.sha256[:12]}"
        self.name = NAMES.get(name, name)
        # tiktoken merges in order of rank and returns ranks. Ids may be in another order. If two
        # merges make the same token, it has the rank of the first.
        by_rank = dict.fromkeys([*ALPHABET, *(merge.replace(" ", "") for merge in merges)])
        self.ids = np.array([vocab[token] for token in by_rank], np.uint16)
        if not hasattr(tiktoken.Encoding, "encode_to_numpy"):
            raise UserError("tiktoken is older than 0.9: pip install --upgrade tiktoken")
        # Without any special token, tiktoken would look for an empty one at each character.
        self.encoding = tiktoken.Encoding(
            self.name,
            pat_str=WORD,
            mergeable_ranks={self.tokens[i]: rank for rank, i in enumerate(self.ids)},
            special_tokens={end: len(self.ids)},
        )

    def encode_array(self, text: str) -> np.ndarray:
        """Return the tokens of text, uint16. An end of text inside it is ordinary text."""
        return self.ids[self.encoding.encode_to_numpy(text, disallowed_special=())]

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that do not form a whole character become U+FFFD."""
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")

    def token_text(self, token: int) -> str:
        """Return a token's text. A byte of an incomplete character is written like \\xf0."""
        return self.tokens[token].decode(errors="backslashreplace")

    def files(self, seq_len: int | None = None) -> dict[str, bytes]:
        """Return the files that transformers.AutoTokenizer loads, by name."""
        merges = "".join(f"{merge}\n" for merge in ["#version: 0.2", *self.merges])
        config: dict = dict.fromkeys(("bos_token", "eos_token", "unk_token"), self.end)
        config |= {"tokenizer_class": "GPT2Tokenizer", "model_max_length": seq_len}
        config["clean_up_tokenization_spaces"] = False
        # Treat <|endoftext|> inside a text as ordinary text. OpenAI's GPT-2 does not.
        config["split_special_tokens"] = self.name != "gpt2"
        return {
            "vocab.json": json.dumps(self.vocab).encode(),  # with an indent it takes 0.2 s
            "merges.txt": merges.encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        }


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer in folder, if any. Raise UserError if it is of another kind."""
    try:
        if (folder / "tokenizer.json").exists():  # which AutoTokenizer prefers, too
            vocab, merges = from_tokenizer_json(read_json(folder / "tokenizer.json"))
        elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            vocab = read_json(folder / "vocab.json") | read_json(folder / "added_tokens.json")
            lines = (folder / "merges.txt").read_text("utf-8").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
        else:
            return None
        settings = read_json(folder / "tokenizer_config.json")
        if settings.get("add_prefix_space"):
            raise ValueError("add_prefix_space")
        end = END_OF_TEXT
        for content in (read_json(folder / "special_tokens_map.json"), settings):
            found = content.get("eos_token")
            found = found["content"] if isinstance(found, dict) else found
            end = found if found in vocab else end
        return Tokenizer(vocab, merges, end)
    except Exception as error:  # the files may hold anything
        text = f"the tokenizer in {folder} is not a byte-level BPE"
        raise UserError(f"{text}: {error!r:.200}") from error


def from_tokenizer_json(content: dict) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and merges in a file that Hugging Face's tokenizers wrote. Raise
    ValueError if any of its settings changes how text is tokenized."""
    model, split, added = content["model"], content["pre_tokenizer"], content["added_tokens"]
    kind = model["type"], split["type"], split.get("use_regex", True)
    keys = "normalizer", "dropout", "ignore_merges", "end_of_word_suffix", "add_prefix_space"
    wrong = [key for key in keys if (content | model | split).get(key)]
    wrong += [token["content"] for token in added if not token["special"]]
    if wrong or kind != ("BPE", "ByteLevel", True):
        raise ValueError(f"{kind} with {wrong}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return model["vocab"] | {token["content"]: token["id"] for token in added}, merges


def read_json(path: Path) -> dict:
    return json.loads(path.read_bytes()) if path.exists() else {}


def bytes_tokenizer() -> Tokenizer:
    return Tokenizer({char: byte for byte, char in enumerate([*ALPHABET, END_OF_TEXT])}, [])


def gpt2_tokenizer(may_download: bool = False) -> Tokenizer | None:
    """Return OpenAI's tokenizer from tiktoken's cache, or None if it is not there and must not be
    downloaded. Raise UserError if the download fails."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
    paths = [Path(cache, hashlib.sha1(url.encode()).hexdigest()) for url in GPT2]
    if not may_download and not all(path.exists() for path in paths):
        return None
    try:
        vocab, merges = [read_file_cached(url, digest) for url, digest in GPT2.items()]
    except (OSError, ValueError) as error:  # no network, or a proxy's page instead
        text = f"GPT-2's vocabulary can't be downloaded ({error!s:.200}): name a folder with"
        raise UserError(f"{text} hf.co/gpt2's vocab.json and merges.txt by --tokenizer") from error
    return Tokenizer(json.loads(vocab), merges.decode().splitlines()[1:])


def find_tokenizer(folder: Path, name: str) -> Tokenizer | None:
    """Return the tokenizer with this name ("" for any), whose files may be in folder, or None if it
    is not on this machine. Raise UserError if folder holds a different tokenizer."""
    found = read_tokenizer(folder)
    if found and name not in ("", found.name):
        raise UserError(f"{folder} holds tokens of {name}, but the vocabulary of {found.name}")
    if found or name not in ("bytes", "gpt2"):
        return found
    return bytes_tokenizer() if name == "bytes" else gpt2_tokenizer()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a BPE with up to vocab_size tokens on texts. The same texts give the same tokenizer."""
    bpe = ByteLevelBPETokenizer()  # splits words by GPT-2's pattern
    bpe.train_from_iterator(texts, vocab_size - 1, min_frequency=0, show_progress=False)
    vocab, merges = from_tokenizer_json(json.loads(bpe.to_str()))
    return Tokenizer(vocab | {END_OF_TEXT: len(vocab)}, merges)
