"""Evaluate a run's newest checkpoint, or any other GPT-2: validation loss and multiple choice.
python evaluate.py out/book                        # on the run's own validation data
python evaluate.py gpt2 --data-dir data/fineweb    # a name on the Hugging Face hub
python evaluate.py out/124M --hellaswag hellaswag_val.jsonl
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from config import TrainConfig, resolve, to_take
from dataloader import ShardLoader, open_folder
from model import GPT, VARLEN_BACKENDS, ComputeConfig
from support.checkpoint import find_weights, load_weights
from support.cli import Parser, UserError, program, show
from support.device import autocast, device_name, to_device
from support.tokenizer import Tokenizer, find_tokenizer, read_json
from support.world import Stop, World, connected


def random_seed(*numbers: int) -> int:
    """Return a seed for torch that depends on all of these numbers."""
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64).item()


@torch.no_grad()
def validate(  # noqa: PLR0913
    net: torch.nn.Module,
    model: GPT,
    loader: ShardLoader,
    tokenizer: Tokenizer | None,
    config: TrainConfig,
    world: World,
    stop: Stop | None = None,
) -> dict[str, float]:
    """Return the mean loss over the first --eval-tokens tokens of loader, in several units."""
    num_sequences = max(1, min(config.eval_tokens // loader.T, len(loader)))
    # The ranks take turns, so any number of ranks covers the same tokens, in nearly equal shares.
    of_rank = range(world.rank, num_sequences, world.size)
    batches = [of_rank[i : i + loader.B] for i in range(0, len(of_rank), loader.B)]
    # A forward-only pass must be compiled separately, which takes 7 s on an H100: the time it saves
    # in some 200 batches, or a few validations of 64. But the compiled pass takes less memory.
    is_short = len(batches) <= 64 and not config.recompute and not config.loss_chunk_tokens
    num_bytes = 0  # bytes of text in the targets
    loss_sum = torch.zeros(1, device=world.device)
    for numbers in batches:
        if stop:
            break
        batch = loader.batch(numbers)
        if tokenizer:
            num_bytes += tokenizer.lengths[batch[1]].sum()
        # net is compiled for full batches, so a shorter last batch uses the plain model.
        forward = model if is_short or len(numbers) < loader.B else net
        with autocast(config.dtype, world.device):
            loss = forward(*to_device(batch, world.device))
        loss_sum += loss * len(numbers)
    val_loss = world.sum(loss_sum).item() / num_sequences
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    num_bytes = sum(world.gather(num_bytes))  # world.sum's float32 is exact only up to 2**24
    if num_bytes:
        bytes_per_token = num_bytes / (num_sequences * loader.T)
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def format_metrics(figures: dict[str, float]) -> str:
    """Return "val loss 3.2800, perplexity 26.5758, ..."."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items()).replace("_", " ")


def sample(
    model: GPT, tokenizer: Tokenizer, config: TrainConfig, number: int, stop: Stop | None = None
) -> Iterator[bytes]:
    """Yield the bytes of the tokens that the network draws after --prompt, in sample `number`."""
    device = model.lm_head.weight.device
    # A separate generator makes a run's samples independent of when they are drawn.
    rng = torch.Generator(device).manual_seed(random_seed(config.seed, number))
    # Every document begins with <|endoftext|>, and so does a sample without a prompt.
    ids = tokenizer.encode(config.prompt) or [tokenizer.end_of_text]
    start = torch.tensor([ids], device=device)
    tokens = model.generate(start, rng, config.temperature, config.top_k)
    for _ in range(config.sample_tokens):
        # Keep the yield outside autocast, which would also apply to the caller's code.
        with autocast(config.dtype, device):
            token = int(next(tokens))
        if stop or token == tokenizer.end_of_text:  # what follows is another document
            return
        yield tokenizer.tokens[token]


def samples(model: GPT, tokenizer: Tokenizer, config: TrainConfig, stop: Stop) -> str:
    """Return all samples of an evaluation as one string. A signal to stop cuts them short."""
    numbers = range(config.num_samples)
    contents = [b"".join(sample(model, tokenizer, config, number, stop)) for number in numbers]
    return "\n---\n".join(config.prompt + text.decode(errors="replace") for text in contents)


class Question(NamedTuple):
    context: list[int]  # tokens
    choices: list[list[int]]  # tokens; each choice follows the context
    num_chars: list[int]  # of each choice, without the space before it
    label: int  # the index of the right choice


def open_questions(path: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[Question]:
    """Return the questions in a file, or [] if path is empty. Raise UserError if any is invalid."""
    if not path:
        return []
    if tokenizer is None or tokenizer.size > vocab_size:
        raise UserError("--hellaswag: the network's tokenizer is not on this machine")
    questions = []
    try:
        for line in Path(path).read_bytes().splitlines():
            record = json.loads(line)
            context = tokenizer.encode(record["ctx"])
            choices = [tokenizer.encode(f" {text}") for text in record["endings"]]  # as in llm.c
            num_chars = [len(text) for text in record["endings"]]
            label = int(record["label"])  # a number in HellaSwag's files, text in Hugging Face's
            if label not in range(len(choices)):
                raise ValueError("the label names no ending")
            questions.append(Question(context, choices, num_chars, label))
    except Exception as error:  # the file may hold anything
        raise UserError(f"--hellaswag {path}, line {len(questions) + 1}: {error!r}") from error
    return questions


@torch.no_grad()
def answers(
    model: GPT, questions: list[Question], dtype: str, world: World, stop: Stop | None = None
) -> dict[str, float]:
    """Return how often the right choice has the highest log-probability: in total (acc), per
    character (acc_norm, like lm-evaluation-harness) or per token (acc_norm_tokens, like llm.c)."""
    right = np.zeros(3)
    for question in questions[world.rank :: world.size]:
        if stop:
            break
        with autocast(dtype, world.device):
            losses = choice_losses(model, question, world.device)
        num_tokens = [len(choice) for choice in question.choices]
        scores = np.stack([losses, losses / question.num_chars, losses / num_tokens])
        right += scores.argmin(axis=1) == question.label
    shares = np.sum(world.gather(right), axis=0) / len(questions)
    names = "hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_tokens"
    return dict(zip(names, shares.tolist(), strict=True))


def choice_losses(model: GPT, question: Question, device: torch.device) -> np.ndarray:
    """Return each choice's loss in nats, summed over its tokens. A text that is too long for the
    network loses its start."""
    longest = model.config.seq_len + 1
    texts = [torch.tensor((question.context + choice)[-longest:]) for choice in question.choices]
    rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
    with sdpa_kernel(VARLEN_BACKENDS):
        logits = model.logits(rows[:, :-1]).float()
    losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    sums = []
    for row, text, choice in zip(losses, texts, question.choices, strict=True):
        unpadded = row[: len(text) - 1]  # nothing predicts the first token
        sums.append(unpadded[-len(choice) :].sum().item())
    return np.array(sums)


def evaluate(typed: dict, world: World):
    """Print the figures of a run's newest checkpoint, or of other weights, as a line of text."""
    weights = find_weights(typed.pop("weights"))
    typed["compile"] = False  # an evaluation is too short for it to pay off
    # If the weights are a run's, use its data and precision. Checkpoints before 1.0 lack flags.
    saved = read_json(weights.folder / "state.json").get("flags", {})
    config = resolve(typed, to_take(saved, device_name(world.device)), weights, world)
    model = GPT(weights.shape, ComputeConfig(**config.fields_of(ComputeConfig))).to(world.device)
    load_weights(model.eval(), weights.folder)
    data = world.together(open_folder, Path(config.data_dir))
    weights.check_tokens(data)
    tokenizer = find_tokenizer(data.folder, data.tokenizer)
    questions = open_questions(config.hellaswag, tokenizer, weights.shape.vocab_size)
    figures: dict[str, float] = {}
    if config.eval_tokens:
        loader = world.together(ShardLoader, data.val, config.micro_batch_size, config.seq_len)
        figures |= validate(model, model, loader, tokenizer, config, world)
    if questions:
        figures |= answers(model, questions, config.dtype, world)
    if world.is_main:
        show(f"{weights.folder} on {data.folder}: {format_metrics(figures)}")


@program
def main(argv: list[str]):
    names = "data_dir", "eval_tokens", "hellaswag", "device"
    parser = Parser(TrainConfig, __doc__ or "", names)
    parser.add_argument("weights", help="a run, a checkpoint, a folder, or a name on the hub")
    typed = parser.parse(argv)
    with connected(typed.get("device", "")) as world:
        evaluate(typed, world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
