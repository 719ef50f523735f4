"""Networks of others: Hugging Face, nanoGPT, build-nanogpt, in and out.

What comes from a stranger is looked at before it is used: each file must be a plain file and whole,
each number in it a number, and the tensors must have the names, shapes and types of a GPT-2 of the
shape that the file claims. Anything else is a ValueError of one line. Memory goes with the size of
the files, never with what they say: nothing of a claimed size is made until the tensors agree.
"""

import json
import math
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataloader import VOCAB_SIZES, missing_vocab, vocab_files
from model import GPT, GPTConfig
from support import checkpoint
from support.files import whole_file

LARGEST = 2**24  # of each number of a shape; GPT-3's largest is 50,257
JSON_BYTES = 2**22  # of a file: 300 for each tensor of a thousand layers
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps them as (in, out)
MASKS = (".attn.bias", ".attn.masked_bias")  # old files hold them
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
HF_TOKENIZER = {  # of GPT-2, as tokenizer_config.json says it
    "tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024,
} | dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")  # fmt: skip
FIGURES = ("loss", "val_loss", "perplexity", "bits_per_byte", "hellaswag_acc_norm")


class ForeignConfig:
    """Stands in for the class whose object build-nanogpt keeps in its checkpoints, so that its
    numbers can be read without running its code."""


STAND_INS = ((ForeignConfig, "__main__.GPTConfig"), (ForeignConfig, "model.GPTConfig"))

# --------------------------------------------------------------------------------------------------
# In


@dataclass(frozen=True)
class Source:
    """The weights of a network, and what is known of them."""

    path: Path
    shape: GPTConfig
    tensors: dict[str, Tensor]  # float32 by the parameters' names, without padding
    tokenizer: str  # "gpt2", "bytes" or "unknown"
    flags: dict  # of the run that made them, if it was this program's

    def weights(self, config: GPTConfig) -> dict[str, Tensor]:
        """What GPT(config) loads; config may have fewer positions. Padded rows are 0."""
        wte, wpe = (self.tensors[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
        wte = F.pad(wte, (0, 0, 0, config.num_rows - len(wte)))
        ends = {"transformer.wte.weight": wte, "lm_head.weight": wte}
        return self.tensors | ends | {"transformer.wpe.weight": wpe[: config.seq_len]}


def read_source(name: str, report: Callable[[str], None]) -> Source:
    """The network in name, a folder in Hugging Face's format, a .safetensors file with config.json
    beside it, a run's folder (report is told of its damaged checkpoints), a checkpoint of nanoGPT,
    of build-nanogpt or of this project, or one on the hub; ValueError if it is none, or no GPT-2.
    """
    path = Path(name) if os.path.lexists(name) else downloaded(name)
    try:
        if path.is_dir() and checkpoint.checkpoints(path):
            if newest := checkpoint.newest_checkpoint(path, report):
                return from_run(*newest)
            raise ValueError("none of its checkpoints is good")
        if path.is_dir() or path.suffix == ".safetensors":
            return from_hf(path)
        if "identity" not in (saved := read_tensors(path)):
            return from_nanogpt(path, saved)
        checkpoint.check_state(saved, path)
        return from_run(path, saved)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make any reader fail in any way
        why = f"{path} is no GPT-2: {cause(error)}"
    raise ValueError(why)


def cause(error: Exception) -> str:
    text = (str(error) or repr(error)).splitlines()[0]
    plain = text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
    return f"{plain:.300}"


def downloaded(name: str) -> Path:
    """The folder of a model on the Hugging Face hub; ValueError with the cure if there is none."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        raise ValueError("no such file or folder, and no name of a model on the Hugging Face hub")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except ImportError:
        why = "no such folder; to download it: pip install huggingface_hub"
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = f"no such folder, and it can't be downloaded ({cause(error):.200})"
    cure = f"hf download {name} --local-dir {name.replace('/', '-')}, where there is a network"
    raise ValueError(f"{why}; or {cure}")


def from_run(path: Path, saved: dict) -> Source:
    """What a checkpoint of this project holds, which was checked when it was read."""
    facts = saved["identity"]
    shape = GPTConfig(**{f.name: facts[f.name] for f in fields(GPTConfig)})
    tokenizer = facts.get("tokenizer")
    if not isinstance(tokenizer, str) or VOCAB_SIZES.get(tokenizer, 0) > shape.vocab_size:
        raise ValueError(f"its tokenizer is {tokenizer!s:.40}, for {shape.vocab_size} ids")
    weights = fitted(saved["model"], shape, shape.num_rows, math.inf)
    return Source(path, shape, weights, tokenizer, saved["config"])


def from_nanogpt(path: Path, saved: dict) -> Source:
    """A checkpoint of nanoGPT or of build-nanogpt."""
    settings = saved.get("model_args") or getattr(saved.get("config"), "__dict__", None)
    if not isinstance(settings, dict) or not isinstance(saved.get("model"), dict):
        raise ValueError("it lacks model, or both of model_args and config: what wrote it?")
    shape = shape_in(settings, HF_SHAPE | {"seq_len": "block_size"})
    rows = shape.vocab_size
    if rows == 50304:  # their default, padded
        shape = replace(shape, vocab_size=50257)
    weights = fitted(saved["model"], shape, rows, path.stat().st_size)
    return Source(path, shape, weights, tokenizer_of(shape.vocab_size), {})


def from_hf(path: Path) -> Source:
    """A folder in Hugging Face's format, or a .safetensors file in one."""
    folder = path if path.is_dir() else path.parent
    settings = read_json(folder / "config.json")
    shape = shape_in(settings, HF_SHAPE)
    for name, known in {**HF_SETTINGS, "n_inner": (None, 4 * shape.n_embd)}.items():
        if (value := settings.get(name, known[0])) not in known:
            raise ValueError(f"config.json: {name} {value!s:.40} is not supported")
    files, tensors = [path] if path != folder else weight_files(folder), {}
    for file in files:
        tensors |= read_tensors(file)
    size = sum(file.stat().st_size for file in files)
    weights = fitted(tensors, shape, shape.vocab_size, size, is_hf=True)
    return Source(path, shape, weights, tokenizer_of(shape.vocab_size), {})


def shape_in(settings: dict, names: dict[str, str]) -> GPTConfig:
    """The shape that settings claim under names; ValueError if it is none."""
    found = {ours: settings.get(theirs) for ours, theirs in names.items()}
    for ours, n in found.items():
        if type(n) is not int or not 0 < n <= LARGEST:
            raise ValueError(f"{names[ours]} {n!s:.40} is no whole number from 1 to {LARGEST}")
    return GPTConfig(**found)


def tokenizer_of(vocab_size: int) -> str:
    """By the ids: GPT-2's may have some more, for padding or for the ends of a chat."""
    return "bytes" if vocab_size == 257 else "gpt2" if 50257 <= vocab_size <= 50432 else "unknown"


def fitted(
    tensors: dict, shape: GPTConfig, rows: int, size: float, is_hf: bool = False
) -> dict[str, Tensor]:
    """The parameters of a network of this shape, float32, without padding; ValueError unless
    tensors, read from files of size bytes and with so many rows in the embedding, are these.
    nanoGPT may leave out all biases: they are 0."""
    found = {f"transformer.{re.sub(WRAPPERS, '', str(name))}": tensor
             for name, tensor in tensors.items()
             if not str(name).endswith((*MASKS, "lm_head.weight"))}  # tied to wte  # fmt: skip
    if len(found) < 6 * shape.n_layer:  # so no lie can make what follows take long
        raise ValueError(f"it holds {len(found)} tensors for {shape.n_layer} layers")
    sizes, left_out = parameter_sizes(replace(shape, vocab_size=rows)), set()
    if not is_hf and not any(name.endswith("bias") for name in found):
        left_out = {name for name in sizes if name.endswith("bias")}
    if wrong := found.keys() - sizes.keys():
        raise ValueError(f"it holds {min(wrong)}, which is not in its shape")
    if missing := sizes.keys() - found.keys() - left_out:
        raise ValueError(f"it lacks {min(missing)}")
    found = {name: parameter(found[name], name, sizes[name], is_hf) for name in found}
    if sum(tensor.nbytes for tensor in found.values()) > size:  # one number, many times
        raise ValueError(f"its tensors are larger than its {size:,} bytes")
    found = {name: tensor.float() for name, tensor in found.items()}
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite in float32")
    wte = {"transformer.wte.weight": found["transformer.wte.weight"][: shape.vocab_size]}
    return found | wte | {name: torch.zeros(sizes[name]) for name in left_out}


def parameter_sizes(shape: GPTConfig) -> dict[str, torch.Size]:
    """Of each parameter, without padding; all layers have the first one's."""
    with torch.device("meta"):
        one_layer = GPT(replace(shape, n_layer=1, pad_vocab=False))
    sizes = {name: p.shape for name, p in one_layer.named_parameters()}
    return {name.replace(".h.0.", f".h.{i}."): size
            for i in range(shape.n_layer) for name, size in sizes.items()}  # fmt: skip


def parameter(tensor, name: str, size: torch.Size, is_hf: bool) -> Tensor:
    """A view of tensor as this program has it; ValueError if it has another type or size."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.dtype not in TYPES:
        raise ValueError(f"{name} is no plain tensor of 16, 32 or 64-bit floating-point numbers")
    tensor = tensor.detach()
    if tensor.dim() == 2 and is_hf and name.endswith(CONV1D):
        tensor = tensor.t()
    if tensor.shape != size:
        raise ValueError(f"{name} has the shape {(*tensor.shape,)}, not {(*size,)}")
    return tensor


def weight_files(folder: Path) -> list[Path]:
    """Where the tensors of a folder in Hugging Face's format are: in one file or in several."""
    path = next((folder / name for name in WEIGHT_FILES if os.path.lexists(folder / name)), None)
    if path is None:
        raise ValueError(f"it has no weights: none of {', '.join(WEIGHT_FILES)}")
    if path.suffix != ".json":
        return [path]
    files = read_json(path).get("weight_map")
    names = [*files.values()] if isinstance(files, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path.name} names no files")
    return [folder / name for name in sorted({Path(name).name for name in names})]


def plain_file(path: Path) -> Path:
    """path; ValueError if it is anything else: reading a pipe would wait for ever."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    return path


def read_json(path: Path) -> dict:
    """The object in a JSON file; ValueError if it holds another thing, or far too much."""
    with open(plain_file(path), "rb") as file:
        content = file.read(JSON_BYTES + 1)
    if len(content) > JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {JSON_BYTES:,} bytes")
    if not isinstance(found := json.loads(content.decode()), dict):
        raise ValueError(f"{path.name} holds a {type(found).__name__}, not names with values")
    return found


def read_tensors(path: Path) -> dict:
    """What is in a .safetensors file or an archive of torch.save. The former is read, not mapped: a
    mapped file that is cut meanwhile kills the process."""
    if plain_file(path).suffix == ".safetensors":
        load = safetensors(f"{path}").load
        try:
            return load(path.read_bytes())
        except Exception as error:  # the library has its own
            why = cause(error)
    elif zipfile.is_zipfile(path):
        return checkpoint.load_archive(path, STAND_INS)
    else:
        why = "cut, not written by torch.save, or before PyTorch 1.6: convert it to safetensors"
    raise ValueError(f"{path.name} can't be read: {why}")


def safetensors(what: str):
    """The library; ValueError with the cure where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError(f"{what} needs a library: pip install safetensors") from None
    return safetensors.torch


# --------------------------------------------------------------------------------------------------
# Out


def export(model: GPT, source: Source, folder: Path, records: list):
    """Write a network in Hugging Face's format as a new folder, whole or not at all; records are
    those of its run's log. OSError if the folder is there or can't be written."""
    if os.path.lexists(folder):
        raise FileExistsError(f"--export {folder} exists: name a new folder")
    files = texts(model.config, source, folder.name, records)
    files["model.safetensors"] = safetensors("--export").save(hf_weights(model), {"format": "pt"})
    made = [path for path in folder.absolute().parents if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as unfinished:
        new = Path(unfinished, "new")
        try:
            write_all(new, files)
        except OSError as error:
            why = f"--export {folder} can't be written: {error.strerror}"
            raise OSError(error.errno, why) from None
        if os.name == "posix":
            folder.mkdir()  # fails if it is there by now; a rename would replace an empty one
        os.rename(new, folder)
    for path in (folder.absolute(), *made) if os.name == "posix" else ():
        os.fsync(parent := os.open(path.parent, os.O_RDONLY))
        os.close(parent)


def write_all(folder: Path, files: dict[str, bytes]):
    """A new folder with these files, each of them whole."""
    folder.mkdir()
    for name, content in files.items():
        with whole_file(folder / name) as file:
            file.write(content)


def texts(config: GPTConfig, source: Source, name: str, records: list) -> dict[str, bytes]:
    """The files beside the tensors."""
    end_of_text = VOCAB_SIZES[source.tokenizer] - 1 if source.tokenizer in VOCAB_SIZES else None
    settings = hf_config(config, end_of_text)
    tokens = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    found = {"config.json": settings, "generation_config.json": tokens}
    files = {}
    if source.tokenizer == "gpt2" and not missing_vocab():
        found["tokenizer_config.json"] = HF_TOKENIZER
        paths = zip(("merges.txt", "vocab.json"), vocab_files(), strict=True)
        files = {file: path.read_bytes() for file, path in paths}
    found = {file: json.dumps(content, indent=2) for file, content in found.items()}
    found["README.md"] = card(source, name, records)
    return files | {n: f"{text}\n".encode(errors="replace") for n, text in found.items()}


def card(source: Source, name: str, records: list) -> str:
    """The README of an exported network, with its run's last figures."""
    lines = [f"# {name}", "", f"GPT-2, written by train_gpt2.py from {source.path}.", ""]
    if source.tokenizer == "bytes":
        lines += ["Its tokens are the bytes of the text, 0 to 255; 256 comes before each text.", ""]
    path = source.path
    last = figures(records, checkpoint.step_of(path) if checkpoint.is_checkpoint(path) else -1)
    lines += ["| figure | step | value |", "|---|--:|--:|"] if last else []
    lines += [f"| {n} | {step:,} | {value:.4f} |" for n, (step, value) in last.items()]
    return "\n".join(lines)


def figures(records: list, last_step: int) -> dict[str, tuple[int, float]]:
    """The last of each that a log's records hold up to a step, with its step: what is a number, for
    a log may be damaged."""
    found = {}
    for record in records:
        step = record.get("step") if isinstance(record, dict) else None
        for name in FIGURES if type(step) is int and 0 <= step <= last_step else ():
            value = record.get(name)
            if type(value) is float and math.isfinite(value):
                found[name] = step, value
    return found


def hf_weights(model: GPT) -> dict[str, Tensor]:
    """The weights as Hugging Face's GPT2LMHeadModel names and lays them out, without padding."""
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: model.config.vocab_size]
    return {n: (p.t() if n.endswith(CONV1D) else p).contiguous() for n, p in weights.items()}


def hf_config(config: GPTConfig, end_of_text: int | None) -> dict:
    """What config.json says of it."""
    shape = {theirs: asdict(config)[ours] for ours, theirs in HF_SHAPE.items()}
    settings = {name: values[0] for name, values in HF_SETTINGS.items()}
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    return settings | shape | {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32"}
