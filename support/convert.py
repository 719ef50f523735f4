"""Convert a checkpoint of nanoGPT or build-nanogpt to a folder in Hugging Face's format.
    python -m support.convert out/ckpt.pt hf-folder
train_gpt2.py --init-from, sample.py and transformers read that folder."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from dataloader import GPT2_TOKENS
from model import GPT, GPTConfig
from support.checkpoint import save_weights
from support.cli import RunError, UserError, report
from support.tokenizer import gpt2_tokenizer

WRAPPERS = r"^(module\.|_orig_mod\.)*"  # name prefixes of DDP and torch.compile


def convert(path: Path, folder: Path):
    """Write the network in the .pt file at path into folder. Raise UserError if it is none."""
    try:
        # build-nanogpt's files hold a GPTConfig object. Its numbers are read without its code.
        stand_ins: list = [(SimpleNamespace, f"{file}.GPTConfig") for file in ("__main__", "model")]
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, "cpu", weights_only=True)
        settings = saved.get("model_args") or vars(saved["config"])
        is_gpt2 = settings["vocab_size"] in (GPT2_TOKENS, 50304)  # both programs pad it
        vocab_size = GPT2_TOKENS if is_gpt2 else settings["vocab_size"]
        names = ("n_layer", "n_head", "n_embd")
        shape = GPTConfig(vocab_size, settings["block_size"], *(settings[name] for name in names))
        weights = {re.sub(WRAPPERS, "", name): tensor for name, tensor in saved["model"].items()}
        model = GPT(shape)
        for name, param in model.named_parameters():
            p = param.detach()[: vocab_size if name.endswith("wte.weight") else None]
            if name.endswith("bias") and name not in weights:
                p.zero_()  # nanoGPT's --bias=False acts like biases of 0
            elif weights[name][: len(p)].shape != p.shape:
                raise ValueError(f"{name} is not of the shape {tuple(p.shape)}")
            else:
                p.copy_(weights[name][: len(p)])
    except Exception as error:  # the file may hold anything
        text = f"{path} is no checkpoint of nanoGPT or build-nanogpt"
        raise UserError(f"{text}: {type(error).__name__}: {error!s:.200}") from error
    folder.mkdir(parents=True)
    save_weights(folder, model, gpt2_tokenizer() if is_gpt2 else None, "gpt2" if is_gpt2 else "")


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m support.convert FILE.pt NEW_FOLDER")
        convert(Path(argv[0]), Path(argv[1]))
        print(f"wrote {argv[1]}")
        return 0
    except (RunError, OSError) as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
