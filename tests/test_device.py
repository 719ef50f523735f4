"""Tests ../support/device.py."""

import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import train_gpt2
from support import device
from support.device import cpu_name
from support.guard import explained
from train_gpt2 import parse_args

ROOT = Path(train_gpt2.__file__).parent


@pytest.mark.parametrize(
    ("cpu", "nano", "gpt2"),
    [
        ("avx512f avx512_vnni", {"bf16"}, {"bf16"}),
        ("avx512f avx512_bf16 avx512_fp16", {"bf16"}, set()),
        ("avx512_bf16 amx_bf16 amx_tile", {"flash"}, set()),
        ("asimd i8mm bf16", {"bf16"}, set()),
    ],
)
def test_a_cpu_does_without_what_gains_nothing(monkeypatch, tmp_path, cpu, nano, gpt2):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {cpu}\n")
    kinds = train_gpt2.device.bf16_kinds(torch.device("cpu"), tmp_path / "cpuinfo")
    monkeypatch.setattr(train_gpt2.device, "bf16_kinds", lambda *_: kinds)

    def off(*line: str) -> set[str]:
        config, given, _ = parse_args([*line], "cpu")
        return {*train_gpt2.device.why_off(asdict(config), given, torch.device("cpu"))}

    assert off("--model", "nano") == {"tf32", "compile"} | nano
    assert off("--model", "gpt2") == {"tf32", "compile"} | gpt2
    for model in ("nano", "gpt2"):
        assert not {"bf16", "flash"} & off("--model", model, "--bf16", "--flash")
        assert "flash" not in off("--model", model, "--no-bf16", "--seq-len=128")
        assert ("flash" in off("--model", model, "--bf16", "--seq-len=512")) == ("amx" in cpu)
        assert "flash" not in off("--model", model, "--bf16", "--seq-len=513")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name : Xeon 8 @ 2 GHz\n" * 2, "Xeon 8 @ 2 GHz, "),
        ("CPU implementer : 0x41\nCPU part : 0xd0c\n" * 4, "0x41 0xd0c, "),
        ("CPU part : 0xd03\n\nCPU part\t: 0xd09\n", "0xd03 0xd09, "),
    ],
)
def test_a_processor_has_a_name(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    capability = torch.backends.cpu.get_cpu_capability()
    assert cpu_name(tmp_path / "cpuinfo") == name + capability
    assert len(cpu_name(tmp_path / "none")) > len(capability) + 2


HOSTILE_NAMES = ["$(touch x)", '"; touch x; "', "a`touch x`", "it's", "two words\nand a line", "-C"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_the_programs_folder_may_have_any_name(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    git = ["git", "-C", Path(name).absolute()]
    subprocess.run([*git, "init", "-q"], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, *who, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    monkeypatch.setattr(device, "__file__", str(Path(name, "support", "device.py")))
    assert re.fullmatch(
        "[0-9a-f]{40}", train_gpt2.device.environment(torch.device("cpu"), 1)["commit"]
    )
    assert os.listdir() == [name]


@pytest.mark.skipif(sys.platform == "win32", reason="a script stands in for git")
@pytest.mark.parametrize(
    "script", [None, "exit 1", "/bin/sleep 60", "printf '\\377'", "no program"]
)
def test_a_git_that_does_not_answer_costs_nothing(tmp_path, script, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        head = "" if script == "no program" else "#!/bin/sh\n"
        (tmp_path / "git").write_text(f"{head}{script}\n")
        (tmp_path / "git").chmod(0o755)
    start = time.monotonic()
    assert train_gpt2.device.environment(torch.device("cpu"), 1)["commit"] == ""
    assert time.monotonic() - start < 30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is meant")
def test_a_large_freed_tensor_stays_with_the_process():
    """Above 2 GiB too, which a step of 124M at T 1024 needs."""
    program = """
import ctypes, torch, train_gpt2
break_of_heap = ctypes.CDLL(None).sbrk
break_of_heap.restype = ctypes.c_void_p
train_gpt2.device.set_allocator(torch.device("cpu"), keep=True)
before = break_of_heap(0)
large = torch.empty(3 << 30, dtype=torch.uint8)
del large
print(break_of_heap(0) - before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) > 2 << 30, done.stderr


def after_a_start(program: str) -> str:
    """What a program prints in a new process, in which train_gpt2.py has started and ended."""
    start = 'import torch, train_gpt2\ntrain_gpt2.main(["--steps", "no number"])\n'
    names = ("THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="Linux gives huge pages to none here, or to all",
)
def test_large_tensors_have_huge_pages():
    mapped = after_a_start("""
large = torch.ones(1 << 26)  # 256 MiB
print(open("/proc/self/smaps_rollup").read())
""")
    assert int(re.search(r"AnonHugePages: +(\d+) kB", mapped)[1]) > 128 << 10


def test_compiled_code_has_tanh_of_exponentials():
    program = "import torch._inductor.config as c; print(c.cpp.use_decompose_tanh)"
    assert after_a_start(program) == "True\n"


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5.4 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_lack_of_memory_is_known_in_all_its_words(error, is_it):
    assert device.is_out_of_memory(error) == is_it

    def attempt():
        raise error

    if is_it:
        assert not device.has_memory(attempt)
        code, why = explained(error)
        assert code == 2 and "lower --micro-batch-size, or add --recompute" in why
    else:
        with pytest.raises(type(error)):
            device.has_memory(attempt)


def on_a_card(monkeypatch, capability: tuple[int, int], **more) -> torch.device:
    """What torch.cuda says of a GPU of this compute capability."""
    stand_ins = {
        "get_device_capability": lambda _: capability,
        "get_device_name": lambda _: "a card",
    }
    for name, function in (stand_ins | more).items():
        monkeypatch.setattr(torch.cuda, name, function)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("known", "capability", "is_usable"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (7, 0), False),  # a V100 and CUDA 13
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (7, 5), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (8, 9), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (12, 1), True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", (13, 0), True),  # its PTX
        ("sm_80 sm_86 sm_90a", (10, 0), False),
        ("sm_80 sm_86 compute_90", (10, 0), True),
        ("", (7, 0), True),
    ],
)
def test_a_card_without_kernels_is_refused_with_the_cure(monkeypatch, known, capability, is_usable):
    card = on_a_card(monkeypatch, capability, get_arch_list=known.split)
    if is_usable:
        return device.check_gpu(card)
    with pytest.raises(ValueError, match="has no kernels for a card .* for an older CUDA"):
        device.check_gpu(card)


def test_a_driver_that_is_too_old_is_one_line():
    said = (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU"
        " driver by downloading and installing a new version from the URL: http://..."
    )
    code, why = explained(RuntimeError(said))
    assert code == 2 and why.endswith("or set CUDA_VISIBLE_DEVICES= for the CPU")
    assert "(found version 11040): update it, or install" in why and "http" not in why


def test_a_card_from_before_2020_takes_float16(monkeypatch):
    card = on_a_card(monkeypatch, (7, 5))
    monkeypatch.setattr(device, "why_not_compile", lambda _: "")

    def choices(*line: str) -> dict[str, bool]:
        config, given, _ = parse_args([*line], "cuda")
        return device.chosen(device.why_off(asdict(config), given, card), given, card)

    assert choices() == {"tf32": False, "bf16": False, "fp16": True}
    assert choices("--fp16") == {"tf32": False, "bf16": False}
    assert choices("--no-fp16") == {"tf32": False, "bf16": False}
    assert choices("--no-bf16") == {"tf32": False}
    with pytest.raises(ValueError, match="--bf16 is emulated .* 2020, a card: --fp16 instead"):
        choices("--bf16")
    with pytest.raises(ValueError, match="--tf32 needs .* this is a card: add --no-tf32"):
        choices("--tf32")
    on_a_card(monkeypatch, (8, 0))
    assert choices() == {}


def test_a_trial_takes_no_more_than_is_free(monkeypatch):
    """Windows would lend the rest."""
    found = []
    on_a_card(monkeypatch, (8, 9), mem_get_info=lambda _: (6 << 30, 8 << 30),
              memory_reserved=lambda _: 1 << 30,
              set_per_process_memory_fraction=lambda *args: found.append(args))  # fmt: skip
    device.limit_memory(torch.device("cuda", 0))
    device.limit_memory(torch.device("cpu"))
    assert found == [(7 / 8, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("kind", "has_triton", "cure"),
    [
        ("cpu", False, "C++ compiler"),
        ("cuda", True, "gcc and python3-dev"),
        ("cuda", False, "triton"),
    ],
)
def test_compile_that_fails_names_what_is_missing(monkeypatch, kind, has_triton, cure):
    def fails(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: None)
    monkeypatch.setattr(device, "find_spec", lambda name: has_triton)
    assert cure in device.why_not_compile(torch.device(kind)).partition("install ")[2]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165), ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4060 Ti", 44), ("NVIDIA GeForce RTX 4060", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA T400", None), ("AMD EPYC", None),
    ],
)  # fmt: skip
def test_a_known_card_has_a_peak(name, peak):
    assert device.peak_tflops(name) == peak
