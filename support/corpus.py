"""A run's data: either a folder that the user names or Python's standard library."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import dataloader
from config import TrainConfig
from dataloader import TOKEN, VOCAB_SIZES, Shard, ShardError, ShardLoader, TokenFolder, open_folder
from model import SHAPES
from support.cli import quoted
from support.ending import UserError
from support.files import did_you_mean
from support.pretrained import Pretrained
from support.tokenizer import how_to_get, load_tokenizer, read_tokenizer


def open_data(
    config: TrainConfig, pretrained: Pretrained | None, begun_with: str = ""
) -> tuple[TokenFolder, int]:
    """Return the data, and the vocabulary size of a network trained on it. Raise UserError or
    ShardError if the network in `pretrained` can't read the data, or if the run in --out-dir began
    with other tokens than these, whose fingerprint is `begun_with` ("": it has not begun)."""
    folder = Path(config.data_dir)
    if not config.data_dir:
        name = python_source_tokenizer(config.model, pretrained)
        if pretrained and pretrained.shape.vocab_size < VOCAB_SIZES.get(name, 0):
            text = f"{pretrained.path} knows too few tokens for Python's source in {name}"
            raise UserError(f"{text}: name its own data with --data-dir")
        folder = python_source(name)
    data = open_tokens(folder)
    # The fingerprint covers tokens, not file names, so the folder may have moved.
    if begun_with and data.fingerprint != begun_with:
        cure = f"to train on it, begin a new run with --init-from {quoted(config.out_dir)}"
        text = f"--data-dir {data.folder} differs from the data that the run in {config.out_dir}"
        raise UserError(f"{text} began with: {cure} and another --out-dir")
    if pretrained:
        vocab_size = pretrained.shape.vocab_size
    elif config.model != "nano" and not config.data_dir:
        vocab_size = SHAPES[config.model].vocab_size  # to have GPT-2's size and speed
    elif data.tokenizer == "unknown":
        vocab_size = 1 + max(largest_id(shard) for shard in data.train + data.val)
    else:
        vocab_size = data.vocab_size
    check_data(data, config.seq_len, pretrained, vocab_size)
    return data, vocab_size


def open_tokens(folder: Path) -> TokenFolder:
    """Return a folder's shards, and load its tokenizer if it holds one. Raise UserError if it is
    not complete."""
    near = "" if os.path.lexists(folder) else did_you_mean(str(folder), "data")
    if near:
        raise UserError(f"--data-dir {folder} is not there{near}")
    tokenizer = read_tokenizer(folder)
    try:
        if tokenizer:
            data = open_folder(folder, tokenizer.name, tokenizer.size)
        else:
            data = open_folder(folder)
    except ShardError as error:  # at the start, a bad shard is a user error, not a disk error
        raise UserError(str(error)) from error
    if tokenizer and tokenizer.name != data.tokenizer:
        text = f"{folder} holds tokens of {data.tokenizer}, but the vocabulary of {tokenizer.name}"
        raise UserError(f"{text}: prepare it again")
    return data


def python_source_tokenizer(model: str, pretrained: Pretrained | None) -> str:
    """Return the --tokenizer for Python's source. Existing weights need theirs. New large models
    use GPT-2's if it is on this machine, because then they are GPT-2 in every way."""
    if pretrained:
        name = pretrained.tokenizer.partition("-")[0]
        return name if name in ("bytes", "bpe") else "gpt2"
    has_gpt2 = Path("data/stdlib-gpt2").exists() or load_tokenizer("gpt2") is not None
    return "gpt2" if has_gpt2 and model != "nano" else "bpe"


def python_source(tokenizer: str) -> Path:
    """Return the folder with Python's tokenized standard library. Create it if necessary."""
    folder = Path(f"data/stdlib-{tokenizer}")
    if not any(folder.glob("*.bin")) or (folder / dataloader.UNFINISHED).exists():
        print(f"no --data-dir: tokenizing Python's standard library into {folder}", flush=True)
        program = Path(__file__).parent.with_name("prepare_data.py")
        flags = ["--tokenizer", tokenizer, "--data-dir", str(folder)]
        if subprocess.run([sys.executable, program, *flags]).returncode:  # it has printed why
            raise UserError(f"{folder} could not be made: fix that, or name data with --data-dir")
    return folder


def check_data(data: TokenFolder, seq_len: int, pretrained: Pretrained | None, vocab_size: int):
    """Raise UserError or ShardError if the network, which may have weights, can't read data."""
    for shards in (data.train, data.val):
        ShardLoader(shards, 1, seq_len)  # raises if shards are too short
    name = pretrained.tokenizer if pretrained else "unknown"
    if pretrained and name != data.tokenizer and "unknown" not in (name, data.tokenizer):
        text = f"{pretrained.path} knows {name} tokens, but {data.folder} holds {data.tokenizer}"
        if name.startswith("alphabet"):
            raise UserError(f"{text}: name the data by character that it was trained on")
        if name not in VOCAB_SIZES and not load_tokenizer(name):
            raise UserError(f"{text}; this machine lacks {name}: {how_to_get(name)}")
        cure = quoted(name if name in VOCAB_SIZES else str(pretrained.path))
        raise UserError(f"{text}: prepare a new --data-dir with --tokenizer {cure}")
    for shard in data.train + data.val:
        # Without a manifest, max_id is only the tokenizer's limit.
        largest = shard.max_id if shard.max_id < vocab_size else largest_id(shard)
        if largest >= vocab_size:
            limit = f"but the network only knows 0 to {vocab_size - 1}"
            cure = "name data in its own tokens" if pretrained else "prepare the data again"
            raise UserError(f"{shard.path} holds token {largest}, {limit}: {cure}")


def largest_id(shard: Shard) -> int:
    return int(np.memmap(shard.path, TOKEN, "r", shard.offset).max())
