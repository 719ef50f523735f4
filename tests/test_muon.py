"""Tests ../support/muon.py: beside PyTorch's Muon and AdamW, and an exact decomposition."""

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from support import muon
from support.muon import MuonAdamW, orthogonalize

SHAPE = GPTConfig(vocab_size=11, seq_len=8, n_layer=3, n_head=2, n_embd=16)


def make(kind: str) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a model, and an optimizer for it: "adamw", or Muon in "float32" or "bfloat16"."""
    model = GPT(SHAPE)
    decayed, others = model.decay_groups()
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "fused": True}
    if kind == "adamw":
        return model, torch.optim.AdamW(groups, **options)
    return model, MuonAdamW(groups, model.matrices(), bf16=kind == "bfloat16", **options)


def set_gradients(model: GPT, seed: int):
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=rng)
        if "wte" in name:
            p.grad[SHAPE.vocab_size :] = 0  # of the padded rows


def test_the_matrices_are_those_of_the_blocks():
    model = GPT(SHAPE)
    names = {p: name for name, p in model.named_parameters()}
    matrices = [names[p] for p in model.matrices()]
    assert matrices == [n for n in names.values() if ".c_" in n and n.endswith("weight")]
    assert len(matrices) == 4 * SHAPE.n_layer


@pytest.mark.parametrize("most", [1 << 25, 700])
def test_the_matrices_are_updated_as_by_torch(monkeypatch, most):
    """One after the other or many at a time; torch has bfloat16 alone."""
    monkeypatch.setattr(muon, "MAX_NUMBERS", most)
    ours, optimizer = make("bfloat16")
    theirs, _ = make("adamw")
    options = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    torch_muon = torch.optim.Muon(theirs.matrices(), **options)
    start = [p.detach().clone() for p in theirs.matrices()]
    for step in range(5):
        for model in (ours, theirs):
            set_gradients(model, step)
        optimizer.step()
        torch_muon.step()
    for p, q, p0 in zip(ours.matrices(), theirs.matrices(), start, strict=True):
        assert (p - q).norm() < 0.02 * (q - p0).norm()


def test_the_other_parameters_are_updated_as_by_adamw_and_padded_rows_stay_zero():
    ours, optimizer = make("float32")
    theirs, adamw = make("adamw")
    for step in range(5):
        for model in (ours, theirs):
            set_gradients(model, step)
        optimizer.step()
        adamw.step()
    matrices = {id(p) for p in ours.matrices()}
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) == (id(p) not in matrices), name
    assert not ours.lm_head.weight[SHAPE.vocab_size :].any()
    assert ours.lm_head.weight[: SHAPE.vocab_size].all()


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24), (1, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_keeps_its_singular_vectors_and_gets_singular_values_near_1(shape, dtype):
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
