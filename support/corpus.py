"""A run's data: either a folder that the user names or Python's standard library."""

import subprocess
import sys
from pathlib import Path

import numpy as np

import dataloader
from config import TrainConfig
from dataloader import TOKEN, VOCAB_SIZES, ShardError, ShardLoader, TokenFolder, open_folder
from model import SHAPES
from support.ending import UserError
from support.pretrained import Pretrained
from support.tokenizer import load_tokenizer


def open_data(config: TrainConfig, source: Pretrained | None) -> tuple[TokenFolder, int]:
    """Return the data, and the vocabulary size of a network trained on it. Raise UserError or
    ShardError if the network in `source` can't read the data."""
    folder = Path(config.data_dir)
    if not config.data_dir:
        # Existing weights need their own tokenizer. New large models use GPT-2's if available.
        if source:
            wants_gpt2 = source.tokenizer != "bytes"
        elif config.model == "nano":
            wants_gpt2 = False
        else:
            wants_gpt2 = Path("data/stdlib-gpt2").exists() or load_tokenizer("gpt2") is not None
        folder = python_source("gpt2" if wants_gpt2 else "bytes")
    try:
        data = open_folder(folder)
    except ShardError as error:  # at the start, a bad shard is a user error, not a disk error
        raise UserError(str(error)) from error
    # On bytes, --model gpt2 keeps 50,257 embedding rows, to have GPT-2's size and speed.
    vocab_size = SHAPES[config.model].vocab_size
    if source:
        vocab_size = source.shape.vocab_size
    elif config.model == "nano":
        vocab_size = VOCAB_SIZES.get(data.tokenizer, VOCAB_SIZES["gpt2"])
    check_data(data, config.seq_len, source.tokenizer if source else "", vocab_size)
    return data, vocab_size


def python_source(tokenizer: str) -> Path:
    """Return the folder with Python's tokenized standard library. Create it if necessary."""
    folder = Path(f"data/stdlib-{tokenizer}")
    if not any(folder.glob("*.bin")) or (folder / dataloader.UNFINISHED).exists():
        print(f"no --data-dir: tokenizing Python's standard library into {folder}", flush=True)
        program = Path(__file__).parent.with_name("prepare_data.py")
        flags = ["--tokenizer", tokenizer, "--data-dir", str(folder)]
        if subprocess.run([sys.executable, program, *flags]).returncode:  # it has printed why
            raise UserError(f"{folder} could not be made: fix that, or name another --data-dir")
    return folder


def check_data(data: TokenFolder, seq_len: int, tokenizer: str, vocab_size: int):
    """Raise UserError or ShardError if the network can't read data. Tokenizer "" means any."""
    for shards in (data.train, data.val):
        ShardLoader(shards, 1, seq_len)  # raises if shards are too short
    if {data.tokenizer, tokenizer} == {"bytes", "gpt2"}:
        raise UserError(f"prepare --data-dir with --tokenizer {tokenizer}, not {data.tokenizer}")
    for shard in data.train + data.val:
        largest = shard.max_id
        if largest >= vocab_size:  # without a manifest, max_id is the tokenizer's limit
            largest = np.memmap(shard.path, TOKEN, "r", shard.offset).max()
        if largest >= vocab_size:
            limit = f"but the network only knows 0 to {vocab_size - 1}"
            raise UserError(f"{shard.path} holds token {largest}, {limit}: prepare the data again")
