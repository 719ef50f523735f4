"""A network in Hugging Face's format, for whoever goes on with it there: a new folder, whole or not
there."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from dataloader import VOCAB_SIZES
from model import GPT, GPTConfig
from support.files import missing_vocab, vocab_files, write_folder
from support.weights import CONV1D, HF_SETTINGS, HF_SHAPE, Source, library

FIGURES = ("loss", "val_loss", "perplexity", "bits_per_byte", "hellaswag_acc_norm")
END_OF_TEXT = "<|endoftext|>"
FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
---
"""
USAGE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {folder!r}
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
model = AutoModelForCausalLM.from_pretrained(folder)
ids = model.generate(**tokenizer("The", return_tensors="pt"), max_length={length}, do_sample=True)
print(tokenizer.decode(ids[0]))
```
"""


def export(model: GPT, source: Source, folder: Path, records: list) -> str:
    """Write a network in Hugging Face's format as a new folder, whole or not at all, and say how to
    load it; records are those of its run's log. OSError if the folder is there or can't be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(f"--export {folder} exists: name a new folder")
    save = library("safetensors.torch").save
    files = texts(model.config, source, folder, records)
    files["model.safetensors"] = save(hf_weights(model), {"format": "pt"})
    try:
        write_folder(folder, files)
    except OSError as error:
        why = f"--export {folder} can't be written: {error.strerror}"
        raise OSError(error.errno, why) from None
    return f"wrote {folder}: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def texts(config: GPTConfig, source: Source, folder: Path, records: list) -> dict[str, bytes]:
    """The files beside the tensors."""
    end_of_text = VOCAB_SIZES[source.tokenizer] - 1 if source.tokenizer in VOCAB_SIZES else None
    settings = {"config.json": hf_config(config, end_of_text)}
    files = {"README.md": card(config, source, folder, records).encode(errors="replace")}
    facts = {"model_max_length": config.seq_len}
    if source.tokenizer == "bytes":
        settings["tokenizer.json"] = hf_bytes()
        facts |= dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
        # as support/text.py has it: what a text says is never <|endoftext|>, and no space is lost
        facts |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
        settings["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | facts
    elif source.tokenizer == "gpt2" and not missing_vocab():
        settings["tokenizer_config.json"] = {"tokenizer_class": "GPT2Tokenizer"} | facts
        files["merges.txt"], files["vocab.json"] = (p.read_bytes() for p in vocab_files())
    return files | {n: f"{json.dumps(s, indent=2)}\n".encode() for n, s in settings.items()}


def hf_bytes() -> dict:
    """The tokenizer of bytes, in the format of Hugging Face's tokenizers: BPE without a merge."""
    # a printable character for each byte, as in https://github.com/openai/gpt-2, src/encoder.py
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = [chr(b if b in printable else 256 + others.index(b)) for b in range(256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": False}  # where there are no merges, words change nothing
    end = {"id": len(chars), "content": END_OF_TEXT, "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    vocab = {token: i for i, token in enumerate([*chars, END_OF_TEXT])}
    return {
        "version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip


def card(config: GPTConfig, source: Source, folder: Path, records: list) -> str:
    """The README of an exported network, a model card: how it was trained, its run's last figures,
    and how to use it."""
    last = figures(records, source.step)
    text = f"{FRONT_MATTER}\n# {folder.name}\n\n{history(config, source, records)}\n"
    if source.tokenizer == "bytes":
        text += "\nIts tokens are the bytes of the text, 0 to 255; 256 comes before each text.\n"
    text += "\n| figure | step | value |\n|---|--:|--:|\n" if last else ""
    text += "".join(f"| {n} | {step:,} | {x:.4f} |\n" for n, (step, x) in last.items())
    if source.tokenizer not in VOCAB_SIZES:
        return f"{text}\nWhich tokenizer it was trained with is not known.\n"
    has_own = source.tokenizer == "bytes" or not missing_vocab()
    tokenizer = "folder" if has_own else '"openai-community/gpt2"'
    length = min(100, config.seq_len)
    return text + USAGE.format(folder=str(folder), tokenizer=tokenizer, length=length)


def history(config: GPTConfig, source: Source, records: list) -> str:
    """What the network is, and how it was trained, as far as that is known."""
    num_params = replace(config, pad_vocab=False).num_params
    words = [f"GPT-2 with {config.n_layer} layers, {config.n_head} heads and {config.n_embd}"
             f" channels: {num_params:,} parameters, up to {config.seq_len:,} tokens at a time.",
             f"Written by train_gpt2.py from {source.path}."]  # fmt: skip
    if source.flags:
        first = next(iter(at_starts("init_from", str, source, records)), "")
        sizes = sorted({*at_starts("batch_tokens", int, source, records)})
        tokens = " or ".join(f"{size:,}" for size in sizes)
        data = source.flags.get("data_dir") or "Python's own source"
        words.append(f"Trained from {first or 'scratch'} for {source.step:,} steps of {tokens}"
                     f" tokens on {data}.")  # fmt: skip
    if found := figures(records, source.step).get("val_loss"):
        step, loss = found
        words.append(f"The last validation, at step {step:,}: a loss of {loss:.4f} nats per token.")
    return " ".join(words)


def at_starts(name: str, kind: type, source: Source, records: list) -> list:
    """What a flag of the run was each time it started, by its log, which may be damaged, and at
    last: a resumed run may have other flags than before."""
    noted = [record.get("flags") for record in records if isinstance(record, dict)]
    known = [flags for flags in [*noted, source.flags] if isinstance(flags, dict)]
    return [flags[name] for flags in known if type(flags.get(name)) is kind]


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
