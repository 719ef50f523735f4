"""Tests ../support/evaluate.py: validation, bits per byte, and questions asked."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import questions, records, run, write_shard

import dataloader
import train_gpt2
from model import GPT
from support import corpus
from support.files import missing_vocab
from support.questions import choice_losses, read_examples
from support.text import bytes_per_token, codec
from support.weights import read_source
from train_gpt2 import TrainConfig


def test_validation_is_the_same_for_all_micro_batches_and_ranks(whole, data_dir, tmp_path):
    def first(out_dir):
        return records(out_dir, "val_loss")[0]

    for B, ranks in ((4, 1), (6, 2)):
        other = run(tmp_path, data_dir, f"{B}x{ranks}", ranks, micro_batch_size=B, steps=3)
        assert first(other) == pytest.approx(first(whole[3]), rel=1e-6)
    tokens = np.fromfile(data_dir / "val_000000.bin", "<u2")[512:][1:513]  # 32 times 16 targets
    expected = first(whole[1]) / math.log(2) * 512 / (tokens < 256).sum()
    assert records(whole[1], "bits_per_byte")[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_bits_per_byte_are_of_the_bytes_that_were_predicted(tmp_path, tokenizer):
    """Of a set that begins with single letters and ends with long words, for any number of tokens,
    against the text itself."""
    if tokenizer == "gpt2" and missing_vocab():
        pytest.skip("GPT-2's vocabulary is not at hand")
    texts = ["1 a\n"] * 40 + ["", "é" * 9, "🙂"] + [" international understanding" * 9] * 9
    encode = codec(tokenizer).encode
    end = dataloader.VOCAB_SIZES[tokenizer] - 1
    pieces = [(i, b"") if i == end else (i, codec(tokenizer).decode(i))
              for text in texts for i in (end, *encode(text))]  # fmt: skip
    assert b"".join(piece for _, piece in pieces).decode() == "".join(texts)
    for name, part in (("val_0.bin", pieces[:301]), ("val_1.bin", pieces[301:])):
        write_shard(tmp_path / name, np.array([i for i, _ in part]))
    shards = corpus.find(tmp_path, "val")
    ratios = set()
    for T, eval_tokens in itertools.product((7, 16, 60), (1, 64, 200, 10_000)):
        starts = [i for a, z in ((0, 301), (301, len(pieces))) for i in range(a, z - T, T)]
        starts = starts[: max(1, eval_tokens // T)]
        size = sum(len(piece) for i in starts for _, piece in pieces[i + 1 : i + 1 + T])
        for B, rank, ranks in ((1, 0, 1), (3, 1, 2)):
            loader = dataloader.ShardLoader(shards, B, T, rank, ranks)
            count = train_gpt2.evaluate.num_sequences(loader, eval_tokens)
            ratio = bytes_per_token(loader, count, tokenizer)
            assert count == len(starts) and ratio == size / (T * len(starts))
            bits = train_gpt2.evaluate.in_units(2.5, ratio).get("bits_per_byte", math.inf)
            assert bits == pytest.approx(2.5 / math.log(2) * T * len(starts) / size)
        ratios.add(round(ratio, 1))
    assert len(ratios) > (2 if tokenizer == "gpt2" else 1)


def test_without_a_vocabulary_there_are_no_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    write_shard(tmp_path / "val.bin", np.arange(100))
    loader = dataloader.ShardLoader(corpus.find(tmp_path, "val"), 1, 9)
    for tokenizer in ("gpt2", "unknown"):
        ratio = bytes_per_token(loader, 5, tokenizer)
        assert train_gpt2.evaluate.in_units(1.0, ratio).keys() == {"val_loss", "perplexity"}


def test_choices_are_those_of_an_independent_scoring(tmp_path):
    """500 questions, one at a time, by transformers, as the lm-evaluation-harness scores them."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    oracle = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p += 0.1 * torch.randn(p.shape)
    oracle.save_pretrained(tmp_path / "hf")
    path = questions(tmp_path, 500)
    right = {"acc": [], "acc_norm": [], "acc_norm_chars": []}
    choices = []
    for line in (tmp_path / "questions.jsonl").read_text().splitlines():
        question = json.loads(line)
        likelihoods = []
        for ending in question["endings"]:
            context, answer = question["ctx"].encode(), b" " + ending.encode()
            ids = torch.tensor([list(context + answer)])
            with torch.no_grad():
                log_probs = oracle(ids).logits[0].log_softmax(dim=-1)
            likelihoods.append(sum(log_probs[len(context) + i - 1, byte].item()
                                   for i, byte in enumerate(answer)))  # fmt: skip
        sizes = [len(ending) for ending in question["endings"]]
        best = {
            "acc": np.argmax(likelihoods),
            "acc_norm": np.argmax(np.array(likelihoods) / (np.array(sizes) + 1)),
            "acc_norm_chars": np.argmax(np.array(likelihoods) / sizes),
        }
        choices.append(best["acc"])
        for name in right:
            right[name].append(best[name] == question["label"])
    examples, source = read_examples(path), read_source(str(tmp_path / "hf"), print)
    model = GPT(source.shape)
    model.load_state_dict(source.weights(source.shape))
    config, world = TrainConfig(bf16=False, warmup_steps=1), train_gpt2.ranks.find_world({}, 0)
    cast = partial(train_gpt2.autocast, config, world.device)
    ours = choice_losses(model, examples, range(500), world.device, cast, world.note)
    assert [losses.argmin() for losses in ours] == choices
    shares = train_gpt2.evaluate.answers(model, examples, "bytes", world, cast)
    assert shares == {name: pytest.approx(np.mean(values)) for name, values in right.items()}
    assert len({*shares.values()}) > 1


def test_ranks_share_the_questions(data_dir, tmp_path):
    asked = {"hellaswag": questions(tmp_path, 33), "steps": 2, "warmup_steps": 1}
    names = ("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_acc_norm_chars")
    one, two = (run(tmp_path, data_dir, f"{n}", n, **asked) for n in (1, 2))
    for name in names:
        assert records(one, name) == pytest.approx(records(two, name))
