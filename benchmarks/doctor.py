"""Say in ten lines what this machine can do for train_gpt2.py: put them into a bug report.

    python benchmarks/doctor.py

Rates are measured for a quarter of a second each, the attention kernel is the one that ran, and the
flags are what a run of one step chose.
"""

import json
import os
import platform
import re
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import machine
import torch

sys.path.insert(0, str(machine.REPO))
from support.device import matmul_tflops
from support.tokenizer import missing_vocab

SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad_vocab", "fused", "bf16_residual")


def main():
    machine.OneLineParser(prog="doctor.py", description=__doc__.splitlines()[0]).parse_args()
    warnings.filterwarnings("ignore")  # from a compiler that is tried
    no_cuda = "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device("cuda" if torch.cuda.is_available() else no_cuda)
    vocab = ", ".join(map(str, missing_vocab()))
    lines = {
        "device": device_line(device),
        "programs": programs(),
        "precision": precision(device),
        "attention": attention(device),
        "compile": compiler(device),
        "ranks": ranks(device),
        "vocabulary": f"GPT-2's is missing: {vocab}" if vocab else "GPT-2's is here",
        "disk": f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free here",
        "rates": rates(device),
        "flags": flags(),
    }
    for name, text in lines.items():
        print(f"{name + ':':<12}{' '.join(text.split())}")


def device_line(device: torch.device) -> str:
    processor = f"{machine.cpu_name()}, {machine.num_cores()} cores"
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        processor += f", {memory / 2**30:,.0f} GiB"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name = f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:,.0f} GiB"
        if torch.version.hip:
            return f"{name}, ROCm {torch.version.hip}: untested with train_gpt2.py; {processor}"
        capability = f"compute capability {gpu.major}.{gpu.minor}, driver {machine.driver()}"
        return f"{name}, {capability}; {processor}"
    if torch.xpu.is_available():
        return f"{device.type}; train_gpt2.py does not use Intel's GPUs: untested; {processor}"
    if not torch.version.cuda and shutil.which("nvidia-smi"):
        return f"{device.type}, an NVIDIA GPU, but this torch has no CUDA: pytorch.org; {processor}"
    return f"{device.type}, no NVIDIA GPU; {processor}"


def programs() -> str:
    commit = machine.output("git", "-C", str(machine.REPO), "describe", "--always", "--dirty")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"commit {commit or 'unknown'}, torch {torch.__version__}{cuda},"
        f" Python {platform.python_version()}, {platform.platform()}"
    )


def precision(device: torch.device) -> str:
    if device.type == "cuda":
        has_both = torch.cuda.get_device_capability() >= (8, 0)
        return f"BF16 and TF32 {'' if has_both else 'not '}in hardware"
    cpuinfo = Path("/proc/cpuinfo")
    has_bf16 = cpuinfo.exists() and re.search(r"bf16\b", cpuinfo.read_text())
    return f"BF16 {'' if has_bf16 else 'not '}in hardware, TF32 not in hardware"


def attention(device: torch.device) -> str:
    """Return the kernels that run for --flash, in bfloat16 and float32."""
    kernels = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(4, 1024, 12, 64, device=device, dtype=dtype, requires_grad=True)
        q = x.transpose(1, 2)  # the model's have these strides too
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        match = re.match(r"ScaledDotProduct(\w+?)Attention", y.grad_fn.name())
        name = match[1].lower() if match else "math"
        kernels.append(f"{name} in {str(dtype).removeprefix('torch.')}")
    return ", ".join(kernels)


def compiler(device: torch.device) -> str:
    x = torch.randn(8, 8, device=device, requires_grad=True)
    result = "works"
    try:
        torch.compile(torch.nn.functional.gelu, dynamic=False)(x).sum().backward()
    except Exception as error:  # Dynamo, Inductor, Triton and C++ compilers have their own errors
        result = f"fails ({type(error).__name__}: {error!s:.200})"
    triton = "Triton" if find_spec("triton") else "no Triton"
    cxx = machine.output(os.environ.get("CXX", "g++"), "--version").partition("\n")[0]
    return f"torch.compile {result}; {triton}, {cxx or 'no C++ compiler'}"


def ranks(device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo" if torch.distributed.is_gloo_available() else "none"
    has_nccl = torch.distributed.is_nccl_available()
    return f"NCCL {torch.cuda.nccl.version()}" if has_nccl else "no NCCL: one rank"


def rates(device: torch.device) -> str:
    """Return TFLOP/s of matrix products, as train_gpt2.py measures them."""
    float32 = matmul_tflops(device, torch.float32)
    bf16 = matmul_tflops(device, torch.bfloat16)
    return f"matrix products in TFLOP/s: float32 {float32:.3g}, BF16 {bf16:.3g}"


def flags() -> str:
    """Return the speed-ups that train_gpt2.py chooses here, by running one step of one layer."""
    with TemporaryDirectory() as folder:
        small = ["--n-layer=1", "--micro-batch-size=1", "--batch-tokens=1024", "--steps=1"]
        quiet = ["--eval-tokens=0", "--num-samples=0", "--save-every=0", f"--out-dir={folder}/run"]
        program = [sys.executable, str(machine.TRAIN), *small, *quiet]
        code, errors = machine.run_quietly(program)
        if code:
            return f"train_gpt2.py ends with {code}: {errors[-500:]}"
        with open(f"{folder}/run/log.jsonl", encoding="utf-8") as log:
            record = json.loads(next(log))
    words = [f"--model {record['flags']['model']}"]
    for name in SPEED_UPS:
        no = "" if record["flags"][name] else "no-"
        words.append(f"--{no}{name.replace('_', '-')}")
    reasons = "; ".join(f"no {name}: {why}" for name, why in record["off"].items())
    return f"{' '.join(words)}; {reasons or 'nothing is off'}"


if __name__ == "__main__":
    main()
