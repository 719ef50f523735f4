"""Evaluation: the units of a validation loss; questions: read, scored and counted."""

import json
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from dataloader import VOCAB_SIZES
from model import ANY_SHAPE, GPT
from support.errors import UserError, reset_watchdog
from support.tokenizer import Tokenizer, require_tokenizer


@contextmanager
def dropout_off(net: nn.Module):
    """Inside, net drops no activations. Without dropout its mode is left alone: a compiled net
    would be compiled anew for each change."""
    was_training = net.training
    if any(isinstance(module, nn.Dropout) and module.p for module in net.modules()):
        net.eval()
    try:
        yield
    finally:
        net.train(was_training)


def in_units(val_loss: float, bytes_per_token: float) -> dict[str, float]:
    """Return a loss in nats per token, and in other units; bytes_per_token is 0 if not known."""
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    if bytes_per_token:
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def in_words(figures: dict[str, float]) -> str:
    """Return "loss 3.2800, perplexity 26.5758, ..."."""
    texts = []
    for name, value in figures.items():
        label = name.removeprefix("val_").replace("_", " ")
        texts.append(f"{label} {value:.4f}")
    return ", ".join(texts)


# ---- Multiple-choice questions: JSON lines as HellaSwag's, or as ARC's in Hugging Face's layout --


class Example(NamedTuple):
    """A question in tokens: uint16 arrays, none empty."""

    context: np.ndarray
    choices: list[np.ndarray]
    num_chars: list[int]  # of each choice, less the space before it
    label: int  # which choice is right


def open_examples(path: str, vocab_size: int, tokenizer: str) -> list[Example]:
    """Return the questions in path, none without a path. Raise UserError with the line that is not
    a question, or if the network does not know the tokens."""
    if not path:
        return []
    codec = require_tokenizer(tokenizer)
    if VOCAB_SIZES[tokenizer] > vocab_size:
        raise UserError(f"--hellaswag: the network knows ids below {vocab_size}, not {tokenizer}'s")
    if not os.path.isfile(path):  # reading a pipe would wait forever
        raise UserError(f"--hellaswag {path}: there is no such file")
    where, examples = path, []
    try:
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            where = f"{path}, line {number}"
            if line.strip():
                examples.append(as_example(json.loads(line), codec))
        if not examples:
            raise ValueError("no questions")
    except Exception as error:  # a record may hold anything
        cure = "it needs ctx, endings and label; prepare_data.py --download hellaswag fetches some"
        raise UserError(
            f"--hellaswag {where} is not a valid question ({error!r}): {cure}"
        ) from None
    return examples


def as_example(record: dict, codec: Tokenizer) -> Example:
    """Return a record in tokens: of its context, and of a space and each choice, as in llm.c."""
    if "endings" in record:
        context, choices = record["ctx"], record["endings"]
        label = int(str(record["label"]))  # a number in HellaSwag's files, text in Hugging Face's
    else:
        # The words around ARC's questions are lm-evaluation-harness's.
        context, choices = f"Question: {record['question']}\nAnswer:", record["choices"]["text"]
        label = record["choices"]["label"].index(record["answerKey"])
    if not (context and all(choices) and 0 <= label < len(choices) >= 2):
        raise ValueError("an empty text, or a label that names no choice")
    texts = [context] + [f" {choice}" for choice in choices]
    tokens = [np.array(codec.encode(text), np.uint16) for text in texts]
    return Example(tokens[0], tokens[1:], [len(choice) for choice in choices], label)


@torch.no_grad()
def choice_losses(model: GPT, examples: list[Example], device: torch.device) -> list[np.ndarray]:
    """Return for each example the summed loss of each choice's tokens, in nats."""
    texts = []  # of each choice: context and choice, and how many tokens the choice has
    for example in examples:
        for choice in example.choices:
            tokens = np.concatenate([example.context, choice]).astype(np.int64)
            texts.append((tokens, len(choice)))
    losses = np.zeros(len(texts))
    # Texts of similar length share a pass, since all are padded to the longest: the last one.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    tokens_per_pass = 16384 if device.type == "cuda" else 2048
    while order:
        reset_watchdog()
        num_texts = max(1, tokens_per_pass // len(texts[order[-1]][0]))
        batch = order[-num_texts:]
        del order[-num_texts:]
        losses[batch] = answer_losses(model, [texts[i] for i in batch], device).tolist()
    in_order = iter(losses)
    return [np.array([next(in_order) for _ in example.choices]) for example in examples]


def answer_losses(model: GPT, texts: list[tuple], device: torch.device) -> Tensor:
    """Return for each text the summed loss of its last tokens, the answer: (len(texts),). A text
    that is too long for the network loses its beginning."""
    inputs, targets = [], []
    for tokens, num_answer_tokens in texts:
        tokens = torch.from_numpy(tokens[-model.config.seq_len - 1 :]).to(device)
        inputs.append(tokens[:-1])
        targets.append(tokens[1:][-num_answer_tokens:])  # nothing predicts the first token
    padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True)  # (B, T)
    with sdpa_kernel(ANY_SHAPE):
        x = model.features(padded)  # (B, T, C)
    counts = [len(answer) for answer in targets]
    # Only the answers' positions go through the head.
    answers = []
    for b, num_answer_tokens in enumerate(counts):
        end = len(inputs[b])
        answers.append(x[b, end - num_answer_tokens : end])
    logits = model.head(torch.cat(answers)).float()
    losses = F.cross_entropy(logits, torch.cat(targets), reduction="none")
    return torch.stack([part.sum() for part in losses.split(counts)])


def right_answers(examples: list[Example], losses: list[np.ndarray]) -> dict[str, int]:
    """Return in how many examples the likeliest choice is right: acc by the sum of a choice's
    log-probabilities; acc_norm per character, as in the lm-evaluation-harness; acc_norm_tokens per
    token, as in llm.c and build-nanogpt."""
    right = {"acc": 0, "acc_norm": 0, "acc_norm_tokens": 0}
    for example, sums in zip(examples, losses, strict=True):
        num_tokens = [len(choice) for choice in example.choices]
        scores = {
            "acc": sums,
            "acc_norm": sums / example.num_chars,
            "acc_norm_tokens": sums / num_tokens,
        }
        for name, values in scores.items():
            right[name] += int(values.argmin() == example.label)
    return right
