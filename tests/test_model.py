"""Tests ../model.py. The oracle is Hugging Face's GPT-2."""

import math
from dataclasses import fields, replace
from itertools import islice, product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from config import RECIPES, TrainConfig
from model import GPT, ComputeConfig, GPTConfig, attention, flash_attention, sample_token
from support.checkpoint import CONV1D

TINY = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)
EITHER_ATTENTION = pytest.mark.parametrize("flash", [True, False])


def tokens(*shape: int, vocab_size: int = 97, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def shape_of(name: str, **changes) -> GPTConfig:
    """Return the network of a recipe."""
    flags = RECIPES[name] | {"warmup_steps": 0}
    return GPTConfig(**TrainConfig(**flags).fields_of(GPTConfig) | changes)


def tiny(**computation) -> GPT:
    return GPT(TINY, ComputeConfig(**computation))


def spread(model: GPT) -> GPT:
    """Move the weights off their initial values, so that choices differ clearly."""
    for p, rows in zip(model.parameters(), model.weights().values(), strict=True):
        rows += 0.2 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


# ---- The network, and Hugging Face's -------------------------------------------------------------


def test_sizes():
    sizes = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168}
    for name, num_params in (sizes | {"gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}).items():
        with torch.device("meta"):
            plain, model = GPT(shape_of(name, pad_vocab=False)), GPT(shape_of(name))
        assert sum(p.numel() for p in plain.parameters()) == num_params
        assert sum(p.numel() for p in model.weights().values()) == num_params
        if name == "gpt2":
            groups = [(len(g), sum(p.numel() for p in g)) for g in plain.decay_groups()]
            assert groups == [(50, 124_318_464), (98, 121_344)]
            assert model.flops_per_token() == pytest.approx(855.4e6, rel=1e-4)  # nanoGPT's


def hugging_face(config: GPTConfig, spread: float = 0.02, dropout: float = 0.0):
    """Return Hugging Face's network of this shape, with every parameter off its initial value."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    shape |= {"n_positions": config.seq_len, "vocab_size": config.vocab_size}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    torch.manual_seed(1)
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(torch.randn(p.shape), alpha=spread)
    return oracle


def in_our_layout(theirs: torch.Tensor, name: str) -> torch.Tensor:
    return theirs.t() if name.endswith(CONV1D) else theirs


def copy_weights(oracle: torch.nn.Module, model: GPT):
    for name, p in model.weights().items():
        p.copy_(in_our_layout(oracle.get_parameter(name).detach(), name))


def check_against_hugging_face(config: GPTConfig, flash: bool, dtype: torch.dtype):
    """Compare logits, losses, gradients and weights of three steps: in float32 to 1e-5, in float64,
    with logits in float32, to 1e-6."""
    oracle = hugging_face(config).to(dtype)
    model = GPT(config, ComputeConfig(flash=flash)).to(dtype)
    rel = 1e-6 if dtype == torch.float64 else 1e-5
    copy_weights(oracle, model)
    row = tokens(2, 33, vocab_size=config.vocab_size)
    idx, targets = row[:, :-1], row[:, 1:]
    logits = oracle(idx).logits
    error = (model.logits(idx)[..., : config.vocab_size] - logits).abs().max()
    assert error <= rel * logits.abs().max()

    def train(m) -> tuple[list[float], dict]:
        # An eps above float32's rounding: Adam would make whole steps of a gradient that is noise,
        # as the keys' bias has, which softmax ignores.
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.1)
        losses, grads = [], {}
        for _ in range(3):
            if m is model:
                loss = m(idx, targets)
            else:
                loss = F.cross_entropy(m(idx).logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            grads = grads or {name: p.grad.clone() for name, p in m.named_parameters()}
            losses.append(loss.item())
            optimizer.step()
        return losses, grads

    (losses, grads), (their_losses, their_grads) = train(model), train(oracle)
    assert losses == pytest.approx(their_losses, rel=rel)
    for name, p in model.named_parameters():
        pairs = [(grads[name], their_grads[name]), (p, oracle.get_parameter(name))]
        for ours, theirs in pairs:
            theirs = in_our_layout(theirs, name)
            assert not ours[len(theirs) :].any()  # padded rows
            # by norm: one element may be small by chance
            assert (ours[: len(theirs)] - theirs).norm() <= rel * theirs.norm(), name


LARGER = [
    pytest.param(f"gpt2-{size}", True, marks=pytest.mark.slow) for size in ("medium", "large", "xl")
]


@pytest.mark.parametrize(("name", "flash"), [("gpt2", False), ("gpt2", True), *LARGER])
def test_hugging_face(name, flash):
    config = shape_of(name, n_layer=2, vocab_size=997, seq_len=32)
    check_against_hugging_face(config, flash, torch.float32)


@pytest.mark.slow
def test_whole_124m():
    """In float64: in float32 its logits were 2e-5 apart on one CPU, 1e-6 on another."""
    check_against_hugging_face(shape_of("gpt2"), True, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flash_attention(dtype):
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    whole = attention(q, k, v)
    for last in (1, 9):  # of the last position alone too, as with cached keys
        for attend in (attention, flash_attention):
            result = attend(q[:, :, -last:], k, v)
            assert_close(result, whole[:, :, -last:], rtol=tolerance, atol=tolerance)


def test_initial_weights():
    model = GPT(shape_of("nano", n_layer=8, vocab_size=4096))
    for name, p in model.weights().items():
        if name.endswith("bias"):
            assert not p.any()
        elif p.dim() == 1:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert p.mean().item() == pytest.approx(0, abs=std / 20), name
    idx, targets = tokens(8, 16), tokens(8, 16, seed=1)
    assert tiny()(idx, targets).item() == pytest.approx(math.log(97), rel=0.01)


def test_padding():
    assert GPTConfig().num_rows == 50304 and GPTConfig(pad_vocab=False).num_rows == 50257
    padded, plain = tiny(), GPT(replace(TINY, pad_vocab=False))
    assert padded.lm_head.weight is padded.transformer.wte.weight
    idx, targets = tokens(4, 16), tokens(4, 16, seed=1)
    losses = [model(idx, targets) for model in (padded, plain)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, rtol=1e-6, atol=0)
    for (name, p), q in zip(padded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p[: len(q)], q), name  # drawn from the same random numbers
        assert_close(p.grad[: len(q)], q.grad, rtol=1e-5, atol=1e-8)
        assert not p[len(q) :].any() and not p.grad[len(q) :].any()


# ---- Traps for whoever changes the network -------------------------------------------------------


class Rearranged(GPT):
    """GPT-2 whose parameters are declared in another order, with one more."""

    def __init__(self, config: GPTConfig, seed: int):
        super().__init__(config, seed=seed)
        parts = self.transformer._modules
        for name in ("wpe", "h", "wte"):  # each becomes the last
            parts[name] = parts.pop(name)
        self.transformer.extra = torch.nn.Linear(8, 8)
        for p in self.parameters():
            p.data.zero_()
        self.init_weights(seed)


def test_initial_weights_by_seed_and_name():
    plain = dict(GPT(TINY, seed=3).named_parameters())
    drawn = [name for name, p in plain.items() if p.dim() == 2]
    for name, p in Rearranged(TINY, seed=3).named_parameters():
        if name in drawn:
            assert torch.equal(p, plain[name]), name
    for name, p in GPT(TINY, seed=4).named_parameters():
        assert name not in drawn or not torch.equal(p, plain[name]), name
    tensors = [plain[name].detach()[:16].flatten() for name in drawn if "c_attn" in name]
    assert not torch.equal(tensors[0], tensors[1])  # each layer has its own


def test_published_initial_weights():
    """Each published figure of a run depends on them. They change with intent alone."""
    shape = GPTConfig(4096, seq_len=64, n_layer=4, n_head=4, n_embd=128)  # nano's until 2026-11-29
    params = dict(GPT(shape, seed=1337).named_parameters())
    first = {name: params[f"transformer.{name}.weight"][0, :3] for name in INITIAL}
    for name, values in INITIAL.items():
        assert_close(first[name], torch.tensor(values), rtol=1e-4, atol=1e-7)


INITIAL = {  # the first three weights, with seed 1337
    "wte": [-0.0131245, 0.006305, 0.0205011],
    "wpe": [0.0243434, 0.0283858, 0.0294092],
    "h.3.attn.c_attn": [-0.0053371, 0.0031078, 0.0037198],
    "h.3.mlp.c_proj": [-0.0066355, -0.0123915, -0.0050442],
}


@EITHER_ATTENTION
def test_causality(flash):
    """To the bit, for each position: all tokens after it are others."""
    model = spread(tiny(flash=flash)).eval()
    idx = tokens(1, 16)
    others = (idx + 1) % 97
    rows = torch.stack([torch.cat([idx[0, : t + 1], others[0, t + 1 :]]) for t in range(16)])
    logits, whole = model.logits(rows), model.logits(idx.expand(16, 16))
    for t in range(16):
        assert torch.equal(logits[t, : t + 1], whole[t, : t + 1]), t
    changed = logits[:-1] - whole[:-1]  # the positions after t do see their own tokens
    assert all(changed[t, t + 1 :, :97].abs().amax(dim=-1).min() > 1e-3 for t in range(15))


# ---- Ways to compute it --------------------------------------------------------------------------


@EITHER_ATTENTION
def test_dropout(flash):
    model, idx = tiny(flash=flash, dropout=0.5), tokens(2, 16)
    assert torch.equal(model.eval().logits(idx), tiny(flash=flash).logits(idx))
    model.train()
    torch.manual_seed(1)
    first = model.logits(idx)
    torch.manual_seed(1)
    assert torch.equal(first, model.logits(idx)) and not torch.equal(first, model.logits(idx))
    ones = torch.ones(50, 50, 4, 4)
    kept = model.transformer.h[0].attn.attend(ones, ones, ones, 0.5)  # each weight 0 or doubled
    assert kept.mean().item() == pytest.approx(1, abs=0.05) and kept.std() > 0.3


def test_dropout_of_hugging_face():
    """With the same random numbers, both drop the same activations, in the same places."""
    config = shape_of("gpt2", n_layer=2, vocab_size=997, seq_len=32)
    oracle = hugging_face(config, dropout=0.1).train()
    model = GPT(config, ComputeConfig(flash=False, dropout=0.1))
    copy_weights(oracle, model)
    idx = tokens(2, 32, vocab_size=997)
    torch.manual_seed(1)
    logits = model.logits(idx)[..., :997]
    torch.manual_seed(1)
    assert_close(logits, oracle(idx).logits, rtol=1e-4, atol=1e-4)


def loss_and_gradients(
    dtype: torch.dtype | None = None, scale: float = 1.0, **computation
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return those of a network whose loss is far from ln V, under autocast to dtype."""
    model, idx, targets = spread(tiny(**computation)), tokens(2, 16), tokens(2, 16, seed=1)
    torch.manual_seed(3)  # of dropout
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(idx, targets)
    (loss * scale).backward()
    return loss.detach(), [p.grad / scale for p in model.parameters()]


@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_in_chunks(chunk, dtype, tolerance):
    whole, grads = loss_and_gradients(dtype)
    loss, others = loss_and_gradients(dtype, 8.0, loss_chunk_tokens=chunk)
    assert_close(loss, whole, rtol=tolerance, atol=0)
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() <= tolerance * grad.norm() + 1e-12
    with torch.no_grad():
        loss = spread(tiny(loss_chunk_tokens=chunk))(tokens(2, 16), tokens(2, 16, seed=1))
    assert_close(loss, loss_and_gradients()[0], rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile about torch itself
def test_compiled_loss_in_chunks():
    """Compiled with the network, and in the loop's own call of the plain module."""
    whole, grads = loss_and_gradients()
    model = spread(tiny(compile=True, loss_chunk_tokens=7))
    net, batch = torch.compile(model, dynamic=False), (tokens(2, 16), tokens(2, 16, seed=1))
    for module in (net, model):
        model.zero_grad()
        loss = module(*batch)
        loss.backward()
        assert_close(loss.detach(), whole, rtol=1e-6, atol=0)
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert (grad - p.grad).norm() <= 1e-6 * grad.norm() + 1e-12
        with torch.no_grad():
            assert_close(module(*batch), whole, rtol=1e-6, atol=0)


def test_recompute():
    results, held = [], []
    for recompute in (False, True):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            results.append(loss_and_gradients(recompute=recompute, dropout=0.3))
        held.append(sum(sizes))
    (loss, grads), (again, others) = results
    assert torch.equal(loss, again) and all(map(torch.equal, grads, others))
    assert held[1] < held[0] / 2


def test_bf16_residual():
    dtypes, model = [], tiny(bf16_residual=True)
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, args, y: dtypes.extend([args[0].dtype, y.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(2, 16), tokens(2, 16)).backward()
    assert dtypes == [torch.bfloat16] * 4
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    loss, grads = loss_and_gradients()
    rounded, others = loss_and_gradients(torch.bfloat16, bf16_residual=True)
    assert_close(rounded, loss, rtol=2e-2, atol=0)
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() < 5e-2 * grad.norm() + 1e-9


# ---- Generation ----------------------------------------------------------------------------------


def generate(model: GPT, idx, num_tokens: int, seed=0, temperature=1.0, top_k=0) -> torch.Tensor:
    """Return idx (B, T) and what follows it: (B, T + num_tokens)."""
    following = model.generate(idx, torch.Generator().manual_seed(seed), temperature, top_k)
    return torch.cat([idx, *islice(following, num_tokens)], dim=1)


OTHER_VALUES = {  # by field of GPTConfig; the tests below count on this vocabulary and length
    "vocab_size": 97, "seq_len": 16, "n_layer": 1, "n_head": 4, "n_embd": 48,
}  # fmt: skip
OTHER_VALUES |= {f.name: not getattr(TINY, f.name) for f in fields(GPTConfig) if f.type is bool}


def test_other_values():
    """So that the tests below try it. Whoever adds a number to GPTConfig adds a value for it."""
    assert OTHER_VALUES.keys() == {f.name for f in fields(GPTConfig)}


@EITHER_ATTENTION
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_cache(flash, temperature, name):
    """Against a pass over all that is remembered for each token: beyond seq_len, the newer half.
    For each field of the shape, also those that somebody adds. Padded ids are never drawn."""
    shape = replace(TINY, **{name: OTHER_VALUES[name]})
    model, idx, start = spread(GPT(shape, ComputeConfig(flash=flash))), tokens(3, 5), 0
    model.lm_head.weight.data[97:] = 100.0  # as a bad checkpoint might have it
    state = torch.get_rng_state()
    rng = torch.Generator().manual_seed(3)
    for _ in range(60):
        logits = model.logits(idx[:, start:])[:, -1, :97]
        idx = torch.cat([idx, sample_token(logits, rng, temperature, 20)], dim=1)
        start = idx.shape[1] - 8 if idx.shape[1] - start > 16 else start
    assert torch.equal(generate(model, tokens(3, 5), 60, 3, temperature, 20), idx)
    assert len(idx[0].unique()) > 5 and idx.max() < 97
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="17 tokens exceed seq_len 16"):
        model.logits(tokens(1, 17))


def test_temperature_and_top_k():
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    logits, rng = probs.log().expand(20_000, 5), torch.Generator().manual_seed(0)
    for (temperature, top_k), expected in {
        (1.0, 0): probs,
        (0, 0): torch.eye(5)[0],
        (0.5, 0): probs**2 / (probs**2).sum(),
        (1.0, 2): torch.tensor([5, 2, 0, 0, 0]) / 7,
        (1.0, 9): probs,
    }.items():
        ids = sample_token(logits, rng, temperature, top_k)[:, 0]
        assert_close(ids.bincount(minlength=5) / len(logits), expected, rtol=0, atol=0.015)


def test_extreme_logits():
    logits = 100 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    for temperature, top_k in product([5e-324, 1e-45, 1.2e-38, 1e-20, -0.0, 0], [0, 20, 1]):
        ids = sample_token(logits, torch.Generator(), temperature, top_k)
        assert torch.equal(ids, logits.argmax(dim=-1, keepdim=True))
    for temperature, value in product([0, 1.0, 1e308], [math.inf, math.nan]):
        logits[1, 4] = value
        with pytest.raises(FloatingPointError):
            sample_token(logits, torch.Generator(), temperature, 3)


@EITHER_ATTENTION
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_positions(flash, name):
    """With one layer, since two causal ones tell an order without positions. For each field of the
    shape, also those that somebody adds."""
    config = replace(TINY, n_layer=1, **{name: OTHER_VALUES[name]} if name != "n_layer" else {})
    model = GPT(config, ComputeConfig(flash), seed=1).eval()
    last = model.logits(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1, :97]
    assert (last[0] - last[1]).abs().max() > 1e-6
