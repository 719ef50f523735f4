"""Multiple-choice questions: JSON lines as HellaSwag's, or as ARC's in Hugging Face's layout."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloader import VOCAB_SIZES
from support.errors import UserError
from support.files import vocab_cure
from support.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Example:
    """A question in tokens: uint16 arrays, none empty."""

    context: np.ndarray
    choices: list[np.ndarray]
    num_chars: list[int]  # of each choice, less the space before it
    label: int  # which choice is right


def open_examples(path: str, vocab_size: int, tokenizer: str) -> list[Example]:
    """Return the questions in path, none without a path. Raise UserError with the line that is no
    question, or if the network does not know the tokens."""
    if not path:
        return []
    codec = load_tokenizer(tokenizer)
    if codec is None or VOCAB_SIZES[tokenizer] > vocab_size:
        cure = f": {vocab_cure()}" if tokenizer == "gpt2" else ""
        raise UserError(f"--hellaswag needs the tokenizer of the data, {tokenizer}{cure}")
    where, examples = path, []
    try:
        if not Path(path).is_file():  # reading a pipe would wait forever
            raise ValueError("no such file")
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            where = f"{path}, line {number}"
            if line.strip():
                examples.append(as_example(json.loads(line), codec))
        if not examples:
            raise ValueError("no questions")
    except Exception as error:  # a record may hold anything
        cure = "python prepare_data.py --download hellaswag fetches a good file"
        raise UserError(f"--hellaswag {where} is not a question ({error!r}); {cure}") from None
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
