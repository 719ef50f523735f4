"""Tests ../support/device.py: what this machine is, what is fastest on it, what fits, and that the
network sees no later token."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import finish, start_ranks
from test_world import instead_of_a_run
from torch import nn

from config import RECIPES, TrainConfig
from model import GPT, ComputeConfig, GPTConfig
from support import device
from support.cli import UserError
from support.device import check_causality, choose, fit
from support.world import World
from train_gpt2 import set_backends

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
CONFIG = TrainConfig(
    model="nano", bf16=False, warmup_steps=0, compile=False, n_layer=1, n_head=2, n_embd=8,
    seq_len=4, batch_tokens=96, micro_batch_size=24, tf32=False,
)  # fmt: skip

# ---- This machine --------------------------------------------------------------------------------


def test_compiled_code_of_another_precision(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    monkeypatch.setattr(device, "set_determinism", lambda enabled: None)
    tags = set()
    for changes in ({}, {"bf16": True}, {"fp16": True}):
        set_backends(replace(CONFIG, compile=True, recompute=True, **changes), ALONE)
        tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 3


# ---- What is fastest -----------------------------------------------------------------------------


def test_fastest_is_chosen(monkeypatch):
    times = {(False, True): 3.25, (True, True): 9.5, (False, False): 2.75, (True, False): 1.5}
    monkeypatch.setattr(device, "race", lambda each: [times[c.bf16, c.flash] for c in each])
    cases = ({}, True, False), ({"bf16": False}, False, False), ({"flash": True}, False, True)
    for given, bf16, flash in cases:
        config, text = choose(replace(CONFIG, **given), given, ALONE)
        assert config == replace(CONFIG, **{"bf16": bf16, "flash": flash} | given)
        assert f"{times[bf16, flash]:.1f}" in text
    given = {"bf16": True, "flash": True}
    assert choose(replace(CONFIG, **given), given, ALONE) == (replace(CONFIG, **given), "")
    for changes in ({"fp16": True}, {"bf16": True, "bf16_residual": True}):  # they decide on bf16
        config, _ = choose(replace(CONFIG, **changes), changes, ALONE)
        assert replace(config, flash=True) == replace(CONFIG, **changes)
    assert choose(CONFIG, {}, World(0, 1, torch.device("cuda"))) == (CONFIG, "")


# ---- What fits -----------------------------------------------------------------------------------


class Limited(nn.Module):
    """A network with memory for so many sequences, which remembers what it was given."""

    def __init__(self, most: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.most, self.tried = most, []

    def forward(self, idx, targets):
        self.tried.append(len(idx))
        if len(idx) > self.most:
            raise torch.OutOfMemoryError("2 GiB")
        return self.weight * idx.float().mean()


def test_fit():
    for B, most, tried in (
        (24, 24, [24]),
        (24, 5, [24, 12, 6, 3]),
        (15, 7, [15, 5]),  # only divisors, or a step would be no whole number of passes
    ):
        net = Limited(most)
        config = fit(net, replace(CONFIG, micro_batch_size=B), ALONE)
        assert config == replace(CONFIG, micro_batch_size=tried[-1]) and net.tried == tried
        assert net.weight.grad is None and net.weight == 1
    with pytest.raises(UserError, match="memory.*--seq-len"):
        fit(Limited(0), replace(CONFIG, micro_batch_size=1), ALONE)


def fit_on_two(world: World):
    for most in ((7, 99), (99, 7)):  # of each rank
        net = nn.parallel.DistributedDataParallel(Limited(most[world.rank]))
        assert world.gather(fit(net, CONFIG, world).micro_batch_size) == [6, 6]
        assert net.module.tried == [24, 12, 6]


@pytest.mark.slow
def test_fit_on_two_ranks(tmp_path):
    processes = start_ranks([], tmp_path, 2, inject=partial(instead_of_a_run, fit_on_two))
    code, _, err = finish(processes, tmp_path)
    assert code == 0, err + (tmp_path / "rank1.err").read_text()


# ---- No token is seen before its time ------------------------------------------------------------

NANO = GPTConfig(257, **{name: RECIPES["nano"][name] for name in ("n_layer", "n_head", "n_embd")})
DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_networks(dtype):
    for compute in ({}, {"flash": False}, {"bf16_residual": dtype == "bfloat16"},
                    {"recompute": True}, {"dropout": 0.5}):  # fmt: skip
        for shape in (NANO, GPTConfig(97, 1, 1, 1, 8), GPTConfig(97, 16, 2, 2, 32)):
            model = GPT(shape, ComputeConfig(**compute))
            check_causality(model, dtype, CPU)


def without_a_mask(q, k, v, dropout=0.0):
    return F.scaled_dot_product_attention(q, k, v)


class MeanOverTime(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["mask", "norm"])
def test_networks_that_see_later_tokens(how, dtype):
    for shape in (NANO, GPTConfig(997, n_layer=2), GPTConfig(97, 16, 2, 2, 32)):
        model = GPT(shape)
        if how == "norm":
            model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, MeanOverTime())
        for block in model.transformer.h if how == "mask" else ():
            block.attn.attend = without_a_mask
        with pytest.raises(UserError, match="position"):
            check_causality(model, dtype, CPU)
            raise AssertionError(shape)
