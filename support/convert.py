"""Convert a checkpoint of nanoGPT or build-nanogpt to a folder in Hugging Face's format.
    python -m support.convert out/ckpt.pt hf-folder
train_gpt2.py --init-from, sample.py and transformers read that folder."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from model import GPT, GPTConfig
from support.checkpoint import SIZES, save_weights
from support.cli import UserError, program
from support.tokenizer import gpt2_tokenizer


def convert(path: Path, folder: Path):
    """Write the network in the .pt file at path into folder. Raise UserError if it is none."""
    try:
        # build-nanogpt's files hold a GPTConfig object. Its numbers are read without its code.
        stand_ins: list = [(SimpleNamespace, f"{file}.GPTConfig") for file in ("__main__", "model")]
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(path, "cpu", weights_only=True)
        args = saved.get("model_args") or vars(saved["config"])
        sizes = {name: args[name] for name in SIZES} | {"seq_len": args["block_size"]}
        model = GPT(GPTConfig(**sizes, pad_vocab=False))
        weights = {}
        for name, tensor in saved["model"].items():  # DDP and torch.compile prefix the names
            weights[re.sub(r"^(module\.|_orig_mod\.)*", "", name)] = tensor
        missing, _ = model.load_state_dict(weights, strict=False)
        if not all(name.endswith("bias") for name in missing):  # ours are 0, as --bias=False acts
            raise ValueError(f"it lacks {missing}")
    except Exception as error:  # the file may hold anything
        raise UserError(f"{path} is no checkpoint of nanoGPT's: {error!r:.200}") from error
    folder.mkdir(parents=True)
    gpt2 = GPTConfig()
    is_gpt2 = sizes["vocab_size"] in (gpt2.vocab_size, gpt2.num_rows)  # both programs pad it
    if is_gpt2:
        sizes["vocab_size"] = gpt2.vocab_size
    model.config = GPTConfig(**sizes)
    save_weights(folder, model, gpt2_tokenizer() if is_gpt2 else None, "")


@program
def main(argv: list[str]):
    if len(argv) != 2:
        raise UserError("usage: python -m support.convert FILE.pt NEW_FOLDER")
    convert(Path(argv[0]), Path(argv[1]))
    print(f"wrote {argv[1]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
