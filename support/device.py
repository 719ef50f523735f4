"""What this machine can do: which speed-ups it has, and why not the others; the micro-batch that
fits; its own rates; its name, for the record."""

import ctypes
import gc
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn

PEAKS = {  # TFLOP/s; a name may go on, as in A100-SXM4-80GB, where there is no $
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362,
    "L4$": 121, "V100": 125, "T4$": 65, "RTX 4090$": 165, "RTX 4060 Ti$": 44, "RTX 3090$": 71,
}  # fmt: skip


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
        cure = "a C++ compiler (g++)"
        if device.type == "cuda":  # Triton compiles its launchers with them
            cure = "gcc and python3-dev" if find_spec("triton") else "triton (triton-windows)"
        return f"fails here ({type(error).__name__}: {error!s:.200}): install {cure}"
    return ""


def why_off(flags: dict, given: set[str], device: torch.device) -> dict[str, str]:
    """The speed-ups that this device does without, and why; ValueError if those given on the
    command line ask for one that can't be had."""
    why, cuda, is_nano = {}, device.type == "cuda", flags["model"] == "nano"
    kinds, is_old = bf16_kinds(device, Path("/proc/cpuinfo")), is_before_2020(device)
    if not cuda or is_old:
        name = device_name(device) if cuda else device
        why["tf32"] = f"needs an NVIDIA GPU of 2020 or later, this is {name}"
        if "tf32" in given and flags["tf32"]:
            raise ValueError(f"--tf32 {why['tf32']}: add --no-tf32")
    if is_old:
        why["bf16"] = f"is emulated by an NVIDIA GPU from before 2020, {name}: --fp16 instead"
        if "bf16" in given and flags["bf16"]:
            raise ValueError(f"--bf16 {why['bf16']}")
    elif not cuda and (not kinds or (is_nano and "amx_bf16" not in kinds)):
        why["bf16"] = "gains nothing where the hardware lacks it, nor without AMX for nano"
    bf16 = flags["bf16"] and ("bf16" in given or "bf16" not in why)
    # ms per layer for 1,024 tokens of 124M, plain and flash: T 256 8, 16; 512 15, 21; 1024 29, 26
    if bf16 and "amx_bf16" in kinds and flags["seq_len"] <= 512:
        why["flash"] = "is slower in bfloat16 on a CPU with AMX up to a --seq-len of 512"
    if not cuda or is_nano:
        why["compile"] = f"takes longer than it saves {'for nano' if is_nano else 'without a GPU'}"
    wanted = flags["compile"] and ("compile" in given or "compile" not in why)
    if wanted and (cause := why_not_compile(device)):
        if "compile" in given:
            raise ValueError(f"--compile {cause}; or add --no-compile")
        why["compile"] = cause
    return {name: text for name, text in why.items() if name not in given}


def chosen(off: dict[str, str], given: set[str], device: torch.device) -> dict[str, bool]:
    """What becomes of the flags where these are off: a GPU without bfloat16 takes float16."""
    has_fp16_instead = device.type == "cuda" and "bf16" in off and not {"bf16", "fp16"} & given
    return dict.fromkeys(off, False) | ({"fp16": True} if has_fp16_instead else {})


def set_environment():
    """Before the first tensor and the first compiling, since torch reads these once. Huge pages for
    large tensors save a CPU 3 % of a step of 124M; tanh made of exponentials, in what is compiled
    for a CPU, 8 % of a compiled step of nano (its absolute error is 2e-7)."""
    for name in ("THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH"):
        os.environ.setdefault(name, "1")
    if hasattr(sys.stdout, "reconfigure"):  # a sample may hold what a terminal can't show
        sys.stdout.reconfigure(errors="replace")


def set_determinism(on: bool, is_compiled: bool):
    """Whether the same numbers always give the same bits, which cuBLAS has only with a workspace of
    fixed size."""
    if is_compiled:
        torch.use_deterministic_algorithms(on)
    else:  # the same, but for Inductor, whose import takes 0.2 s
        torch.set_deterministic_debug_mode("error" if on else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it serves to find bugs
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_allocator(device: torch.device, keep: bool):
    """For a CPU, let glibc keep large freed tensors for the next ones. It would return each to the
    system, which then clears every page anew: a sixth of a step of GPT-2 124M. Not where memory is
    short: what is kept has gaps."""
    if device.type != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return  # another system's allocator
    if keep:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
    else:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, bytes: each larger tensor gets one


def check_gpu(device: torch.device):
    """ValueError if the installed torch has no kernels for this GPU: those of a compute capability
    run on later ones of the same major number, and what it has as PTX on any later one."""
    if device.type != "cuda" or torch.version.hip or not (known := torch.cuda.get_arch_list()):
        return
    own = torch.cuda.get_device_capability(device)
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(known)):
        made_for = divmod(int(number), 10)
        if made_for <= own and (kind == "compute" or made_for[0] == own[0]):
            return
    name = f"{device_name(device)} (compute capability {own[0]}.{own[1]})"
    why = f"torch {torch.__version__} has no kernels for {name}, only for {' '.join(known)}"
    cure = "install one for an older CUDA (pytorch.org), or set CUDA_VISIBLE_DEVICES= for the CPU"
    raise ValueError(f"{why}: {cure}")


def is_before_2020(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU without TF32 and bfloat16, such as a T4 or a V100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def has_memory(attempt: Callable) -> bool:
    """Whether attempt() finds memory, which is free again afterwards."""
    try:
        attempt()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        free_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was lacking, the device's or the computer's. PyTorch has a class for a part of
    it; the rest is told by its allocators for CPUs and Macs, by cuBLAS, CUDA and NCCL."""
    words = "out of memory|ALLOC_FAILED|t allocate memory|not enough memory"
    is_told = isinstance(error, RuntimeError) and re.search(words, str(error), re.IGNORECASE)
    return bool(is_told) or isinstance(error, torch.OutOfMemoryError | MemoryError)


def limit_memory(device: torch.device):
    """Let PyTorch take no more of a GPU's memory than is free now. Where Windows manages it, under
    WSL too, what is more comes out of the computer's, at a tenth of the speed and without an
    error."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        most = (torch.cuda.memory_reserved(device) + free) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, most), device)


def most_sequences(sequences: int, seq_len: int, device: torch.device) -> int:
    """The largest power of two that divides so many sequences: on a GPU up to 64, to be tried,
    elsewhere up to 4,096 tokens."""
    most = 64 if device.type == "cuda" else max(1, 4096 // seq_len)
    return math.gcd(sequences, 1 << (most.bit_length() - 1))


def fitting(make: Callable, attempt: Callable, B: int, world) -> tuple[nn.Module, nn.Module, int]:
    """What make makes, a model and what it was sped up to, and the largest of B, B / 2, ...
    sequences with which an attempt at a pass fits on every rank, beside gradients and moments;
    OutOfMemoryError if not even one does. A GPU is asked with the plain model first, which takes no
    compiling."""

    def fits(net: nn.Module) -> bool:
        def hold_and_try():
            _held = step_memory(model)
            attempt(net, B)

        return all(world.gather(has_memory(hold_and_try)))

    limit_memory(world.device)
    model, net = make()
    while world.device.type == "cuda" and B > 1 and not fits(model):
        B //= 2
    while not fits(net):
        if B == 1:
            raise torch.OutOfMemoryError("not even one sequence")
        world.tell(f"--micro-batch-size {B} does not fit after all: trying {B // 2}")
        B //= 2
        del model, net  # and their memory
        free_memory()
        model, net = make()
    return model, net, B


def step_memory(model: nn.Module) -> list[torch.Tensor]:
    """As much memory as a step holds besides a pass: gradients, and AdamW's moments (Muon has half
    of them)."""
    params = list(model.parameters())
    num_moments = 2 * sum(p.numel() for p in params)
    return [*map(torch.empty_like, params), torch.empty(num_moments, device=params[0].device)]


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of square matrix products on this device, measured for a quarter of a second."""
    n = {"cuda": 8192, "mps": 4096}.get(device.type, 1024)
    per_wait = 1 if device.type == "cpu" else 20  # a GPU would be idle at each
    a = torch.randn(n, n, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    start = time.perf_counter()
    for products in count(per_wait, per_wait):
        for _ in range(per_wait):
            product = a @ a
        product[0, 0].item()  # waits for the device
        if (seconds := time.perf_counter() - start) > 0.25:
            return products * 2 * n**3 / seconds / 1e12


def peak_tflops(name: str) -> float | None:
    """What NVIDIA's data sheet says of a GPU of that name: TFLOP/s in products of 16-bit numbers
    with float32 sums, without sparsity; None for those that are not listed."""
    return next((peak for known, peak in PEAKS.items() if re.search(rf"\b({known})", name)), None)


def peak_memory_mib(device: torch.device) -> float | None:
    """Of the device, or of this process where the device has no memory of its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac, else KiB
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def device_name(device: torch.device) -> str:
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else cpu_name(Path("/proc/cpuinfo"))


def environment(device: torch.device, num_ranks: int) -> dict:
    """What a result depends on besides the flags."""
    return {
        "commit": commit(), "torch": str(torch.__version__), "numpy": np.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": str(device.type), "device_name": device_name(device),
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
