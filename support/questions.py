"""Multiple-choice questions: their file format, written, read and asked.

A file is llm.c's: 256 int32 (20240522, 1, number of examples, most bytes of one, 0 ...), then
uint16: for each example 65535, its bytes, its index, the right choice's index, the number of
choices; then for the context and each choice how many tokens, and these.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloader import EVAL_MAGIC, HEADER_BYTES, TOKEN, VERSION, VOCAB_SIZES
from support.files import locked, whole_file

START = 65535  # of each example
PREPARE = "prepare_data.py --multiple-choice"


@dataclass(frozen=True)
class Example:
    """A question in tokens, uint16 each."""

    context: np.ndarray
    choices: list[np.ndarray]
    label: int  # which choice is right


# --------------------------------------------------------------------------------------------------
# Read


def read_examples(path: Path) -> list[Example]:
    """The questions in path; ValueError if there are none, or not all of them whole."""
    try:
        return examples_in(path)
    except (OSError, ValueError, MemoryError) as error:
        why = f"{path} is not a whole file of multiple-choice questions: {error}"
    raise ValueError(f"{why}; copy it again, or write it with {PREPARE}")


def examples_in(path: Path) -> list[Example]:
    if not path.is_file():
        raise ValueError("no file")
    magic, version, num_examples = np.append(np.fromfile(path, "<i4", 3), [0] * 3)[:3].tolist()
    if (magic, version) != (EVAL_MAGIC, VERSION):
        raise ValueError(f"starts with {magic}, {version} instead of {EVAL_MAGIC}, {VERSION}")
    words, examples = np.frombuffer(path.read_bytes()[HEADER_BYTES:], TOKEN), []
    while len(words):
        example, words = first_example(words, len(examples))
        examples.append(example)
    if len(examples) != num_examples or not examples:
        raise ValueError(f"holds {len(examples):,} examples, its header says {num_examples:,}")
    return examples


def first_example(words: np.ndarray, index: int) -> tuple[Example, np.ndarray]:
    """The example that words begin with, and the words behind it; ValueError if it is damaged."""
    start, size, own_index, label, num_choices = np.append(words[:5], [0] * 5)[:5].tolist()
    counts, texts, rest = [], [], words[5 : size // 2]
    while len(rest):
        counts.append(int(rest[0]))
        texts.append(rest[1 : 1 + counts[-1]])
        rest = rest[1 + counts[-1] :]
    if (start, own_index) != (START, index):
        raise ValueError(f"example {index} starts as {start}, {own_index}, not {START}, {index}")
    whole = size == 2 * (5 + len(counts) + sum(counts)) <= 2 * len(words)
    if not whole or len(counts) != num_choices + 1:
        raise ValueError(f"example {index} does not fit into its {size:,} bytes")
    if not all(counts):
        raise ValueError(f"example {index} has an empty context or choice")
    if not label < num_choices >= 2:
        raise ValueError(f"example {index} has label {label} of {num_choices} choices")
    return Example(texts[0], texts[1:], label), words[size // 2 :]


def open_examples(path: str, vocab_size: int, tokenizer: str) -> list[Example]:
    """The questions of --hellaswag, where there are any; ValueError if they are in other tokens."""
    examples = read_examples(Path(path)) if path else []
    ids = [int(part.max()) for example in examples for part in (example.context, *example.choices)]
    largest = max(ids, default=0)
    if largest >= min(vocab_size, VOCAB_SIZES.get(tokenizer, vocab_size)) or (
        examples and tokenizer == "gpt2" and largest < 256
    ):
        why = f"--hellaswag {path}: its largest token is {largest}, the data's are of {tokenizer}"
        raise ValueError(f"{why}; write it again with --tokenizer {tokenizer}")
    return examples


# --------------------------------------------------------------------------------------------------
# Written


def layout(record: dict) -> tuple[str, list[str], object, list[tuple]]:
    """Context, choices, answer, and what the answer may be for each choice, of a record as those of
    HellaSwag, of Hugging Face's ARC, or of question, choices and answer: an index, a letter or the
    text. The words around a question are lm-evaluation-harness's for ARC."""
    if "ctx" in record:
        names = [(i, str(i)) for i in range(len(record["endings"]))]
        return record["ctx"], record["endings"], record.get("label"), names
    context, choices = "Question: " + record["question"] + "\nAnswer:", record["choices"]
    if isinstance(choices, dict):
        names = [(label,) for label in choices["label"]]
        return context, choices["text"], record.get("answerKey"), names
    names = [(i, text, chr(ord("A") + i)) for i, text in enumerate(choices)]
    return context, choices, record.get("answer"), names


def as_example(record: dict, encode: Callable[[str], np.ndarray]) -> Example:
    """A record in tokens: of its context, and of a space and each choice, as in llm.c."""
    context, choices, answer, names = layout(record)
    if answer in (None, ""):
        raise ValueError("has no label (as HellaSwag's test split: use its validation split)")
    texts = [context, *choices]
    if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("has a context or a choice that is empty or no text")
    named = [i for i, own in enumerate(names) if answer in own and not isinstance(answer, bool)]
    if len(named) != 1 or len(names) != len(choices) or len(choices) < 2:
        why = f"has label {answer!r}, which names {len(named)} of {len(choices)} choices"
        raise ValueError(f"{why} and not 1 of 2 or more")
    texts[1:] = [f" {text}" for text in choices]
    tokens = [encode(text) for text in texts]
    return Example(tokens[0], tokens[1:], named[0])


def lines_in(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Each line that is not empty, and where it is."""
    for file in files:
        with open(file, "rb") as f:
            yield from ((f"{file}, line {n}", line) for n, line in enumerate(f, 1) if line.strip())


def examples_of(
    files: list[str], encode: Callable[[str], np.ndarray]
) -> tuple[list[Example], list[np.ndarray]]:
    """The questions in lines of JSON, and their words; ValueError with the line that is none."""
    examples, rows = [], []
    for where, line in lines_in(files):
        try:
            examples.append(as_example(json.loads(line), encode))
            rows.append(example_words(examples[-1], len(rows)))
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            foreign = f"is not laid out as HellaSwag, ARC or question, choices, answer: {error!r}"
            why = error if isinstance(error, ValueError) else foreign
            raise ValueError(f"{where}: {why}; correct the line or leave it out") from None
    if not rows:
        raise ValueError(f"no questions in {' '.join(files)}; name another file")
    return examples, rows


def example_words(example: Example, index: int) -> np.ndarray:
    """An example as it is in a file, uint16; ValueError if there is no room for it."""
    texts = (example.context, *example.choices)
    size = 2 * (5 + len(texts) + sum(map(len, texts)))
    if size > 65535:
        raise ValueError(f"takes {size:,} bytes, more than the 65,535 of the format")
    if index >= 65535:
        raise ValueError("is example 65,536, more than the 65,535 of the format")
    head = [START, size, index, example.label, len(example.choices)]
    return np.hstack([head, *(part for text in texts for part in (len(text), text))]).astype(TOKEN)


def write_examples(path: Path, rows: list[np.ndarray]):
    header = [EVAL_MAGIC, VERSION, len(rows), 2 * max(map(len, rows))]
    with locked(path.parent):
        check_absent(path)  # again: another process may have been faster
        with whole_file(path) as f:
            f.write(np.array(header, "<i4").tobytes().ljust(HEADER_BYTES, b"\0"))
            f.write(np.concatenate(rows).tobytes())


def write_questions(
    files: list[str], folder: Path, encode: Callable[[str], np.ndarray], tokenizer: str
) -> str:
    """Write the questions of all files into one in folder, under the first one's name, and say what
    it holds. llm.c reads it if each has 4 choices, train_gpt2.py any number from 2."""
    path = folder / f"{Path(files[0]).stem}.bin"
    check_absent(path)
    examples, rows = examples_of(files, encode)
    write_examples(path, rows)
    tokens = sum(len(text) for e in examples for text in (e.context, *e.choices))
    longest = max(len(e.context) + max(map(len, e.choices)) for e in examples)
    choices = " or ".join(str(n) for n in sorted({len(e.choices) for e in examples}))
    return (
        f"{len(rows):,} examples of {choices} choices, {tokens:,} tokens ({tokenizer}), the"
        f" longest {longest:,}: python train_gpt2.py ... --hellaswag {shlex.quote(str(path))}"
    )


def check_absent(path: Path):
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists; move it away, or name another --data-dir")


# --------------------------------------------------------------------------------------------------
# Asked


def choice_losses(
    model, examples: list[Example], mine: range, device, autocast: Callable, note: Callable
) -> list[np.ndarray]:
    """For each choice of examples mine the sum of the losses of its tokens, in nats: a GPT is asked
    inside autocast(), after a note() to the watchdog. Choices of about the same length share a
    pass, the longest first."""
    import torch  # not at the top: preparing questions does without its 200 MB

    rows = [(n, j, np.concatenate([examples[i].context, choice])) for n, i in enumerate(mine)
            for j, choice in enumerate(examples[i].choices)]  # fmt: skip
    rows.sort(key=lambda row: len(row[2]))
    losses = [np.zeros(len(examples[i].choices)) for i in mine]
    per_pass = 16384 if device.type == "cuda" else 2048  # tokens
    total = len(rows)
    while rows:
        note(f"multiple choice {total - len(rows) + 1}/{total}")
        count = max(1, per_pass // len(rows[-1][2]))
        batch, rows = rows[-count:], rows[:-count]
        tokens = [torch.from_numpy(row.astype(np.int64)).to(device) for _, _, row in batch]
        counts = [len(examples[mine[n]].choices[j]) for n, j, _ in batch]
        with autocast():
            sums = model.answer_losses(list(zip(tokens, counts, strict=True))).tolist()
        for (n, j, _), value in zip(batch, sums, strict=True):
            losses[n][j] = value
    return losses


def right_answers(
    examples: list[Example], losses: list[np.ndarray], decode: Callable | None
) -> dict[str, int]:
    """Of how many examples the likeliest choice is the right one: by the sum of its tokens'
    log-probabilities (acc), by their mean, as in llm.c (acc_norm), and by the sum over the number
    of characters, as in the lm-evaluation-harness (acc_norm_chars, where an id can be decoded)."""
    sizes = {"acc": lambda choice: 1, "acc_norm": len}
    if decode:  # less the space before it
        sizes["acc_norm_chars"] = lambda choice: max(
            1, len(b"".join(map(decode, choice.tolist())).decode("utf-8", "replace")) - 1
        )
    right = dict.fromkeys(sizes, 0)
    for example, values in zip(examples, losses, strict=True):
        for name, size in sizes.items():
            norms = [size(choice) for choice in example.choices]
            right[name] += int((values / norms).argmin()) == example.label
    return right
