"""Convert a checkpoint of nanoGPT or build-nanogpt to a folder in Hugging Face's format.
    python -m support.convert out/ckpt.pt hf-folder
train_gpt2.py --init-from, sample.py and transformers read that folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from dataloader import GPT2_TOKENS
from model import GPT, GPTConfig
from support.checkpoint import save_weights
from support.cli import RunError, UserError
from support.tokenizer import gpt2_tokenizer

WRAPPERS = ("module.", "_orig_mod.")  # name prefixes of DDP and torch.compile


def convert(path: Path, folder: Path):
    """Write the network in the .pt file at path into folder. Raise UserError if it is none."""
    # build-nanogpt's files hold a GPTConfig object. Its numbers are read without its code.
    stand_ins: list = [(SimpleNamespace, f"{file}.GPTConfig") for file in ("__main__", "model")]
    try:
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, "cpu", weights_only=True)
        settings = saved.get("model_args") or vars(saved["config"])
        weights = saved["model"]
    except Exception as error:  # the file may hold anything
        raise UserError(f"{path} is no checkpoint of nanoGPT or build-nanogpt: {error}") from error
    for prefix in WRAPPERS:
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    vocab_size, seq_len = settings["vocab_size"], settings["block_size"]
    if vocab_size == 50304:  # both programs pad GPT-2's vocabulary
        vocab_size = GPT2_TOKENS
    shape = {name: settings[name] for name in ("n_layer", "n_head", "n_embd")}
    model = GPT(GPTConfig(vocab_size, seq_len, **shape, pad_vocab=False))
    for name, param in model.named_parameters():
        p = param.detach()
        if name.endswith("bias") and name not in weights:
            p.zero_()  # nanoGPT's --bias=False acts like biases of 0
        elif name not in weights or weights[name][: len(p)].shape != p.shape:
            raise UserError(f"{path} has no {name} of shape {tuple(p.shape)}")
        else:
            p.copy_(weights[name][: len(p)])
    is_gpt2 = vocab_size == GPT2_TOKENS
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
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", RunError.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
