"""A run's folder, its checkpoints (written, verified, read, rotated), and Hugging Face models.

A checkpoint is a folder, step_000250, that Hugging Face's tools load as a model:
    config.json             the shape of the network
    model.safetensors       its weights, with Hugging Face's names and layout, without padding
    vocab.json, merges.txt, tokenizer_config.json      the tokenizer, if it is known
    training.safetensors    Run.state()["tensors"], such as optimizer/0/exp_avg
    state.json              everything else in Run.state()
    SHA256SUMS              the digests of these files, for `sha256sum -c SHA256SUMS`
It is written as step_000250.tmp, synced, and renamed, so it is complete or absent."""

import atexit
import hashlib
import json
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataloader import GPT2_TOKENS, TokenFolder
from model import GPT, GPTConfig
from support.cli import RunError, UserError
from support.log import LOG
from support.tokenizer import Tokenizer, find_tokenizer, read_tokenizer

SUMS = "SHA256SUMS"
NEEDED = ("config.json", "model.safetensors", "state.json", "training.safetensors")
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's files
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # old files' masks; copy of wte
WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
SIZES = ("vocab_size", "n_layer", "n_head", "n_embd")  # in config.json and GPTConfig
HF_SETTINGS = {  # the values in config.json that we support, with the default first
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names for one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
OURS = "train_gpt2"  # the key of config.json for GPTConfig's fields and the tokenizer's name


# ---- A run's folder ------------------------------------------------------------------------------


def find_run(typed: dict) -> Path | None:
    """Return the folder of the run to continue, after locking it, or None to begin a new one."""
    name, resume = typed.get("out_dir"), typed.get("resume")
    continues = resume or typed.get("auto_resume")
    if not name:
        if continues:
            raise UserError("which run? name its folder with --out-dir")
        return None
    out_dir = Path(name)
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"--out-dir {name} is not a folder")
    if checkpoints(out_dir):
        if continues:
            return lock(out_dir)
        raise UserError(f"--out-dir {name} holds a run: add --resume, or name another folder")
    if resume:
        raise UserError(f"--resume: {name} holds no checkpoint")
    if (out_dir / "config.json").exists() and not (out_dir / LOG).exists():  # we would overwrite it
        raise UserError(f"--out-dir {name} holds another program's files: name another folder")
    return None


def make_folder(name: str) -> Path:
    """Make and lock the folder of a new run, which is out/NNN if it has no name."""
    number = 0
    while not name:
        number += 1
        with suppress(FileExistsError):  # another run may just have taken it
            Path(f"out/{number:03d}").mkdir(parents=True)
            name = f"out/{number:03d}"
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out-dir {name} can't be made: {error}") from error
    return lock(Path(name))


def lock(out_dir: Path) -> Path:
    """Lock a run's folder until this process ends, remove a dead run's leftovers, and return it."""
    file_lock = FileLock(out_dir / ".lock", is_singleton=True)
    atexit.register(file_lock.release)  # which also keeps it alive until then
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"--out-dir {out_dir} belongs to a live run: name another") from None
    except (OSError, NotImplementedError) as error:  # Lustre and NFS may have no locks
        print(f"{out_dir} can't be locked ({error}): let no other run use it", file=sys.stderr)
    for unfinished in out_dir.glob("step_*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    return out_dir


# ---- Writing -------------------------------------------------------------------------------------


def save(out_dir: Path, model: GPT, state: dict, tokenizer: Tokenizer | None, name: str):
    """Write a checkpoint of Run.state(). `name` is the tokenizer's, even if tokenizer is None."""
    path = out_dir / f"step_{state['step']:06d}"
    if path.exists() and not damaged_file(path):  # the first step of a resume was not finite
        return
    unfinished = path.with_suffix(".tmp")
    tensors = {key: tensor.cpu().contiguous() for key, tensor in state["tensors"].items()}
    try:
        unfinished.mkdir()
        (unfinished / "state.json").write_bytes(as_json(state | {"tensors": None}))
        save_file(tensors, unfinished / "training.safetensors")
        save_weights(unfinished, model, tokenizer, name)
        lines = map(sum_line, sorted(unfinished.iterdir()))
        (unfinished / SUMS).write_bytes("".join(lines).encode())
        for file in unfinished.iterdir():
            shutil.copymode(unfinished / "state.json", file)  # save_file lets only the owner read
            sync(file)
        sync(unfinished)
        shutil.rmtree(path, ignore_errors=True)  # if it is there, it is damaged
        rename(unfinished, path)
        sync(out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(f"{path} can't be written: {error}; those before are whole") from error


def as_json(value: dict) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def sum_line(path: Path) -> str:
    """Return a file's line in SHA256SUMS."""
    with open(path, "rb") as f:
        return f"{hashlib.file_digest(f, 'sha256').hexdigest()}  {path.name}\n"


def sync(path: Path):
    """Sync a file, or the names in a folder, to disk. Otherwise, a power failure may lose them."""
    is_file = path.is_file()
    if is_file or os.name == "posix":
        number = os.open(path, os.O_RDWR if is_file else os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def rename(source: Path, target: Path):
    """Rename a folder. Retry for 5 s, as a virus scanner or backup may hold a file in it open."""
    for _ in range(5):
        with suppress(PermissionError):
            return source.rename(target)
        time.sleep(1)
    return source.rename(target)


def rotate(out_dir: Path, step: int, keep: int, val_losses: dict[int, float]):
    """Remove all checkpoints up to `step`, except the newest `keep` and the one with the best
    validation loss. One after `step` is damaged, but its weights may be of use to somebody."""
    paths = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    best = min(paths, key=lambda path: val_losses.get(step_of(path), float("inf")))
    for path in {*paths[keep:]} - {best}:
        shutil.rmtree(path, ignore_errors=True)  # on Windows, a file in it may be open


# ---- Reading -------------------------------------------------------------------------------------


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(out_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    found = [path for path in out_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(out_dir: Path) -> Path:
    """Return the newest checkpoint that is whole, and print the name of each damaged one. Raise
    RunError if none is whole, or OSError if the disk fails."""
    for path in checkpoints(out_dir):
        damaged = damaged_file(path)
        if not damaged:
            return path
        print(f"{path}: {damaged} is damaged or missing; trying the one before", file=sys.stderr)
    raise RunError(f"no checkpoint in {out_dir} is whole")


def damaged_file(path: Path) -> str:
    """Return the name of a checkpoint's first file that is missing or does not match SHA256SUMS,
    or "" if all are good. Raise OSError for any other disk error, which is not damage."""
    try:
        lines = (path / SUMS).read_text("latin-1").splitlines(keepends=True)
        # In a line, the name follows 64 digits and 2 spaces.
        expected = dict.fromkeys(NEEDED, "") | {line[66:-1]: line for line in lines}
        return next((name for name in expected if expected[name] != sum_line(path / name)), "")
    except (FileNotFoundError, IsADirectoryError) as error:  # the latter if SHA256SUMS is cut
        return Path(error.filename).name


def load_newest(out_dir: Path) -> tuple[Path, dict]:
    """Return a run's newest good checkpoint, and the state in it, as Run.state() gave it."""
    path = newest(out_dir)
    state = json.loads((path / "state.json").read_bytes())
    return path, state | {"tensors": load_file(path / "training.safetensors")}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, such as optimizer/0/exp_avg."""
    return {
        f"optimizer/{i}/{name}": tensor
        for i, moments in optimizer.state_dict()["state"].items()
        for name, tensor in moments.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]):
    """Load what optimizer_tensors() returned, given all tensors of a checkpoint. Raise UserError if
    names or shapes differ from the optimizer's, as a fused kernel would write out of bounds."""
    saved = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
    if not saved:  # as long as float16 overflows
        return
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # each step of the training sets it
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()  # makes the tensors, and changes no weight
    optimizer.zero_grad(set_to_none=True)
    made = optimizer_tensors(optimizer)
    for name in sorted(made.keys() | saved.keys()):
        if name not in made or name not in saved or made[name].shape != saved[name].shape:
            raise UserError(f"the checkpoint is of another optimizer: it differs in {name}")
        made[name].copy_(saved[name])


# ---- Hugging Face's GPT-2 ------------------------------------------------------------------------


def save_weights(folder: Path, model: GPT, tokenizer: Tokenizer | None, tokenizer_name: str):
    """Write into folder the files that Hugging Face's tools load, in their names and layout."""
    config = model.config
    sizes = {name: getattr(config, name) for name in SIZES}
    is_gpt2 = config == GPTConfig(**sizes, seq_len=config.seq_len, pad_vocab=config.pad_vocab)
    end_of_text = tokenizer.end_of_text if tokenizer else None
    settings = {
        # transformers must not take a changed network for a GPT-2, and shows this name.
        "model_type": "gpt2" if is_gpt2 else f"a changed {config}",
        "architectures": ["GPT2LMHeadModel"] if is_gpt2 else [],
        **{name: values[0] for name, values in HF_SETTINGS.items()},
        **sizes,
        "n_positions": config.seq_len,
        "n_ctx": config.seq_len,  # for llama.cpp
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        OURS: {"shape": asdict(config), "tokenizer": tokenizer_name},
    }
    (folder / "config.json").write_bytes(as_json(settings))
    files = tokenizer.files(config.seq_len) if tokenizer else {}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    weights = {}
    for name, param in model.weights().items():
        p = param.cpu()  # a transposed copy might not fit on the GPU
        weights[name] = p.t().contiguous() if name.endswith(CONV1D) else p
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


class Weights(NamedTuple):
    """A folder with a GPT-2 in Hugging Face's format."""

    folder: Path
    shape: GPTConfig
    tokenizer: str  # its name, or "" if nothing says it

    def check_tokens(self, data: TokenFolder):
        """Raise UserError if the network can't be trained or evaluated on these tokens."""
        if self.tokenizer not in ("", data.tokenizer):
            text = f"{self.folder} knows {self.tokenizer} tokens, but {data.folder} holds"
            raise UserError(f"{text} {data.tokenizer}: prepare_data.py --tokenizer {self.folder}")
        largest = max(shard.max_id for shard in data.train + data.val)
        if largest >= self.shape.vocab_size:
            text = f"{data.folder} may hold token {largest}, but {self.folder} knows"
            raise UserError(f"{text} 0 to {self.shape.vocab_size - 1}")


def find_weights(name: str) -> Weights:
    """Return the weights in a run (its newest good checkpoint), in a checkpoint or another folder
    of Hugging Face's format, or of a model on the hub. Raise UserError if there are none."""
    path = Path(name)
    if path.is_file():
        raise UserError(f"{name} is a file: python -m support.convert {name} FOLDER makes one")
    if not path.is_dir():
        try:
            from huggingface_hub import snapshot_download

            patterns = ["*.json", "*.safetensors", "merges.txt"]
            path = Path(snapshot_download(name, allow_patterns=patterns))
        except Exception as error:  # the library is missing, or fails in one of its many ways
            raise UserError(f"{name} is neither a folder nor on the hub: {error!s:.200}") from error
    return read_shape(newest(path) if checkpoints(path) else path)


def read_shape(folder: Path) -> Weights:
    """Return the Weights that a folder's config.json describes. Hugging Face's keys take precedence
    for the shape, since their tools change these; ours add what only our network has."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        ours = settings.get(OURS, {"shape": {}, "tokenizer": ""})
        if settings["model_type"] != "gpt2" and not ours["shape"]:
            raise ValueError(f"model_type {settings['model_type']} is not supported")
        for name, values in HF_SETTINGS.items():
            if settings.get(name, values[0]) not in values:
                raise ValueError(f"{name} {settings[name]} is not supported")
        sizes = {name: settings[name] for name in SIZES} | {"seq_len": settings["n_positions"]}
        shape = GPTConfig(**ours["shape"] | sizes)
        name = ours["tokenizer"] or ("gpt2" if shape.vocab_size == GPT2_TOKENS else "")
    except Exception as error:  # the file may hold anything
        raise UserError(f"{folder} holds no GPT-2 that model.py knows: {error!r:.200}") from error
    tokenizer = read_tokenizer(folder)
    return Weights(folder, shape, tokenizer.name if tokenizer else name)


def load_weights(model: GPT, folder: Path):
    """Copy the weights in a folder into model, which may have fewer positions. Raise UserError
    unless all weights are there, have the right shape and are finite."""
    weights = {}
    try:
        files = [*folder.glob("model.safetensors")] or folder.glob("model-*-of-*.safetensors")
        for file in files:
            for name, tensor in load_file(file).items():
                if not name.endswith(UNUSED):
                    name = f"transformer.{name.removeprefix('transformer.')}"
                    weights[name] = tensor.t() if name.endswith(CONV1D) else tensor
        padding = torch.zeros(model.config.num_rows - model.config.vocab_size, model.config.n_embd)
        weights[WTE] = weights["lm_head.weight"] = torch.cat([weights[WTE], padding])
        if WPE in weights:  # a network with other positions may have none
            weights[WPE] = weights[WPE][: model.config.seq_len]
        model.load_state_dict(weights)
        # An inf or nan survives a sum, which is ten times as fast as isfinite().all().
        if not all(p.sum().isfinite() for p in model.parameters()):
            raise ValueError("a number is not finite")
    except Exception as error:  # the files may hold anything
        raise UserError(f"{folder} does not hold this GPT-2's weights: {error!s:.300}") from error


def load_model(name: str) -> tuple[GPT, Tokenizer | None]:
    """Return the network and the tokenizer (None if it is not here) that find_weights finds."""
    weights = find_weights(name)
    model = GPT(weights.shape).eval()
    load_weights(model, weights.folder)
    return model, find_tokenizer(weights.folder, weights.tokenizer)
