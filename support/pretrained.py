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
from support.errors import UserError

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face stores them as (in, out)
UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # masks of old files; tied to wte
WRAPPERS = r"^(module\.|_orig_mod\.|transformer\.)+"  # name prefixes of DDP, compile and GPT
HF_SHAPE = {  # field of GPTConfig -> name in config.json
    "vocab_size": "vocab_size",
    "seq_len": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
NANOGPT_SHAPE = HF_SHAPE | {"seq_len": "block_size"}
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
    for name, p in model.named_parameters():
        p = p.detach()
        tensor = weights[name]
        if name == "transformer.wte.weight":
            p.zero_()
            p = p[: model.config.vocab_size]
        elif name == "transformer.wpe.weight":
            tensor = tensor[: model.config.seq_len]
        p.copy_(tensor)


# ---- Ours to Hugging Face's ----------------------------------------------------------------------


def hf_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights as Hugging Face's GPT2LMHeadModel names and lays them out, without
    padding, on the CPU."""
    weights = {}
    for name, p in model.named_parameters():
        p = p.detach().cpu()  # a transposed copy might not fit on a GPU
        if name == "transformer.wte.weight":
            p = p[: model.config.vocab_size]
        weights[name] = p.t().contiguous() if name.endswith(CONV1D) else p
    return weights


def hf_config(config: GPTConfig, tokenizer: str) -> dict:
    """Return what config.json says: a GPT-2 for Hugging Face's tools, and our own shape."""
    shape = asdict(config)
    settings = {name: values[0] for name, values in HF_SETTINGS.items()}
    settings |= {theirs: shape[ours] for ours, theirs in HF_SHAPE.items()}
    settings["n_ctx"] = config.seq_len  # llama.cpp's converter asks for it
    settings["architectures"] = ["GPT2LMHeadModel"]
    settings["torch_dtype"] = "float32"
    end_of_text = VOCAB_SIZES[tokenizer] - 1 if tokenizer in VOCAB_SIZES else None
    settings["bos_token_id"] = settings["eos_token_id"] = end_of_text
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        settings[name] = 0.0
    settings[OWN] = {"shape": shape, "tokenizer": tokenizer}
    for f in fields(GPTConfig):
        if f.name not in (*HF_SHAPE, "pad_vocab") and shape[f.name] != f.default:
            # Somebody has changed the network: transformers must refuse it, not load it as GPT-2.
            settings["model_type"] = OWN
            settings["architectures"] = []
    return settings


# ---- Others' to ours -----------------------------------------------------------------------------


def read(path: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format (such as each of our checkpoints), or
    in a .pt of nanoGPT or build-nanogpt."""
    if path.name == "model.safetensors":
        path = path.parent
    try:
        return read_hf(path) if path.is_dir() else read_nanogpt(path)
    except UserError:
        raise
    except Exception as error:  # what a file holds may make any line fail in any way
        reason = f"{type(error).__name__}: {first_line(error):.300}"
        if "Weights only" in reason:
            reason = "it holds more than tensors, which could run code"
        raise UserError(f"{path} does not hold a GPT-2 that can be read: {reason}") from error


def download(name: str) -> Path:
    """Return the folder of a model on the Hugging Face hub, downloaded if it is not cached."""
    problem = f"--init-from {name}: no such file or folder"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    except ImportError:
        cure = "to get it from the Hugging Face hub: pip install huggingface_hub"
        raise UserError(f"{problem}; {cure}") from None
    except Exception as error:  # of the library, or of one of those that it uses
        cure = f"`hf download {name} --local-dir {Path(name).name}` where there is a network"
        raise UserError(f"{problem}, nor on the hub ({first_line(error):.200}); {cure}") from error


def read_hf(folder: Path) -> Pretrained:
    """Return the weights in a folder in Hugging Face's format."""
    settings = json.loads(existing(folder / "config.json").read_bytes())
    path = folder / "model.safetensors"
    if not path.exists() and (folder / "pytorch_model.bin").exists():
        path = folder / "pytorch_model.bin"  # of models from before safetensors
    weights = {}
    for name, tensor in renamed(read_tensors(path)).items():
        weights[name] = tensor.transpose(0, -1) if name.endswith(CONV1D) else tensor
    if OWN in settings:
        # A field that it lacks was added to GPTConfig later, and has its default.
        shape = make_shape(settings[OWN]["shape"], folder)
        tokenizer = str(settings[OWN]["tokenizer"])
        return Pretrained(folder, shape, checked(weights, shape, path), tokenizer)
    for name, values in HF_SETTINGS.items():
        value = settings.get(name, values[0])
        if value not in values:
            raise UserError(f"{folder}: {name} {value!s:.40} is not supported")
    shape = make_shape({ours: settings.get(hf) for ours, hf in HF_SHAPE.items()}, folder)
    return Pretrained(folder, shape, checked(weights, shape, path), tokenizer_of(shape.vocab_size))


def read_nanogpt(path: Path) -> Pretrained:
    """Return the weights in a checkpoint of nanoGPT or build-nanogpt."""
    saved = read_tensors(path)
    settings = saved.get("model_args") or getattr(saved.get("config"), "__dict__", None)
    if not isinstance(settings, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path} lacks model, or both of model_args and config: what wrote it?")
    shape = make_shape({ours: settings.get(name) for ours, name in NANOGPT_SHAPE.items()}, path)
    weights = renamed(saved["model"])
    if not any(name.endswith("bias") for name in weights):
        # nanoGPT may leave out all biases: they are 0.
        biases = [(name, p) for name, p in parameters(shape).items() if name.endswith("bias")]
        weights |= {name: torch.zeros(p.shape) for name, p in biases}
    weights = checked(weights, shape, path)
    if shape.vocab_size == 50304:  # both pad GPT-2's vocabulary
        shape = replace(shape, vocab_size=VOCAB_SIZES["gpt2"])
        wte = "transformer.wte.weight"
        weights[wte] = weights[wte][: shape.vocab_size]
    return Pretrained(path, shape, weights, tokenizer_of(shape.vocab_size))


def parameters(shape: GPTConfig) -> dict[str, Tensor]:
    """Return the parameters of a network as names and sizes alone, which take no memory."""
    with torch.device("meta"):
        return dict(GPT(replace(shape, pad_vocab=False)).named_parameters())


def checked(weights: dict, shape: GPTConfig, path: Path) -> dict:
    """Return weights in float32. Raise UserError unless they are those of a network of this shape,
    and finite."""
    if shape.n_layer > len(weights):  # or a network would be made of as many layers as it claims
        raise UserError(f"{path} holds {len(weights)} tensors for {shape.n_layer} layers")
    expected = parameters(shape)
    missing = sorted(expected.keys() - weights.keys())[:1]
    unknown = sorted(weights.keys() - expected.keys())[:1]
    if missing or unknown:
        raise UserError(
            f"{path} is not a GPT-2 of its shape, or another version of the code wrote it:"
            f" it lacks {missing or 'nothing'} and has {unknown or 'nothing'} besides"
        )
    result = {}
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            sizes = f"{tuple(tensor.shape)}, not {tuple(expected[name].shape)}"
            raise UserError(f"{path}: {name} has the shape {sizes}")
        result[name] = tensor.detach().float()
        if not tensor.is_floating_point() or not result[name].isfinite().all():
            raise UserError(f"{path}: {name} holds a value that is not finite")
    return result


def renamed(weights: dict) -> dict:
    """Return weights with the names of GPT's parameters."""
    result = {}
    for name, tensor in weights.items():
        if not str(name).endswith(UNUSED):
            result[f"transformer.{re.sub(WRAPPERS, '', str(name))}"] = tensor
    return result


def make_shape(shape: dict, path: Path) -> GPTConfig:
    try:
        return GPTConfig(**shape)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a GPT-2, or another version of the code wrote it: {error}"
        ) from error


def tokenizer_of(vocab_size: int) -> str:
    """Guess the tokenizer by the number of ids. GPT-2's may have some more: padding, or the ends of
    a chat."""
    if vocab_size == VOCAB_SIZES["bytes"]:
        return "bytes"
    return "gpt2" if VOCAB_SIZES["gpt2"] <= vocab_size <= 50432 else "unknown"


def read_tensors(path: Path) -> dict:
    """Return what a .safetensors file or an archive of torch.save holds, by name."""
    if existing(path).suffix == ".safetensors":
        return load_file(path)
    # build-nanogpt's checkpoints hold an object of its own class: its numbers are read, not its
    # code.
    stand_ins = [(SimpleNamespace, "__main__.GPTConfig"), (SimpleNamespace, "model.GPTConfig")]
    with torch.serialization.safe_globals(stand_ins):
        content = torch.load(path, "cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors with names")
    return content


def existing(path: Path) -> Path:
    if not path.is_file():  # reading a pipe would wait forever
        raise UserError(f"{path}: there is no such file")
    return path


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
