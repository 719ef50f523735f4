"""Tests ../support/choices.py."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from config import TrainConfig
from support import choices
from support.ranks import World

CPU = World(0, 1, torch.device("cpu"))
MPS = World(0, 1, torch.device("mps"))
SMALL = TrainConfig(
    model="nano", n_layer=1, n_head=2, n_embd=32, seq_len=16, batch_tokens=64, warmup_steps=0
)


def slow(monkeypatch, kinds: set):
    """Make passes in these precisions, or with these kinds of attention, take 21 ms instead of 1,
    by a clock that other programs can't disturb."""
    clock = [0.0]
    monkeypatch.setattr(choices, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for name, index in (("layer_pass", 2), ("attention_pass", 0)):
        original = getattr(choices, name)

        def slower(*args, original=original, index=index):
            clock[0] += 0.021 if args[index] in kinds else 0.001
            original(*args)

        monkeypatch.setattr(choices, name, slower)


@pytest.mark.parametrize("slow_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slow_kind", [choices.attention, choices.flash_attention])
def test_the_faster_precision_and_attention_are_chosen(monkeypatch, slow_dtype, slow_kind):
    slow(monkeypatch, {slow_dtype, slow_kind})
    bf16, flash = slow_dtype == torch.float32, slow_kind == choices.attention
    config, reasons = choices.choose(SMALL, {}, CPU)
    assert (config.bf16, config.flash) == (bf16, flash)
    names = ["--bf16" if bf16 else "--no-bf16", "--flash" if flash else "--no-flash"]
    assert [*reasons] == [*names, "--no-compile"]
    assert all(reasons[name].count(" ms") == 2 for name in names)
    # What was typed or saved is never measured.
    typed = {"bf16": not bf16, "flash": not flash, "compile": True}
    assert choices.choose(replace(SMALL, **typed), typed, CPU) == (replace(SMALL, **typed), {})


def test_attention_that_would_need_gigabytes_is_not_tried(monkeypatch):
    slow(monkeypatch, {choices.flash_attention})
    long = replace(SMALL, seq_len=513, batch_tokens=513)
    assert choices.choose(long, {"bf16": False, "compile": False}, CPU)[0].flash


def test_an_emulated_precision_costs_one_call(monkeypatch):
    def layer_pass(layer, x, dtype):
        calls.append(dtype)
        time.sleep(0.3 if dtype == torch.bfloat16 else 0.001)

    calls: list[torch.dtype] = []
    monkeypatch.setattr(choices, "layer_pass", layer_pass)
    assert not choices.choose(SMALL, {"flash": True, "compile": False}, CPU)[0].bf16
    assert calls.count(torch.bfloat16) == 1


COMPILING = [  # ms of a block, ms of a compiled one, seconds to compile it, and what comes of it
    (10, 9, 0.01, True),
    (10, 12, 0.01, False),
    # The whole network takes five times as long to compile, which 10% of a run do not pay.
    (10, 9, 1.0, False),
    (1, 0.5, 0.01, False),  # the run is short, so that nothing is compiled
]


@pytest.mark.parametrize(("plain", "compiled", "compile_s", "pays"), COMPILING)
def test_a_long_run_is_compiled_if_that_saves_time(monkeypatch, plain, compiled, compile_s, pays):
    class Compiled(torch.nn.Module):
        is_new = True

        def forward(self, x):
            time.sleep(compiled / 1000 + (compile_s if self.is_new else 0))
            self.is_new = False
            return x * 1

    class Block(torch.nn.Module):
        def __init__(self, *_):
            super().__init__()

        def forward(self, x):
            time.sleep(plain / 1000)
            return x * 1

    asked = {"bf16": False, "flash": True}
    monkeypatch.setattr(choices, "Block", Block)
    monkeypatch.setattr(choices, "LONG_RUN_S", 5)
    made = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: made.append(Compiled()) or made[0])
    config, reasons = choices.choose(replace(SMALL, steps=1000), asked, CPU)
    assert config.compile == pays and [*reasons] == ["--compile" if pays else "--no-compile"]
    assert len(made) == (plain == 10)


def test_a_compiler_that_is_missing_is_said(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no g++")

    monkeypatch.setattr(choices, "LONG_RUN_S", 0)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    config, reasons = choices.choose(SMALL, {"bf16": False, "flash": True}, CPU)
    assert not config.compile and "g++" in reasons["--no-compile"]


@pytest.mark.parametrize(("tflops", "steps"), [(700, 240), (30, 107), (0.1, 20)])
def test_a_first_run_on_a_slow_device_has_fewer_steps(monkeypatch, tflops, steps):
    monkeypatch.setattr(choices, "matmul_tflops", lambda device, dtype: tflops)
    first = TrainConfig(batch_tokens=65_536, steps=240, warmup_steps=48)
    config, reasons = choices.choose(first, {"bf16": True}, MPS)
    assert (config.steps, config.warmup_steps) == (steps, steps // 5)
    assert [*reasons] == ([] if steps == 240 else [f"--steps {steps}"])
    kinds: list[dict] = [{"data_dir": "mine"}, {"init_from": "gpt2"}, {"model": "nano"}]
    kinds.append({"deterministic": True})  # else the result would depend on a stopwatch
    for others in kinds:
        assert choices.choose(replace(first, **others), {}, MPS)[0].steps == 240
    for typed in ("steps", "warmup_steps"):
        assert choices.choose(first, {typed: 48}, MPS)[0].steps == 240
