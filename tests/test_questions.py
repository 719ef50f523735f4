"""Tests ../support/questions.py: its file format, read and written."""

import json
import multiprocessing
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import NEEDS_GPT2, NEEDS_POSIX, Killed, content, jsonl, prepare
from test_dataloader import llmc

from support import questions
from support.corpus import open_folder
from support.questions import read_examples

QUESTIONS = [  # context, choices, label
    ([318, 50256, 0], [[7], [8, 9], [10, 11, 12], [13]], 3),
    ([1], [[65535], [2, 65535, 2]], 0),
    (list(range(100)), [[5]] * 25 + [[6, 7]], 25),
]


def packed(label: int, texts: list[list[int]], index=0, size=None, start=65535, num=None) -> bytes:
    """An example as llm.c's documentation has it; texts: its context and its choices."""
    body = struct.pack("<2H", label, len(texts) - 1 if num is None else num)
    body += b"".join(struct.pack(f"<{1 + len(text)}H", len(text), *text) for text in texts)
    return struct.pack("<3H", start, len(body) + 6 if size is None else size, index) + body


def eval_file(examples: list[bytes], magic=20240522, version=1, count=None) -> bytes:
    count = len(examples) if count is None else count
    header = struct.pack("<4i", magic, version, count, max(map(len, examples), default=0))
    return header.ljust(1024, b"\0") + b"".join(examples)


def eval_file_of(questions: list[tuple]) -> bytes:
    return eval_file([packed(q[2], [q[0], *q[1]], i) for i, q in enumerate(questions)])


def read_back(path: Path) -> list[tuple]:
    """The questions that read_examples finds, as lists of numbers."""
    examples = read_examples(path)
    assert all(t.dtype == np.uint16 for e in examples for t in (e.context, *e.choices))
    return [(e.context.tolist(), [c.tolist() for c in e.choices], e.label) for e in examples]


def test_questions_of_any_number_of_choices_are_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(eval_file_of(QUESTIONS))
    assert read_back(tmp_path / "a.bin") == QUESTIONS


GOOD, TEXTS = packed(1, [[1], [2], [3]]), [[1], [2], [3]]
NO_QUESTIONS = {
    "empty": (b"", "starts with 0, 0 instead of 20240522, 1"),
    "a shard": (llmc(), "starts with 20240520, 1 instead"),
    "other version": (eval_file([GOOD], version=2), "starts with 20240522, 2 instead"),
    "header only": (eval_file([]), "holds 0 examples, its header says 0"),
    "one too few": (eval_file([GOOD], count=2), "holds 1 examples, its header says 2"),
    "one too many": (eval_file([GOOD], count=0), "holds 1 examples, its header says 0"),
    "less than none": (eval_file([GOOD], count=-1), "holds 1 examples, its header says -1"),
    "a byte more": (eval_file([GOOD]) + b"a", "buffer size must be a multiple"),
    "a word more": (eval_file([GOOD]) + b"ab", "example 1 starts as 25185, 0, not 65535, 1"),
    "no start": (eval_file([packed(1, TEXTS, start=7)]), "example 0 starts as 7, 0, not 65535, 0"),
    "same index": (eval_file([GOOD, GOOD]), "example 1 starts as 65535, 0, not 65535, 1"),
    "no bytes": (eval_file([packed(1, TEXTS, size=0)]), "example 0 does not fit into its 0 bytes"),
    "odd bytes": (eval_file([packed(1, TEXTS, size=23)]), "does not fit into its 23 bytes"),
    "too few bytes": (eval_file([packed(1, TEXTS, size=20)]), "does not fit into its 20 bytes"),
    "too many bytes": (eval_file([packed(1, TEXTS, size=24)]), "does not fit into its 24 bytes"),
    "fewer choices": (eval_file([packed(1, TEXTS, num=3)]), "does not fit into its 22 bytes"),
    "more choices": (eval_file([packed(0, TEXTS, num=1)]), "does not fit into its 22 bytes"),
    "no context": (eval_file([packed(1, [[], [2], [3]])]), "has an empty context or choice"),
    "empty choice": (eval_file([packed(1, [[1], [2], []])]), "has an empty context or choice"),
    "label": (eval_file([packed(2, TEXTS)]), "example 0 has label 2 of 2 choices"),
    "one choice": (eval_file([packed(0, TEXTS[:2])]), "example 0 has label 0 of 1 choices"),
}


@pytest.mark.parametrize("case", NO_QUESTIONS)
def test_a_file_that_is_not_whole_questions_is_refused_in_one_line(case, tmp_path):
    content, why = NO_QUESTIONS[case]
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"^.*a.bin is not a whole file .*: .*{re.escape(why)}.*$"):
        read_examples(tmp_path / "a.bin")


def test_questions_cut_anywhere_are_refused(tmp_path):
    content = eval_file_of(QUESTIONS)
    for size in [*range(0, 1024, 10), *range(1024, len(content))]:
        (tmp_path / "a.bin").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"^.*a.bin is not a whole file of .*$"):
            read_examples(tmp_path / "a.bin")


def test_questions_with_flipped_words_are_refused_or_are_what_the_file_says(tmp_path):
    words, rng = np.frombuffer(eval_file_of(QUESTIONS[:2] * 3), "<u2"), np.random.default_rng(0)
    num_read = 0
    for _ in range(600):
        damaged = words.copy()
        at = rng.choice([*range(8), *range(512, len(words))], rng.integers(1, 4))
        damaged[at] = rng.choice(
            [0, 1, 2, 3, 5, 18, 30, 65534, 65535, rng.integers(65536)], at.size
        )
        (tmp_path / "a.bin").write_bytes(damaged.tobytes())
        try:
            found = eval_file_of(read_back(tmp_path / "a.bin"))
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path}") and "\n" not in str(error)
            continue
        num_read += 1
        assert found[:12] + found[1024:] == damaged[:6].tobytes() + damaged[512:].tobytes()
    assert 60 < num_read < 540


ENDINGS = ["uses wrap.", "rips tiles off\u2026", "<|endoftext|>", " starts"]
ARC = {"text": ["dry", "wet palms", "oily"], "label": ["A", "B", "C"]}
LAYOUTS = {  # records, and the texts and label that each must become
    "HellaSwag": [
        ({"ind": 24, "ctx": "A man. he", "endings": ENDINGS, "label": 3, "split": "val"},
         "A man. he", ENDINGS, 3),
        ({"ctx": "<|endoftext|> caf\u00e9 ", "endings": ENDINGS[::-1], "label": "0"},
         "<|endoftext|> caf\u00e9 ", ENDINGS[::-1], 0),
    ],
    "ARC": [
        ({"id": "x", "question": "Which skin?", "choices": ARC, "answerKey": "B"},
         "Question: Which skin?\nAnswer:", ARC["text"], 1),
        ({"question": "Why?", "choices": ARC | {"label": ["1", "2", "3"]}, "answerKey": "3"},
         "Question: Why?\nAnswer:", ARC["text"], 2),
    ],
    "plain": [
        ({"question": "2+2?", "choices": ["3", "4"], "answer": answer},
         "Question: 2+2?\nAnswer:", ["3", "4"], 1) for answer in (1, "B", "4")
    ],
}  # fmt: skip


def ids(tokenizer: str, text: str) -> list[int]:
    import tiktoken

    gpt2 = tiktoken.get_encoding("gpt2") if tokenizer == "gpt2" else None
    return gpt2.encode_ordinary(text) if gpt2 else list(text.encode())


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_questions_become_llmcs_file_byte_for_byte(layout, tokenizer, tmp_path, capsys):
    records, contexts, choices, labels = zip(*LAYOUTS[layout], strict=True)
    expected = [
        (ids(tokenizer, context), [ids(tokenizer, " " + text) for text in texts], label)
        for context, texts, label in zip(contexts, choices, labels, strict=True)
    ]
    files = jsonl(tmp_path / "my val.jsonl", records[0]), jsonl(tmp_path / "2.jsonl", *records[1:])
    files[0].write_bytes(b"\n" + files[0].read_bytes().replace(b"\n", b"\r\n"))  # as Windows has it
    flags = ("--multiple-choice", *files, "--tokenizer", tokenizer)
    assert prepare(tmp_path / "a" / "data", *flags) == 0
    path = tmp_path / "a" / "data" / "my val.bin"
    assert path.read_bytes() == eval_file_of(expected)
    assert read_back(path) == expected
    assert set(os.listdir(path.parent)) == {path.name, "lock"}
    tokens = sum(len(text) for context, texts, _ in expected for text in (context, *texts))
    longest = max(len(context) + len(text) for context, texts, _ in expected for text in texts)
    counts = f"{len(records)} examples of {len(choices[0])} choices, {tokens} tokens ({tokenizer})"
    command = f"python train_gpt2.py ... --hellaswag '{path}'"
    assert capsys.readouterr().out == f"{counts}, the longest {longest}: {command}\n"


def test_unlike_numbers_of_choices_are_named(tmp_path, capsys):
    (first, *_), (second, *_) = LAYOUTS["HellaSwag"][0], LAYOUTS["plain"][0]
    flags = ("--multiple-choice", jsonl(tmp_path / "a.jsonl", first, second, first))
    assert prepare(tmp_path, *flags) == 0
    assert "3 examples of 2 or 4 choices, " in capsys.readouterr().out


def without(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


[HELLASWAG, _], [SKIN, _], [PLAIN, *_] = ([q[0] for q in LAYOUTS[name]] for name in LAYOUTS)
TEST_SPLIT = "has no label (as HellaSwag's test split: use its validation split)"
NO_TEXT = "has a context or a choice that is empty or no text"
FOREIGN = "is not laid out as HellaSwag, ARC or question, choices, answer: "
BAD_RECORDS = [
    (HELLASWAG | {"label": ""}, TEST_SPLIT),
    (without(HELLASWAG, "label"), TEST_SPLIT),
    (SKIN | {"answerKey": None}, TEST_SPLIT),
    (without(PLAIN, "answer"), TEST_SPLIT),
    (HELLASWAG | {"label": 4}, "has label 4, which names 0 of 4 choices and not 1 of 2 or more"),
    (HELLASWAG | {"label": "-1"}, "has label '-1', which names 0 of 4 choices"),
    (HELLASWAG | {"label": True}, "has label True, which names 0 of 4 choices"),
    (HELLASWAG | {"label": 1.5}, "has label 1.5, which names 0 of 4 choices"),
    (HELLASWAG | {"label": [1]}, "has label [1], which names 0 of 4 choices"),
    (SKIN | {"answerKey": "D"}, "has label 'D', which names 0 of 3 choices"),
    (SKIN | {"choices": ARC | {"label": ["A", "A", "B"]}, "answerKey": "A"}, "names 2 of 3"),
    (SKIN | {"choices": ARC | {"label": ["A", "B"]}}, "has label 'B', which names 1 of 3 choices"),
    (PLAIN | {"answer": "C"}, "has label 'C', which names 0 of 2 choices"),
    (PLAIN | {"choices": ["B", "A"], "answer": "A"}, "has label 'A', which names 2 of 2 choices"),
    (PLAIN | {"choices": ["4"], "answer": 0}, "has label 0, which names 1 of 1 choices"),
    (HELLASWAG | {"endings": [*ENDINGS[:3], ""]}, NO_TEXT),
    (HELLASWAG | {"ctx": ""}, NO_TEXT),
    (HELLASWAG | {"ctx": None}, NO_TEXT),
    (PLAIN | {"choices": [3, 4]}, NO_TEXT),
    (PLAIN | {"choices": "34"}, NO_TEXT),
    (PLAIN | {"choices": None}, FOREIGN + "TypeError("),
    (PLAIN | {"question": {"stem": "2+2?"}}, FOREIGN + "TypeError("),
    (without(HELLASWAG, "ctx"), FOREIGN + "KeyError('question')"),
    (without(HELLASWAG, "endings"), FOREIGN + "KeyError('endings')"),
    (SKIN | {"choices": {"text": ["x", "y"]}}, FOREIGN + "KeyError('label')"),
    ("text", FOREIGN),
    ([HELLASWAG], FOREIGN),
    (7, FOREIGN),
    (HELLASWAG | {"ctx": "x" * 40_000}, "takes 80,122 bytes, more than the 65,535 of the format"),
]


def check_refused(line: bytes, why: str, folder: Path, capsys):
    """That it is one line that names file, line and cure, and that nothing is left behind."""
    (folder / "a.jsonl").write_bytes(json.dumps(HELLASWAG).encode() + b"\n\n" + line)
    assert prepare(folder / "data", "--multiple-choice", folder / "a.jsonl") == 2
    error = capsys.readouterr().err
    where = f"prepare_data.py: error: {folder / 'a.jsonl'}, line 3: "
    assert error.startswith(where) and why in error and error.count("\n") == 1
    assert error.endswith("; correct the line or leave it out\n")
    assert os.listdir(folder) == ["a.jsonl"]


@pytest.mark.parametrize(("record", "why"), BAD_RECORDS)
def test_a_bad_record_is_one_line_with_its_place(record, why, tmp_path, capsys):
    check_refused(json.dumps(record).encode(), why, tmp_path, capsys)


@pytest.mark.parametrize(("line", "why"), [
    (b'{"ctx": ', "Expecting value"), (b'{"ctx": "\xff"}', "can't decode"), (b"[" * 10**5, FOREIGN),
], ids=["cut", "not UTF-8", "deep"])  # fmt: skip
def test_a_line_that_is_no_json_is_one_line_with_its_place(line, why, tmp_path, capsys):
    check_refused(line, why, tmp_path, capsys)


def test_the_format_has_room_for_65534_bytes_and_65535_examples():
    def example(length: int) -> questions.Example:
        return questions.Example(np.zeros(length, "u2"), [np.zeros(1, "u2")] * 2, 0)

    words = questions.example_words(example(32_757), 65_534)
    assert words[:3].tolist() == [65535, 65_534, 65_534] and words.nbytes == 65_534
    with pytest.raises(ValueError, match="takes 65,536 bytes, more than the 65,535 of the format"):
        questions.example_words(example(32_758), 0)
    with pytest.raises(ValueError, match="is example 65,536, more than the 65,535 of the format"):
        questions.example_words(example(1), 65_535)


def test_questions_overwrite_nothing_and_leave_nothing_half_written(tmp_path, monkeypatch, capsys):
    flags = ("--multiple-choice", jsonl(tmp_path / "a.jsonl", HELLASWAG))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(tmp_path / "data", *flags)
    assert os.listdir(tmp_path / "data") == ["lock"]
    (tmp_path / "data" / "a.bin").write_bytes(b"mine")
    assert prepare(tmp_path / "data", *flags) == 2
    why = f"{tmp_path / 'data' / 'a.bin'} exists; move it away, or name another --data-dir\n"
    assert capsys.readouterr().err.endswith(f"error: {why}")
    assert content(tmp_path / "data")["a.bin"] == b"mine" and len(content(tmp_path / "data")) == 2


def write_questions(folder: Path, n: int, barrier, codes):
    write_examples = questions.write_examples

    def at_once(*args):
        barrier.wait(300)
        write_examples(*args)

    questions.write_examples = at_once
    flags = "--multiple-choice", folder / f"{n}" / "a.jsonl"
    codes.put(prepare(folder / "data", *flags))


@NEEDS_POSIX
def test_of_two_that_write_the_same_questions_at_once_one_wins_whole(tmp_path):
    """Repeated, since they must meet."""
    context = multiprocessing.get_context("fork")
    for n, records in enumerate(([HELLASWAG] * 400, [PLAIN] * 400)):
        (tmp_path / f"{n}").mkdir()
        jsonl(tmp_path / f"{n}" / "a.jsonl", *records)
        assert prepare(tmp_path / f"alone{n}", "--multiple-choice", tmp_path / f"{n}/a.jsonl") == 0
    whole = [(tmp_path / f"alone{n}" / "a.bin").read_bytes() for n in (0, 1)]
    for _ in range(10):
        barrier, codes = context.Barrier(2), context.SimpleQueue()
        processes = [
            context.Process(target=write_questions, args=(tmp_path, n, barrier, codes))
            for n in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        assert sorted([codes.get(), codes.get()]) == [0, 2]
        assert set(os.listdir(tmp_path / "data")) == {"a.bin", "lock"}
        assert (tmp_path / "data" / "a.bin").read_bytes() in whole
        (tmp_path / "data" / "a.bin").unlink()


def test_a_file_without_questions_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    assert prepare(tmp_path / "data", "--multiple-choice", tmp_path / "a.jsonl") == 2
    assert f"no questions in {tmp_path / 'a.jsonl'}; name another" in capsys.readouterr().err
    assert prepare(tmp_path / "data", "--multiple-choice", tmp_path / "b.jsonl") == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("name", ["hellaswag_val", "hellaswag_train", "train_val", "zval"])
def test_questions_in_a_data_folder_are_no_shard(name, texts, tmp_path):
    folder, flags = tmp_path / "data", ("--input", texts, "--shard-tokens", 10_000)
    assert prepare(folder, *flags) == 0
    before = open_folder(folder)
    questions = jsonl(tmp_path / f"{name}.jsonl", HELLASWAG)
    assert prepare(folder, "--multiple-choice", questions) == 0
    assert prepare(folder, "--verify") == 0 and open_folder(folder) == before
    (folder / "manifest.json").unlink()
    after = open_folder(folder)
    assert [s.path for s in after.train] == [s.path for s in before.train]
    assert [s.path for s in after.val] == [s.path for s in before.val]
