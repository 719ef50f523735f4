"""A network in Hugging Face's format, for whoever goes on with it there: a new folder, whole or not
there."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from dataloader import VOCAB_SIZES
from model import GPT, GPTConfig
from support.files import missing_vocab, vocab_files, write_folder
from support.weights import CONV1D, HF_SETTINGS, HF_SHAPE, Source, library

FIGURES = ("loss", "val_loss", "perplexity", "bits_per_byte", "hellaswag_acc_norm")


def export(model: GPT, source: Source, folder: Path, records: list) -> str:
    """Write a network in Hugging Face's format as a new folder, whole or not at all, and say how to
    load it; records are those of its run's log. OSError if the folder is there or can't be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(f"--export {folder} exists: name a new folder")
    save = library("safetensors.torch").save
    files = texts(model.config, source, folder.name, records)
    files["model.safetensors"] = save(hf_weights(model), {"format": "pt"})
    try:
        write_folder(folder, files)
    except OSError as error:
        why = f"--export {folder} can't be written: {error.strerror}"
        raise OSError(error.errno, why) from None
    return f"wrote {folder}: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def texts(config: GPTConfig, source: Source, name: str, records: list) -> dict[str, bytes]:
    """The files beside the tensors."""
    end_of_text = VOCAB_SIZES[source.tokenizer] - 1 if source.tokenizer in VOCAB_SIZES else None
    settings = {"config.json": hf_config(config, end_of_text)}
    files = {"README.md": card(source, name, records).encode(errors="replace")}
    if source.tokenizer == "gpt2" and not missing_vocab():
        facts = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config.seq_len}
        settings["tokenizer_config.json"] = facts
        files["merges.txt"], files["vocab.json"] = (p.read_bytes() for p in vocab_files())
    return files | {n: f"{json.dumps(s, indent=2)}\n".encode() for n, s in settings.items()}


def card(source: Source, name: str, records: list) -> str:
    """The README of an exported network, with its run's last figures."""
    path = source.path
    text = f"# {name}\n\nGPT-2, written by train_gpt2.py from {path}.\n"
    if source.tokenizer == "bytes":
        text += "\nIts tokens are the bytes of the text, 0 to 255; 256 comes before each text.\n"
    last = figures(records, source.step)
    text += "\n| figure | step | value |\n|---|--:|--:|\n" if last else ""
    return text + "".join(f"| {n} | {step:,} | {x:.4f} |\n" for n, (step, x) in last.items())


def figures(records: list, last_step: int) -> dict[str, tuple[int, float]]:
    """The last of each that a log's records hold up to a step, with its step: what is a number, for
    a log may be damaged."""
    found = {}
    for record in records:
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step <= last_step:
            numbers = {name: record[name] for name in FIGURES if type(record.get(name)) is float}
            found |= {name: (step, x) for name, x in numbers.items() if math.isfinite(x)}
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
