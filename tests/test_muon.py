"""Tests ../support/muon.py: beside a plain implementation in float64, PyTorch's AdamW, and an exact
decomposition."""

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from support import muon
from support.muon import MuonAdamW, orthogonalize
from support.world import World

SHAPE = GPTConfig(vocab_size=11, seq_len=8, n_layer=3, n_head=2, n_embd=16)
ALONE = World(0, 1, torch.device("cpu"))


def make(kind: str) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a model, and an optimizer for it: "adamw", or Muon in "float32" or "bfloat16"."""
    model = GPT(SHAPE)
    decayed, others = model.decay_groups()
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "fused": True}
    if kind == "adamw":
        return model, torch.optim.AdamW(groups, **options)
    return model, MuonAdamW(groups, model.matrices(), kind == "bfloat16", ALONE, **options)


def set_gradients(model: GPT, seed: int):
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=rng)
        if "wte" in name:
            p.grad[SHAPE.vocab_size :] = 0  # of the padded rows


def test_matrices_of_the_blocks():
    model = GPT(SHAPE)
    names = {p: name for name, p in model.named_parameters()}
    matrices = {names[p]: rows for p, rows in model.matrices()}
    assert [*matrices] == [n for n in names.values() if ".c_" in n and n.endswith("weight")]
    assert len(matrices) == 4 * SHAPE.n_layer
    for name, rows in matrices.items():
        assert rows == ([16] * 3 if "c_attn" in name else [len(model.get_parameter(name))])


class PlainMuon:
    """One matrix, in float64, one operation after the other."""

    def __init__(self, weight: np.ndarray):
        self.weight = weight.astype(np.float64)
        self.momentum = np.zeros_like(self.weight)
        self.row_moment = np.zeros(len(weight))

    def step(self, grad: np.ndarray):
        self.momentum = 0.95 * self.momentum + 0.05 * grad
        x = 0.05 * grad + 0.95 * self.momentum
        x /= np.sqrt((x**2).sum())
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        self.row_moment = 0.95 * self.row_moment + 0.05 * (x**2).mean(axis=1)
        x /= np.sqrt(self.row_moment)[:, None]
        x *= 0.2 / np.sqrt((x**2).mean())
        self.weight -= 0.01 * (0.1 * self.weight + x)


@pytest.mark.parametrize("most", [1 << 25, 700])
def test_plain_implementation(monkeypatch, most):
    """q, k and v apart; one matrix after the other, or many at a time."""
    monkeypatch.setattr(muon, "MAX_ENTRIES", most)
    model, optimizer = make("float32")
    plain = {}
    for name, p in model.transformer.h.named_parameters():
        if p.dim() == 2:
            parts = np.split(p.detach().numpy(), 3 if "c_attn" in name else 1)
            plain[p] = [PlainMuon(part) for part in parts]
    for step in range(3):
        set_gradients(model, step)
        for p, parts in plain.items():
            for part, grad in zip(parts, np.split(p.grad.numpy(), len(parts)), strict=True):
                part.step(grad.astype(np.float64))
        optimizer.step()
    for p, parts in plain.items():
        expected = torch.tensor(np.concatenate([part.weight for part in parts]))
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_other_parameters():
    ours, optimizer = make("float32")
    theirs, adamw = make("adamw")
    for step in range(5):
        for model in (ours, theirs):
            set_gradients(model, step)
        optimizer.step()
        adamw.step()
    matrices = {id(p) for p, _ in ours.matrices()}
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) == (id(p) not in matrices), name
    assert not ours.lm_head.weight[SHAPE.vocab_size :].any()
    assert ours.lm_head.weight[: SHAPE.vocab_size].all()


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24), (1, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values(shape, dtype):
    rng = np.random.default_rng(0)
    u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = np.linspace(1, 0.01, s.size).reshape(s.shape)  # the last ones of chance may be near 0
    low, high, most = (0.68, 1.21, 1e-3) if dtype == torch.float32 else (0.6, 1.3, 0.1)
    matrices = torch.tensor(u * s[:, None] @ vt, dtype=torch.float32)
    results = orthogonalize(matrices, dtype).double().numpy()
    for i, result in enumerate(results):
        inner = u[i].T @ result @ vt[i].T
        values = np.diag(inner)
        assert low < values.min() and values.max() < high
        assert np.abs(inner - np.diag(values)).max() < most
