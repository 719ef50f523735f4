"""What weights are worth: the validation loss, in the units that people compare, and the shares of
right answers. To ask changes no run: the loader is its own, no random number is drawn, and what the
ranks read together does not depend on how many they are."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dataloader import Shard, ShardLoader
from model import GPT
from support.questions import Example, choice_losses, right_answers
from support.text import bytes_per_token, codec


@contextmanager
def no_dropout(net: nn.Module) -> Iterator[None]:
    """Inside, net leaves nothing out; a change of mode without need would have it compiled anew."""
    was = net.training
    net.train(was and not any(isinstance(m, nn.Dropout) and m.p for m in net.modules()))
    try:
        yield
    finally:
        net.train(was)


def num_sequences(loader: ShardLoader, eval_tokens: int) -> int:
    return max(1, min(eval_tokens // loader.T, len(loader)))


@torch.no_grad()
def validation(
    model: GPT, net: nn.Module, loader: ShardLoader, eval_tokens: int, tokenizer: str, world,
    autocast: Callable,
) -> dict[str, float]:  # fmt: skip
    """Mean loss in nats per token over the first eval_tokens of loader, and in other units. Each
    rank takes every size-th sequence. What fills no micro-batch goes through model, since net is
    compiled for one shape."""
    count = num_sequences(loader, eval_tokens)
    mine = range(world.rank, count, world.size)

    def own_losses() -> Tensor:
        loss_sum = torch.zeros((), device=world.device)
        for start in range(0, len(mine), loader.B):
            world.note(f"validation {start // loader.B + 1}/{-(-len(mine) // loader.B)}")
            numbers = mine[start : start + loader.B]
            x, y = (t.to(world.device) for t in loader.batch(numbers))
            with autocast():
                loss = (net if len(numbers) == loader.B else model)(x, y)
            loss_sum += loss * len(numbers)
        return loss_sum

    with no_dropout(net):
        loss = world.sum([world.together(own_losses)]).item() / count
    return in_units(loss, world.together(partial(bytes_per_token, loader, count, tokenizer)))


def in_units(val_loss: float, bytes_per_token: float) -> dict[str, float]:
    """A validation's loss, in nats per token, in the other units that people compare."""
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    if bytes_per_token:
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def answers(
    model: GPT, examples: list[Example], tokenizer: str, world, autocast: Callable
) -> dict[str, float]:
    """The shares of right answers, in each of the three ways to count them. Each rank takes its
    share of the examples."""
    mine = range(world.rank, len(examples), world.size)

    def own_answers() -> dict[str, int]:
        losses = choice_losses(model, examples, mine, world.device, autocast, world.note)
        known = codec(tokenizer)
        return right_answers([examples[i] for i in mine], losses, known and known.decode)

    with no_dropout(model):
        right = world.gather(world.together(own_answers))
    names = [name for name in right[0] if all(name in own for own in right)]  # as each rank decodes
    return {name: sum(own[name] for own in right) / len(examples) for name in names}


def in_words(figures: dict[str, float]) -> str:
    names = {"val_loss": "loss"}
    return ", ".join(f"{names.get(n, n).replace('_', ' ')} {v:.4f}" for n, v in figures.items())


def report(
    name: str, model: GPT, shards: list[Shard], T: int, eval_tokens: int, tokenizer: str,
    examples: list[Example], world, autocast: Callable,
) -> str:  # fmt: skip
    """Validation of the weights of that name over sequences of T tokens, and answers, in words."""
    B = 32 if world.device.type == "cuda" else max(1, 4096 // T)
    loader = ShardLoader(shards, B, T, world.rank, world.size)
    words = []
    if eval_tokens:
        figures = validation(model, model, loader, eval_tokens, tokenizer, world, autocast)
        num_tokens = num_sequences(loader, eval_tokens) * loader.T
        words += [f"{num_tokens:,} validation tokens: {in_words(figures)}"]
    if examples:
        shares = answers(model, examples, tokenizer, world, autocast)
        words += [f"{len(examples):,} questions: {in_words(shares)}"]
    told = "\n".join(words or ["nothing was asked for: --eval-tokens 0, no --hellaswag"])
    return f"{name}, {told}"
