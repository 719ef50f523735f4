"""Continue prompts with a run's model, one of its checkpoints, or any other GPT-2.
python sample.py out/book                          # type prompts, or pipe them in
python sample.py out/book/step_000700 --prompt "Once upon" --num-samples 3
python sample.py gpt2                              # a name on the Hugging Face hub
"""

import codecs
import sys
from dataclasses import dataclass

from config import TrainConfig
from evaluate import sample
from support.checkpoint import load_model
from support.cli import RunError, UserError, flag, make_parser, parse, report, show
from support.world import DONE, INTERRUPTED, find_world


@dataclass
class SampleConfig:
    prompt: str = flag("", "text to continue (default: lines typed or piped in)")
    num_samples: int = flag(1, "samples per prompt", min=1)
    sample_tokens: int = flag(200, "maximum number of tokens per sample", min=1)
    temperature: float = flag(0.8, "sampling temperature; 0: always take the likeliest token")
    top_k: int = flag(50, "sample from the k likeliest tokens; 0: from all")
    seed: int = flag(1337, "the same seed gives the same samples")
    device: str = flag("", "cuda, cuda:1, cpu, mps, ... (default: the best)")


def show_samples(typed: dict):
    """Load the model, and print each prompt's samples token by token."""
    world = find_world(typed.get("device", ""))
    name = typed.pop("model")
    model, tokenizer = load_model(name)
    if tokenizer is None:
        raise UserError(f"the tokenizer of {name} is not here: copy its files beside the weights")
    model.to(world.device)
    if "prompt" not in typed and sys.stdin.isatty():
        print("type the beginning of a text, or Ctrl-D to end", file=sys.stderr)
    prompts = [typed["prompt"]] if "prompt" in typed else (line.rstrip("\n") for line in sys.stdin)
    for i, prompt in enumerate(prompts):
        config = TrainConfig(**typed | {"prompt": prompt, "bf16": False, "warmup_steps": 0})
        for number in range(config.num_samples):
            show("---\n" if i or number else "", end="")
            show(prompt, end="")
            decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back half characters
            for content in sample(model, tokenizer, config, number):
                show(decoder.decode(content), end="")
            show("")


def main(argv: list[str]) -> int:
    try:
        parser = make_parser(SampleConfig, __doc__ or "")
        parser.add_argument("model", help="a run, a checkpoint, a folder, or a name on the hub")
        show_samples(parse(parser, SampleConfig, argv))
        return DONE
    except (RunError, OSError, FloatingPointError) as error:  # the last if the logits overflow
        return report(error)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore  # some can't show every character
    sys.exit(main(sys.argv[1:]))
