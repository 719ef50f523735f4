"""Converts weights between Hugging Face's format and ours, and from the formats of nanoGPT and
build-nanogpt to ours. No code in a file is run, since a .pt is read with weights_only=True."""

import json
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dataloader import VOCAB_SIZES
from model import GPT, GPTConfig
from support.ending import UserError, is_main_rank, print_error
from support.files import did_you_mean, read_small
from support.tokenizer import load_tokenizer, read_alphabet, read_tokenizer

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's files
HUB_FILES = ["*.json", "*.safetensors", "merges.txt"]
# .bin predates safetensors; an index names the files that hold the tensors
WEIGHT_FILES = ["model.safetensors", "model.safetensors.index.json"]
WEIGHT_FILES += ["pytorch_model.bin", "pytorch_model.bin.index.json"]
FOREIGN = {  # the first bytes of files that people mistake for weights, and what those files are
    b"version https://git-lfs": "a pointer of Git LFS: run git lfs pull",
    b"<!doctype": "a web page",
    b"<html": "a web page",
    b"\x89HDF": "TensorFlow's: in transformers, save the model as PyTorch's",
    np.array([20240326], "<i4").tobytes(): "llm.c's: it has a script that exports to Hugging Face",
}
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # old files' masks; copy of wte
WRAPPERS = r"^(module\.|_orig_mod\.|transformer\.)+"  # name prefixes of DDP, compile and GPT
SHAPE = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}  # ours -> theirs
HF_SHAPE = SHAPE | {"seq_len": "n_positions"}
NANOGPT_SHAPE = SHAPE | {"seq_len": "block_size"}
HF_SETTINGS = {  # the values in config.json that we support, with the default first
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names for one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "n_inner": (None,),
}
# Fields of a changed network that hf_config maps to transformers' settings.
MAPPED: set[str] = set()
GPT2_LOSS = "8.3263"  # formula_loss() of transformers 5.23's GPT-2
OUR_KEY = "train_gpt2"  # our config.json's key for GPTConfig's fields and the tokenizer
WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
# The tokenizer for a vocabulary size. GPT-2's vocabulary may have padding or chat tokens.
GUESSES = {VOCAB_SIZES["bytes"]: "bytes"} | dict.fromkeys(range(50257, 50433), "gpt2")
UNREADABLE = "is not a readable GPT-2, or was written by another version of this code"


@dataclass
class Pretrained:
    """The weights of a network, and what their files say about it."""

    path: Path
    shape: GPTConfig
    weights: dict[str, Tensor]  # GPT's names and layout, in float32, without padded rows
    tokenizer: str  # its name, or "unknown"


def load_weights(model: GPT, source: Pretrained):
    """Move source's weights into model, which may have fewer positions. Padded rows become 0."""
    weights, source.weights = source.weights, {}
    for name, param in model.named_parameters():
        p = param.detach()
        tensor = weights[name][: len(p)]
        p[: len(tensor)].copy_(tensor)
        p[len(tensor) :].zero_()


def hf_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights with Hugging Face's names and layout, without padding, on the CPU."""
    weights = {}
    for name, param in model.named_parameters():
        p = param.detach().cpu()  # a transposed copy might not fit on the GPU
        if name == WTE:
            p = p[: model.config.vocab_size]
        weights[name] = p.t().contiguous() if name.endswith(CONV1D) else p
    return weights


def hf_config(config: GPTConfig, tokenizer: str) -> dict:
    """Return the contents of config.json: settings for Hugging Face's tools, and our shape."""
    shape = asdict(config)
    settings: dict = {name: values[0] for name, values in HF_SETTINGS.items()}
    settings |= {theirs: shape[ours] for ours, theirs in HF_SHAPE.items()}
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    settings["n_ctx"] = config.seq_len  # for llama.cpp's converter
    settings |= {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32"}
    codec = load_tokenizer(tokenizer)
    end_of_text = codec.end_of_text if codec else None
    if tokenizer in VOCAB_SIZES:  # gpt2's vocabulary may not be on this machine
        end_of_text = VOCAB_SIZES[tokenizer] - 1
    settings["bos_token_id"] = settings["eos_token_id"] = end_of_text
    settings[OUR_KEY] = {"shape": shape, "tokenizer": tokenizer, "formula": formula_loss()}
    if changes(config):  # transformers must not load it as a GPT-2, and shows this reason
        reason = f"GPT-2 changed by {', '.join(changes(config))}: see README.md beside config.json"
        settings |= {"model_type": reason, "architectures": []}
    return settings


def changes(config: GPTConfig) -> list[str]:
    """Return what makes this network something other than what transformers loads: fields of
    GPTConfig, or an edit of model.py that no field shows."""
    found = [f"{name}={getattr(config, name)}" for name in changed_fields(config)]
    return found if formula_loss() == GPT2_LOSS else [*found, "an edit of model.py"]


def changed_fields(config: GPTConfig) -> list[str]:
    """Return the fields that transformers does not know, and that differ from their defaults."""
    known = (*HF_SHAPE, *MAPPED, "pad_vocab")
    added = [f for f in fields(GPTConfig) if f.name not in known]
    return [f.name for f in added if getattr(config, f.name) != f.default]


@lru_cache
def formula_loss(**changed) -> str:
    """Return the loss of a small network, which an edit of what model.py computes changes. Its
    weights are made up, so that no part of it is idle. Fields that aren't in `changed` have their
    defaults."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # --tf32 would also change it on some CPUs
    small = GPTConfig(vocab_size=64, seq_len=16, n_layer=2, n_head=4, n_embd=64)
    model = GPT(replace(small, **changed)).eval()
    tokens = torch.arange(17)[None] * 7 % 64
    with torch.no_grad():
        for p in model.parameters():
            k = torch.arange(p.numel())
            p.copy_((k * k % 1009 / 1009 - 0.5).view(p.shape) + (p.dim() == 1))
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    torch.set_float32_matmul_precision(precision)
    return f"{loss:.4f}"


def read_weights(path: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format, or in a .pt file like nanoGPT's. A
    file of such a folder stands for the folder."""
    if path.is_file() and path.name in ["config.json", *WEIGHT_FILES]:
        path = path.parent
    elif path.is_file() and path.suffix == ".safetensors":
        cure = "name a folder with its config.json, in which it is called model.safetensors"
        raise UserError(f"{path} lacks the shape of its network: {cure}")
    tokenizer = read_tokenizer(path) if path.is_dir() else None
    formula_loss()  # here, so that an edit of model.py that fails is not blamed on the file
    try:
        source = read_hf(path) if path.is_dir() else read_nanogpt(path)
        source.tokenizer = tokenizer.name if tokenizer else source.tokenizer
        return source
    except UserError:
        raise
    except Exception as error:  # a file may hold anything, so any line may fail in any way
        reason = f"{type(error).__name__}: {error!s:.300}"
        if "Weights only" in reason:
            reason = "it holds objects that could run code, not only tensors"
        raise UserError(f"{path} {UNREADABLE}: {reason}") from error


def download(name: str) -> Path:
    """Download a model from the Hugging Face hub unless it is cached, and return its folder."""
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, allow_patterns=HUB_FILES)
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(name, allow_patterns=[*HUB_FILES, "pytorch_model*"])
        return Path(folder)
    except Exception as error:  # the library is missing or broken, or the download fails
        near = did_you_mean(name, "out")
        problem = f"{name}: no such file, folder or model on the hub{near} ({error!s:.200})"
        cure = "" if find_spec("huggingface_hub") else "pip install huggingface_hub; "
        cure += f"hf download {name} --local-dir {Path(name).name}"
        raise UserError(f"{problem}; on an online machine, run: {cure}") from error


def read_hf(folder: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format, which may be in several files."""
    found = [name for name in WEIGHT_FILES if (folder / name).exists()]
    if not found or not (folder / "config.json").exists():
        has = ", ".join(sorted(os.listdir(folder))[:5]) or "nothing"
        needs = "config.json and model.safetensors"
        others = [f": name {path}" for path in sorted(folder.glob("*.pt"))]
        text = f"{folder} holds no GPT-2, which is {needs}, but {has}"
        raise UserError("".join([text, *others[:1]]))
    tensors = read_file(folder / found[0])
    if found[0].endswith(".index.json"):
        files = sorted({Path(file).name for file in tensors["weight_map"].values()})
        tensors = {}
        for file in files:
            tensors |= read_file(folder / file)
    return from_hf(read_file(folder / "config.json"), tensors, folder)


def from_hf(settings: dict, tensors: dict[str, Tensor], folder: Path) -> Pretrained:
    """Return the weights from the contents of config.json and model.safetensors."""
    weights = renamed(tensors)
    for name, tensor in weights.items():
        if name.endswith(CONV1D):
            weights[name] = tensor.transpose(0, -1)
    if OUR_KEY in settings:
        ours = settings[OUR_KEY]  # a field added to GPTConfig since then gets its default
        unknown = ", ".join(sorted(ours["shape"].keys() - {f.name for f in fields(GPTConfig)}))
        if unknown:
            text = "was written by another version of this code, whose model.py has"
            raise UserError(f"{folder} {text} {unknown}: use that")
        formula = str(ours.get("formula", formula_loss()))
        return checked(folder, ours["shape"], weights, str(ours["tokenizer"]), formula)
    for name, values in HF_SETTINGS.items():
        value = settings.get(name, values[0])
        if value not in values:
            raise UserError(f"{folder}: {name} {value!s:.40} is not supported")
    shape = {name: settings.get(theirs) for name, theirs in HF_SHAPE.items()}
    return checked(folder, shape, weights)


def read_nanogpt(path: Path) -> Pretrained:
    """Return the weights in a checkpoint of nanoGPT or build-nanogpt."""
    saved = read_file(path)
    settings = saved.get("model_args") or vars(saved["config"])
    shape = {name: settings.get(theirs) for name, theirs in NANOGPT_SHAPE.items()}
    weights = renamed(saved["model"])
    if not any(name.endswith("bias") for name in weights):
        for name in weights.keys() - {WTE, WPE}:  # nanoGPT's --bias=False acts like biases of 0
            weights[f"{name.removesuffix('weight')}bias"] = torch.zeros(len(weights[name]))
    if shape["vocab_size"] == 50304:  # both projects pad GPT-2's vocabulary
        shape["vocab_size"] = VOCAB_SIZES["gpt2"]
        weights[WTE] = weights[WTE][: VOCAB_SIZES["gpt2"]]
    config = saved["config"] if isinstance(saved.get("config"), dict) else {}
    for folder in (path.parent, Path("data", str(config.get("dataset")))):
        alphabet = read_alphabet(folder / "meta.pkl")
        if alphabet and alphabet.size == shape["vocab_size"]:
            return checked(path, shape, weights, alphabet.name)
    return checked(path, shape, weights)


def checked(
    path: Path, shape: dict, weights: dict, tokenizer: str = "", formula: str = GPT2_LOSS
) -> Pretrained:
    """Return weights in float32. Raise UserError unless they are finite and fit this shape. Say so
    if model.py does not compute their network, whose formula_loss() is `formula`."""
    if formula != formula_loss() and is_main_rank():
        text = "does not compute the network of"
        print_error(f"model.py {text} {path}: its losses and text will not be that network's")
    config = GPTConfig(**shape)
    if config.n_layer > len(weights):  # before building a network that deep
        raise UserError(f"{path} holds {len(weights)} tensors for {config.n_layer} layers")
    with torch.device("meta"):  # creates only names and sizes, using no memory
        expected = dict(GPT(replace(config, pad_vocab=False)).named_parameters())
    missing = sorted(expected.keys() - weights.keys())[:1]
    unknown = sorted(weights.keys() - expected.keys())[:1]
    if missing or unknown:
        raise UserError(f"{path} {UNREADABLE}: missing {missing}, unexpected {unknown}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            sizes = f"{tuple(tensor.shape)}, not {tuple(expected[name].shape)}"
            raise UserError(f"{path}: {name} has the shape {sizes}")
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise UserError(f"{path}: {name} is not a plain floating-point tensor")
        weights[name] = tensor.detach().float()
        # An inf or nan survives a sum, which is ten times as fast as isfinite().all().
        if not weights[name].sum().isfinite():
            raise UserError(f"{path}: {name} holds a value that is not finite")
    return Pretrained(path, config, weights, tokenizer or GUESSES.get(config.vocab_size, "unknown"))


def renamed(weights: dict) -> dict:
    """Return weights with the names of GPT's parameters."""
    used = [name for name in weights if not name.endswith(UNUSED)]
    return {f"transformer.{re.sub(WRAPPERS, '', name)}": weights[name] for name in used}


def read_file(path: Path) -> dict:
    """Return the contents of a .json file, a .safetensors file or a file written by torch.save."""
    if not path.is_file():  # reading a pipe would wait forever
        raise UserError(f"{path}: there is no such file")
    with open(path, "rb") as f:
        head = f.read(64).lstrip().lower()
    for start, kind in FOREIGN.items():
        if head.startswith(start.lower()):
            raise UserError(f"{path} is {kind}")
    if path.suffix == ".json":
        return json.loads(read_small(path))
    if path.suffix == ".safetensors":
        return load_file(path)
    # A file of build-nanogpt holds a GPTConfig object. Read its numbers without its code.
    stand_ins: list = [(SimpleNamespace, f"{file}.GPTConfig") for file in ("__main__", "model")]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, "cpu", weights_only=True)
