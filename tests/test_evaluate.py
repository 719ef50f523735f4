"""Tests ../evaluate.py: what it measures, by independent computations, and as a program."""

import itertools
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPT2, jsonl, questions, records, run, train, write_shard
from test_model import TINY, hugging_face, spread, tokens
from torch.testing import assert_close

import evaluate
from config import TrainConfig
from dataloader import ShardLoader, open_shard
from evaluate import Question, open_questions
from model import GPT, GPTConfig, sample_token
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


class StopAfter:
    """Is asked so many times before it is true."""

    def __init__(self, count: int):
        self.left = count

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left < 0


# ---- Validation ----------------------------------------------------------------------------------


def test_validation_is_the_same_for_all_micro_batches_and_ranks(whole, data_dir, tmp_path):
    def first(out_dir):
        return records(out_dir, "val_loss")[0]

    for B, ranks in ((4, 1), (6, 2)):
        other = run(tmp_path, data_dir, f"{B}x{ranks}", ranks, micro_batch_size=B, steps=3)
        assert first(other) == pytest.approx(first(whole[1]), rel=1e-6)
    targets = np.fromfile(data_dir / "val_000000.bin", "<u2")[512:][1:513]  # 32 times 16
    for out_dir in (whole[1], other):
        expected = first(out_dir) / math.log(2) * 512 / (targets < 256).sum()
        assert records(out_dir, "bits_per_byte")[0] == pytest.approx(expected, rel=1e-12)


@EITHER_TOKENIZER
def test_loss_and_bits_per_byte_are_of_what_was_predicted(tmp_path, name):
    """Of a set that begins with single letters and ends with long words, for any number of tokens,
    against the text itself and the losses of each sequence."""
    tokenizer = BYTES if name == "bytes" else gpt2_tokenizer()
    end = tokenizer.end_of_text
    texts = ["1 a\n"] * 40 + ["", "é" * 9, "🙂"] + [" international understanding" * 9] * 9
    ids = np.array([i for text in texts for i in (end, *tokenizer.encode(text))])
    sizes = np.array([0 if i == end else len(tokenizer.token_bytes(i)) for i in ids])
    assert sizes.sum() == len("".join(texts).encode())
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
        bits = figures["val_loss"] / math.log(2) * T * len(starts) / num_bytes
        assert figures["bits_per_byte"] == pytest.approx(bits)
        ratios.add(round(num_bytes / len(starts) / T, 1))
    assert len(ratios) > (2 if name == "gpt2" else 1)
    figures = evaluate.validate(model, model, loader, None, config, ALONE)
    assert figures.keys() == {"val_loss", "perplexity"}  # without a vocabulary


class Counted(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, *args):
        self.calls += 1
        return self.model(*args)


def test_a_signal_to_stop_cuts_an_evaluation_short(data_dir, tmp_path):
    loader = ShardLoader([open_shard(data_dir / "train_000000.bin")], 1, 4)
    net = Counted(spread(GPT(GPTConfig(257, 16, 1, 1, 4))))
    config = replace(CONFIG, eval_tokens=4 * 65, num_samples=1, prompt="a", temperature=0)
    for asked, calls in ((99, 65), (5, 5)):
        net.calls = 0
        evaluate.validate(net, net.model, loader, BYTES, config, ALONE, StopAfter(asked))
        assert net.calls == calls and net.training
    short = replace(config, eval_tokens=4 * 64)  # for which no forward pass is compiled
    evaluate.validate(net, net.model, loader, BYTES, short, ALONE)
    assert net.calls == calls
    whole = evaluate.samples(net.model, BYTES, config, StopAfter(999))
    cut = evaluate.samples(net.model, BYTES, config, StopAfter(2))
    assert len(cut) < len(whole) and whole.startswith(cut)
    asked = open_questions(str(questions(tmp_path, 9)), BYTES, 257)
    calls = []
    features = net.model.features
    net.model.features = lambda *args: calls.append(1) or features(*args)
    evaluate.answers(net.model, asked, CONFIG.dtype, ALONE, StopAfter(3))
    assert len(calls) == 3 and net.model.training


# ---- Samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{"temperature": 0}, {"top_k": 3}, {"top_k": 0, "seed": 4}])
def test_a_cached_sample_is_the_one_of_whole_passes(flags):
    """Also where the network's positions are full, and the older half is dropped."""
    model = spread(GPT(replace(TINY, vocab_size=257))).eval()
    config = replace(CONFIG, prompt="ab", sample_tokens=40, **flags)
    rng = torch.Generator().manual_seed(evaluate.random_seed(config.seed, 2))
    idx, start = torch.tensor([[97, 98]]), 0
    while idx.shape[1] < 42:
        if idx.shape[1] - start > 16:
            start = idx.shape[1] - 8
        with torch.no_grad():
            logits = model.logits(idx[:, start:])[:, -1, :257]
        new = sample_token(logits, rng, config.temperature, config.top_k)
        if new == BYTES.end_of_text:
            break
        idx = torch.cat([idx, new], dim=1)
    assert idx.shape[1] > 20
    drawn = b"".join(evaluate.sample(model, BYTES, config, 2))
    assert drawn == bytes(idx[0, 2:].tolist())


def speaking(*positions: tuple[int, list[float]]) -> GPT:
    """A network that says the byte 'a' at each position, but what is given at these."""
    model = GPT(GPTConfig(257, 16, 1, 1, 4)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight[ord("a"), 0] = model.transformer.wte.weight[256, 1] = 1
        model.transformer.wte.weight[0xC3, 2] = 1
        model.transformer.wpe.weight[:, 0] = 2
        for position, channels in positions:
            model.transformer.wpe.weight[position] = torch.tensor(channels)
    return model


def test_a_sample_ends_with_the_document_and_a_whole_character():
    config = replace(CONFIG, prompt="one", num_samples=2, temperature=0)
    model = speaking((5, [0.0, 2, 0, 0]))
    assert evaluate.samples(model, BYTES, config, StopAfter(99)) == "oneaaa\n---\noneaaa"
    half = [(position, [0.0, 0, 2, 0]) for position in range(16)]  # the first byte of two
    config = replace(config, num_samples=1, sample_tokens=3)
    text = evaluate.samples(speaking(*half), BYTES, config, StopAfter(99))
    assert text.startswith("one") and {*text[3:]} == {"\ufffd"}


# ---- Questions -----------------------------------------------------------------------------------

ENDINGS = ["uses wrap.", "rips tiles off\u2026", "<|endoftext|>", " starts"]
RECORD = {"ind": 24, "ctx": "A man. he", "endings": ENDINGS, "label": 3}


@EITHER_TOKENIZER
def test_questions_become_tokens_of_context_and_choices_with_a_space(name, tmp_path):
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


BAD = [RECORD | {"label": ""}, RECORD | {"label": 4}, RECORD | {"label": "-1"},
       RECORD | {"label": [1]}, {"ctx": "a", "endings": ENDINGS}, RECORD | {"ctx": None},
       RECORD | {"endings": 7}, RECORD | {"endings": ["one"]}, "text", [RECORD], 7]  # fmt: skip


def test_what_is_no_question_is_refused_with_its_line(tmp_path):
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


def test_the_loss_of_a_choice_is_the_sum_over_its_tokens():
    model = spread(GPT(TINY)).eval()
    rows = [
        (tokens(n, seed=n), count) for n, count in ((5, 2), (17, 16), (9, 1), (30, 4), (40, 30))
    ]
    for context in (3, 9, 35):  # the last is longer than the network
        start = tokens(context, seed=context)
        choices = [row[-count:].tolist() for row, count in rows]
        question = Question(start.tolist(), choices, [1] * len(choices), 0)
        losses = evaluate.choice_losses(model, question, CPU)
        for choice, loss in zip(choices, losses, strict=True):
            row = torch.tensor([*start.tolist(), *choice])[-17:]  # what fits
            log_probs = model.logits(row[None, :-1])[0].log_softmax(dim=-1)
            expected = -log_probs.gather(1, row[1:, None])[-len(choice) :].sum()
            assert_close(torch.tensor(loss), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_choices_are_those_of_an_independent_scoring(count, tmp_path):
    """Questions, one at a time, by transformers, as the lm-evaluation-harness scores them."""
    oracle = hugging_face(GPTConfig(257, 32, 2, 2, 32), spread=0.1)
    oracle.save_pretrained(tmp_path / "hf")
    path = questions(tmp_path, count)
    right = {"hellaswag_acc": [], "hellaswag_acc_norm_tokens": [], "hellaswag_acc_norm": []}
    all_sums = []
    for question in map(json.loads, path.read_text().splitlines()):
        likelihoods = []
        for ending in question["endings"]:
            context, answer = question["ctx"].encode(), b" " + ending.encode()
            ids = torch.tensor([list(context + answer)])
            with torch.no_grad():
                log_probs = oracle(ids).logits[0].log_softmax(dim=-1)
            scores = log_probs[:-1].gather(1, ids[0, 1:, None])
            likelihoods.append(scores[len(context) - 1 :].sum().item())
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


# ---- The program ---------------------------------------------------------------------------------


def evaluated(folder, ranks: int, *line) -> str:
    code, out, err = train([*map(str, line)], folder, ranks, script="evaluate")
    assert code == 0 and out.count("\n") == 1, err
    return out


def test_evaluate_py_says_what_the_run_said(data_dir, tmp_path):
    """By any number of ranks, of all that a run measures."""
    asked = {"hellaswag": questions(tmp_path, 33), "steps": 2, "warmup_steps": 1}
    one, two = (run(tmp_path, data_dir, f"{n}", n, **asked) for n in (1, 2))
    figures = {}
    for name in ("val_loss", "perplexity", "bits_per_byte", *ASKED):
        figures[name] = records(one, name)[2]
        assert records(two, name)[2] == pytest.approx(figures[name], rel=1e-5)
    said = evaluate.format_metrics(figures)
    for ranks in (1, 2):
        assert said in evaluated(tmp_path, ranks, one)
    moved = shutil.copytree(one / "step_000002", tmp_path / "moved")
    assert said in evaluated(tmp_path, 1, moved)  # a checkpoint knows its run's flags
    (moved / "state.json").unlink()  # other weights do not
    loss = f"loss {figures['val_loss']:.4f}"
    out = evaluated(tmp_path, 1, moved, "--data-dir", data_dir, "--eval-tokens", 512)
    assert f"{loss}," in out and "hellaswag" not in out
    out = evaluated(tmp_path, 1, one, "--eval-tokens", 0)
    assert "loss" not in out and "hellaswag acc " in out


def test_a_mistake_of_evaluate_py_is_one_line(data_dir, tmp_path, capsys):
    save_weights(tmp_path, GPT(TINY), None, "")  # of 97 tokens
    for line, word in (
        ([tmp_path, "--data-dir", data_dir], "0 to 96"),
        ([tmp_path, "--data-dir", tmp_path / "none"], "--data-dir"),
        ([tmp_path, "--learning-rate", 3], "--learning-rate"),
        ([tmp_path, "--data-dir", data_dir, "--eval-tokens", -1], "--eval-tokens"),
        ([], "weights"),
    ):
        assert evaluate.main([*map(str, line)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and word in err
