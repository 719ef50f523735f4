"""Checkpoints: how they are written, verified, read and rotated; and GPT-2s of Hugging Face.

A checkpoint is a folder, step_000250, that Hugging Face's tools load as a model:
    config.json             the shape of the network
    model.safetensors       its weights, with Hugging Face's names and layout, without padding
    vocab.json, merges.txt, tokenizer_config.json      the tokenizer, if it is known
    training.safetensors    the tensors of Run.state(), by their paths in it: optimizer/state/0/...
    state.json              all that is no tensor in Run.state()
    SHA256SUMS              the digests of these files, for `sha256sum -c SHA256SUMS`

It is written as step_000250.tmp, synced, and renamed, so it is complete or absent."""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataloader import GPT2_TOKENS, TokenFolder
from model import GPT, GPTConfig
from support.cli import RunError, UserError
from support.tokenizer import Tokenizer, find_tokenizer, read_tokenizer

SUMS = "SHA256SUMS"
WEIGHTS = ("config.json", "model.safetensors")
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's files
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # old files' masks; copy of wte
WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
# A field of GPTConfig -> its name in config.json
HF_SHAPE = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
HF_SHAPE["seq_len"] = "n_positions"
HF_SETTINGS = {  # the values in config.json that we support, with the default first
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names for one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "n_inner": (None,),
}
OURS = "train_gpt2"  # the key of config.json for GPTConfig's fields and the tokenizer's name


class Damaged(Exception):
    """A file of a checkpoint is missing, or has another SHA-256."""


# ---- Writing -------------------------------------------------------------------------------------


def save(out_dir: Path, model: GPT, state: dict, tokenizer: Tokenizer | None, name: str):
    """Write the checkpoint of state["step"] into out_dir, or raise RunError. `name` is the
    tokenizer's, which may not be on this machine."""
    path = out_dir / f"step_{state['step']:06d}"
    unfinished = path.with_suffix(".tmp")
    tensors, rest = flatten(state)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        (unfinished / "state.json").write_bytes(as_json(rest))
        save_file(tensors, unfinished / "training.safetensors")
        save_weights(unfinished, model, tokenizer, name)
        for large in unfinished.glob("*.safetensors"):  # save_file lets only the owner read them
            shutil.copymode(unfinished / "state.json", large)
        with ThreadPoolExecutor() as pool:  # to process both large files at once
            lines = list(pool.map(sync_and_sum, sorted(unfinished.iterdir())))
        (unfinished / SUMS).write_bytes("".join(lines).encode())
        sync_and_sum(unfinished / SUMS)
        sync_folder(unfinished)
        if path.exists():  # it is damaged, or the run would have resumed from it
            shutil.rmtree(path)
        rename(unfinished, path)
        sync_folder(out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(f"{path} can't be written: {error}; those before are whole") from error


def save_weights(folder: Path, model: GPT, tokenizer: Tokenizer | None, name: str):
    """Write the files that Hugging Face's tools load into folder."""
    for file, content in (tokenizer.files(model.config.seq_len) if tokenizer else {}).items():
        (folder / file).write_bytes(content)
    end_of_text = tokenizer.end_of_text if tokenizer else None
    (folder / "config.json").write_bytes(as_json(hf_config(model.config, name, end_of_text)))
    save_file(hf_weights(model), folder / "model.safetensors", {"format": "pt"})


def flatten(state: Any, path: str = "") -> tuple[dict[str, Tensor], Any]:
    """Return the tensors in nested dicts and lists, by path, and the rest, with None in place of
    each tensor."""
    if isinstance(state, Tensor):
        return {path: state.detach().cpu().contiguous()}, None
    if not isinstance(state, dict | list | tuple):
        return {}, state
    tensors: dict = {}
    rest: dict = {}
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        below, rest[str(key)] = flatten(value, f"{path}/{key}" if path else str(key))
        tensors |= below
    return tensors, rest if isinstance(state, dict) else list(rest.values())


def unflatten(rest: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return what flatten took apart. Keys that are digits become numbers again, tuples lists."""
    if path in tensors:
        return tensors[path].clone()  # not a view of the mapped file
    start = f"{path}/" if path else ""
    if isinstance(rest, list):
        return [unflatten(value, tensors, f"{start}{i}") for i, value in enumerate(rest)]
    if isinstance(rest, dict):
        items = {key: unflatten(value, tensors, f"{start}{key}") for key, value in rest.items()}
        return {int(key) if key.isdigit() else key: value for key, value in items.items()}
    return rest


def as_json(value: dict) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def sync_and_sum(path: Path) -> str:
    """Sync a file to disk, and return its SHA256SUMS line."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return f"{hashlib.file_digest(f, 'sha256').hexdigest()}  {path.name}\n"


def sync_folder(folder: Path):
    """Sync the names in a folder to disk. Otherwise, a new file may be lost in a power failure."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def rename(source: Path, target: Path):
    """Rename a folder. Retry for some seconds, because on Windows and some network disks, a virus
    scanner or backup may hold a file in it open for a moment."""
    for seconds_left in range(5, -1, -1):
        try:
            return source.rename(target)
        except PermissionError:
            if not seconds_left:
                raise
            time.sleep(1)


def rotate(out_dir: Path, step: int, keep: int, val_losses: dict[int, float]):
    """Remove all checkpoints up to `step`, except the newest `keep` and the one with the best
    validation loss. One after `step` is damaged, but its weights may be of use to somebody."""
    paths = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    validated = [path for path in paths if step_of(path) in val_losses]
    best = min(validated, key=lambda path: val_losses[step_of(path)], default=None)
    for path in paths[keep:]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)  # on Windows, a file in it may be open


def check_space(out_dir: Path, model: GPT, keep: int):
    """Raise RunError if the disk is too full for the checkpoints of a run. While one is written,
    `keep` older ones and the best are there."""
    needed = 12 * sum(p.numel() for p in model.parameters())  # weights and moments in float32
    needed *= max(1, keep + 2 - len(checkpoints(out_dir)))
    free = shutil.disk_usage(out_dir).free
    if free < needed:
        text = f"--out-dir {out_dir}: checkpoints need {needed / 1e9:.2f} GB"
        raise RunError(f"{text}, but only {free / 1e9:.2f} GB are free")


# ---- Reading -------------------------------------------------------------------------------------


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(out_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    found = [path for path in out_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(out_dir: Path, for_resume: bool = True) -> Path | None:
    """Return the newest checkpoint whose digests are right, or None if there is no checkpoint.
    Print the name of each damaged one. Raise RunError if all are damaged, or if the disk fails."""
    paths = checkpoints(out_dir)
    for path in paths:
        try:
            verify(path, for_resume)
            return path
        except Damaged as error:
            print(f"{path} is damaged ({error}): trying the one before", file=sys.stderr)
    if paths:
        raise RunError(f"no checkpoint in {out_dir} is whole")
    return None


def verify(path: Path, for_resume: bool):
    """Raise Damaged unless the files of a checkpoint have the digests in SHA256SUMS: all of them
    or, if not for a resume, the weights and their shape. Another error of the disk is no damage."""
    if for_resume and (path / "optimizer.safetensors").exists():
        text = f"{path} is of a version before 1.0, and can't be resumed"
        raise UserError(f"{text}: --init-from {path} takes its weights")
    try:
        lines = (path / SUMS).read_bytes().decode("ascii").split("\n")
        if lines.pop():
            raise ValueError("its end is cut")
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        needed = {*WEIGHTS, "state.json", "training.safetensors", *sums} if for_resume else WEIGHTS
        for name in sorted(needed):
            with open(path / name, "rb") as f:
                if hashlib.file_digest(f, "sha256").hexdigest() != sums.get(name):
                    raise Damaged(f"{name} has another SHA-256")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except ValueError as error:
        raise Damaged(f"{SUMS} is no list of digests") from error
    except OSError as error:
        raise RunError(f"{path} can't be read: {error}; nothing was changed") from error


def load_newest(out_dir: Path) -> tuple[Path, dict]:
    """Return a run's newest good checkpoint, and the state in it, as Run.state() gave it."""
    path = newest(out_dir)
    if path is None:
        raise UserError(f"{out_dir} holds no checkpoint")
    rest = json.loads((path / "state.json").read_bytes())
    return path, unflatten(rest, load_file(path / "training.safetensors"))


def load_optimizer(optimizer: torch.optim.Optimizer, moments: dict):
    """Load an optimizer's moments, but keep its options, as flags may have changed. Raise UserError
    if a moment is missing or has another shape: a fused kernel would write beyond its memory."""
    options = optimizer.state_dict()["param_groups"]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()  # makes the moments, and changes no weight
    optimizer.zero_grad(set_to_none=True)
    made, _ = flatten(optimizer.state_dict()["state"])
    found, _ = flatten(moments)
    shapes = [{path: tensor.shape for path, tensor in each.items()} for each in (made, found)]
    if moments and shapes[0] != shapes[1]:  # there are none as long as float16 overflows
        path = min(dict(shapes[0].items() ^ shapes[1].items()))
        raise UserError(f"the checkpoint's optimizer is another one: it differs in {path}")
    optimizer.load_state_dict({"state": moments, "param_groups": options})


# ---- Hugging Face's GPT-2 ------------------------------------------------------------------------


def hf_config(config: GPTConfig, tokenizer: str, end_of_text: int | None) -> dict:
    """Return the contents of config.json: settings for Hugging Face's tools, and our shape."""
    shape = asdict(config)
    settings: dict = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    settings |= {name: values[0] for name, values in HF_SETTINGS.items()}
    settings |= {theirs: shape[ours] for ours, theirs in HF_SHAPE.items()}
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    settings |= {"n_ctx": config.seq_len, "torch_dtype": "float32"}  # n_ctx is for llama.cpp
    settings |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    added = [f for f in fields(config) if f.name not in (*HF_SHAPE, "pad_vocab")]
    changes = [f"{f.name}={shape[f.name]}" for f in added if shape[f.name] != f.default]
    if changes:  # transformers must not take it for a GPT-2, and shows this name
        settings |= {"model_type": f"GPT-2 with {', '.join(changes)}", "architectures": []}
    return settings | {OURS: {"shape": shape, "tokenizer": tokenizer}}


def hf_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights with Hugging Face's names and layout, without padding, on the CPU."""
    weights = {}
    for name, param in model.named_parameters():
        p = param.detach().cpu()  # a transposed copy might not fit on the GPU
        if name == WTE:
            p = p[: model.config.vocab_size]
        weights[name] = p.t().contiguous() if name.endswith(CONV1D) else p
    return weights


@dataclass(frozen=True)
class Weights:
    """A folder with a GPT-2 in Hugging Face's format."""

    folder: Path
    shape: GPTConfig
    tokenizer: str  # its name, or "" if nothing says it

    def check_tokens(self, data: TokenFolder):
        """Raise UserError if the network can't be trained or evaluated on these tokens."""
        if self.tokenizer not in ("", data.tokenizer):
            text = f"{self.folder} knows {self.tokenizer} tokens, but {data.folder} holds"
            cure = f"prepare_data.py --tokenizer {self.folder} makes data for it"
            raise UserError(f"{text} {data.tokenizer}: {cure}")
        largest = max(shard.max_id for shard in data.train + data.val)
        if largest >= self.shape.vocab_size:
            text = f"{data.folder} may hold token {largest}, but the network in {self.folder}"
            raise UserError(f"{text} knows 0 to {self.shape.vocab_size - 1}")


def find_weights(name: str) -> Weights:
    """Return the weights in a run (its newest checkpoint), in a checkpoint or another folder of
    Hugging Face's format, or of a model on the hub. Raise UserError if there are none."""
    path = Path(name)
    if path.is_file():
        text = f"{name} is a file: name its folder, which holds config.json and model.safetensors"
        raise UserError(f"{text} (of a .pt file, python -m support.convert makes such a folder)")
    if not path.is_dir():
        path = download(name)
    if (path / SUMS).exists():  # a checkpoint
        try:
            verify(path, for_resume=False)
        except Damaged as error:
            raise RunError(f"{path} is damaged: {error}") from error
    return read_shape(newest(path, for_resume=False) or path)


def download(name: str) -> Path:
    """Download a model from the Hugging Face hub unless it is cached, and return its folder."""
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "merges.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library is missing, or fails in one of its many ways
        text = f"{name} is no folder, and no model that could be loaded from the hub"
        raise UserError(f"{text} (pip install huggingface_hub): {error!s:.200}") from error


def read_shape(folder: Path) -> Weights:
    """Return what a folder's config.json says. Hugging Face's keys decide about the shape, since
    their tools change these; ours add what only our network has."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        ours = settings.get(OURS, {"shape": {}, "tokenizer": ""})
        if settings["model_type"] != "gpt2" and not ours["shape"]:
            raise ValueError(f"model_type {settings['model_type']!s:.40} is not supported")
        for name, values in HF_SETTINGS.items():
            if settings.get(name, values[0]) not in values:
                raise ValueError(f"{name} {settings[name]!s:.40} is not supported")
        known = {name: settings[theirs] for name, theirs in HF_SHAPE.items()}
        if not all(type(size) is int and 0 < size < 1 << 24 for size in known.values()):
            raise ValueError(f"its sizes are {known}")
        shape = GPTConfig(**ours["shape"] | known)
        tokenizer = read_tokenizer(folder)
        name = "gpt2" if shape.vocab_size == GPT2_TOKENS else ""  # if nothing else says it
        name = tokenizer.name if tokenizer else ours["tokenizer"] or name
    except UserError:
        raise
    except Exception as error:  # the file may hold anything
        raise UserError(f"{folder} holds no GPT-2 that model.py knows: {error!r:.200}") from error
    return Weights(folder, shape, name)


def load_weights(model: GPT, folder: Path):
    """Copy the weights in a folder into model, which may have fewer positions. Padded rows become
    0. Raise UserError unless all weights are there, have the right shape and are finite."""
    try:
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        found: dict[str, Tensor] = {}
        for name in names:
            found |= load_file(folder / Path(name).name)
    except Exception as error:  # the files may hold anything
        raise UserError(f"the weights in {folder} can't be read: {error}") from error
    weights = {
        f"transformer.{name.removeprefix('transformer.')}": tensor
        for name, tensor in found.items()
        if not name.endswith(UNUSED)
    }
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        names = sorted(params.keys() ^ weights.keys())
        raise UserError(f"{folder} and model.py differ in {names[0]} ({len(names)} tensors in all)")
    for name, param in params.items():
        p, tensor = param.detach(), weights[name].float()
        tensor = tensor.t() if name.endswith(CONV1D) else tensor
        num_rows = model.config.vocab_size if name == WTE else len(p)
        if name == WPE:
            tensor = tensor[:num_rows]
        if tensor.shape != (num_rows, *p.shape[1:]):
            sizes = f"{tuple(tensor.shape)}, not {(num_rows, *p.shape[1:])}"
            raise UserError(f"{folder}: {name} has the shape {sizes}")
        # An inf or nan survives a sum, which is ten times as fast as isfinite().all().
        if not tensor.sum().isfinite():
            raise UserError(f"{folder}: {name} holds a value that is not finite")
        p[:num_rows].copy_(tensor)
        p[num_rows:].zero_()


def load_model(name: str) -> tuple[GPT, Tokenizer | None]:
    """Return the network and the tokenizer (None if it is not here) of a run, a checkpoint, a
    folder, or a name on the hub, for notebooks and scripts."""
    weights = find_weights(name)
    model = GPT(weights.shape).eval()
    load_weights(model, weights.folder)
    return model, find_tokenizer(weights.folder, weights.tokenizer)
