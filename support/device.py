"""This machine: its name, speed and settings, what is fastest on it, what fits in its memory."""

import ctypes
import gc
import math
import os
import platform
import re
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from config import TrainConfig
from model import GPT, Block, ComputeConfig, GPTConfig
from support.cli import UserError
from support.world import World

NO_MEMORY = "out of memory"
# Dense 16-bit TFLOP/s with float32 sums, from NVIDIA's data sheets, by name pattern.
PEAK_TFLOPS = {
    "NVIDIA G?B200": 2250,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H[12]00 NVL": 835,
    "NVIDIA H[12]00": 989,
    "NVIDIA A100": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "NVIDIA A10G": 70,
    "NVIDIA RTX A6000": 155,
    "Tesla V100": 125,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 5090": 210,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 4080": 97,
    "NVIDIA GeForce RTX 4070": 58,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 3080": 60,
}


def autocast(dtype: str, device: torch.device) -> torch.autocast:
    """Speed-up 2: return a context in which matrix products and attention use dtype, while sums,
    norms and the loss stay float32. If dtype is "float32", the context does nothing."""
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def device_name(device: torch.device) -> str:
    """Return the GPU's name or, without a GPU, the processor's name and PyTorch's instruction set,
    as both may change the last bits of a sum. On Arm, Linux has numbers instead of a name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    parts = re.findall(r"(?m)^(?:model name|Hardware|CPU implementer|CPU part)\s*: (.+)", text)
    name = " ".join(dict.fromkeys(parts)) or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def machine(world: World) -> dict:
    """Return what, besides the flags, affects the bits of a run's result."""
    return {
        "device": device_name(world.device),
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "commit": commit(),
    }


def commit() -> str:
    """Return this program's commit, with "-dirty" if a file differs from it, or "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        folder = Path(__file__).parent
        result = subprocess.run(command, cwd=folder, capture_output=True, timeout=5, text=True)
        return result.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def peak_tflops(name: str) -> float | None:
    """Return the data-sheet TFLOP/s of the GPU with this name, or None if it is not listed."""
    for pattern, peak in PEAK_TFLOPS.items():
        if re.match(rf"{pattern}\b(?! Ti| SUPER| Laptop|.* MIG)", name):
            return peak
    return None


def set_determinism(enabled: bool, is_compiled: bool):
    """Choose whether the same inputs always give the same bits."""
    if is_compiled:
        torch.use_deterministic_algorithms(enabled)
    else:  # this has the same effect without importing Inductor, which takes 0.2 s
        torch.set_deterministic_debug_mode("error" if enabled else "default")
    # Don't fill uninitialized memory: filling it only helps to find bugs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if enabled:  # cuBLAS needs a fixed workspace to be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def tag_compiled_code(dtype: str):
    """Tell torch's cache of compiled code what it does not look at itself: which attention kernels
    are allowed and, up to torch 2.11, autocast's dtype (pytorch#181564). Otherwise, a run may get
    code that was compiled for another precision."""
    from torch.compiler import config

    cuda = torch.backends.cuda
    kernels = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    kernels += [cuda.cudnn_sdp_enabled(), os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")]
    own = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    config.cache_key_tag = f"{own} {dtype} {kernels}"


def keep_freed_memory():
    """Make glibc keep the memory of large freed tensors for new ones, since the system clears each
    page that it hands out. Without this, a step of nano took 1.55 times as long (two cores of an
    EPYC, bfloat16), and one of 124M 1.04 times."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return  # this system does not use glibc
    mallopt(-4, 0)  # M_MMAP_MAX: give no tensor a separate mapping
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory


def choose(config: TrainConfig, given: dict, world: World) -> tuple[TrainConfig, str]:
    """Return the config with those of --bf16 and --flash that are not given set to what is fastest
    on this CPU, and what was measured. The main rank measures alone: others would disturb it."""
    fixed = {name: value for name, value in given.items() if name in ("bf16", "flash")}
    if config.fp16 or config.bf16_residual:
        fixed["bf16"] = config.bf16
    if world.device.type != "cpu" or len(fixed) == 2:
        return config, ""
    times = world.gather(race(config, fixed) if world.is_main else {})[0]
    bf16, flash = min(times, key=times.__getitem__)
    figures = []
    for (is_bf16, is_flash), ms in times.items():
        name = f"{'bf16' if is_bf16 else 'float32'} and {'flash' if is_flash else 'plain'}"
        figures.append(f"{name} {ms:.1f}")
    return replace(config, bf16=bf16, flash=flash), f"; ms of a block: {', '.join(figures)}"


def race(config: TrainConfig, fixed: dict) -> dict[tuple[bool, bool], float]:
    """Return the time of a block's forward and backward in ms for each (bf16, flash) that `fixed`
    allows. A processor's list of instructions would say too little: of two that list bfloat16, it
    cut nano's step from 95 to 46 ms on one (an AMD EPYC), and stretched it from 106 to 160 ms on
    the other (an Intel Xeon)."""
    T, C = config.seq_len, config.n_embd
    num_tokens = min(config.batch_tokens, 4096, 2**27 // C**2)  # as some CPUs only emulate bfloat16
    x = torch.randn(max(1, num_tokens // T), T, C, requires_grad=True)
    blocks: dict = {}
    times: dict = {}
    for bf16, flash in ((False, True), (True, True), (False, False), (True, False)):
        if fixed.get("bf16", bf16) == bf16 and fixed.get("flash", flash) == flash:
            compute = ComputeConfig(**config.fields_of(ComputeConfig) | {"flash": flash})
            blocks[bf16, flash] = Block(GPTConfig(**config.fields_of(GPTConfig)), compute)
    deadline = math.inf
    while not times or time.perf_counter() < deadline:  # they take turns, as others may disturb
        for (bf16, flash), block in blocks.items():
            started = time.perf_counter()
            with autocast("bfloat16" if bf16 else "float32", x.device):
                y = block(x)
            y.backward(torch.ones_like(y))
            ms = 1000 * (time.perf_counter() - started)
            if deadline < math.inf:  # the first round includes planning
                times[bf16, flash] = min(ms, times.get((bf16, flash), math.inf))
        deadline = min(deadline, time.perf_counter() + 0.5)
    return times


class CompileError(Exception):
    """torch can't compile the network on some rank's machine."""


def fit(net: nn.Module, config: TrainConfig, world: World) -> TrainConfig:
    """Return the config with its micro-batch halved until a pass fits in memory on every rank.
    Raise CompileError if torch can't compile the network on some rank."""
    while failures := {*world.gather(try_pass(net, config, world))} - {""}:
        B = config.micro_batch_size
        if failures != {NO_MEMORY}:
            raise CompileError(max(failures))
        if B == 1:
            text = "not even one sequence fits in memory: lower --seq-len"
            raise UserError(f"{text}, or add --recompute and --loss-chunk-tokens 1024")
        half = next(size for size in range(B // 2, 0, -1) if B % size == 0)
        config = replace(config, micro_batch_size=half)
    return config


def try_pass(net: nn.Module, config: TrainConfig, world: World) -> str:
    """Return "" if a pass fits in memory, together with an optimizer's moments; NO_MEMORY; or why
    the network can't be compiled. Gradients are not averaged, so that no rank waits for another
    that fails."""
    failure = ""
    try:
        num_moments = 2 * sum(p.numel() for p in net.parameters())
        moments = torch.empty(num_moments, device=world.device)
        with gradient_sync(net, enabled=False):
            dummy_pass(net, config, world)
        del moments
    except torch.OutOfMemoryError:
        failure = NO_MEMORY
    except Exception as error:  # Dynamo, Inductor, Triton and C++ share no exception class
        if not any(name.endswith("_orig_mod") for name, _ in net.named_modules()):
            raise  # the network is not compiled
        failure = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    net.zero_grad(set_to_none=True)
    if failure:
        gc.collect()  # frees what the failed pass left behind
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return failure


def dummy_pass(net: nn.Module, config: TrainConfig, world: World):
    """Run forward and backward on dummy sequences, and discard the gradients."""
    shape = config.micro_batch_size, config.seq_len
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    with autocast(config.dtype, world.device):
        # Pass two tensors, as a step does, because passing one twice would force a recompile.
        loss = net(tokens, tokens.clone())
    loss.backward()
    for name, p in net.named_parameters():
        if p.grad is None:  # it is useless, and DDP would fail
            raise RuntimeError(f"{name} gets no gradient")
    net.zero_grad(set_to_none=True)


def gradient_sync(net: nn.Module, enabled: bool) -> AbstractContextManager:
    """Return a context in which backward averages gradients over the ranks only if enabled."""
    return net.no_sync() if isinstance(net, DDP) and not enabled else nullcontext()


@torch.no_grad()
def check_causality(model: GPT, dtype: str, device: torch.device):
    """Raise UserError if a position sees a later token, as in a network whose attention has no
    mask: its loss would soon be near zero, and its text worthless."""
    tokens = torch.zeros((1, min(8, model.config.seq_len)), dtype=torch.int64, device=device)
    outputs = []
    for last in (0, 1):
        tokens[0, -1] = last
        torch.manual_seed(0)  # the same dropout, since the network is tried as it trains
        with autocast(dtype, device):
            outputs.append(model.logits(tokens)[0, :-1, : model.config.vocab_size].float())
    first, second = outputs
    differs = (~torch.isclose(first, second, rtol=1e-3, atol=1e-4)).any(dim=1)  # by position
    if differs.any():
        position = int(differs.nonzero()[0])
        raise UserError(f"position {position} sees token {tokens.shape[1] - 1}: is the mask there?")
