"""Continue prompts with a run's model, one of its checkpoints, or any other GPT-2.
python sample.py out/book                          # type prompts, or pipe them in
python sample.py out/book/step_000700 --prompt "Once upon" --num-samples 3
python sample.py gpt2                              # a name on the Hugging Face hub
"""

import codecs
import sys

from config import TrainConfig
from evaluate import sample
from support.checkpoint import load_model
from support.cli import Parser, UserError, program, show
from support.world import find_world

FLAGS = "prompt", "num_samples", "sample_tokens", "temperature", "top_k", "seed", "device"


@program
def main(argv: list[str]):
    parser = Parser(TrainConfig, __doc__ or "", FLAGS)
    parser.add_argument("weights", help="a run, a checkpoint, a folder, or a name on the hub")
    typed = parser.parse(argv)
    name = typed.pop("weights")
    world = find_world(typed.get("device", ""))
    model, tokenizer = load_model(name)
    if tokenizer is None:
        raise UserError(f"the tokenizer of {name} is not here: copy its files beside the weights")
    model.to(world.device)
    if "prompt" not in typed and sys.stdin.isatty():
        print("type the beginning of a text, or Ctrl-D to end", file=sys.stderr)
    prompts = [typed["prompt"]] if "prompt" in typed else (line.rstrip("\n") for line in sys.stdin)
    separator = ""
    for prompt in prompts:
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
