"""This machine: its name, speed and settings, what is fastest on it, what fits in its memory."""

import ctypes
import gc
import os
import platform
import re
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from config import TrainConfig
from model import GPT, Block, ComputeConfig, GPTConfig
from support.cli import UserError
from support.world import World

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
    """Return a context (speed-up 2) for products in dtype; sums, norms and loss stay float32."""
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's and its instruction set, which may change bits."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it, and on Arm it has no name
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    name = found[1] if found else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def machine(world: World) -> dict:
    """Return what, besides the flags, affects the bits of a run's result."""
    # "-dirty" if a file differs from the commit, and nothing without git
    line, folder = "git describe --always --dirty --exclude=*", Path(__file__).parent
    result = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
    return {
        "device": device_name(world.device),
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "commit": result.stdout.strip(),
    }


def peak_tflops(name: str) -> float | None:
    """Return the data-sheet TFLOP/s of the GPU with this name, or None if it is not listed."""
    for pattern, peak in PEAK_TFLOPS.items():
        if re.match(rf"{pattern}\b(?! Ti| SUPER| Laptop|.* MIG)", name):
            return peak
    return None


def set_determinism(enabled: bool):
    """Choose whether the same inputs always give the same bits."""
    torch.use_deterministic_algorithms(enabled)
    # Filling uninitialized memory would only help to find bugs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if enabled:  # cuBLAS needs a fixed workspace to be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def keep_freed_memory():
    """Make glibc keep freed memory, as the system clears each new page. Without this, a step of
    nano took 1.55 times as long (two cores of an EPYC, bfloat16), and one of 124M 1.04 times."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: give no tensor a separate mapping
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory


def choose(config: TrainConfig, given: dict, world: World) -> tuple[TrainConfig, str]:
    """Return the config with --bf16 and --flash, where not given, set to what is fastest on this
    CPU, and a summary of the timings. Only the main rank measures: others would disturb it."""
    dtypes = [config.bf16] if config.fp16 or "bf16" in given else [False, True]
    kernels = [config.flash] if "flash" in given else [True, False]
    configs = [replace(config, bf16=bf16, flash=flash) for bf16 in dtypes for flash in kernels]
    if world.device.type != "cpu" or len(configs) == 1:
        return config, ""
    times = world.on_main(race, configs)
    fastest = configs[times.index(min(times))]
    return fastest, f"; measured: {min(times):.1f} ms a block, the slowest choice {max(times):.1f}"


def race(configs: list[TrainConfig]) -> list[float]:
    """Measure for half a second, and return each config's ms for a block's two passes. bfloat16 cut
    nano's step from 95 to 46 ms on an AMD EPYC, but stretched it from 106 to 160 ms on an Intel
    Xeon that lists the same instructions."""
    shape = GPTConfig(**configs[0].fields_of(GPTConfig))
    blocks = [Block(shape, ComputeConfig(**c.fields_of(ComputeConfig))) for c in configs]
    T, C = shape.seq_len, shape.n_embd
    num_tokens = min(configs[0].batch_tokens, 4096, 2**27 // C**2)  # some CPUs emulate bfloat16
    x = torch.randn(max(1, num_tokens // T), T, C, requires_grad=True)
    times: list[list[float]] = [[] for _ in configs]
    end = time.perf_counter() + 0.5
    # At least two rounds, as the first includes planning. Configs take turns, as load may vary.
    while len(times[0]) < 2 or time.perf_counter() < end:
        for config, block, ms in zip(configs, blocks, times, strict=True):
            started = time.perf_counter()
            with autocast(config.dtype, x.device):
                y = block(x)
            y.sum().backward()
            ms.append(1000 * (time.perf_counter() - started))
    return [min(ms) for ms in times]


def fit(net: nn.Module, config: TrainConfig, world: World) -> TrainConfig:
    """Return the config with its micro-batch halved until a pass fits in memory on every rank."""
    while not all(world.gather(try_pass(net, config, world))):
        B = config.micro_batch_size
        if B == 1:
            raise UserError("one sequence needs more memory: add --recompute, or lower --seq-len")
        half = max(size for size in range(1, B) if B % size == 0)
        config = replace(config, micro_batch_size=half)
    return config


def try_pass(net: nn.Module, config: TrainConfig, world: World) -> bool:
    """Return whether a pass fits in memory, together with an optimizer's moments. Gradients are not
    averaged, so that no rank waits for another that fails."""
    try:
        moments = torch.empty(2 * sum(p.numel() for p in net.parameters()), device=world.device)
        with gradient_sync(net, enabled=False):
            dummy_pass(net, config, world)
        del moments
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        net.zero_grad(set_to_none=True)
        gc.collect()  # frees what a failed pass left behind
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def dummy_pass(net: nn.Module, config: TrainConfig, world: World):
    """Run forward and backward on dummy sequences, and discard the gradients."""
    B, T = config.micro_batch_size, config.seq_len
    idx = torch.zeros(B, T, dtype=torch.int64, device=world.device)
    with autocast(config.dtype, world.device):
        # Pass two tensors, as a step does, because passing one twice would force a recompile.
        loss = net(idx, idx.clone())
    loss.backward()
    net.zero_grad(set_to_none=True)


def to_device(batch: tuple, device: torch.device) -> list[Tensor]:
    """Copy a batch of numpy arrays to a device, without waiting for the copy."""
    tensors = [torch.from_numpy(array) for array in batch]
    if device.type == "cuda":  # from pinned memory, the GPU copies while it computes
        tensors = [tensor.pin_memory() for tensor in tensors]
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def gradient_sync(net: nn.Module, enabled: bool) -> AbstractContextManager:
    """Return a context in which backward averages gradients over the ranks only if enabled."""
    return net.no_sync() if isinstance(net, DDP) and not enabled else nullcontext()


@torch.no_grad()
def check_causality(model: GPT, dtype: str, device: torch.device):
    """Raise UserError if a position sees a later token, as in a network whose attention has no
    mask: its loss would soon be near zero, and its text worthless."""
    tokens = torch.zeros(2, min(8, model.config.seq_len), dtype=torch.int64, device=device)
    tokens[1, -1] = 1
    model.eval()  # dropout would differ between the two
    with autocast(dtype, device):
        first, second = model.logits(tokens)[:, :-1].float()
    model.train()
    # By position. This check ignores weights that overflow: the first step reports them.
    sees_it = ~torch.isclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True).all(dim=1)
    if sees_it.any():
        position, last = int(sees_it.nonzero()[0]), tokens.shape[1] - 1
        raise UserError(f"position {position} sees token {last}: is the mask there?")
