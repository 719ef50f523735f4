"""Tests ../support/convert.py: what nanoGPT and build-nanogpt save becomes a folder in Hugging
Face's format, and nothing in a file is executed. The oracle is transformers."""

import os
import pickle
import sys
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPT2, content
from test_checkpoint import Evil
from test_model import TINY, spread, tokens

from model import GPT, GPTConfig
from support import convert
from support.checkpoint import load_model
from support.tokenizer import gpt2_tokenizer

PADDED = GPTConfig(vocab_size=50304, seq_len=16, n_layer=2, n_head=2, n_embd=8, pad_vocab=False)


def nanogpt(shape: GPTConfig, prefix: str = "", bias: bool = True) -> tuple[GPT, dict]:
    """Return a network, and it as nanoGPT saves it."""
    model = GPT(replace(shape, pad_vocab=False))
    if bias:
        spread(model)
    weights = {n: p for n, p in model.state_dict().items() if bias or "bias" not in n}
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # its mask
    weights = {prefix + name: tensor for name, tensor in weights.items()}
    args = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd}
    args |= {"block_size": shape.seq_len, "vocab_size": shape.vocab_size, "dropout": 0.1}
    saved = {"model": weights, "model_args": args | {"bias": bias}, "iter_num": 5}
    return model, saved | {"best_val_loss": torch.tensor(3.0), "optimizer": {"state": {}}}


def check(path: Path, model: GPT):
    """Check that a folder is this network, for transformers and for us."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ours, _ = load_model(str(path))
    V = oracle.config.vocab_size
    idx = tokens(2, 16, vocab_size=V)
    logits = model.logits(idx)[..., :V]
    for other in (oracle(idx).logits, ours.logits(idx)[..., :V]):
        assert (other - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize(("prefix", "bias"), [("", True), ("module._orig_mod.", False)])
def test_nanogpt(tmp_path, prefix, bias):
    model, saved = nanogpt(TINY, prefix, bias)
    torch.save(saved, tmp_path / "ckpt.pt")
    path = tmp_path / "hf"
    assert convert.main([str(tmp_path / "ckpt.pt"), str(path)]) == 0
    check(path, model)
    back = load_model(str(path))[0].state_dict()
    assert all(torch.equal(p[:97], back[name][:97]) for name, p in model.state_dict().items())
    before = content(path)
    assert convert.main([str(tmp_path / "ckpt.pt"), str(path)])  # nothing is overwritten
    assert content(path) == before


@NEEDS_GPT2
def test_build_nanogpt(tmp_path, monkeypatch):
    """It holds an object of a class that this process must not need."""
    names = ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"]
    theirs = make_dataclass("GPTConfig", names)
    theirs.__module__ = "__main__"
    model = spread(GPT(PADDED))
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "GPTConfig", theirs, raising=False)
        config = theirs(16, 50304, 2, 2, 8)
        torch.save({"model": model.state_dict(), "config": config, "step": 9}, tmp_path / "m.pt")
    assert convert.main([str(tmp_path / "m.pt"), str(tmp_path / "hf")]) == 0
    check(tmp_path / "hf", model)
    ours, tokenizer = load_model(str(tmp_path / "hf"))
    assert ours.config == replace(PADDED, vocab_size=50257, pad_vocab=ours.config.pad_vocab)
    assert tokenizer.sha256 == gpt2_tokenizer().sha256
    assert torch.equal(ours.lm_head.weight[:50257], model.lm_head.weight[:50257])


_, PLAIN = nanogpt(TINY)
ARGS, WEIGHTS = PLAIN["model_args"], PLAIN["model"]
NO_CHECKPOINTS = {
    "text": b"no archive",
    "an evil pickle": pickle.dumps(Evil(), protocol=2),
    "an evil weight": PLAIN | {"model": WEIGHTS | {"x": Evil()}},
    "heads": PLAIN | {"model_args": ARGS | {"n_head": 7}},
    "more layers": PLAIN | {"model_args": ARGS | {"n_layer": 3}},
    "another shape": PLAIN | {"model": WEIGHTS | {"transformer.wpe.weight": torch.ones(3)}},
}


@pytest.mark.parametrize("what", NO_CHECKPOINTS)
def test_no_checkpoint(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    saved = NO_CHECKPOINTS[what]
    if isinstance(saved, bytes):
        Path("ckpt.pt").write_bytes(saved)
    else:
        torch.save(saved, "ckpt.pt")
    assert convert.main(["ckpt.pt", "hf"]) == 2
    err = capsys.readouterr().err
    assert "ckpt.pt" in err and err.count("\n") == 1
    assert os.listdir() == ["ckpt.pt"]
