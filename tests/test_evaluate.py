"""Tests ../support/evaluate.py, and what train_gpt2.py measures by it."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPT2, questions, records, run, write_shard
from test_model import TINY, hugging_face, spread, tokens
from torch.testing import assert_close

from config import TrainConfig
from dataloader import VOCAB_SIZES, ShardLoader, open_shard
from model import GPT, GPTConfig
from support import evaluate
from support.evaluate import open_questions
from support.pretrained import load_weights, read_weights
from support.ranks import World
from support.tokenizer import load_tokenizer

ALONE = World(0, 1, torch.device("cpu"))
CONFIG = TrainConfig(bf16=False, warmup_steps=0)


def test_validation_is_the_same_for_all_micro_batches_and_ranks(whole, data_dir, tmp_path):
    def first(out_dir):
        return records(out_dir, "val_loss")[0]

    for B, ranks in ((4, 1), (6, 2)):
        other = run(tmp_path, data_dir, f"{B}x{ranks}", ranks, micro_batch_size=B, steps=3)
        assert first(other) == pytest.approx(first(whole[3]), rel=1e-6)
    targets = np.fromfile(data_dir / "val_000000.bin", "<u2")[512:][1:513]  # 32 times 16
    expected = first(whole[1]) / math.log(2) * 512 / (targets < 256).sum()
    assert records(whole[1], "bits_per_byte")[0] == pytest.approx(expected, rel=1e-12)


class BesideOneWithoutTokenizer(World):
    def gather(self, value) -> list:
        return [value, None]


def test_ranks_without_the_tokenizer_leave_no_wrong_bits_per_byte(whole, data_dir):
    loader = ShardLoader([open_shard(data_dir / "val_000000.bin")], 4, 16)
    model = GPT(GPTConfig(257, 16, 1, 1, 4))
    config = TrainConfig(bf16=False, warmup_steps=0, eval_tokens=64)
    found = []
    for kind in (World, BesideOneWithoutTokenizer):
        world = kind(0, 1, torch.device("cpu"))
        found.append(evaluate.validate(model, model, loader, "bytes", config, world))
    assert found[0]["val_loss"] == found[1]["val_loss"]
    assert "bits_per_byte" in found[0] and "bits_per_byte" not in found[1]


@pytest.mark.parametrize(("batches", "is_compiled"), [(64, False), (65, True)])
def test_a_short_validation_compiles_no_forward_pass(data_dir, batches, is_compiled):
    class Compiled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.calls = model, 0

        def forward(self, *args):
            self.calls += 1
            return self.model(*args)

    loader = ShardLoader([open_shard(data_dir / "train_000000.bin")], 1, 4)
    model = GPT(GPTConfig(257, 16, 1, 1, 4))
    net = Compiled(model)
    config = TrainConfig(bf16=False, warmup_steps=0, eval_tokens=4 * batches)
    evaluate.validate(net, model, loader, "bytes", config, World(0, 1, torch.device("cpu")))
    assert net.calls == (batches if is_compiled else 0)


def test_a_sample_ends_with_the_document_and_the_next_one_begins():
    """A network that says a a a <|endoftext|>, by position, whatever it has read."""
    model = GPT(GPTConfig(257, 16, 1, 1, 4)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight[ord("a"), 0] = model.transformer.wte.weight[256, 1] = 1
        model.transformer.wpe.weight[:, 0] = 2
        model.transformer.wpe.weight[5] = torch.tensor([0.0, 2, 0, 0])
    config = TrainConfig(bf16=False, warmup_steps=0, prompt="one", num_samples=2, temperature=0)
    assert evaluate.samples(model, "bytes", config) == "oneaaa\n---\noneaaa"


def test_a_sample_never_ends_inside_a_character():
    """A network that always says the first byte of two."""
    model = GPT(GPTConfig(257, 16, 1, 1, 4)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wte.weight[0xC3, 0] = 1
        model.transformer.wpe.weight[:, 0] = 2
    config = TrainConfig(bf16=False, warmup_steps=0, prompt="one", temperature=0, sample_tokens=3)
    assert evaluate.samples(model, "bytes", config) == "one\ufffd\ufffd"


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=NEEDS_GPT2)])
def test_bits_per_byte_are_of_the_bytes_that_were_predicted(tmp_path, name):
    """Of a set that begins with single letters and ends with long words, for any number of tokens,
    against the text itself and the losses of each sequence."""
    tokenizer, end = load_tokenizer(name), VOCAB_SIZES[name] - 1
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
        config = TrainConfig(bf16=False, warmup_steps=0, eval_tokens=eval_tokens, seq_len=T)
        loader = ShardLoader(shards, 3, T)
        figures = evaluate.validate(model, model, loader, name, config, ALONE)
        assert figures["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        bits = figures["val_loss"] / math.log(2) * T * len(starts) / num_bytes
        assert figures["bits_per_byte"] == pytest.approx(bits)
        ratios.add(round(num_bytes / len(starts) / T, 1))
    assert len(ratios) > (2 if name == "gpt2" else 1)
    figures = evaluate.validate(model, model, loader, "unknown", config, ALONE)
    assert figures.keys() == {"val_loss", "perplexity"}  # without a vocabulary


def test_the_loss_of_an_answer_is_the_sum_over_its_tokens():
    model = spread(GPT(TINY))
    rows = [(tokens(n, seed=n), count) for n, count in ((5, 2), (17, 16), (9, 1), (30, 4))]
    asked = [np.split(row.numpy(), [-count]) for row, count in rows]
    losses = evaluate.batch_losses(model, asked, torch.device("cpu"))
    for (row, count), loss in zip(rows, losses, strict=True):
        row = row[-17:]  # what fits
        log_probs = model.logits(row[None, :-1])[0].log_softmax(dim=-1)
        expected = -log_probs.gather(1, row[1:, None])[-count:].sum()
        assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_choices_are_those_of_an_independent_scoring(count, tmp_path):
    """Questions, one at a time, by transformers, as the lm-evaluation-harness scores them."""
    oracle = hugging_face(GPTConfig(257, 32, 2, 2, 32), spread=0.1)
    oracle.save_pretrained(tmp_path / "hf")
    path = questions(tmp_path, count)
    right = {"hellaswag_acc": [], "hellaswag_acc_norm_tokens": [], "hellaswag_acc_norm": []}
    choices = []
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
        choices.append(best[0])
        for name, choice in zip(right, best, strict=True):
            right[name].append(choice == question["label"])
    pretrained = read_weights(tmp_path / "hf")
    model = GPT(pretrained.shape)
    load_weights(model, pretrained)
    examples = open_questions(str(path), 257, "bytes")
    losses = evaluate.choice_losses(model, examples, ALONE.device)
    assert [sums.argmin() for sums in losses] == choices
    shares = evaluate.answers(model, examples, CONFIG, ALONE)
    assert shares == {name: pytest.approx(np.mean(values)) for name, values in right.items()}
    assert len({*shares.values()}) > 1


def test_ranks_share_the_questions(data_dir, tmp_path):
    asked = {"hellaswag": questions(tmp_path, 33), "steps": 2, "warmup_steps": 1}
    one, two = (run(tmp_path, data_dir, f"{n}", n, **asked) for n in (1, 2))
    for name in ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_tokens"):
        assert records(one, name) == pytest.approx(records(two, name))
