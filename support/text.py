"""Between text and ids: the tokenizers that this machine has, and samples."""

import codecs
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from dataloader import VOCAB_SIZES, ShardLoader
from support.files import missing_vocab


class Codec(NamedTuple):
    """Between text and ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[int], bytes]  # of one id


def codec(tokenizer: str) -> Codec | None:
    """None where this machine lacks what it takes."""
    if tokenizer == "bytes":
        return Codec(str.encode, lambda i: bytes([i]) if i < 256 else b"<|endoftext|>")
    if tokenizer != "gpt2" or missing_vocab():
        return None
    try:
        import tiktoken
    except ImportError:
        return None
    gpt2 = tiktoken.get_encoding("gpt2")
    return Codec(gpt2.encode_ordinary, lambda i: gpt2.decode_bytes([i]) if i < 50257 else b"")


def token_bytes(tokenizer: str) -> np.ndarray:
    """How many bytes of text each id stands for, (65536,): <|endoftext|> for none, and where this
    machine lacks what it takes all of them."""
    lengths, text = np.zeros(1 << 16, np.int64), codec(tokenizer)
    for i in range(VOCAB_SIZES[tokenizer] - 1 if text else 0):
        lengths[i] = len(text.decode(i))
    return lengths


@lru_cache
def bytes_per_token(loader: ShardLoader, num_sequences: int, tokenizer: str) -> float:
    """Of the targets in the first num_sequences of loader, counted; 0 where nothing is known."""
    lengths = token_bytes(tokenizer)
    counts = [lengths[loader[n][1:]].sum() for n in range(num_sequences)] if lengths.any() else [0]
    return float(sum(counts)) / (num_sequences * loader.T)


def samples(
    model, tokenizer: str, count: int, seed: int, autocast: Callable, note: Callable, **how
) -> Iterator[Iterator[str]]:
    """Samples of a GPT, each piece by piece and from the same random numbers each time. how is what
    stream takes."""
    for number in range(count):
        entropy = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]
        rng = torch.Generator(model.lm_head.weight.device).manual_seed(int(entropy))
        yield stream(model, tokenizer, rng, autocast, note, **how)


def stream(
    model, tokenizer: str, rng: torch.Generator, autocast: Callable, note: Callable, *,
    prompt: str, sample_tokens: int, **how: float,
) -> Iterator[str]:  # fmt: skip
    """A sample of a GPT, piece by piece: the prompt, and what it goes on with, asked inside
    autocast(), after a note() to the watchdog. how is generate's temperature and top_k."""
    text = codec(tokenizer)
    end_of_text = min(VOCAB_SIZES.get(tokenizer, 1), model.config.vocab_size) - 1  # before each
    ids = list(text.encode(prompt)) if text and prompt else [end_of_text]
    if max(ids) >= (size := model.config.vocab_size):
        raise ValueError(f"--prompt: token {max(ids)}, the network knows 0 to {size - 1}")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be half a character
    yield prompt if text else "no vocabulary here for --prompt, nor to read this: "
    tokens = model.generate(torch.tensor([ids], device=rng.device), rng, **how)
    for _ in range(sample_tokens):
        note("a sample")
        with autocast():  # not around the yield: whoever reads this goes on in it
            i = int(next(tokens))
        yield decoder.decode(text.decode(i)) if text else f"{i} "
    yield decoder.decode(b"", final=True)
