"""Continue prompts with a run's model, one of its checkpoints, or any other GPT-2.
python sample.py out/book                          # type prompts, or pipe them in
python sample.py out/book/step_000850 --prompt "Once upon" --num-samples 3
python sample.py gpt2                              # a name on the Hugging Face hub
python sample.py out/book --prompt "Once upon" --top 10    # the likeliest next tokens
"""

import codecs
import sys

import torch

from config import TrainConfig
from evaluate import load_with_tokenizer, sample
from model import GPT
from support.cli import Parser, UserError, program, show
from support.tokenizer import Tokenizer
from support.world import find_world

FLAGS = "prompt", "num_samples", "sample_tokens", "temperature", "top_k", "seed", "device"


@torch.no_grad()
def likeliest(model: GPT, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """Return a table of the likeliest next tokens after a prompt, with their probabilities."""
    tokens = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    row = torch.tensor([tokens[-model.config.seq_len :]], device=model.lm_head.weight.device)
    logits = model.logits(row)[0, -1, : model.config.vocab_size]
    probs, ids = logits.softmax(-1).topk(min(count, len(logits)))
    rows = zip(probs.tolist(), ids.tolist(), strict=True)
    return "\n".join(f"{prob:8.3%}  {tokenizer.token_text(i)!r}" for prob, i in rows)


@program
def main(argv: list[str]):
    parser = Parser(TrainConfig, __doc__ or "", FLAGS)
    parser.add_argument("weights", help="a run, a checkpoint, a folder, or a name on the hub")
    parser.add_argument("--top", type=int, help="print the N likeliest next tokens instead")
    typed = parser.parse(argv)
    name, top = typed.pop("weights"), typed.pop("top", 0)
    if top < 0:
        raise UserError(f"--top {top} is below 0")
    model, tokenizer = load_with_tokenizer(name, find_world(typed.get("device", "")))
    if "prompt" not in typed and sys.stdin.isatty():
        print("type the beginning of a text, or Ctrl-D to end", file=sys.stderr)
    prompts = [typed["prompt"]] if "prompt" in typed else (line.rstrip("\n") for line in sys.stdin)
    separator = ""
    for prompt in prompts:
        if top:
            show(f"{prompt}\n{likeliest(model, tokenizer, prompt, top)}")
            continue
        config = TrainConfig(**typed | {"prompt": prompt, "bf16": False, "warmup_steps": 0})
        for number in range(config.num_samples):
            show(separator + prompt, end="")
            contents = sample(model, tokenizer, config, number)
            for text in codecs.iterdecode(contents, "utf-8", "replace"):  # buffers partial UTF-8
                show(text, end="")
            show("")
            separator = "---\n"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore  # some can't show every character
    sys.exit(main(sys.argv[1:]))
