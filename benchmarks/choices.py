"""What multiple-choice questions cost beside the forward passes that they can't do without.

    python benchmarks/choices.py                          # GPT-2 124M, 100 questions
    python benchmarks/choices.py --examples 10042         # as many as HellaSwag has, on a GPU

Questions of random tokens, as long as HellaSwag's are about (a context of 20 to 100 tokens, four
endings of 5 to 40), go through support/questions.py; then through the same network go batches
of the same shapes, with all their logits. Both in alternation; the ratio is that of the medians.
Writes benchmarks/results/choices-<device>-<date>.json.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

import machine
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt2
from model import GPT, SHAPES
from support.questions import Example, choice_losses


def random_examples(count: int, vocab_size: int) -> list[Example]:
    rng = np.random.default_rng(0)

    def tokens(least: int, most: int) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(least, most + 1)).astype(np.uint16)

    return [Example(tokens(20, 100), [tokens(5, 40) for _ in range(4)], 0) for _ in range(count)]


def seconds(function, device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def network() -> tuple[GPT, train_gpt2.TrainConfig, train_gpt2.World]:
    """As train_gpt2.py has it on this machine."""
    world = train_gpt2.ranks.find_world({}, torch.cuda.device_count())
    config, given, _ = train_gpt2.parse_args(["--model", "gpt2"], world.device.type)
    off = train_gpt2.device.why_off(asdict(config) | {"compile": False}, given, world.device)
    config = replace(config, **{name: False for name in off} | {"compile": False})
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    return GPT(SHAPES["gpt2"], config.flash).to(world.device).eval(), config, world


def measure(num_examples: int, rounds: int) -> dict:
    model, config, world = network()
    examples = random_examples(num_examples, model.config.vocab_size)
    shapes, features = [], model.features

    def ask():
        cast = partial(train_gpt2.autocast, config, world.device)
        mine = range(num_examples)
        choice_losses(model, examples, mine, world.device, cast, world.note)

    def noted(idx):
        shapes.append(idx.shape)
        return features(idx)

    @torch.no_grad()
    def forward():
        with train_gpt2.autocast(config, world.device):
            for shape in shapes:
                model.logits(torch.zeros(shape, dtype=torch.int64, device=world.device))

    model.features = noted
    ask()  # warms up, and notes the shapes
    model.features = features
    forward()
    pairs = [(seconds(ask, world.device), seconds(forward, world.device)) for _ in range(rounds)]
    questions, passes = (median(times) for times in zip(*pairs, strict=True))
    return {
        "examples": num_examples, "bf16": config.bf16, "questions_and_forward_s": pairs,
        "padded_tokens": sum(shape.numel() for shape in shapes),
        "examples_per_s": num_examples / questions, "ratio": questions / passes,
        "environment": machine.environment(train_gpt2.device.environment(world.device, world.size)),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    content = measure(args.examples, args.rounds)
    path = machine.results_path("choices", content["environment"]["device_name"])
    machine.save(path, content)
    print(
        f"{content['examples_per_s']:.1f} questions/s, {content['padded_tokens']:,} padded tokens,"
        f" {content['ratio']:.2f} times their forward passes: {path.relative_to(machine.REPO)}"
    )


if __name__ == "__main__":
    main()
