"""Tests how ../support/evaluate.py reads questions and counts right answers."""

import json

import numpy as np
import pytest
from conftest import NEEDS_GPT2, jsonl

from dataloader import VOCAB_SIZES
from support import evaluate, tokenizer
from support.ending import UserError
from support.evaluate import Question, open_questions

ENDINGS = ["uses wrap.", "rips tiles off\u2026", "<|endoftext|>", " starts"]
ARC = {"text": ["dry", "wet palms", "oily"], "label": ["A", "B", "C"]}
HELLASWAG = {"ind": 24, "ctx": "A man. he", "endings": ENDINGS, "label": 3}
SKIN = {"question": "Which skin?", "choices": ARC, "answerKey": "B"}
LAYOUTS = [  # records, and the texts and label that each must become
    (HELLASWAG, "A man. he", ENDINGS, 3),
    (HELLASWAG | {"ctx": "<|endoftext|> caf\u00e9 ", "label": "0"}, "<|endoftext|> caf\u00e9 ",
     ENDINGS, 0),
    (SKIN, "Question: Which skin?\nAnswer:", ARC["text"], 1),
    (SKIN | {"choices": ARC | {"label": ["1", "2", "3"]}, "answerKey": "3"},
     "Question: Which skin?\nAnswer:", ARC["text"], 2),
]  # fmt: skip


def ids(tokenizer: str, text: str) -> list[int]:
    if tokenizer == "bytes":
        return list(text.encode())
    import tiktoken

    return tiktoken.get_encoding("gpt2").encode_ordinary(text)


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)])
def test_questions_become_tokens_of_context_and_choices_with_a_space(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *(record for record, *_ in LAYOUTS))
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\n", b"\r\n"))  # as Windows has it
    examples = open_questions(str(path), VOCAB_SIZES[tokenizer], tokenizer)
    for example, (_, context, choices, label) in zip(examples, LAYOUTS, strict=True):
        assert example.context.tolist() == ids(tokenizer, context)
        expected = [ids(tokenizer, f" {text}") for text in choices]
        assert [choice.tolist() for choice in example.choices] == expected
        assert example.label == label
        assert example.context.dtype == example.choices[0].dtype == np.uint16


def test_without_a_file_there_are_no_questions():
    assert open_questions("", 257, "bytes") == []


BAD = [
    HELLASWAG | {"label": ""}, HELLASWAG | {"label": 4}, HELLASWAG | {"label": "-1"},
    HELLASWAG | {"label": True}, HELLASWAG | {"label": 1.5}, HELLASWAG | {"label": [1]},
    {"ctx": "a", "endings": ENDINGS}, HELLASWAG | {"endings": [*ENDINGS[:3], ""]},
    HELLASWAG | {"ctx": ""}, HELLASWAG | {"ctx": None}, HELLASWAG | {"endings": ["one"]},
    HELLASWAG | {"endings": 7}, SKIN | {"answerKey": "D"}, SKIN | {"answerKey": None},
    SKIN | {"choices": {"text": ["x", "y"]}}, SKIN | {"choices": None}, "text", [HELLASWAG], 7,
]  # fmt: skip


@pytest.mark.parametrize("line", [*map(json.dumps, BAD), '{"ctx": ', "[" * 10**5, "\x00"])
def test_a_bad_line_is_one_line_with_its_place(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(HELLASWAG) + "\n\n" + line)
    message = r"^--hellaswag .*a.jsonl, line 3 is not a valid question .*$"
    with pytest.raises(UserError, match=message):
        open_questions(str(tmp_path / "a.jsonl"), 257, "bytes")


def test_what_is_no_file_of_questions_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "llmc.bin").write_bytes(np.array([20240522, 1], "<i4").tobytes())
    for name, cure in {"empty.jsonl": "hellaswag_val.jsonl", "llmc.bin": "hellaswag_val.jsonl",
                       "nowhere": "no such file", ".": "no such file"}.items():  # fmt: skip
        with pytest.raises(UserError, match=cure):
            open_questions(str(tmp_path / name), 257, "bytes")
    path = str(jsonl(tmp_path / "a.jsonl", HELLASWAG))
    with pytest.raises(UserError, match="these weights come without their tokenizer"):
        open_questions(path, 65, "unknown")
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *_: None)
    with pytest.raises(UserError, match="gpt2 on this machine: run python .* as vocab.json"):
        open_questions(path, 50257, "gpt2")


def test_right_answers_are_counted_by_sum_by_characters_and_by_tokens():
    """The likeliest choice: the first by sum, the second per character, the third per token."""
    tokens = [np.zeros(n, "u2") for n in (2, 9, 6)]
    sums = np.array([2.0, 5.0, 3.0 * 1.1])
    for label in range(3):
        example = Question(np.zeros(1, "u2"), tokens, [1, 4, 2], label)
        counted = evaluate.count_right([example], [sums])
        per_char = sums / [1, 4, 2]
        per_token = sums / [2, 9, 6]
        assert counted == {
            "acc": int(sums.argmin() == label),
            "acc_norm": int(per_char.argmin() == label),
            "acc_norm_tokens": int(per_token.argmin() == label),
        }
