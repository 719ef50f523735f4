"""Evaluation of a run or of finished weights: validation, samples and questions."""

import codecs
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import sdpa_kernel

from config import TrainConfig
from dataloader import ShardLoader, TokenFolder
from model import GPT, VARLEN_BACKENDS
from support import log
from support.device import autocast
from support.ending import UserError, signals, until_signal, watchdog
from support.files import did_you_mean, read_small
from support.fit import pass_fits
from support.ranks import World
from support.tokenizer import ALPHABET, Tokenizer, load_tokenizer, require_tokenizer


def random_seed(*numbers: int) -> int:
    """Return a seed for torch that depends on all of these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def to_device(batch: tuple, device: torch.device) -> tuple:
    # The loader pins memory for CUDA, so the GPU can compute during the copy.
    return tuple(tensor.to(device, non_blocking=device.type == "cuda") for tensor in batch)


class Question(NamedTuple):
    """A multiple-choice question as tokens, in uint16 arrays that are never empty."""

    context: np.ndarray
    choices: list[np.ndarray]
    num_chars: list[int]  # of each choice, without the space before it
    label: int  # the index of the right choice


@torch.no_grad()
def validate(
    net: Module, model: GPT, loader: ShardLoader, tokenizer: str, config: TrainConfig, world: World
) -> dict[str, float]:
    """Return the mean loss over the first --eval-tokens tokens of loader, in several units."""
    # The ranks take turns, so any number of ranks covers the same tokens, in nearly equal shares.
    num_sequences = num_val_sequences(config.eval_tokens, loader)
    numbers_of_rank = range(world.rank, num_sequences, world.size)
    codec = load_tokenizer(tokenizer)
    num_bytes = 0  # bytes of text in the targets
    loss_sum = torch.zeros((), device=world.device)
    starts = range(0, len(numbers_of_rank), loader.B)
    # A forward pass without a backward one must be compiled apart, which takes 7 s on an H100: as
    # long as it saves in some 200 batches, or a few validations of 64. But it needs less memory.
    is_short = len(starts) <= 64 and not config.recompute and not config.loss_chunk_tokens
    forward = model if is_short else net
    net.eval()
    for start in until_signal(log.progress(starts, "validation", world.is_main)):
        numbers = numbers_of_rank[start : start + loader.B]
        batch = loader.batch(numbers)
        if codec:
            num_bytes += int(codec.lengths[batch[1].numpy()].sum())
        x, y = to_device(batch, world.device)
        with autocast(config.dtype, world.device):
            # net is compiled for full batches, so a shorter last batch uses the plain model.
            loss = forward(x, y) if len(numbers) == loader.B else model(x, y)
        loss_sum += loss * len(numbers)
    net.train()
    val_loss = world.sum(loss_sum.view(1)).item() / num_sequences
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    # Avoid world.sum: float32 is exact only up to 2**24. Ranks without the tokenizer send None.
    counts = world.gather(num_bytes if codec else None)
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and any(known):
        bytes_per_token = sum(known) / (num_sequences * loader.T)
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def num_val_sequences(eval_tokens: int, loader: ShardLoader) -> int:
    return max(1, min(eval_tokens // loader.T, len(loader)))


def format_metrics(figures: dict[str, float]) -> str:
    """Return "loss 3.2800, perplexity 26.5758, ..."."""
    text = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    return text.replace("val_", "").replace("_", " ")


def evaluate_weights(
    model: GPT, data: TokenFolder, questions: list[Question], config: TrainConfig, world: World
) -> str:
    """Return what --eval-only prints: the loss, and the fractions of right answers."""
    # Start with enough sequences to keep the device busy, and halve until a pass fits.
    B = 32 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    with torch.no_grad():
        while B > 1 and not pass_fits(model, B, config, world):
            B //= 2
    loader = ShardLoader(data.val, B, config.seq_len, world.rank, world.size)
    text = ""
    figures: dict[str, float] = {}
    if config.eval_tokens:
        text = f"{num_val_sequences(config.eval_tokens, loader) * loader.T:,} validation tokens: "
        figures |= validate(model, model, loader, data.tokenizer, config, world)
    if questions:
        figures |= answers(model, questions, config, world)
    return text + (format_metrics(figures) or "nothing to do: add --eval-tokens or --hellaswag")


def sample(model: GPT, tokenizer_name: str, config: TrainConfig, number: int) -> Iterator[str]:
    """Yield sample `number` piece by piece: first the prompt, then the network's continuation."""
    tokenizer = require_tokenizer(tokenizer_name)
    size = model.config.vocab_size
    device = model.lm_head.weight.device
    # A separate generator makes a run's samples independent of when they are drawn.
    rng = torch.Generator(device).manual_seed(random_seed(config.seed, number))
    # Every document begins with <|endoftext|>, and so does a sample without a prompt. An alphabet
    # has none; there, nanoGPT's samples begin a new line.
    end = tokenizer.end_of_text
    first = tokenizer.vocab.get(ALPHABET[ord("\n")], 0) if end is None else min(end, size - 1)
    ids = tokenizer.encode(config.prompt) or [first]
    if max(ids) >= size:
        raise UserError(f"--prompt: token {max(ids)}, but the network only knows 0 to {size - 1}")
    yield config.prompt
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    tokens = model.generate(torch.tensor([ids]).to(device), rng, config.temperature, config.top_k)
    for _ in until_signal(range(config.sample_tokens)):
        # Keep the yield outside autocast, which would also apply to the caller's code.
        with autocast(config.dtype, device):
            token = int(next(tokens))
        if token == end:  # what follows belongs to another document
            break
        yield decoder.decode(tokenizer.token_bytes(token))  # holds back half a character


def samples(model: GPT, tokenizer: str, config: TrainConfig) -> str:
    """Return all samples of an evaluation as one string."""
    texts = []
    model.eval()
    try:
        for number in range(config.num_samples):
            texts.append("".join(sample(model, tokenizer, config, number)))
    except (FloatingPointError, UserError) as error:
        texts.append(f"(no sample: {error})")  # a failed sample must not end a run
    model.train()
    return "\n---\n".join(texts)


def open_questions(path: str, vocab_size: int, tokenizer: str) -> list[Question]:
    """Return the questions in a file, or [] if path is empty. Raise UserError if any is invalid."""
    if not path:
        return []
    codec = require_tokenizer(tokenizer)
    if codec.size > vocab_size:
        raise UserError(f"--hellaswag: {tokenizer} tokens exceed the network's {vocab_size} ids")
    if not os.path.isfile(path):
        raise UserError(f"--hellaswag {path}: there is no such file{did_you_mean(path)}")
    where, questions = f"--hellaswag {path}", []
    try:
        for number, line in enumerate(read_small(Path(path)).splitlines(), 1):
            where = f"--hellaswag {path}, line {number}"
            if line.strip():
                questions.append(as_question(json.loads(line), codec))
        if not questions:
            raise ValueError("no questions")
    except Exception as error:  # a record may contain anything
        cure = "it needs ctx, endings and label, like hellaswag_val.jsonl"
        raise UserError(f"{where} is not a valid question ({error!r}): {cure}") from None
    return questions


def as_question(record: dict, codec: Tokenizer) -> Question:
    """Return a record's context and choices as tokens. A space precedes a choice, as in llm.c."""
    if "endings" in record:
        context, choices = record["ctx"], record["endings"]
        label = int(str(record["label"]))  # a number in HellaSwag's files, text in Hugging Face's
    else:
        # This is how lm-evaluation-harness words ARC's questions.
        context, choices = f"Question: {record['question']}\nAnswer:", record["choices"]["text"]
        label = record["choices"]["label"].index(record["answerKey"])
    if not (context and all(choices) and 0 <= label < len(choices) >= 2):
        raise ValueError("it has an empty text, or a label that names no choice")
    texts = [context] + [f" {choice}" for choice in choices]
    tokens = [np.array(codec.encode(text), np.uint16) for text in texts]
    return Question(tokens[0], tokens[1:], [len(choice) for choice in choices], label)


def answers(model: GPT, questions: list[Question], config: TrainConfig, world: World) -> dict:
    """Return the fraction of right answers by three measures. The ranks share the work."""
    questions_of_rank = questions[world.rank :: world.size]
    model.eval()
    with autocast(config.dtype, world.device):
        losses = choice_losses(model, questions_of_rank, world.device)
    model.train()
    shares = {}
    for name, count in count_right(questions_of_rank, losses).items():
        shares[f"hellaswag_{name}"] = sum(world.gather(count)) / len(questions)
    return shares


@torch.no_grad()
def choice_losses(model: GPT, questions: list[Question], device: torch.device) -> list[np.ndarray]:
    """For each question, return the loss of each choice in nats, summed over its tokens."""
    texts = [(question.context, choice) for question in questions for choice in question.choices]
    lengths = [len(context) + len(choice) for context, choice in texts]
    losses = np.zeros(len(texts))
    # A pass pads all its texts to the length of the longest, so sort the texts by length.
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    tokens_per_pass = 16384 if device.type == "cuda" else 2048
    while order and not signals.received:
        watchdog.reset()
        num_texts = max(1, tokens_per_pass // lengths[order[-1]])
        order, batch = order[:-num_texts], order[-num_texts:]
        losses[batch] = batch_losses(model, [texts[i] for i in batch], device).tolist()
    in_order = iter(losses)
    return [np.array([next(in_order) for _ in question.choices]) for question in questions]


def batch_losses(model: GPT, texts: list[tuple], device: torch.device) -> Tensor:
    """Return the summed loss of each text's choice: (len(texts),). A text is a context and a
    choice, as tokens. If a text is too long for the network, its beginning is cut off."""
    inputs, targets = [], []
    for context, choice in texts:
        tokens = np.concatenate([context, choice])[-model.config.seq_len - 1 :].astype(np.int64)
        ids = torch.from_numpy(tokens).to(device)
        inputs.append(ids[:-1])
        targets.append(ids[1:][-len(choice) :])  # nothing predicts the first token
    padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)  # (B, T)
    with sdpa_kernel(VARLEN_BACKENDS):
        x = model.features(padded)  # (B, T, C)
    # Only the choices' positions go through the head.
    features = []
    for row, ids, target in zip(x, inputs, targets, strict=True):
        features.append(row[: len(ids)][-len(target) :])
    logits = model.head(torch.cat(features)).float()
    losses = F.cross_entropy(logits, torch.cat(targets), reduction="none")
    parts = losses.split([len(target) for target in targets])
    return torch.stack([part.sum() for part in parts])


def count_right(questions: list[Question], losses: list[np.ndarray]) -> dict[str, int]:
    """Count questions whose right choice has the highest log-probability: in total (acc), per
    character (acc_norm, like lm-evaluation-harness) or per token (acc_norm_tokens, like llm.c)."""
    right = {"acc": 0, "acc_norm": 0, "acc_norm_tokens": 0}
    for question, sums in zip(questions, losses, strict=True):
        num_tokens = [len(choice) for choice in question.choices]
        right["acc"] += int(sums.argmin() == question.label)
        right["acc_norm"] += int((sums / question.num_chars).argmin() == question.label)
        right["acc_norm_tokens"] += int((sums / num_tokens).argmin() == question.label)
    return right
