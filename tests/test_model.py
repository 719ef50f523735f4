"""Tests ../model.py."""

import dataclasses
import json
import math
import pickle
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
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
    assert sum(p.numel() for p in model.parameters()) == num_parameters


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


def generate(model: GPT, idx, num_tokens: int, seed=0, temperature=1.0, top_k=0, top_p=1.0):
    """idx (B, T) and what follows it: (B, T + num_tokens)."""
    rng = torch.Generator().manual_seed(seed)
    following = model.generate(idx, rng, temperature, top_k, top_p)
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
        idx = torch.cat([idx, pick(logits, rng, temperature, 20, 0.9)], dim=1)
        start = idx.shape[1] - 8 if idx.shape[1] - start > 16 else start
    assert torch.equal(generate(model, tokens(3, 5), 60, 3, temperature, 20, 0.9), idx)
    assert len(idx[0].unique()) > 5


def spread(model: GPT) -> GPT:
    """With weights that make its choices differ clearly."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model.eval()


def test_pick_draws_by_temperature_top_k_and_top_p():
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    logits, rng = probs.log().expand(20_000, 5), torch.Generator().manual_seed(0)

    def shares(temperature, top_k, top_p) -> torch.Tensor:
        drawn = pick(logits, rng, temperature, top_k, top_p)[:, 0]
        return drawn.bincount(minlength=5) / len(logits)

    for settings, expected in {
        (1.0, 0, 1.0): probs,
        (0, 0, 1.0): torch.eye(5)[0],
        (0.5, 0, 1.0): probs**2 / (probs**2).sum(),
        (1.0, 2, 1.0): torch.tensor([5, 2, 0, 0, 0]) / 7,
        (1.0, 0, 0.6): torch.tensor([5, 2, 0, 0, 0]) / 7,
        (1.0, 0, 0.1): torch.eye(5)[0],
        (1.0, 0, 0.0): torch.eye(5)[0],
        (1e-40, 0, 1.0): torch.eye(5)[0],
        (1.0, 3, 0.9): torch.tensor([50, 20, 15, 0, 0]) / 85,
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


@pytest.mark.parametrize(
    ("name", "flash"), [("gpt2", False), *((name, True) for name in SHAPES if name != "nano")]
)
def test_two_layers_of_each_shape_train_as_hugging_faces(name, flash):
    config = dataclasses.replace(SHAPES[name], n_layer=2, vocab_size=997, seq_len=32)
    check_against_hugging_face(config, flash, T=32)


@pytest.mark.slow
def test_the_whole_124m_trains_as_hugging_faces():
    """In float64: in float32 its logits were 2e-5 apart on one CPU, 1e-6 on another."""
    check_against_hugging_face(SHAPES["gpt2"], flash=True, T=128, double=True)


# --------------------------------------------------------------------------------------------------
# The bridge to Hugging Face's format, and other projects' checkpoints


def random_gpt(config: GPTConfig):
    """Hugging Face's, with every parameter off its initial 0 and 1."""
    oracle = hugging_face(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(torch.randn(p.shape), alpha=0.05)
    return oracle


def loaded(path: Path, **changes) -> GPT:
    source = model_file.read_source(path)
    config = dataclasses.replace(source.shape, **changes)
    model = GPT(config)
    model.load_state_dict(source.weights(config))
    return model.eval()


def small(name: str) -> GPTConfig:
    return dataclasses.replace(SHAPES[name], n_layer=2, vocab_size=997, seq_len=32)


@pytest.mark.parametrize(("name", "shard_size"), [
    ("gpt2", "3MB"), *((name, "1GB") for name in SHAPES if name != "nano")
])  # fmt: skip
def test_a_folder_of_hugging_faces_loads_and_goes_back_bit_for_bit(tmp_path, name, shard_size):
    oracle = random_gpt(small(name))
    oracle.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "3MB")
    model, idx = loaded(tmp_path), tokens(2, 32, vocab_size=997)
    assert model.config == small(name)
    logits = oracle(idx).logits
    error = (model.logits(idx)[..., :997] - logits).abs().max()
    assert error <= 1e-5 * logits.abs().max()
    back = model_file.hf_weights(model)
    theirs = {n: p for n, p in oracle.state_dict().items() if n != "lm_head.weight"}
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in back)


@pytest.mark.slow
def test_the_whole_124m_goes_to_hugging_face_and_back_bit_for_bit(tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    oracle = random_gpt(SHAPES["gpt2"])
    oracle.save_pretrained(tmp_path / "theirs")
    model = loaded(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_file(
        model_file.hf_weights(model), tmp_path / "ours" / "model.safetensors", {"format": "pt"}
    )
    settings = model_file.hf_config(model.config, 50256)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(settings))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, p), (_, q) in zip(back.named_parameters(), oracle.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_config_that_goes_out_is_the_one_that_comes_in(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model_file.hf_config(small("gpt2"), None)))
    assert model_file.read_source(tmp_path).shape == small("gpt2")


def test_a_model_without_prefix_or_in_a_pickle_file_loads_too(tmp_path):
    oracle = random_gpt(small("gpt2"))
    oracle.transformer.save_pretrained(tmp_path / "plain")  # as OpenAI's gpt2 is published
    oracle.save_pretrained(tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(oracle.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    a, b = (loaded(tmp_path / name).state_dict() for name in ("plain", "bin"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_padding_and_fewer_positions_change_no_loss(tmp_path):
    random_gpt(small("gpt2")).save_pretrained(tmp_path)
    idx, targets = (tokens(2, 16, vocab_size=997, seed=seed) for seed in (0, 1))
    losses = [
        loaded(tmp_path, **changes)(idx, targets)
        for changes in ({}, {"pad_vocab": False}, {"seq_len": 16})
    ]
    for loss in losses[1:]:
        assert_close(loss, losses[0], rtol=1e-6, atol=0)


def nanogpt_checkpoint(model: GPT, bias: bool) -> dict:
    """As nanoGPT saves a compiled model."""
    state = {n: p for n, p in model.state_dict().items() if bias or "bias" not in n}
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # its mask
    state = {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}
    c = model.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "bias": bias}
    args = shape | {"block_size": c.seq_len, "vocab_size": c.vocab_size, "dropout": 0.1}
    return {"model": state, "model_args": args, "iter_num": 5, "best_val_loss": torch.tensor(3.0)}


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_loads(tmp_path, bias):
    model = GPT(dataclasses.replace(TINY, pad_vocab=False)).eval()
    torch.save(nanogpt_checkpoint(model, bias), tmp_path / "ckpt.pt")
    idx = tokens(2, 16)
    same = loaded(tmp_path / "ckpt.pt", pad_vocab=False).logits(idx)  # fresh biases are 0
    assert torch.equal(same, model.logits(idx))


def test_a_checkpoint_of_build_nanogpt_loads_without_its_code(tmp_path):
    """It holds an object of a class that this process must not need."""
    module, name = sys.modules["__main__"], "GPTConfig"
    theirs = dataclasses.make_dataclass(
        name, ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"]
    )
    theirs.__module__ = "__main__"
    setattr(module, name, theirs)
    config = dataclasses.replace(TINY, vocab_size=50304, pad_vocab=False, n_embd=8)
    model = GPT(config)
    saved = {"model": model.state_dict(), "config": theirs(16, 50304, 2, 2, 8), "step": 9}
    torch.save(saved, tmp_path / "model_00009.pt")
    delattr(module, name)
    other = loaded(tmp_path / "model_00009.pt")
    assert other.config == dataclasses.replace(config, vocab_size=50257, pad_vocab=True)
    wte = model.state_dict()["lm_head.weight"][:50257]
    assert torch.equal(other.state_dict()["lm_head.weight"][:50257], wte)


def flip_header(path: Path):
    content = bytearray(path.read_bytes())
    content[20] ^= 0x44
    path.write_bytes(content)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def pickle_with_code(path: Path):
    path.unlink()
    path.with_name("pytorch_model.bin").write_bytes(pickle.dumps(Evil(), protocol=2))


def torch_file_with_code(path: Path):
    path.unlink()
    torch.save({"x": Evil()}, path.with_name("pytorch_model.bin"))


def edit_tensors(path: Path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(path: Path, **changes):
    path = path.with_name("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN = {
    "lacks transformer.h.1.attn.c_attn.weight": lambda p: edit_tensors(
        p, lambda t: t.pop("transformer.h.1.attn.c_attn.weight")),
    "transformer.ln_f.bias has the shape (7,), not (32,)": lambda p: edit_tensors(
        p, lambda t: t.update({"transformer.ln_f.bias": torch.zeros(7)})),
    "model.safetensors can't be read": flip_header,
    "model.safetensors can't be read: ": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "pytorch_model.bin can't be read": pickle_with_code,
    "pytorch_model.bin can't be read: ": torch_file_with_code,
    "has no weights": Path.unlink,
    "activation_function relu is not supported": lambda p: edit_config(
        p, activation_function="relu"),
    "scale_attn_by_inverse_layer_idx True is": lambda p: edit_config(
        p, scale_attn_by_inverse_layer_idx=True),
    "model_type llama is not supported": lambda p: edit_config(p, model_type="llama"),
    "n_inner 99 is not supported": lambda p: edit_config(p, n_inner=99),
    "is no GPT-2: Expecting property": lambda p: p.with_name("config.json").write_text("{"),
    "is no GPT-2: TypeError": lambda p: p.with_name("config.json").write_text("[]"),
    "is no GPT-2: RecursionError": lambda p: p.with_name("config.json").write_text("[" * 200_000),
    "ln_f.bias holds numbers that are not finite": lambda p: edit_tensors(
        p, lambda t: t["transformer.ln_f.bias"].fill_(torch.nan)),
    "holds transformer.h.1.attn.c_attn.bias, which is not in its shape": lambda p: edit_config(
        p, n_layer=1),
    "wpe.weight has the shape (16, 32), not (8, 32)": lambda p: edit_config(p, n_positions=8),
    "wte.weight has the shape (99, 32), not (98, 32)": lambda p: edit_config(p, vocab_size=98),
    "lacks transformer.h.0.ln_1.bias": lambda p: edit_tensors(
        p, lambda t: [t.pop(name) for name in [*t] if name.endswith("bias")]),
    "pytorch_model.bin can't be read: TypeError": lambda p: (
        p.unlink(), torch.save(torch.ones(3), p.with_name("pytorch_model.bin"))),
    "holds transformer.0, which is not": lambda p: (
        p.unlink(), torch.save({0: torch.ones(3)}, p.with_name("pytorch_model.bin"))),
    "lacks transformer.wte.weight": lambda p: (
        p.unlink(), torch.save({"wte.weight": [5]}, p.with_name("pytorch_model.bin"))),
    "n_embd 12.5": lambda p: edit_config(p, n_embd=12.5),
    "No such file": lambda p: p.with_name("config.json").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_one_line_and_runs_no_code(tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    random_gpt(dataclasses.replace(TINY, vocab_size=99)).save_pretrained(folder)
    BROKEN[message](folder / "model.safetensors")
    with pytest.raises((ValueError, OSError)) as error:
        loaded(folder)
    assert message.strip(": ") in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not Path("executed").exists()


def test_a_checkpoint_of_something_else_is_one_line(tmp_path):
    for saved in ({"model": [1], "model_args": {}}, {"model": {}}, [1], torch.ones(3)):
        torch.save(saved, tmp_path / "ckpt.pt")
        with pytest.raises(ValueError, match="ckpt.pt is no GPT-2: ") as error:
            loaded(tmp_path / "ckpt.pt")
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps({"model": 1})])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(ValueError, match="ckpt.pt is no GPT-2: not written by torch.save") as error:
        loaded(tmp_path / "ckpt.pt")
    assert len(str(error.value).splitlines()) == 1


def test_cached_greedy_text_is_hugging_faces(tmp_path):
    config = dataclasses.replace(small("gpt2"), seq_len=256, n_embd=96)
    oracle = random_gpt(config)
    oracle.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    for seed in range(20):
        prompt = tokens(1, 5 + seed, vocab_size=997, seed=seed)
        theirs = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(generate(model, prompt, 200, temperature=0), theirs)
