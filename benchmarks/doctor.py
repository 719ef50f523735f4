"""Print ten lines on what this machine can do for train_gpt2.py. Put them into a bug report.

    python benchmarks/doctor.py

"attention" names the kernels that ran, rates are measured for a quarter of a second each, and the
flags are those that a run of one step chose.
"""

import json
import os
import platform
import re
import shutil
import sys
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import machine
import torch

sys.path.insert(0, str(machine.REPO))
from support.device import matmul_tflops
from support.tokenizer import missing_vocab

SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad_vocab", "fused", "bf16_residual")


def main():
    machine.OneLineParser(prog="doctor.py", description=__doc__.splitlines()[0]).parse_args()
    no_cuda = "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device("cuda" if torch.cuda.is_available() else no_cuda)
    triton = "Triton" if find_spec("triton") else "no Triton"
    cxx = machine.output(os.environ.get("CXX", "g++"), "--version").partition("\n")[0]
    vocab = ", ".join(map(str, missing_vocab()))
    commit = machine.output("git", "-C", str(machine.REPO), "describe", "--always", "--dirty")
    has = torch.distributed.is_available()
    backends = {"gloo": has and torch.distributed.is_gloo_available()}
    backends["NCCL"] = has and torch.distributed.is_nccl_available()
    lines = {
        "device": gpu() if device.type == "cuda" else device.type,
        "processor": f"{machine.cpu_name()}, {machine.num_cores()} cores, {platform.platform()}",
        "programs": f"commit {commit}, torch {torch.__version__}, Python {sys.version}",
        "attention": attention(device),
        "compilers": f"{triton}, {cxx or 'no C++ compiler'}",
        "ranks": ", ".join(name for name, has in backends.items() if has) or "one",
        "vocabulary": f"GPT-2's is missing: {vocab}" if vocab else "GPT-2's is here",
        "disk": f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free here",
        "rates": rates(device),
        "flags": flags(),
    }
    for name, text in lines.items():
        print(f"{name + ':':<12}{' '.join(text.split())}")


def gpu() -> str:
    properties = torch.cuda.get_device_properties(0)
    name = f"{torch.cuda.device_count()} x {properties.name}"
    memory = f"{properties.total_memory / 2**30:,.0f} GiB"
    capability = f"compute capability {properties.major}.{properties.minor}"
    return f"{name}, {memory}, {capability}, driver {machine.driver()}"


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
        code, errors = machine.run_quietly([sys.executable, machine.TRAIN, *small, *quiet])
        if code:
            return f"train_gpt2.py fails: {machine.error_line(code, errors)}"
        with open(f"{folder}/run/log.jsonl", encoding="utf-8") as log:
            start = json.loads(next(log))
    words = [f"--model {start['flags']['model']}"]
    for name in SPEED_UPS:
        no = "" if start["flags"][name] else "no-"
        words.append(f"--{no}{name.replace('_', '-')}")
    reasons = "; ".join(f"{flag}: {reason}" for flag, reason in start["reasons"].items())
    return f"{' '.join(words)}; {reasons or 'nothing is off'}"


if __name__ == "__main__":
    main()
