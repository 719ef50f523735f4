"""Tests ../model.py."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from model import GPT, SHAPES, GPTConfig, attention, flash_attention

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
    assert sum(p.numel() for p in model.parameters()) == num_parameters


def test_padding_rounds_the_vocabulary_up_to_a_multiple_of_64():
    assert GPTConfig().num_rows == 50304
    assert GPTConfig(vocab_size=64).num_rows == 64
    assert GPTConfig(pad_vocab=False).num_rows == 50257


def test_heads_must_divide_the_channels():
    with pytest.raises(ValueError, match="--n-embd 50 must be a multiple of --n-head 12.*60"):
        GPTConfig(n_embd=50)


def test_flash_attention_is_attention():
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    assert_close(attention(q, k, v), flash_attention(q, k, v))


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


def test_generate_draws_only_from_the_top_k_and_never_a_padded_id():
    model = GPT(TINY)
    model.lm_head.weight.data[97:] = 100.0  # as a bad checkpoint might have it
    idx = model.generate(tokens(4, 3), 40, 1.0, 97, torch.Generator().manual_seed(0))
    assert idx.shape == (4, 43)  # longer than seq_len: the oldest are forgotten
    assert idx.max() < 97
    greedy = model.generate(tokens(1, 3), 8, 1.0, 1, torch.Generator().manual_seed(0))
    for end in range(3, 11):
        assert greedy[0, end] == model.logits(greedy[:, :end])[0, -1, :97].argmax()


def test_generate_depends_on_its_own_generator_alone():
    model, state = GPT(TINY), torch.get_rng_state()
    first, again, other = (
        model.generate(tokens(1, 3), 12, 1.0, 50, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


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


def check_against_hugging_face(config: GPTConfig, flash: bool, T: int):
    oracle, model = hugging_face(config), GPT(config, flash)
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
    assert error <= 1e-5 * logits.abs().max()
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
    assert model.losses == pytest.approx(oracle.losses, rel=1e-5)
    for name, p in model.named_parameters():
        check_close(model.grads[name], ours(oracle.grads[name], name), name)
        check_close(p, ours(oracle.get_parameter(name), name), name)


def check_close(mine: torch.Tensor, theirs: torch.Tensor, name: str):
    """But for padded rows, which only mine has, and by norm: one element may be small by chance."""
    assert (mine[: len(theirs)] - theirs).norm() <= 1e-5 * theirs.norm(), name


@pytest.mark.parametrize(
    ("name", "flash"), [("gpt2", False), *((name, True) for name in SHAPES if name != "nano")]
)
def test_two_layers_of_each_shape_train_as_hugging_faces(name, flash):
    config = dataclasses.replace(SHAPES[name], n_layer=2, vocab_size=997, seq_len=32)
    check_against_hugging_face(config, flash, T=32)


@pytest.mark.slow
def test_the_whole_124m_trains_as_hugging_faces():
    check_against_hugging_face(SHAPES["gpt2"], flash=True, T=128)
