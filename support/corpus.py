"""A data set: a folder of shards, opened and checked, and what makes it this one and no other."""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dataloader import PREPARE, TOKEN, VOCAB_SIZES, Shard, ShardError, ShardLoader, open_shard
from support.errors import UserError

MANIFEST = "manifest.json"  # what prepare_data.py knew of the shards when it wrote them


@dataclass(frozen=True)
class TokenFolder:
    folder: Path
    train: list[Shard]
    val: list[Shard]
    tokenizer: str  # "bytes", "gpt2" or "unknown"
    fingerprint: str  # of the tokens and their order, whatever the files are called


def open_folder(path: Path) -> TokenFolder:
    """Return path's shards: its manifest's, or else all. Raise UserError or ShardError."""
    cure = f"python {PREPARE} --input YOUR_TEXT --data-dir data/{path.stem} makes one"
    if not path.is_dir():
        raise UserError(f"--data-dir {path} is not a folder of tokens: {cure}")
    splits = {"train": [], "val": []}
    digest = hashlib.sha256()
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        tokenizer = manifest["tokenizer"]["name"]
        for split, shards in splits.items():
            for entry in manifest[split]["shards"]:
                shard = open_shard(path / entry["name"])
                if shard.num_tokens != entry["tokens"]:
                    raise ShardError(f"{shard.path} is not the one that {MANIFEST} is about")
                shards.append(replace(shard, max_id=entry["largest_id"]))
                digest.update(f"{split} {entry['sha256']} ".encode())
    else:
        tokenizer = "unknown" if (path / "meta.pkl").exists() else "gpt2"  # nanoGPT's alphabets
        for file in sorted(path.iterdir()):
            names = [split for split in splits if split in file.name]
            if file.suffix in (".bin", ".npy") and len(names) == 1:
                shard = replace(open_shard(file), max_id=VOCAB_SIZES.get(tokenizer, 65536) - 1)
                splits[names[0]].append(shard)
                digest.update(f"{names[0]} {shard.num_tokens} ".encode())
                size = min(512, shard.num_tokens)
                for i in range(64):  # samples, from the first token to the last: 1 ms in all
                    digest.update(shard.read(i * (shard.num_tokens - size) // 63, size))
    if not any(splits.values()):
        tokens = f"data/{path.resolve().name}-tokens"
        cure = f"to make some of its text: python {PREPARE} --input {path} --data-dir {tokens}"
        below = [str(manifest.parent) for manifest in sorted(path.glob(f"*/{MANIFEST}"))]
        cure = f"name {' or '.join(below)}" if below else cure
        raise UserError(f"--data-dir {path} holds no shards of tokens: {cure}")
    for split, shards in splits.items():
        if not shards:
            raise UserError(f"--data-dir {path} has no {split} shards: {cure}")
    return TokenFolder(path, splits["train"], splits["val"], tokenizer, digest.hexdigest()[:16])


def read_manifest(folder: Path) -> dict:
    """Return folder's manifest. Raise UserError if it lacks what this program needs of it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        manifest["tokenizer"]["name"] = str(manifest["tokenizer"]["name"])
        for entry in manifest["train"]["shards"] + manifest["val"]["shards"]:
            entry["name"] = Path(str(entry["name"])).name  # so that it leads to no other folder
            entry["sha256"] = str(entry["sha256"])
            entry["tokens"] = int(entry["tokens"])
            entry["largest_id"] = int(entry["largest_id"])
        return manifest
    except Exception as error:  # it may hold anything
        raise UserError(
            f"{folder}/{MANIFEST} is damaged: {error!r:.99}; prepare it again"
        ) from None


def check_data(data: TokenFolder, seq_len: int, tokenizer: str, vocab_size: int):
    """Raise UserError or ShardError if a network that knows these tokens can't read the data."""
    for shards in (data.train, data.val):
        ShardLoader(shards, 1, seq_len)  # raises
    if {data.tokenizer, tokenizer} == {"bytes", "gpt2"}:
        raise UserError(f"--data-dir is in {data.tokenizer}: prepare it as --tokenizer {tokenizer}")
    for shard in data.train + data.val:
        largest = shard.max_id
        if largest >= vocab_size:  # without a manifest, that is only what the tokenizer allows
            largest = np.memmap(shard.path, TOKEN, "r", shard.offset).max()
        if largest >= vocab_size:
            limit = f"the network knows 0 to {vocab_size - 1}"
            raise UserError(f"{shard.path} holds token {largest}, {limit}: prepare the data again")


def own_source(tokenizer: str) -> Path:
    """Return the folder of Python's own source in tokens; write it if it is not there yet."""
    path = Path("data", f"stdlib-{tokenizer}")
    if not path.exists():
        print(f"no --data-dir: preparing Python's own source in {path}", flush=True)
        program = Path(__file__).parent.with_name(PREPARE)
        subprocess.run([sys.executable, program, "--tokenizer", tokenizer, "--data-dir", path])
    return path  # whoever wrote it: another run may have been faster
