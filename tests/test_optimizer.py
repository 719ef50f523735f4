"""Tests ../support/optimizer.py: Muon beside PyTorch's and beside an exact decomposition."""

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from support import optimizer
from support.optimizer import Optimizer, orthogonal

SHAPE = GPTConfig(vocab_size=11, seq_len=8, n_layer=3, n_head=2, n_embd=16, pad_vocab=False)


def make(dtype: torch.dtype | None) -> tuple[GPT, Optimizer]:
    model = GPT(SHAPE)
    decayed, others = model.decay_groups()
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    muon = {"matrices": model.matrices(), "bf16": dtype == torch.bfloat16} if dtype else {}
    return model, Optimizer(groups, lr=0.01, betas=(0.9, 0.95), fused=True, **muon)


def gradients(model: GPT, seed: int):
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng)


def test_the_matrices_are_those_of_the_blocks():
    model = GPT(SHAPE)
    names = {p: name for name, p in model.named_parameters()}
    found = [names[p] for p in model.matrices()]
    assert found == [n for n in names.values() if ".h." in n and n.endswith("c_attn.weight")
                     or ".h." in n and "c_" in n and n.endswith("weight")]  # fmt: skip
    assert len(found) == 4 * SHAPE.n_layer
    decayed = model.decay_groups()[0]
    assert all(a is b for a, b in zip(decayed[2:], model.matrices(), strict=True))


@pytest.mark.parametrize("most", [1 << 25, 700])
def test_the_matrices_are_updated_as_by_torch(monkeypatch, most):
    """One after the other or many at a time; torch has bfloat16 alone."""
    monkeypatch.setattr(optimizer, "MOST", most)
    ours, by_ours = make(torch.bfloat16)
    theirs, _ = make(None)
    muon = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    by_torch = torch.optim.Muon(theirs.matrices(), **muon)
    start = [p.detach().clone() for p in theirs.matrices()]
    for step in range(5):
        for model in (ours, theirs):
            gradients(model, step)
        by_ours.step()
        by_torch.step()
    for p, q, p0 in zip(ours.matrices(), theirs.matrices(), start, strict=True):
        assert (p - q).norm() < 0.02 * (q - p0).norm()


def test_the_other_parameters_are_updated_as_by_adamw():
    ours, by_ours = make(torch.float32)
    theirs, by_adamw = make(None)
    for step in range(5):
        for model in (ours, theirs):
            gradients(model, step)
        by_ours.step()
        by_adamw.step()
    matrices = {n for n, p in ours.named_parameters() if any(p is m for m in ours.matrices())}
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) == (name not in matrices), name


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24), (1, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_keeps_its_singular_vectors_and_gets_singular_values_near_1(shape, dtype):
    rng = np.random.default_rng(0)
    u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = np.linspace(1, 0.01, s.size).reshape(s.shape)  # the last ones of chance may be near 0
    matrices = u * s[:, None] @ vt
    found = orthogonal(torch.tensor(matrices, dtype=torch.float32), dtype).double().numpy()
    for matrix, other in zip(matrices, found, strict=True):
        u, _, vt = np.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ other @ vt.T
        values = np.diag(inner)
        least, most = (0.68, 1.21) if dtype == torch.float32 else (0.6, 1.3)
        assert least < values.min() and values.max() < most
        off = np.abs(inner - np.diag(values)).max()
        assert off < (1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    model, optimizer = make(torch.float32)
    gradients(model, 0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    buffers = [t.clone() for s in optimizer.state.values() for t in s.values()]
    gradients(model, 1)
    for p in model.parameters():
        p.grad.view(-1)[0] = value
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, buffers, strict=True))
    plain, by_plain = make(torch.float32)
    for seed in (0, 2):
        gradients(plain, seed)
        by_plain.found_inf = torch.zeros(())
        by_plain.step()
    gradients(model, 2)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
