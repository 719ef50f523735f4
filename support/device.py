"""What this machine can do: which speed-ups it has, and why not the others; the micro-batch that
fits; its own rates; its name, for the record. Knows no flag."""

import ctypes
import gc
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn


def bf16_kinds(device: torch.device, cpuinfo: Path) -> set[str]:
    """How a CPU multiplies bfloat16 itself, as Linux names it (avx512_bf16, amx_bf16, or bf16 of an
    Arm): a step of GPT-2 124M is 1.8 times as fast, with AMX one of nano 1.6 times."""
    has_any = device.type == "cpu" and cpuinfo.exists()
    return set(re.findall(r"\w*bf16\b", cpuinfo.read_text())) if has_any else set()


def why_not_compile(device: torch.device) -> str:
    """Nothing where torch.compile works, tried on a small piece; else the cause and the cure."""
    x = torch.randn(8, 8, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: nn.functional.gelu(x).sum(), dynamic=False)(x).backward()
    except Exception as error:  # Dynamo, Inductor, Triton or a C++ compiler, each in its own way
        cure = "triton (triton-windows)" if device.type == "cuda" else "a C++ compiler (g++)"
        return f"fails here ({type(error).__name__}: {error!s:.200}): install {cure}"
    return ""


def set_allocator(keep: bool):
    """Let glibc keep large freed tensors for the next ones. It would return each to the system,
    which then clears every page anew: a sixth of a CPU's step of GPT-2 124M. Not where memory is
    short: what is kept has gaps."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return  # another system's allocator
    if keep:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
    else:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, bytes: each larger tensor gets one


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest_that_fits(sequences: int, most: int, try_pass: Callable[[int], None]) -> int:
    """The largest power of two, up to most, that divides so many sequences and with which try_pass
    finds memory; of 1 it is not asked."""
    B = math.gcd(sequences, 1 << (most.bit_length() - 1))
    while B > 1:
        try:
            try_pass(B)
            break
        except torch.OutOfMemoryError:
            B //= 2
        finally:
            free_memory()
    return B


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of square matrix products on this device, measured for a quarter of a second."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    start = time.perf_counter()
    for products in count(1):
        (a @ a)[0, 0].item()  # waits for the device
        if (seconds := time.perf_counter() - start) > 0.25:
            return products * 2 * n**3 / seconds / 1e12


def peak_memory_mib(device: torch.device) -> float | None:
    """Of the device, or of this process where the device has no memory of its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac, else KiB
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def environment(device: torch.device, num_ranks: int) -> dict:
    """What a result depends on besides the flags."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else cpu_name(Path("/proc/cpuinfo"))
    return {
        "commit": commit(), "torch": str(torch.__version__), "numpy": np.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": str(device.type), "device_name": name,
        "threads": torch.get_num_threads(), "ranks": num_ranks,
    }  # fmt: skip


def cpu_name(cpuinfo: Path) -> str:
    """The processor, and which of its instructions PyTorch uses: both may change a sum's bits. An
    Arm has numbers instead of a name."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.findall(r"^(?:model name|Hardware|CPU implementer|CPU part)\s*: (.+)", text, re.M)
    name = " ".join(dict.fromkeys(found)) or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """Of this program; nothing where git does not say it."""
    command = ["git", "-C", str(Path(__file__).parent.parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=True
        ).stdout.decode("ascii").strip()  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
