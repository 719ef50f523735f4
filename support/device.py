"""This machine: the speed-ups it supports, its speed, its settings, and its device's name."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from support.ending import UserError, why_too_old
from support.files import REPO

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
CPUINFO = Path("/proc/cpuinfo")


def speed_ups_off(device: torch.device, model: str, asked: Mapping) -> dict[str, str]:
    """Return the speed-ups that are off on this device unless requested, each with its reason.
    Raise UserError if the user requests one that is not available."""
    off = {}  # name -> the reason, and what else to do if the speed-up is not available
    is_cuda = device.type == "cuda"
    is_old = is_cuda and torch.cuda.get_device_capability(device) < (8, 0)  # a T4 or V100
    if not is_cuda or is_old:
        name = device_name(device) if is_cuda else device.type
        off["tf32"] = f"needs an NVIDIA GPU from 2020 or later; this is {name}", ": add --no-tf32"
    if is_old:
        off["bf16"] = f"is only emulated by {name}", ": use --fp16"
    elif device.type == "mps":
        off["bf16"] = "was never measured on a Mac's GPU", ""
    if device.type == "mps" or (is_cuda and model == "nano"):
        off["compile"] = "takes longer than it saves", ""
    if asked.get("compile", is_cuda and "compile" not in off):
        failure = why_not_compile(device)
        if failure:
            off["compile"] = failure
    for name, (reason, cure) in off.items():
        if cure and asked.get(name):
            raise UserError(f"--{name} {reason}{cure}")
    return {name: reason for name, (reason, _) in off.items() if name not in asked}


def why_not_compile(device: torch.device) -> tuple[str, str] | None:
    """Try torch.compile on a small function. If that fails, return the reason and a cure."""
    try:
        x = torch.randn(8, 8, device=device, requires_grad=True)
        torch.compile(nn.GELU(), dynamic=False)(x).sum().backward()
    except Exception as error:  # Dynamo, Inductor, Triton and C++ share no exception class
        missing = "a C++ compiler (g++)"
        if device.type == "cuda":  # Triton needs a C compiler for its launchers
            missing = "gcc and python3-dev" if find_spec("triton") else "triton (triton-windows)"
        reason = f"fails ({type(error).__name__}: {error!s:.200}): install {missing}"
        return reason, ", or add --no-compile"
    return None


def check_gpu(device: torch.device):
    """Raise UserError if torch can't compute on this GPU: its driver is too old, torch has no code
    for it, or another process has it for itself. That torch sees the GPU says nothing."""
    try:
        torch.cuda.set_device(device)
        torch.randn(1, device=device).add_(1).item()
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        cure = "install the torch of pytorch.org for your driver (for a card from before 2018, with"
        cure += " CUDA 12.6)"
        if re.search("out of memory|busy", reason):
            cure = "end the program that uses it (see nvidia-smi), set CUDA_VISIBLE_DEVICES"
        text = f"PyTorch can't use this GPU ({reason:.200})"
        raise UserError(f"{text}: {cure}, or add --device cpu") from error


def check_torch(version: str):
    """Raise UserError if this version of torch is too old."""
    if why_too_old(version):
        raise UserError(why_too_old(version))


def set_environment():
    """Set variables that torch reads only once: before the first tensor or first compilation."""
    # Huge pages for large tensors make a step of 124M on a CPU 3% faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Computing tanh from exp makes a compiled step of nano on a CPU 8% faster; its error is 2e-7.
    os.environ.setdefault("TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH", "1")
    if sys.platform == "win32":
        # Windows must not sleep before this process ends, and its torch lacks libuv.
        ctypes.windll.kernel32.SetThreadExecutionState(0x80000001)  # CONTINUOUS, SYSTEM_REQUIRED
        os.environ.setdefault("USE_LIBUV", "0")
    if hasattr(sys.stdout, "reconfigure"):  # some terminals can't show every character
        sys.stdout.reconfigure(errors="replace")


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Speed-up 2: return a context in which matrix products and attention use dtype, while sums,
    norms and the loss stay float32. If dtype is float32, the context does nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def wait(device: torch.device):
    """Wait until the device has done its work. A GPU works while Python goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def forbid_spilling(device: torch.device):
    """On Windows, the driver would not say that memory is full, but use the computer's memory, at
    a tenth of the speed. Make torch's own allocator say it."""
    if sys.platform == "win32" or "microsoft" in platform.release():  # the latter is WSL
        torch.cuda.empty_cache()  # what we hold already counts as used
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(0.95 * free / total, device)


def tag_compiled_code(dtype: torch.dtype):
    """Tell torch's cache of compiled code what it does not look at itself: which attention kernels
    are allowed and, up to torch 2.11, autocast's dtype (pytorch#181564). Otherwise, a run may get
    code that was compiled for another precision."""
    cuda = torch.backends.cuda
    kernels = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    kernels += [cuda.cudnn_sdp_enabled(), os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")]
    try:
        from torch.compiler import config
    except ImportError:  # torch 2.5
        from torch._functorch import config as functorch_config

        functorch_config.enable_autograd_cache = False
        return
    own = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    config.cache_key_tag = f"{own} {dtype} {kernels}"


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


def set_allocator(keep_freed: bool):
    """Make glibc keep the memory of large freed tensors for new ones, or return it to the system,
    the default. The system clears each page that it hands out, which takes a sixth of a step of
    GPT-2 124M on a CPU. But kept memory has gaps, so don't keep it if memory is short."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return  # this system does not use glibc
    if keep_freed:
        mallopt(-4, 0)  # M_MMAP_MAX: give no tensor a separate mapping
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory
    else:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, in bytes: map larger tensors separately


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return this device's speed in square matrix products, in TFLOP/s."""
    n = {"cuda": 8192, "mps": 4096}.get(device.type, 1024)
    num_products = 2 if device.type == "cpu" else 20  # so that a GPU rarely idles
    a = torch.randn(n, n, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    times: list[float] = []  # in seconds; we take several, as other programs may slow some down
    deadline = time.perf_counter() + 0.25
    while not times or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(num_products):
            product = a @ a
        product[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return num_products * 2 * n**3 / min(times) / 1e12


def peak_tflops(name: str) -> float | None:
    """Return the data-sheet TFLOP/s of the GPU with this name, or None if it is not listed."""
    for pattern, peak in PEAK_TFLOPS.items():
        if re.match(rf"{pattern}\b(?! Ti| SUPER| Laptop|.* MIG)", name):
            return peak
    return None


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the peak memory used on the GPU or, without a GPU, by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac, else KiB
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def cpuinfo() -> str:
    """Return what Linux says about the processor, or "" on other systems."""
    return CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""


def device_name(device: torch.device) -> str:
    """Return the GPU's name or, without a GPU, the processor's name and PyTorch's instruction set,
    as both may change the last bits of a sum. On Arm, Linux has numbers instead of a name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    parts = re.findall(r"(?m)^(?:model name|Hardware|CPU implementer|CPU part)\s*: (.+)", cpuinfo())
    name = " ".join(dict.fromkeys(parts)) or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def rounding(device: torch.device) -> str:
    """Return what must be the same for all ranks, or their sums would differ in the last bits. Two
    cards of one kind may differ in memory."""
    if device.type != "cuda":
        return device_name(device)
    card = torch.cuda.get_device_properties(device)
    return f"{card.major}.{card.minor} with {card.multi_processor_count} multiprocessors"


def processor(device: torch.device) -> str:
    """Return what may make torch choose other code on a CPU of the same name (a cloud's "Intel
    Xeon"): its model, cache and vector instructions. Return "" for a GPU or without Linux."""
    if device.type == "cuda":
        return ""
    model = re.findall(r"(?m)^(?:cpu family|model|cache size)\s*: (.+)", cpuinfo())
    instructions = re.findall(r"\b(?:avx|amx|fma|f16c|sve|asimd|i8mm|bf16)\w*", cpuinfo())
    return " ".join(sorted({*instructions, "-".join(dict.fromkeys(model)).replace(" ", "")}))


def environment(device: torch.device, num_ranks: int, dtype: torch.dtype) -> dict:
    """Return everything, apart from the flags, that affects a run's results and speed."""
    return {
        "commit": commit(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "processor": processor(device),
        "threads": torch.get_num_threads(),
        "ranks": num_ranks,
        "matmul_tflops": matmul_tflops(device, dtype),
    }


def commit() -> str:
    """Return this program's commit, with "-dirty" appended if any file differs from it. Return ""
    without git, or inside another program's repository, whose commit would be irrelevant."""
    # Pass --git-dir, because inside a git hook GIT_DIR points to another repository.
    command = ["git", "--git-dir", str(REPO / ".git"), "--work-tree", str(REPO)]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, timeout=5, text=True).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
