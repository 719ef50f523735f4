"""Tests ../model.py."""

import dataclasses
import math
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, SHAPES, ChunkedLoss, GPTConfig, attention, flash_attention, pick

TINY = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)


def tokens(*shape, vocab_size=97, seed=0) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_sizes_are_openais(name, num_parameters):
    with torch.device("meta"):
        model = GPT(dataclasses.replace(SHAPES[name], pad_vocab=False))
    assert sum(p.numel() for p in model.parameters()) == num_parameters == model.config.num_params


def test_padding_rounds_the_vocabulary_up_to_a_multiple_of_64():
    assert GPTConfig().num_rows == 50304
    assert GPTConfig(vocab_size=64).num_rows == 64
    assert GPTConfig(pad_vocab=False).num_rows == 50257


def test_heads_must_divide_the_channels():
    with pytest.raises(ValueError, match="--n-embd 50 must be a multiple of --n-head 12.*60"):
        GPTConfig(n_embd=50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flash_attention_is_attention(dtype):
    qkv = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(attention(*qkv), flash_attention(*qkv), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("flash", [True, False])
def test_a_token_changes_no_logits_before_it(flash):
    model, idx = GPT(TINY, flash), tokens(1, 16)
    other = idx.clone()
    other[0, 9] = (idx[0, 9] + 1) % 97
    a, b = model.logits(idx), model.logits(other)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.isclose(a[:, 9:], b[:, 9:]).all(dim=-1).any()


def test_fresh_weights_know_nothing():
    idx, targets = tokens(8, 16), tokens(8, 16, seed=1)
    assert GPT(TINY)(idx, targets).item() == pytest.approx(math.log(97), rel=0.01)


def test_initial_weights_are_gpt2s():
    model = GPT(dataclasses.replace(SHAPES["nano"], n_layer=8))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif p.dim() == 1:
            assert (p == 1).all()
        else:
            p = p[: model.config.vocab_size] if "wte" in name else p
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert p.mean().item() == pytest.approx(0, abs=std / 20), name


def test_embedding_and_head_are_one_tensor_and_survive_loading():
    model, other = GPT(TINY), GPT(dataclasses.replace(TINY))
    other.load_state_dict(model.state_dict())
    assert other.lm_head.weight is other.transformer.wte.weight
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()} | {"lm_head.weight"}


def test_padding_changes_no_loss_and_no_gradient():
    padded, plain = GPT(TINY), GPT(dataclasses.replace(TINY, pad_vocab=False))
    idx, targets = tokens(4, 16), tokens(4, 16, seed=1)
    losses = [model(idx, targets) for model in (padded, plain)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, rtol=1e-6, atol=0)
    for (name, p), q in zip(padded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p[: len(q)], q), name  # drawn from the same random numbers
        assert_close(p.grad[: len(q)], q.grad, rtol=1e-5, atol=1e-8)
        assert not p.grad[len(q) :].any()


def test_flash_attention_of_the_last_position_is_attentions():
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    for last in (1, 9):
        assert_close(attention(q, k, v)[:, :, -last:], attention(q[:, :, -last:], k, v))
        assert_close(attention(q[:, :, -last:], k, v), flash_attention(q[:, :, -last:], k, v))


def generate(model: GPT, idx, num_tokens: int, seed=0, temperature=1.0, top_k=0):
    """idx (B, T) and what follows it: (B, T + num_tokens)."""
    rng = torch.Generator().manual_seed(seed)
    following = model.generate(idx, rng, temperature, top_k)
    return torch.cat([idx, *islice(following, num_tokens)], dim=1)


def test_generate_never_draws_a_padded_id():
    model = GPT(TINY)
    model.lm_head.weight.data[97:] = 100.0  # as a bad checkpoint might have it
    idx = generate(model, tokens(4, 3), 40)
    assert idx.shape == (4, 43) and idx.max() < 97


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_cached_keys_change_no_token(flash, temperature):
    """Against a pass over all that is remembered for each token: beyond seq_len, the newer half."""
    model, idx, start = spread(GPT(TINY, flash)), tokens(3, 5), 0
    rng = torch.Generator().manual_seed(3)
    for _ in range(60):
        logits = model.logits(idx[:, start:])[:, -1, :97]
        idx = torch.cat([idx, pick(logits, rng, temperature, 20)], dim=1)
        start = idx.shape[1] - 8 if idx.shape[1] - start > 16 else start
    assert torch.equal(generate(model, tokens(3, 5), 60, 3, temperature, 20), idx)
    assert len(idx[0].unique()) > 5


def spread(model: GPT) -> GPT:
    """With weights that make its choices differ clearly."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model.eval()


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-45, 1e-40, 1e-38, 1.2e-38, 1e-20, -0.0])
def test_pick_is_greedy_at_the_smallest_temperatures(temperature):
    logits = 100 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1)
    for top_k in (0, 20, 1):
        ids = pick(logits, rng, temperature, top_k)
        assert torch.equal(ids, logits.argmax(dim=-1, keepdim=True))


@pytest.mark.parametrize("temperature", [0, 1.0, 1e308])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_pick_refuses_what_is_not_finite(value, temperature):
    logits = torch.zeros(2, 9)
    logits[1, 4] = value
    with pytest.raises(ValueError, match="weights overflow"):
        pick(logits, torch.Generator(), temperature, 3)


def test_pick_draws_by_temperature_and_top_k():
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    logits, rng = probs.log().expand(20_000, 5), torch.Generator().manual_seed(0)

    def shares(temperature, top_k) -> torch.Tensor:
        drawn = pick(logits, rng, temperature, top_k)[:, 0]
        return drawn.bincount(minlength=5) / len(logits)

    for settings, expected in {
        (1.0, 0): probs,
        (0, 0): torch.eye(5)[0],
        (0.5, 0): probs**2 / (probs**2).sum(),
        (1.0, 2): torch.tensor([5, 2, 0, 0, 0]) / 7,
        (1e-40, 0): torch.eye(5)[0],
        (1.0, 3): torch.tensor([50, 20, 15, 0, 0]) / 85,
    }.items():
        assert_close(shares(*settings), expected, rtol=0, atol=0.015)


def test_generate_depends_on_its_own_generator_alone():
    model, state = GPT(TINY), torch.get_rng_state()
    first, again, other = (generate(model, tokens(1, 3), 12, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_of_an_answer_is_the_sum_over_its_tokens():
    model = spread(GPT(TINY))
    rows = [(tokens(n, seed=n), count) for n, count in ((5, 2), (17, 16), (9, 1), (30, 4))]
    losses = model.answer_losses(rows)
    for (row, count), loss in zip(rows, losses, strict=True):
        row = row[-17:]  # what fits
        log_probs = model.logits(row[None, :-1])[0].log_softmax(dim=-1)
        expected = -log_probs.gather(1, row[1:, None])[-count:].sum()
        assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("flash", [True, False])
def test_dropout_acts_in_training_alone_and_by_its_own_share(flash):
    model, idx = GPT(TINY, flash, dropout=0.5), tokens(2, 16)
    plain = GPT(TINY, flash)
    assert torch.equal(model.eval().logits(idx), plain.logits(idx))
    model.train()
    torch.manual_seed(1)
    first = model.logits(idx)
    torch.manual_seed(1)
    assert torch.equal(first, model.logits(idx)) and not torch.equal(first, model.logits(idx))
    ones = torch.ones(50, 50, 4, 4)
    kept = model.transformer.h[0].attn.attend(ones, ones, ones, 0.5)  # each weight 0 or doubled
    assert kept.mean().item() == pytest.approx(1, abs=0.05) and kept.std() > 0.3


def loss_and_gradients(dtype=None, scale=1.0, **how) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a network whose loss is far from ln V."""
    model, idx, targets = spread(GPT(TINY, **how)).train(), tokens(2, 16), tokens(2, 16, seed=1)
    torch.manual_seed(3)  # of dropout
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(idx, targets)
    (loss * scale).backward()
    return loss.detach(), [p.grad / scale for p in model.parameters()]


@pytest.mark.parametrize("chunk", [7, 32, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(None, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
def test_a_loss_in_chunks_is_the_loss(chunk, dtype, tolerance):
    whole, grads = loss_and_gradients(dtype)
    loss, others = loss_and_gradients(dtype, 8.0, loss_chunk_tokens=chunk)
    assert_close(loss, whole, rtol=tolerance, atol=0)
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() <= tolerance * grad.norm() + 1e-12
    with torch.no_grad():
        model = spread(GPT(TINY, loss_chunk_tokens=chunk))
        loss = model(tokens(2, 16), tokens(2, 16, seed=1))
    assert_close(loss, loss_and_gradients()[0], rtol=1e-6, atol=0)


def test_the_sums_of_a_chunk_fit_into_float16():
    x, weight = torch.full((16384, 4), 6.0), torch.zeros(64, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = ChunkedLoss.apply(x, weight, None, torch.zeros(16384, dtype=torch.int64), 16384)
    loss.backward()
    assert_close(weight.grad[0], torch.full((4,), -6 * 63 / 64), rtol=1e-3, atol=0)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in made)])
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_in_chunks_the_logits_never_exist_whole(grad):
    sizes, shape = {}, dataclasses.replace(TINY, n_embd=4)
    for chunk in (0, 8):
        model = GPT(shape, loss_chunk_tokens=chunk)
        with torch.set_grad_enabled(grad), Largest() as largest:
            loss = model(tokens(8, 16), tokens(8, 16))
            if grad:
                loss.backward()
        sizes[chunk] = largest.numel
    assert sizes[0] == 8 * 16 * 128 and sizes[8] == max(8 * 128, 8 * 16 * 16)


def test_recomputing_changes_no_bit_and_holds_less():
    def run(recompute: bool):
        held = []
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):
            found = loss_and_gradients(recompute=recompute, dropout=0.3)
        return found, sum(held)

    ((loss, grads), held), ((again, others), less) = run(False), run(True)
    assert torch.equal(loss, again) and all(map(torch.equal, grads, others))
    assert less < held / 2


def test_a_bf16_residual_is_bfloat16_and_its_weights_float32():
    seen, model = [], GPT(TINY, bf16_residual=True)
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, args, y: seen.extend([args[0].dtype, y.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(2, 16), tokens(2, 16)).backward()
    assert seen == [torch.bfloat16] * 4
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    loss, grads = loss_and_gradients()
    rounded, others = loss_and_gradients(torch.bfloat16, bf16_residual=True)
    assert_close(rounded, loss, rtol=2e-2, atol=0)
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() < 5e-2 * grad.norm() + 1e-9


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="17 tokens are more than seq_len 16"):
        GPT(TINY).logits(tokens(1, 17))


def test_flops_are_palms():
    with torch.device("meta"):
        model = GPT(SHAPES["gpt2"])
    assert model.flops_per_token() == pytest.approx(855.4e6, rel=1e-4)  # nanoGPT's, for 50,304


# --------------------------------------------------------------------------------------------------
# Hugging Face's GPT-2 as the oracle

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # OpenAI's are (in, out)


def hugging_face(config: GPTConfig):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=config.seq_len, n_layer=config.n_layer, n_head=config.n_head,
            n_embd=config.n_embd, vocab_size=config.vocab_size,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    )  # fmt: skip


def ours(theirs: torch.Tensor, name: str) -> torch.Tensor:
    return theirs.t() if name.endswith(TRANSPOSED) else theirs


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_against_hugging_face(config: GPTConfig, flash: bool, T: int, double=False):
    """In float32 to 1e-5; in float64, with logits in float32, to 1e-6."""
    oracle, model = hugging_face(config), GPT(config, flash)
    rel = 1e-6 if double else 1e-5
    if double:
        oracle, model = oracle.double(), model.double()
    with torch.no_grad():  # parameters off their initial 0 and 1, so that each one matters
        for p in oracle.parameters():
            p.add_(torch.randn(p.shape), alpha=0.02)
        for name, p in model.named_parameters():
            p[: config.vocab_size if "wte" in name else None] = ours(
                oracle.get_parameter(name), name
            )
    row = tokens(2, T + 1, vocab_size=config.vocab_size)
    idx, targets = row[:, :-1], row[:, 1:]
    logits = oracle(idx).logits
    error = (model.logits(idx)[..., : config.vocab_size] - logits).abs().max()
    assert error <= rel * logits.abs().max()
    for m in (oracle, model):
        # an eps above float32's rounding: Adam would make whole steps of a gradient that is noise,
        # as the keys' bias has, which softmax ignores
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.1)
        m.losses = []
        for step in range(3):
            loss = m(idx, targets) if m is model else cross_entropy(m(idx).logits, targets)
            loss.backward()
            m.losses.append(loss.item())
            m.grads = m.grads if step else {n: p.grad.clone() for n, p in m.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    assert model.losses == pytest.approx(oracle.losses, rel=rel)
    for name, p in model.named_parameters():
        check_close(model.grads[name], ours(oracle.grads[name], name), rel, name)
        check_close(p, ours(oracle.get_parameter(name), name), rel, name)


def check_close(mine: torch.Tensor, theirs: torch.Tensor, rel: float, name: str):
    """But for padded rows, which only mine has, and by norm: one element may be small by chance."""
    assert (mine[: len(theirs)] - theirs).norm() <= rel * theirs.norm(), name


LARGE = [pytest.param(f"gpt2-{size}", True, marks=pytest.mark.slow) for size in ("large", "xl")]


@pytest.mark.parametrize(
    ("name", "flash"), [("gpt2", False), ("gpt2", True), ("gpt2-medium", True), *LARGE]
)
def test_two_layers_of_each_shape_train_as_hugging_faces(name, flash):
    config = dataclasses.replace(SHAPES[name], n_layer=2, vocab_size=997, seq_len=32)
    check_against_hugging_face(config, flash, T=32)


@pytest.mark.slow
def test_the_whole_124m_trains_as_hugging_faces():
    """In float64: in float32 its logits were 2e-5 apart on one CPU, 1e-6 on another."""
    check_against_hugging_face(SHAPES["gpt2"], flash=True, T=32, double=True)
