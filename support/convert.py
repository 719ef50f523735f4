"""Convert a checkpoint of nanoGPT or build-nanogpt to a folder in Hugging Face's format.
    python -m support.convert out/ckpt.pt hf-folder
train_gpt2.py --init-from, sample.py and transformers read that folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from model import GPT, GPTConfig
from support.checkpoint import SIZES, save_weights
from support.cli import UserError, program
from support.tokenizer import gpt2_tokenizer


@program
def main(argv: list[str]):
    if len(argv) != 2:
        raise UserError("usage: python -m support.convert FILE.pt NEW_FOLDER")
    file, folder = map(Path, argv)
    try:
        # build-nanogpt's files hold a GPTConfig object. Its numbers are read without its code.
        stand_ins: list = [(SimpleNamespace, f"{name}.GPTConfig") for name in ("__main__", "model")]
        with torch.serialization.safe_globals(stand_ins):
            saved = torch.load(file, "cpu", weights_only=True)
        args = saved.get("model_args") or vars(saved["config"])
        sizes = {name: args[name] for name in SIZES} | {"seq_len": args["block_size"]}
        model = GPT(GPTConfig(**sizes, pad_vocab=False))
        weights = {}
        for name, tensor in saved["model"].items():  # DDP and torch.compile prefix the names
            weights[name.replace("module.", "").replace("_orig_mod.", "")] = tensor
        missing, _ = model.load_state_dict(weights, strict=False)
        if not all(name.endswith("bias") for name in missing):  # ours are 0, as --bias=False acts
            raise ValueError(f"it lacks {missing}")
    except Exception as error:  # the file may hold anything
        raise UserError(f"{file} is no checkpoint of nanoGPT's: {error!r:.200}") from error
    folder.mkdir(parents=True)
    is_gpt2 = sizes["vocab_size"] in (50257, 50304)  # both programs pad GPT-2's vocabulary
    if is_gpt2:
        sizes["vocab_size"] = 50257
    model.config = GPTConfig(**sizes)
    save_weights(folder, model, gpt2_tokenizer() if is_gpt2 else None, "")
    print(f"wrote {folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
