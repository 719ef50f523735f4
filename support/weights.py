"""Weights to begin with: of Hugging Face, nanoGPT, build-nanogpt, or another run of this program.

What comes from a stranger is looked at before it is used: each file must be a plain file and whole,
each number in it a number, and the tensors must have the names, shapes and types of a GPT-2 of the
shape that the file claims. Anything else is a ValueError of one line. Memory goes with the size of
the files, never with what they say: nothing of a claimed size is made until the tensors agree.
"""

import importlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataloader import VOCAB_SIZES
from model import GPT, GPTConfig
from support import checkpoint

JSON_BYTES = 2**22  # of a file: 300 for each tensor of a thousand layers
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps them as (in, out)
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # old files' masks; tied to wte
WRAPPERS = r"^(module\.|_orig_mod\.|transformer\.)+"  # before a name: of DDP, of compile, of GPT
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                "pytorch_model.bin.index.json")  # fmt: skip
HF_SETTINGS = {  # what a config.json may say besides the shape; left out, it is the first value
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "tie_word_embeddings": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
}  # fmt: skip
HF_SHAPE = {"vocab_size": "vocab_size", "seq_len": "n_positions", "n_layer": "n_layer",
            "n_head": "n_head", "n_embd": "n_embd"}  # fmt: skip
# build-nanogpt's checkpoints hold an object of its own: its numbers are read, not its code
STAND_INS = ((SimpleNamespace, "__main__.GPTConfig"), (SimpleNamespace, "model.GPTConfig"))


@dataclass(frozen=True)
class Source:
    """The weights of a network, and what is known of them."""

    path: Path
    shape: GPTConfig
    tensors: dict[str, Tensor]  # float32 by the parameters' names; the embedding may be padded
    tokenizer: str  # "gpt2", "bytes" or "unknown"
    flags: dict  # of the run that made them, if it was this program's
    step: int = -1  # of that run

    def weights(self, config: GPTConfig) -> dict[str, Tensor]:
        """What GPT(config) loads, once: it is not held here any longer. config may have fewer
        positions. Padded rows are 0."""
        wte, wpe = (self.tensors[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
        wte = F.pad(wte[: config.vocab_size], (0, 0, 0, config.num_rows - config.vocab_size))
        ends = {"transformer.wte.weight": wte, "lm_head.weight": wte}
        found = self.tensors | ends | {"transformer.wpe.weight": wpe[: config.seq_len]}
        self.tensors.clear()
        return found

    def check_shape(self, given: dict):
        """ValueError if the flags that are given ask for another shape, or for more positions."""
        own = asdict(self.shape) | {"model": "a shape of its own"}
        if (T := given.get("seq_len", 1)) > (most := own["seq_len"]):
            why = f"--seq-len {T} is more than the {most} positions of {self.path}"
            raise ValueError(f"{why}: try --seq-len {most}")
        for name in ("model", "n_layer", "n_head", "n_embd"):
            if given.get(name, own[name]) != own[name]:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {given[name]}: {self.path} has {own[name]}; leave it out")


def find_source(
    given: dict, typed: dict, report: Callable[[str], None], check: Callable[[dict], dict]
) -> Source | None:
    """read_source, for the --init-from of the flags given, if it is; a run that --resume goes on
    with needs no other. Its own flags must pass check, and those typed may not change its shape."""
    if not (name := given.get("init_from")):
        return None
    if given.get("resume") and given.get("out_dir"):
        own = filter(checkpoint.is_good, checkpoint.checkpoints(Path(given["out_dir"])))
        name = str(next(own, name))
    if name in ("resume", "scratch"):
        raise ValueError(f"--init-from {name}: write --resume to go on, or neither to start")
    try:
        source = read_source(name, report)
        source = replace(source, flags=check(source.flags))
    except ValueError as error:
        raise ValueError(f"--init-from {name}: {error}") from None
    source.check_shape(typed)
    return source


def read_source(name: str, report: Callable[[str], None]) -> Source:
    """The network in name: a folder in Hugging Face's format or a .safetensors file in one, a run's
    folder (report is told of its damaged checkpoints), a checkpoint of this project, nanoGPT or
    build-nanogpt, or a model on the hub; ValueError if it is none of these, or no GPT-2."""
    path = Path(name) if os.path.lexists(name) else downloaded(name)
    try:
        if path.is_dir() and (newest := checkpoint.newest_checkpoint(path, report)):
            return from_run(*newest)
        if path.is_dir() or path.suffix == ".safetensors":
            return from_hf(path)
        if "identity" not in (saved := read_file(path)):
            return from_nanogpt(path, saved)
        checkpoint.check_state(saved, path)
        return from_run(path, saved)
    except MemoryError:
        raise
    except checkpoint.NoGoodCheckpoint:
        raise ValueError(f"{path} is no GPT-2: none of its checkpoints is good") from None
    except Exception as error:  # damaged bytes make any reader fail in any way
        raise ValueError(f"{path} is no GPT-2: {cause(error)}") from None


def cause(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return kind + (str(error) or repr(error)).splitlines()[0][:300]


def downloaded(name: str) -> Path:
    """The folder of a model on the Hugging Face hub; ValueError with the cure if there is none."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        raise ValueError("no such file or folder, and no name of a model on the Hugging Face hub")
    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(library("huggingface_hub").snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # of the library, or of those that it uses
        why = f"no such folder, and it can't be downloaded ({cause(error):.200})"
    cure = f"hf download {name} --local-dir {name.replace('/', '-')}, where there is a network"
    raise ValueError(f"{why}; or {cure}")


def from_run(path: Path, saved: dict) -> Source:
    """What a checkpoint of this project holds, which was checked when it was read."""
    shape = GPTConfig(**{f.name: saved["identity"][f.name] for f in fields(GPTConfig)})
    tokenizer = saved["identity"].get("tokenizer")
    if not isinstance(tokenizer, str) or VOCAB_SIZES.get(tokenizer, 0) > shape.vocab_size:
        raise ValueError(f"its tokenizer is {tokenizer!s:.40}, for {shape.vocab_size} ids")
    return Source(path, shape, saved["model"], tokenizer, saved["config"], saved["step"])


def from_nanogpt(path: Path, saved: dict) -> Source:
    """A checkpoint of nanoGPT or of build-nanogpt."""
    settings = saved.get("model_args") or getattr(saved.get("config"), "__dict__", None)
    if not isinstance(settings, dict) or not isinstance(saved.get("model"), dict):
        raise ValueError("it lacks model, or both of model_args and config: what wrote it?")
    return fitted(path, settings, saved["model"], path.stat().st_size, is_hf=False)


def from_hf(path: Path) -> Source:
    """A folder in Hugging Face's format, or a .safetensors file in one."""
    folder = path if path.is_dir() else path.parent
    settings = read_file(folder / "config.json")
    n_inner = {"n_inner": (None, 4 * settings.get("n_embd", 0))}
    for name, known in (HF_SETTINGS | n_inner).items():
        if (value := settings.get(name, known[0])) not in known:
            raise ValueError(f"config.json: {name} {value!s:.40} is not supported")
    files = weight_files(folder) if path == folder else [path]
    tensors = {name: tensor for file in files for name, tensor in read_file(file).items()}
    return fitted(path, settings, tensors, sum(file.stat().st_size for file in files), is_hf=True)


def fitted(path: Path, settings: dict, tensors: dict, size: int, is_hf: bool) -> Source:
    """The network whose settings and tensors these are, read from files of size bytes; ValueError
    unless the ones fit the others. nanoGPT may leave out all biases: they are 0."""
    names = HF_SHAPE if is_hf else HF_SHAPE | {"seq_len": "block_size"}
    shape = GPTConfig(**{ours: settings.get(theirs) for ours, theirs in names.items()})
    found = {f"transformer.{re.sub(WRAPPERS, '', str(name))}": tensor
             for name, tensor in tensors.items() if not str(name).endswith(UNUSED)}  # fmt: skip
    if len(found) < 6 * shape.n_layer:  # so no lie can make what follows take long
        raise ValueError(f"it holds {len(found)} tensors for {shape.n_layer} layers")
    with torch.device("meta"):
        model = GPT(replace(shape, pad_vocab=False))
    sizes = {name: p.shape for name, p in model.named_parameters()}
    biases = {name for name in sizes if name.endswith("bias")}
    left_out = set() if is_hf or biases & found.keys() else biases
    if wrong := found.keys() - sizes.keys():
        raise ValueError(f"it holds {min(wrong)}, which is not in its shape")
    if missing := sizes.keys() - found.keys() - left_out:
        raise ValueError(f"it lacks {min(missing)}")
    if sum(2 * sizes[name].numel() for name in found) > size:  # one number, many times
        raise ValueError(f"its tensors are larger than its {size:,} bytes")
    found = {name: parameter(found[name], name, sizes[name], is_hf) for name in found}
    found |= {name: torch.zeros(sizes[name]) for name in left_out}
    n = 50257 if shape.vocab_size == 50304 and not is_hf else shape.vocab_size  # theirs is padded
    # GPT-2's may have some more ids, for padding or for the ends of a chat
    tokenizer = "bytes" if n == 257 else "gpt2" if 50257 <= n <= 50432 else "unknown"
    return Source(path, replace(shape, vocab_size=n), found, tokenizer, {})


def parameter(tensor, name: str, size: torch.Size, is_hf: bool) -> Tensor:
    """tensor as this program has it; ValueError if it has another type or size."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.dtype not in TYPES:
        raise ValueError(f"{name} is no plain tensor of 16, 32 or 64-bit floating-point numbers")
    if is_hf and name.endswith(CONV1D):
        tensor = tensor.transpose(0, -1)
    if tensor.shape != size:
        raise ValueError(f"{name} has the shape {(*tensor.shape,)}, not {(*size,)}")
    if not (tensor := tensor.detach().float()).isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite in float32")
    return tensor


def weight_files(folder: Path) -> list[Path]:
    """Where the tensors of a folder in Hugging Face's format are: in one file or in several."""
    path = next((folder / name for name in WEIGHT_FILES if os.path.lexists(folder / name)), None)
    if path is None:
        raise ValueError(f"it has no weights: none of {', '.join(WEIGHT_FILES)}")
    if path.suffix != ".json":
        return [path]
    if not isinstance(names := read_file(path).get("weight_map"), dict):
        raise ValueError(f"{path.name} names no files")
    return [folder / name for name in sorted({Path(name).name for name in names.values()})]


def read_file(path: Path) -> dict:
    """What is in a file of JSON, a .safetensors file or an archive of torch.save, by its names."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")  # reading a pipe would wait for ever
    if path.suffix == ".json":
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"{path.name} is larger than {JSON_BYTES:,} bytes")
        if not isinstance(found := json.loads(path.read_bytes().decode()), dict):
            raise ValueError(f"{path.name} holds a {type(found).__name__}, not names with values")
        return found
    if path.suffix == ".safetensors":
        try:  # read, not mapped: a mapped file that is cut meanwhile kills the process
            return library("safetensors.torch").load(path.read_bytes())
        except Exception as error:  # the library has its own
            raise ValueError(f"{path.name} can't be read: {cause(error)}") from None
    if not zipfile.is_zipfile(path):
        why = "cut, not written by torch.save, or before PyTorch 1.6: convert it to safetensors"
        raise ValueError(f"{path.name} can't be read: {why}")
    return checkpoint.load_archive(path, STAND_INS)


def library(name: str):
    """The one of this name; ValueError with the cure where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"this needs a library: pip install {name.split('.')[0]}") from None
