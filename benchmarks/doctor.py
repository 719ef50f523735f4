"""What this machine can do for train_gpt2.py, in ten lines: put them into a bug report.

    python benchmarks/doctor.py

Rates are measured, a quarter of a second each; the attention kernel is the one that ran; the flags
are asked of train_gpt2.py.
"""

import os
import platform
import re
import shutil
import sys
import time
import warnings
from dataclasses import asdict
from itertools import count

import machine
import torch
from torch import Tensor

sys.path.insert(0, str(machine.REPO))
import train_gpt2
from support.files import missing_vocab
from support.report import has_unused_gpu


def main():
    machine.OneLineParser(description=__doc__.splitlines()[0]).parse_args()  # there is only --help
    warnings.filterwarnings("ignore")  # a compiler's, while it is tried out
    world = train_gpt2.ranks.find_world({}, torch.cuda.device_count())
    lines = {
        "device": device(world.device),
        "programs": programs(),
        "precision": precision(world.device),
        "attention": attention(world.device),
        "compile": compiler(world.device),
        "ranks": ranks(world.device),
        "vocabulary": vocabulary(),
        "disk": f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free here",
        "rates": rates(world.device),
        "flags": flags(world.device),
    }
    for name, text in lines.items():
        print(f"{name + ':':<12}{' '.join(text.split())}")


def device(device: torch.device) -> str:
    processor = f"{machine.cpu_name()}, {machine.num_cores()} cores{memory()}"
    if device.type != "cuda":
        has_unused = has_unused_gpu({"device": device.type})
        no_gpu = "an NVIDIA GPU, but this torch is for CPUs: pytorch.org" if has_unused else ""
        return f"{device.type}, {no_gpu or 'no NVIDIA GPU'}; {processor}"
    facts, number = torch.cuda.get_device_properties(device), torch.cuda.device_count()
    return (
        f"{number} x {facts.name}, {facts.total_memory / 2**30:,.0f} GiB, compute capability"
        f" {facts.major}.{facts.minor}, driver {machine.driver()}; {processor}"
    )


def memory() -> str:
    if not hasattr(os, "sysconf"):
        return ""
    return f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:,.0f} GiB"


def programs() -> str:
    commit = machine.output("git", "-C", str(machine.REPO), "describe", "--always", "--dirty")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"commit {commit or 'unknown'}, torch {torch.__version__}{cuda}, Python"
        f" {platform.python_version()}, {platform.platform()}"
    )


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def precision(device: torch.device) -> str:
    tf32 = has_tf32(device)
    bf16 = tf32 or bool(train_gpt2.device.bf16_kinds(device, train_gpt2.Path("/proc/cpuinfo")))
    answers = {True: "in hardware", False: "not in hardware"}
    return f"BF16 {answers[bf16]}, TF32 {answers[tf32]}"


def attention(device: torch.device) -> str:
    """The kernels that flash_attention runs, in bfloat16 and float32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(4, 1024, 12, 64, device=device, dtype=dtype, requires_grad=True)
        q = x.transpose(1, 2)  # as the model's are
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        kernel = re.match(r"ScaledDotProduct(\w+?)Attention", y.grad_fn.name())
        name = kernel[1].lower() if kernel else "math"
        found.append(f"{name} in {str(dtype).removeprefix('torch.')}")
    return ", ".join(found)


def compiler(device: torch.device) -> str:
    try:
        import triton
    except ImportError:
        triton = None
    cxx = machine.output(os.environ.get("CXX", "g++"), "--version").partition("\n")[0]
    parts = [f"Triton {triton.__version__}" if triton else "no Triton", cxx or "no C++ compiler"]
    return (
        f"torch.compile {train_gpt2.device.why_not_compile(device) or 'works'}; {', '.join(parts)}"
    )


def ranks(device: torch.device) -> str:
    if device.type == "cuda":
        has_nccl = torch.distributed.is_nccl_available()
        version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
        return f"NCCL {version}" if has_nccl else "no NCCL: one rank"
    return "gloo" if torch.distributed.is_gloo_available() else "none"


def vocabulary() -> str:
    missing = missing_vocab()
    return f"GPT-2's is missing: {', '.join(map(str, missing))}" if missing else "GPT-2's is here"


def rates(device: torch.device) -> str:
    """TFLOP/s of matrix products as train_gpt2.py measures them, and GB/s read and written."""
    found = {}
    for name, dtype in (("float32", torch.float32), ("BF16", torch.bfloat16)):
        found[name] = train_gpt2.device.matmul_tflops(device, dtype)
    if has_tf32(device):
        torch.set_float32_matmul_precision("high")
        found["TF32"] = train_gpt2.device.matmul_tflops(device, torch.float32)
        torch.set_float32_matmul_precision("highest")
    products = ", ".join(f"{name} {rate:.3g}" for name, rate in found.items())
    return f"matrix products in TFLOP/s: {products}; copies {copy_rate(device):,.0f} GB/s"


def copy_rate(device: torch.device) -> float:
    source = torch.ones(2**28, dtype=torch.uint8, device=device)
    target = source.clone()
    start = time.perf_counter()
    for copies in count(1):
        wait(target.copy_(source))
        if (seconds := time.perf_counter() - start) > 0.25:
            return 2 * copies * len(source) / seconds / 1e9


def wait(x: Tensor):
    x[0].item()  # until the device has written it


def flags(device: torch.device) -> str:
    """What train_gpt2.py chooses here if it is given none."""
    config, given, _ = train_gpt2.parse_args([], device.type)
    off = train_gpt2.device.why_off(asdict(config), given, device)
    names = ("tf32", "bf16", "compile", "flash", "pad_vocab", "fused")
    states = [f"--{'no-' if name in off else ''}{name.replace('_', '-')}" for name in names]
    reasons = "; ".join(f"no {name}: {why}" for name, why in off.items())
    return f"--model {config.model} {' '.join(states)}; {reasons or 'nothing is off'}"


if __name__ == "__main__":
    main()
