"""Measure what it brings that several ranks share the work of Muon.

    torchrun --standalone --nproc_per_node=2 benchmarks/muon_ranks.py            # GPT-2 124M
    torchrun --standalone --nproc_per_node=2 benchmarks/muon_ranks.py --n-layer 2

Optimizer steps on random gradients, in alternation: each rank makes all matrices orthogonal, or
each makes a share and they gather the rest.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import GPT, SHAPES
from support.device import speed_ups_off
from support.distributed import World, find_world, process_group
from train_gpt2 import TrainConfig, make_optimizer


def seconds_of_step(model: GPT, optimizer: torch.optim.Optimizer, world: World) -> float:
    rng = torch.Generator(world.device).manual_seed(1)  # the same gradients on each rank
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng, device=world.device)
    world.gather(None)  # all begin at the same time
    start = time.perf_counter()
    optimizer.step()
    model.lm_head.weight[0, 0].item()  # waits for a GPU
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-layer", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7, choices=range(1, 100), metavar="N")
    args = parser.parse_args()
    world = find_world(dict(os.environ), torch.cuda.device_count())
    with process_group(world):
        shape = SHAPES["gpt2"]
        off = speed_ups_off(world.device, "gpt2", shape.seq_len, {"compile": False})
        config = TrainConfig(
            muon=True, warmup_steps=0, n_layer=args.n_layer, bf16="bf16" not in off
        )
        model = GPT(config.shape(shape.vocab_size)).to(world.device)
        alone = World(0, 1, world.device)
        optimizers = {
            "each rank all": make_optimizer(model, config, alone),
            "each a share": make_optimizer(model, config, world),
        }
        seconds = {name: [] for name in optimizers}
        for number in range(args.rounds + 1):
            for name, optimizer in optimizers.items():
                taken = max(world.gather(seconds_of_step(model, optimizer, world)))
                if number:  # the first one allocates the state
                    seconds[name].append(taken)
        if world.is_main:
            ms = {name: 1000 * median(values) for name, values in seconds.items()}
            dtype = "bfloat16" if config.bf16 else "float32"
            print(f"{world.size} ranks, {args.n_layer} blocks of 124M, {dtype}")
            print(", ".join(f"{name} {value:.0f} ms" for name, value in ms.items()))
            print(f"share / all: {ms['each a share'] / ms['each rank all']:.2f}")


if __name__ == "__main__":
    main()
