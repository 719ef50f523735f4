"""Evaluation: the units of a validation loss, and multiple-choice questions."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from model import ANY_SHAPE, GPT
from support.errors import reset_watchdog
from support.questions import Example


@contextmanager
def dropout_off(net: nn.Module):
    """Inside, net drops no activations. Without dropout its mode is left alone: a compiled net
    would be compiled anew for each change."""
    was_training = net.training
    if any(isinstance(module, nn.Dropout) and module.p for module in net.modules()):
        net.train(False)
    try:
        yield
    finally:
        net.train(was_training)


def in_units(val_loss: float, bytes_per_token: float) -> dict[str, float]:
    """Return a loss in nats per token in the other units that people compare. bytes_per_token is 0
    where the tokenizer is not installed."""
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    if bytes_per_token:
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def in_words(figures: dict[str, float]) -> str:
    """Return "loss 3.2800, perplexity 26.5758, ..."."""
    texts = []
    for name, value in figures.items():
        label = "loss" if name == "val_loss" else name.replace("_", " ")
        texts.append(f"{label} {value:.4f}")
    return ", ".join(texts)


# ---- Multiple-choice questions -------------------------------------------------------------------


class Row(NamedTuple):
    """A context with one of its choices, which is asked for its loss."""

    example: int  # index of the question
    choice: int  # index of the choice
    tokens: np.ndarray  # (T,), of context and choice
    num_answer_tokens: int  # of the choice, at the end


def choice_losses(model: GPT, examples: list[Example], device: torch.device) -> list[np.ndarray]:
    """Return for each example the summed loss of each choice's tokens, in nats. Choices of similar
    length share a pass, the longest first."""
    rows = []
    for i, example in enumerate(examples):
        for j, choice in enumerate(example.choices):
            tokens = np.concatenate([example.context, choice]).astype(np.int64)
            rows.append(Row(i, j, tokens, len(choice)))
    rows.sort(key=lambda row: len(row.tokens))
    losses = [np.zeros(len(example.choices)) for example in examples]
    tokens_per_pass = 16384 if device.type == "cuda" else 2048
    while rows:
        reset_watchdog()
        longest = len(rows[-1].tokens)
        num_rows = max(1, tokens_per_pass // longest)
        batch = rows[-num_rows:]
        rows = rows[:-num_rows]
        answer_loss = answer_losses(model, batch, device).tolist()
        for row, loss in zip(batch, answer_loss, strict=True):
            losses[row.example][row.choice] = loss
    return losses


@torch.no_grad()
def answer_losses(model: GPT, rows: list[Row], device: torch.device) -> Tensor:
    """Return for each row the summed loss of its answer's tokens: (len(rows),). A row that is too
    long for the network loses its beginning. A row's first token has no loss. The head computes the
    logits of the answers' positions alone."""
    inputs = []
    targets = []
    counts = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens).to(device)
        tokens = tokens[-model.config.seq_len - 1 :]
        count = min(row.num_answer_tokens, len(tokens) - 1)
        inputs.append(tokens[:-1])
        targets.append(tokens[len(tokens) - count :])
        counts.append(count)
    padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True)  # (B, T)
    with sdpa_kernel(ANY_SHAPE):
        x = model.features(padded)  # (B, T, C)
    answers = []
    for b, count in enumerate(counts):
        end = len(inputs[b])
        answers.append(x[b, end - count : end])
    logits = model.head(torch.cat(answers)).float()
    losses = F.cross_entropy(logits, torch.cat(targets), reduction="none")
    return torch.stack([part.sum() for part in losses.split(counts)])


def right_answers(examples: list[Example], losses: list[np.ndarray]) -> dict[str, int]:
    """Return in how many examples the likeliest choice is the right one, counted in three ways: acc
    by the sum of a choice's log-probabilities; acc_norm by their sum over the number of characters,
    as in the lm-evaluation-harness; acc_norm_tokens by their mean per token, as in llm.c and
    build-nanogpt."""
    right = {"acc": 0, "acc_norm": 0, "acc_norm_tokens": 0}
    for example, sums in zip(examples, losses, strict=True):
        num_tokens = [len(choice) for choice in example.choices]
        right["acc"] += int(sums.argmin() == example.label)
        right["acc_norm"] += int((sums / example.num_chars).argmin() == example.label)
        right["acc_norm_tokens"] += int((sums / num_tokens).argmin() == example.label)
    return right
