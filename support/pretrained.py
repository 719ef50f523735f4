"""Weights in the format of Hugging Face's GPT-2 to ours and back, and those of nanoGPT and
build-nanogpt to ours. Nothing in a file is executed: a .pt is read with weights_only=True."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor

from dataloader import VOCAB_SIZES
from model import GPT, GPTConfig
from support.ending import UserError
from support.tokenizer import load_gpt2

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face stores them as (in, out)
HUB_FILES = ["config.json", "*.safetensors", "merges.txt", "vocab.json"]
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # masks of old files; tied to wte
WRAPPERS = r"^(module\.|_orig_mod\.|transformer\.)+"  # name prefixes of DDP, compile and GPT
SAME = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
HF_SHAPE = SAME | {"seq_len": "n_positions"}  # field of GPTConfig -> name in config.json
NANOGPT_SHAPE = SAME | {"seq_len": "block_size"}
HF_SETTINGS = {  # what else a config.json may say. Left out, it is the first value
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "n_inner": (None,),
}
OWN = "train_gpt2"  # in the config.json of our checkpoints: the fields of GPTConfig, the tokenizer
WTE, WPE = "transformer.wte.weight", "transformer.wpe.weight"
NO_GPT2 = "is not a readable GPT-2, or was written by another version of this code"


@dataclass
class Pretrained:
    """The weights of a network, and what is known of it."""

    path: Path
    shape: GPTConfig
    weights: dict[str, Tensor]  # by name and in the layout of GPT, float32, without padded rows
    tokenizer: str  # "gpt2", "bytes" or "unknown"


def load_weights(model: GPT, source: Pretrained):
    """Copy the weights of source into model, which may have fewer positions, and padded rows: those
    are 0. source is empty afterwards."""
    weights, source.weights = source.weights, {}
    for name, param in model.named_parameters():
        p = param.detach()
        tensor = weights[name][: len(p)]
        p[: len(tensor)].copy_(tensor)
        p[len(tensor) :].zero_()


def hf_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights as Hugging Face names and lays them out, without padding, on the CPU."""
    weights = {}
    for name, param in model.named_parameters():
        p = param.detach().cpu()  # a transposed copy might not fit on a GPU
        if name == WTE:
            p = p[: model.config.vocab_size]
        weights[name] = p.t().contiguous() if name.endswith(CONV1D) else p
    return weights


def hf_config(config: GPTConfig, tokenizer: str) -> dict:
    """Return what config.json says: a GPT-2 for Hugging Face's tools, and our own shape."""
    shape = asdict(config)
    settings: dict = {name: values[0] for name, values in HF_SETTINGS.items()}
    settings |= {theirs: shape[ours] for ours, theirs in HF_SHAPE.items()}
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    settings["n_ctx"] = config.seq_len  # llama.cpp's converter asks for it
    settings["architectures"] = ["GPT2LMHeadModel"]
    settings["torch_dtype"] = "float32"
    end_of_text = VOCAB_SIZES[tokenizer] - 1 if tokenizer in VOCAB_SIZES else None
    settings["bos_token_id"] = settings["eos_token_id"] = end_of_text
    settings[OWN] = {"shape": shape, "tokenizer": tokenizer}
    for f in fields(GPTConfig):
        if f.name not in (*HF_SHAPE, "pad_vocab") and shape[f.name] != f.default:
            # Somebody has changed the network: transformers must refuse it, not load it as GPT-2.
            settings |= {"model_type": OWN, "architectures": []}
    return settings


def read(path: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format, or in a .pt of nanoGPT's kind."""
    if path.name == "model.safetensors":
        path = path.parent
    load_gpt2(path if path.is_dir() else path.parent)
    try:
        return read_hf(path) if path.is_dir() else read_nanogpt(path)
    except UserError:
        raise
    except Exception as error:  # what a file holds may make any line fail in any way
        reason = f"{type(error).__name__}: {error!s:.300}"
        if "Weights only" in reason:
            reason = "it holds more than tensors, which could run code"
        raise UserError(f"{path} {NO_GPT2}: {reason}") from error


def download(name: str) -> Path:
    """Return the folder of a model on the Hugging Face hub, downloaded if it is not cached."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # it is not installed, or it or what it uses has failed
        problem = f"--init-from {name}: no such file or folder, nor on the hub ({error!s:.200})"
        cure = f"pip install huggingface_hub; hf download {name} --local-dir {Path(name).name}"
        raise UserError(f"{problem}; where there is a network: {cure}") from error


def read_hf(folder: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format."""
    path = folder / "model.safetensors"
    if not path.exists() and (folder / "pytorch_model.bin").exists():
        path = folder / "pytorch_model.bin"  # of models from before safetensors
    return from_hf(read_file(folder / "config.json"), read_file(path), folder)


def from_hf(settings: dict, tensors: dict[str, Tensor], folder: Path) -> Pretrained:
    """Return what the content of config.json and model.safetensors says."""
    weights = renamed(tensors)
    for name, tensor in weights.items():
        if name.endswith(CONV1D):
            weights[name] = tensor.transpose(0, -1)
    if OWN in settings:
        # A field that it lacks was added to GPTConfig later, and has its default.
        return checked(folder, settings[OWN]["shape"], weights, str(settings[OWN]["tokenizer"]))
    for name, values in HF_SETTINGS.items():
        value = settings.get(name, values[0])
        if value not in values:
            raise UserError(f"{folder}: {name} {value!s:.40} is not supported")
    return checked(folder, {ours: settings.get(hf) for ours, hf in HF_SHAPE.items()}, weights)


def read_nanogpt(path: Path) -> Pretrained:
    """Return the weights in a checkpoint of nanoGPT or build-nanogpt."""
    saved = read_file(path)
    settings = saved.get("model_args") or vars(saved["config"])
    shape = {ours: settings.get(name) for ours, name in NANOGPT_SHAPE.items()}
    weights = renamed(saved["model"])
    if not any(name.endswith("bias") for name in weights):
        # nanoGPT may leave out all biases: they are 0.
        for name in weights.keys() - {WTE, WPE}:
            weights[f"{name.removesuffix('weight')}bias"] = torch.zeros(len(weights[name]))
    if shape["vocab_size"] == 50304:  # both pad GPT-2's vocabulary
        shape["vocab_size"] = VOCAB_SIZES["gpt2"]
        weights[WTE] = weights[WTE][: VOCAB_SIZES["gpt2"]]
    return checked(path, shape, weights)


def checked(path: Path, shape: dict, weights: dict, tokenizer: str = "") -> Pretrained:
    """Return weights in float32; without a tokenizer, guess it. Raise UserError unless they are
    those of a network of this shape, and finite."""
    config = GPTConfig(**shape)
    if config.n_layer > len(weights):  # or a network would be made of as many layers as it claims
        raise UserError(f"{path} holds {len(weights)} tensors for {config.n_layer} layers")
    with torch.device("meta"):  # names and sizes alone, which take no memory
        expected = dict(GPT(replace(config, pad_vocab=False)).named_parameters())
    missing = sorted(expected.keys() - weights.keys())[:1]
    unknown = sorted(weights.keys() - expected.keys())[:1]
    if missing or unknown:
        raise UserError(f"{path} {NO_GPT2}: it lacks {missing} and has {unknown} besides")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            sizes = f"{tuple(tensor.shape)}, not {tuple(expected[name].shape)}"
            raise UserError(f"{path}: {name} has the shape {sizes}")
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise UserError(f"{path}: {name} is no plain tensor of floating-point numbers")
        weights[name] = tensor.detach().float()
        # An inf or nan survives a sum, which takes a tenth of the time of isfinite().all().
        if not weights[name].sum().isfinite():
            raise UserError(f"{path}: {name} holds a value that is not finite")
    return Pretrained(path, config, weights, tokenizer or tokenizer_of(config.vocab_size))


def renamed(weights: dict) -> dict:
    """Return weights with the names of GPT's parameters."""
    return {
        f"transformer.{re.sub(WRAPPERS, '', name)}": tensor
        for name, tensor in weights.items()
        if not name.endswith(UNUSED)
    }


def tokenizer_of(vocab_size: int) -> str:
    """Guess the tokenizer. GPT-2's vocabulary may be padded, or hold the ends of a chat."""
    if vocab_size == VOCAB_SIZES["bytes"]:
        return "bytes"
    return "gpt2" if VOCAB_SIZES["gpt2"] <= vocab_size <= 50432 else "unknown"


def read_file(path: Path) -> dict:
    """Return what a .json file, a .safetensors file or an archive of torch.save holds."""
    if not path.is_file():  # reading a pipe would wait forever
        raise UserError(f"{path}: there is no such file")
    if path.suffix == ".json":
        return json.loads(path.read_bytes())
    if path.suffix == ".safetensors":
        return load_file(path)
    # build-nanogpt's hold an object of its own class: its numbers are read, not its code.
    stand_ins: list = [(SimpleNamespace, f"{file}.GPTConfig") for file in ("__main__", "model")]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, "cpu", weights_only=True)
