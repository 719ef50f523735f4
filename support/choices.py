"""Flags that are chosen by a short measurement on this machine. A processor's list of instructions
would say too little: of two that list bfloat16, it cut nano's step from 95 to 46 ms on one (an AMD
EPYC), and stretched it from 106 to 160 ms on the other (an Intel Xeon)."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainConfig
from model import SHAPES, Block, attention, flash_attention
from support.cli import typed_as
from support.device import autocast, matmul_tflops
from support.ranks import World

LONG_RUN_S = 600  # in a shorter run, compiling can hardly save the minute that it takes
FIRST_RUN_S = 500  # a run without --data-dir takes no longer, except for FEWEST_STEPS
FEWEST_STEPS = 20


def choose(config: TrainConfig, asked: Mapping, world: World) -> tuple[TrainConfig, dict[str, str]]:
    """Return the config with each flag that is measured, except those in `asked`, set to what is
    best on this machine, and the reason for each."""
    reasons: dict[str, str] = {}
    if "steps" not in asked and "warmup_steps" not in asked:
        config, reasons = shorten_first_run(config, world)
    if world.device.type != "cpu" or config.fp16:
        return config, reasons
    # In this order, because each one is measured with what is chosen so far.
    measured = {"bf16": precision, "flash": attention_kernel, "compile": compiling}
    for name, compare in measured.items():
        if name not in asked and not (name == "bf16" and config.bf16_residual):
            share = replace(config, batch_tokens=config.batch_tokens // world.size)
            is_faster, reason = compare(share)
            change: dict[str, Any] = {name: is_faster}
            config = replace(config, **change)
            reasons[typed_as(name, is_faster)] = reason
    return config, reasons


def precision(config: TrainConfig) -> tuple[bool, str]:
    """Return whether a layer of this network is faster in bfloat16 on this CPU, and both times."""
    C = config.n_embd
    # A large network gets few rows, because some CPUs only emulate bfloat16.
    rows = max(1, min(4096, config.batch_tokens, 2**27 // C**2))
    layer, x = nn.Linear(C, 4 * C), torch.randn(rows, C, requires_grad=True)
    single, half = race(
        partial(layer_pass, layer, x, torch.float32),
        partial(layer_pass, layer, x, torch.bfloat16),
    )
    reason = f"a layer takes {half:.1f} ms in bfloat16 and {single:.1f} ms in float32"
    # bfloat16 must be clearly faster, so that a repeated run rarely chooses differently.
    return half < 0.9 * single, reason


def layer_pass(layer: Callable, x: Tensor, dtype: torch.dtype):
    with autocast(dtype, x.device):
        y = layer(x)
    y.backward(y.detach())


def attention_kernel(config: TrainConfig) -> tuple[bool, str]:
    """Return whether flash attention is faster for this network on this CPU, and both times."""
    T, C = config.seq_len, config.n_embd
    if T > 512:
        return True, f"step by step, attention over {T} tokens would need too much memory"
    B = max(1, min(4096, config.batch_tokens) // T)
    q = torch.randn(B, T, config.n_head, C // config.n_head, dtype=config.dtype, requires_grad=True)
    flash, plain = race(
        partial(attention_pass, flash_attention, q), partial(attention_pass, attention, q)
    )
    is_faster = flash < 1.1 * plain  # near a tie, the default, so that repeated runs agree
    return is_faster, f"attention takes {flash:.1f} ms in one kernel, {plain:.1f} ms step by step"


def attention_pass(attend: Callable, q: Tensor):
    q = q.transpose(1, 2)  # (B, nh, T, hs), with the network's strides
    y = attend(q, q, q)
    y.backward(y.detach())


def compiling(config: TrainConfig) -> tuple[bool, str]:
    """Return whether compiling saves more time of this run than it takes on this CPU, and why."""
    B = max(1, min(4096, config.batch_tokens) // config.seq_len)
    block = Block(config.shape(vocab_size=1), config.compute_config())
    x = torch.randn(B, config.seq_len, config.n_embd, requires_grad=True)
    plain_pass = partial(layer_pass, block, x, config.dtype)
    plain_pass()  # the first one takes longer
    started = time.perf_counter()
    plain_pass()
    block_s = time.perf_counter() - started
    num_passes = config.steps * config.batch_tokens / (B * config.seq_len)
    run_s = block_s * config.n_layer * num_passes
    if run_s < LONG_RUN_S:
        return False, f"compiling takes up to a minute, and the run only about {run_s:,.0f} s"
    started = time.perf_counter()
    try:
        compiled_pass = partial(layer_pass, torch.compile(block, dynamic=False), x, config.dtype)
        compiled_pass()
    except Exception as error:  # of any class, as in why_not_compile
        return False, f"compiling fails ({type(error).__name__}): is g++ installed?"
    compile_s = 5 * (time.perf_counter() - started)  # the whole network took 3 to 6 times as long
    plain, compiled = race(plain_pass, compiled_pass)
    saved_s = (1 - compiled / plain) * run_s
    reason = f"a block takes {plain:.1f} ms, and {compiled:.1f} ms compiled, which saves about"
    return (
        saved_s > 1.5 * compile_s,
        f"{reason} {saved_s:,.0f} s; compiling takes {compile_s:.0f} s",
    )


def race(usual: Callable[[], None], other: Callable[[], None]) -> tuple[float, float]:
    """Return each function's least time in ms, over 0.3 s. They take turns, because other
    programs may slow some calls down. Give up if the other is far slower."""
    usual()  # the first call ever in a process takes longer
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < 5 or sum(times[0] + times[1]) < 300:
        for function, its_times in zip((usual, other), times, strict=True):
            started = time.perf_counter()
            function()
            its_times.append(1000 * (time.perf_counter() - started))
        if times[1][0] > 5 * times[0][0] + 100:  # its first call includes planning, below 0.1 s
            break
    return min(times[0]), min(times[1])


def shorten_first_run(config: TrainConfig, world: World) -> tuple[TrainConfig, dict[str, str]]:
    """Return a config with fewer steps, and the reason, if this is a run without --data-dir and
    the device is slow."""
    if config.data_dir or config.init_from or config.model == "nano" or config.deterministic:
        return config, {}
    L, C, T = config.n_layer, config.n_embd, config.seq_len
    vocab_size = SHAPES[config.model].vocab_size
    flops_per_token = 6 * (12 * L * C**2 + vocab_size * C) + 12 * L * C * T
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # GPT-2 124M trains at 0.4 (eager) to 0.6 of this rate on an H100.
    tokens_per_s = 0.4e12 * matmul_tflops(world.device, config.dtype) / flops_per_token * world.size
    steps = max(FEWEST_STEPS, round(FIRST_RUN_S * tokens_per_s / config.batch_tokens))
    if steps >= config.steps:
        return config, {}
    reason = f"this device trains at about {tokens_per_s:,.0f} tokens/s, so a first run is shorter"
    warmup_steps = min(config.warmup_steps, steps // 5)
    short = replace(config, steps=steps, warmup_steps=warmup_steps)
    return short, {typed_as("steps", steps): reason}
