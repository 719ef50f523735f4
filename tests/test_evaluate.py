"""Tests ../evaluate.py: what it measures, by independent computations, and as a program."""

import csv
import itertools
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPT2, jsonl, questions, records, run, train, write_shard
from test_model import TINY, hugging_face

import evaluate
from config import TrainConfig
from dataloader import ShardLoader, open_shard
from evaluate import Question, open_questions
from model import GPT, GPTConfig
from support.checkpoint import load_model, save_weights
from support.cli import UserError
from support.tokenizer import bytes_tokenizer, gpt2_tokenizer
from support.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
CONFIG = TrainConfig(bf16=False, warmup_steps=0)
BYTES = bytes_tokenizer()
EITHER_TOKENIZER = pytest.mark.parametrize(
    "name", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)]
)
ASKED = ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_tokens")


# ---- Validation ----------------------------------------------------------------------------------


@EITHER_TOKENIZER
def test_bits_per_byte(tmp_path, name):
    """Of a set that begins with single letters and ends with long words, for any number of tokens,
    against the text itself and the losses of each sequence."""
    tokenizer = BYTES if name == "bytes" else gpt2_tokenizer()
    end = tokenizer.end_of_text
    texts = ["1 a\n"] * 40 + ["", "é" * 9, "🙂"] + [" international understanding" * 9] * 9
    ids = np.array([i for text in texts for i in (end, *tokenizer.encode(text))])
    sizes = np.array([0 if i == end else len(tokenizer.tokens[i]) for i in ids])
    assert sizes.sum() == len("".join(texts).encode())
    begins = [[b & 0xC0 != 0x80 for b in tokenizer.tokens[i]] for i in ids]  # a character
    counts = np.array([0 if i == end else sum(begun) for i, begun in zip(ids, begins, strict=True)])
    assert counts.sum() == len("".join(texts))
    for file, part in (("val_0.bin", ids[:301]), ("val_1.bin", ids[301:])):
        write_shard(tmp_path / file, part)
    shards = [open_shard(path) for path in sorted(tmp_path.iterdir())]
    model, ratios = GPT(GPTConfig(end + 1, 60, 1, 1, 4)), set()
    for T, eval_tokens in itertools.product((7, 60), (1, 200, 10_000)):
        starts = [i for a, z in ((0, 301), (301, len(ids))) for i in range(a, z - T, T)]
        starts = starts[: max(1, eval_tokens // T)]
        num_bytes = sum(sizes[i + 1 : i + 1 + T].sum() for i in starts)
        rows = torch.tensor(np.array([ids[i : i + T + 1] for i in starts]))
        with torch.no_grad():
            loss = model(rows[:, :-1], rows[:, 1:]).item()
        config = replace(CONFIG, eval_tokens=eval_tokens, seq_len=T)
        loader = ShardLoader(shards, 3, T)
        figures = evaluate.validate(model, model, loader, tokenizer, config, ALONE)
        assert figures["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        bits = figures["val_loss"] / math.log(2) * T * len(starts)
        assert figures["bits_per_byte"] == pytest.approx(bits / num_bytes)
        num_chars = sum(counts[i + 1 : i + 1 + T].sum() for i in starts)
        assert figures["bits_per_character"] == pytest.approx(bits / num_chars)
        ratios.add(round(num_bytes / len(starts) / T, 1))
    assert len(ratios) > (2 if name == "gpt2" else 1)
    figures = evaluate.validate(model, model, loader, None, config, ALONE)
    assert figures.keys() == {"val_loss", "perplexity"}  # without a vocabulary


def test_stop_cuts_evaluations_short(data_dir, tmp_path):
    model = GPT(GPTConfig(257, 16, 1, 1, 4))
    loader = ShardLoader([open_shard(data_dir / "train_000000.bin")], 1, 4)
    config = replace(CONFIG, eval_tokens=400, prompt="a")
    assert evaluate.validate(model, model, loader, BYTES, config, ALONE, True)["val_loss"] == 0
    assert evaluate.samples(model, BYTES, config, True) == "a"
    asked = open_questions(str(questions(tmp_path)), BYTES, 257)
    assert not any(evaluate.answers(model, asked, config.dtype, ALONE, True).values())


# ---- Questions -----------------------------------------------------------------------------------

ENDINGS = ["uses wrap.", "rips tiles off\u2026", "<|endoftext|>", " starts"]
RECORD = {"ind": 24, "ctx": "A man. he", "endings": ENDINGS, "label": 3}


@EITHER_TOKENIZER
def test_questions(name, tmp_path):
    tokenizer = BYTES if name == "bytes" else gpt2_tokenizer()
    context = "<|endoftext|> caf\u00e9 "
    path = jsonl(tmp_path / "a.jsonl", RECORD, RECORD | {"ctx": context, "label": "0"})
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as Windows has it

    def ids(text: str) -> list[int]:
        if name == "bytes":
            return list(text.encode())
        import tiktoken

        return tiktoken.get_encoding("gpt2").encode_ordinary(text)

    choices = [ids(f" {text}") for text in ENDINGS]
    sizes = [len(text) for text in ENDINGS]
    expected = [Question(ids("A man. he"), choices, sizes, 3)]
    expected.append(Question(ids(context), choices, sizes, 0))
    assert open_questions(str(path), tokenizer, tokenizer.size) == expected
    assert open_questions("", tokenizer, tokenizer.size) == []


BAD = [RECORD | {"label": 4}, RECORD | {"label": "-1"}, {"ctx": "a", "endings": ENDINGS}, 7]


def test_no_questions(tmp_path):
    path = tmp_path / "a.jsonl"
    for line in (*map(json.dumps, BAD), '{"ctx": ', "\x00"):
        path.write_text(json.dumps(RECORD) + "\n" + line)
        with pytest.raises(UserError, match=r"^--hellaswag .*a.jsonl, line 2"):
            open_questions(str(path), BYTES, 257)
    path.write_bytes(np.array([20240522, 1], "<i4").tobytes())  # llm.c's
    for name in (path, tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="--hellaswag"):
            open_questions(str(name), BYTES, 257)
    for tokenizer, size in ((None, 257), (BYTES, 65)):
        with pytest.raises(UserError, match="tokenizer"):
            open_questions(str(path), tokenizer, size)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_independent_scoring(count, tmp_path):
    """Questions, one at a time, by transformers, as the lm-evaluation-harness scores them. Of what
    is too long, the start is cut off."""
    oracle = hugging_face(GPTConfig(257, 20, 2, 2, 32), spread=0.1)
    oracle.save_pretrained(tmp_path / "hf")
    path = questions(tmp_path, count)
    right = {"hellaswag_acc": [], "hellaswag_acc_norm_tokens": [], "hellaswag_acc_norm": []}
    all_sums = []
    for question in map(json.loads, path.read_text().splitlines()):
        likelihoods = []
        for ending in question["endings"]:
            context, answer = question["ctx"].encode(), b" " + ending.encode()
            ids = torch.tensor([list(context + answer)[-21:]])
            with torch.no_grad():
                log_probs = oracle(ids[:, :-1]).logits[0].log_softmax(dim=-1)
            scores = log_probs.gather(1, ids[0, 1:, None])
            likelihoods.append(scores[-len(answer) :].sum().item())
        sizes = np.array([len(ending) for ending in question["endings"]])
        best = [np.argmax(np.array(likelihoods) / divisor) for divisor in (1, sizes + 1, sizes)]
        all_sums.append(-np.array(likelihoods))
        for name, choice in zip(right, best, strict=True):
            right[name].append(choice == question["label"])
    model, _ = load_model(str(tmp_path / "hf"))
    asked = open_questions(str(path), BYTES, 257)
    losses = [evaluate.choice_losses(model, question, CPU) for question in asked]
    np.testing.assert_allclose(losses, all_sums, rtol=1e-4)
    shares = evaluate.answers(model, asked, CONFIG.dtype, ALONE)
    assert shares == {name: pytest.approx(np.mean(values)) for name, values in right.items()}
    assert len({*shares.values()}) > 1


# ---- Texts ---------------------------------------------------------------------------------------

TEXTS = {
    "emoji": "a 🙂🙂\r\né中文 <|endoftext|>" * 5,
    "one": "x",
    "empty": "",
    "words": "so it goes. " * 9,
}


@pytest.mark.parametrize("T", [1, 7, 20])
def test_scores_of_texts(T, tmp_path, capsys, monkeypatch):
    """By transformers, from one window for each token."""
    monkeypatch.chdir(tmp_path)
    oracle = hugging_face(GPTConfig(257, T, 2, 2, 32), spread=0.1)
    oracle.save_pretrained("hf")
    for name, content in BYTES.files().items():
        (tmp_path / "hf" / name).write_bytes(content)
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text.encode())
    line = ["hf", "--text", *TEXTS, "--tokens", "out.csv"]
    assert evaluate.main(line) == 0
    said = capsys.readouterr().out.splitlines()
    with open("out.csv", newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    total = 0.0
    for name, text in TEXTS.items():
        ids, nats = [256, *text.encode()], 0.0
        for i in range(1, len(ids)):
            row = rows.pop(0)
            start = 0 if i <= T else math.ceil((i - T) / math.ceil(T / 2)) * math.ceil(T / 2)
            with torch.no_grad():
                log_probs = oracle(torch.tensor([ids[start:i]])).logits[0, -1].log_softmax(-1)
            surprisal = -log_probs[ids[i]].item()
            nats += surprisal
            assert float(row["bits"]) == pytest.approx(surprisal / math.log(2), abs=1e-5)
            assert int(row["rank"]) == 1 + (log_probs > log_probs[ids[i]]).sum()
            assert (row["file"], int(row["offset"])) == (name, i - 1)
            assert row["token"] == bytes([ids[i]]).decode(errors="backslashreplace")
            probs, tokens = log_probs.exp().topk(3)
            for k, (prob, token) in enumerate(zip(probs.tolist(), tokens.tolist(), strict=True), 1):
                assert row[f"token{k}"] == BYTES.token_text(token)
                assert float(row[f"p{k}"]) == pytest.approx(prob, abs=1e-6)
        total += nats
        counts = f"{len(ids) - 1} tokens, {len(text)} characters, "
        mean = nats / max(1, len(ids) - 1)
        assert said.pop(0).startswith(f"{name}: {counts}nats per token {mean:.4f}, perplexity")
    assert not rows
    num_bytes, num_chars = len("".join(TEXTS.values()).encode()), len("".join(TEXTS.values()))
    bits = total / math.log(2)
    [last] = said
    assert last.startswith(f"4 texts: {num_bytes} tokens, {num_chars} characters, ")
    ends = f"bits per byte {bits / num_bytes:.4f}, bits per character {bits / num_chars:.4f}"
    assert last.endswith(ends)
    for mistake in (line, line[:1] + line[-2:], ["hf", "--text", "nowhere"]):
        assert evaluate.main(mistake) != 0
        assert capsys.readouterr().err.count("\n") == 1


# ---- The program ---------------------------------------------------------------------------------


def evaluated(folder, ranks: int, *line) -> str:
    code, out, err = train([*map(str, line)], folder, ranks, script="evaluate")
    assert code == 0 and out.count("\n") == 1, err
    return out


def test_program(data_dir, tmp_path):
    """By any number of ranks, of all that a run measures. Dropout is off."""
    asked = {"hellaswag": questions(tmp_path, 33), "steps": 2, "warmup_steps": 0}
    asked |= {"dropout": 0.2, "learning_rate": 0.0}
    one, two = (run(tmp_path, data_dir, f"{n}", n, **asked) for n in (1, 2))
    figures = {}
    for name in ("val_loss", "perplexity", "bits_per_byte", "bits_per_character", *ASKED):
        figures[name] = records(one, name)[2]
        assert records(two, name)[2] == pytest.approx(figures[name], rel=1e-5)
    said = evaluate.format_metrics(figures)
    for ranks in (1, 2):
        assert said in evaluated(tmp_path, ranks, one)
    moved = shutil.copytree(one / "step_000002", tmp_path / "moved")
    assert said in evaluated(tmp_path, 1, moved)  # a checkpoint knows its run's flags
    (moved / "state.json").write_text("{}")  # others, as those before 1.0, do not
    loss = f"loss {figures['val_loss']:.4f}"
    out = evaluated(tmp_path, 1, moved, "--data-dir", data_dir, "--eval-tokens", 512)
    assert f"{loss}," in out and "hellaswag" not in out
    out = evaluated(tmp_path, 1, one, "--eval-tokens", 0)
    assert "loss" not in out and "hellaswag acc " in out


def test_mistakes(data_dir, tmp_path, capsys):
    save_weights(tmp_path, GPT(TINY), None, "")  # of 97 tokens
    short = tmp_path / "short"
    short.mkdir()
    save_weights(short, GPT(GPTConfig(50257, 16, 1, 1, 4)), None, "")
    write_shard(short / "train.bin", np.arange(40))
    write_shard(short / "val.bin", np.arange(16))
    for line, word in (
        ([tmp_path, "--data-dir", data_dir], "0 to 96"),
        ([short, "--data-dir", short], "--seq-len 16"),
        ([tmp_path, "--data-dir", tmp_path / "none"], "--data-dir"),
        ([], "weights"),
    ):
        assert evaluate.main([*map(str, line)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and word in err
