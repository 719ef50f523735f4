"""Evaluate a run's newest checkpoint, or any other GPT-2: validation loss and multiple choice.
python evaluate.py out/book                        # on the run's own validation data
python evaluate.py gpt2 --data-dir data/fineweb    # a name on the Hugging Face hub
python evaluate.py out/124M --hellaswag hellaswag_val.jsonl
python evaluate.py out/book --text a.txt b.txt --tokens tokens.csv    # how likely are these texts?
"""

import csv
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from config import TrainConfig, resolve, to_take
from dataloader import ShardLoader, open_folder
from model import GPT, VARLEN_BACKENDS, ComputeConfig
from support.checkpoint import find_weights, load_model, load_weights
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
    sizes = np.zeros(2, np.int64)  # bytes and characters of text in the targets
    loss_sum = torch.zeros(1, device=world.device)
    for numbers in batches:
        if stop:
            break
        batch = loader.batch(numbers)
        if tokenizer:
            sizes += tokenizer.sizes[batch[1]].sum(axis=(0, 1))
        # net is compiled for full batches, so a shorter last batch uses the plain model.
        forward = model if is_short or len(numbers) < loader.B else net
        with autocast(config.dtype, world.device):
            loss = forward(*to_device(batch, world.device))
        loss_sum += loss * len(numbers)
    val_loss = world.sum(loss_sum).item() / num_sequences
    sizes = sum(world.gather(sizes))  # world.sum's float32 is exact only up to 2**24
    return {"val_loss": val_loss} | other_units(val_loss, num_sequences * loader.T, sizes)


def other_units(loss: float, num_tokens: float, sizes: Iterable) -> dict[str, float]:
    """Convert a mean loss in nats per token to other units. sizes are the text's bytes and
    characters, 0 if unknown."""
    figures = {"perplexity": math.exp(min(loss, 700))}
    for unit, size in zip(("byte", "character"), sizes, strict=True):
        if size:
            figures[f"bits_per_{unit}"] = loss / math.log(2) * num_tokens / size
    return figures


def load_with_tokenizer(name: str, world: World) -> tuple[GPT, Tokenizer]:
    """Return the network called `name`, on this World's device, and its tokenizer. Raise UserError
    if the tokenizer is not here."""
    model, tokenizer = load_model(name)
    if tokenizer is None or tokenizer.size > model.config.vocab_size:
        raise UserError(f"the tokenizer of {name} is not here: copy its files beside the weights")
    return model.to(world.device), tokenizer


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


@torch.no_grad()
def score(model: GPT, tokens: np.ndarray, end_of_text: int) -> Iterator[tuple]:
    """Yield for each token of a text: its surprisal in nats, its rank (1 if no token was likelier),
    the three likeliest tokens, and their probabilities. The first token follows <|endoftext|>. In a
    long text, windows of seq_len tokens overlap by half, so later tokens follow at least half."""
    T, overlap = model.config.seq_len, model.config.seq_len // 2
    row = torch.from_numpy(np.append(end_of_text, tokens)).to(model.lm_head.weight.device)
    done = 0  # tokens that are scored
    while done < len(tokens):
        start = max(0, done - overlap)
        window = row[start : start + T + 1]
        features = model.features(window[None, :-1])[0, done - start :]
        log_probs = model.head(features)[:, : model.config.vocab_size].log_softmax(-1)
        own = log_probs.gather(1, window[1 + done - start :, None])
        ranks = 1 + (log_probs > own).sum(1)
        top, ids = log_probs.topk(3)
        columns = -own[:, 0], ranks, ids, top.exp()
        yield from zip(*(column.tolist() for column in columns), strict=True)
        done += len(own)


def score_texts(texts: dict[str, str], model: GPT, tokenizer: Tokenizer, path: str):
    """Print the figures of each text and of all together. Write a row for each token into a new CSV
    file at path, unless path is empty."""
    total = np.zeros(4)
    # "x" overwrites nothing.
    with open(path or os.devnull, "x" if path else "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        top = "token1", "token2", "token3", "p1", "p2", "p3"
        table.writerow(["file", "offset", "token", "bits", "rank", *top])
        for name, text in texts.items():
            tokens, nats, offset = tokenizer.encode_array(text), 0.0, 0
            scores = score(model, tokens, tokenizer.end_of_text)
            for token, (loss, rank, ids, probs) in zip(tokens, scores, strict=True):
                row = name, offset, tokenizer.token_text(token), loss / math.log(2), rank
                table.writerow([*row, *map(tokenizer.token_text, ids), *probs])
                nats += loss
                offset += len(tokenizer.tokens[token])
            counts = np.array([nats, len(tokens), *tokenizer.sizes[tokens].sum(axis=0)])
            show(f"{name}: {text_figures(*counts)}")
            total += counts
    if len(texts) > 1:
        show(f"{len(texts)} texts: {text_figures(*total)}")


def text_figures(nats: float, num_tokens: float, num_bytes: float, num_chars: float) -> str:
    loss = nats / max(1, num_tokens)
    figures = {"nats_per_token": loss} | other_units(loss, num_tokens, (num_bytes, num_chars))
    return f"{num_tokens:,.0f} tokens, {num_chars:,.0f} characters, {format_metrics(figures)}"


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


def read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()  # keeps \r\n, so that offsets are the file's
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: {error}") from error


@program
def main(argv: list[str]):
    names = "data_dir", "eval_tokens", "hellaswag", "device"
    parser = Parser(TrainConfig, __doc__ or "", names)
    parser.add_argument("weights", help="a run, a checkpoint, a folder, or a name on the hub")
    parser.add_argument("--text", nargs="+", help="score these UTF-8 texts instead")
    parser.add_argument("--tokens", help="with --text: a new CSV file, with a row per token")
    typed = parser.parse(argv)
    texts = {path: read_text(path) for path in typed.pop("text", [])}
    table = typed.pop("tokens", "")
    if table and not texts:
        raise UserError(f"--tokens {table} needs --text")
    with connected(typed.get("device", "")) as world:
        if not texts:
            evaluate(typed, world)
        elif world.is_main:
            score_texts(texts, *load_with_tokenizer(typed["weights"], world), table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
