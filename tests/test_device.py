"""Tests ../support/device.py."""

import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import NEEDS_POSIX

import config as config_module
import train_gpt2
from config import TrainConfig
from model import GPT, GPTConfig
from support import device, fit, report
from support.ending import UserError
from support.ranks import World

ROOT = Path(train_gpt2.__file__).parent
CPU = torch.device("cpu")


def resolve(on: torch.device, **typed) -> tuple[set[str], dict[str, bool]]:
    """Return what is off on a device with these flags, and those that are chosen for it."""
    config, reasons = config_module.resolve(typed, None, None, on)
    names = ("tf32", "bf16", "fp16", "flash")
    off = {flag[5:] for flag in reasons if flag.startswith("--no-")}
    return off, {name: getattr(config, name) for name in names}


def put_in_card(monkeypatch, capability: tuple[int, int]) -> torch.device:
    """Have torch.cuda say that there is a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(device, "why_not_compile", lambda _: None)
    return torch.device("cuda", 0)


def test_a_card_from_before_2020_takes_float16(monkeypatch):
    card = put_in_card(monkeypatch, (7, 5))
    half = {"tf32": False, "bf16": False, "fp16": True, "flash": True}
    off = {"tf32", "bf16", "bf16-residual"}
    assert resolve(card) == resolve(card, fp16=True) == (off, half)
    assert resolve(card, fp16=False)[1] == half | {"fp16": False}
    with pytest.raises(UserError, match="--bf16 .*a card: use --fp16"):
        resolve(card, bf16=True)
    with pytest.raises(UserError, match="--tf32 .*a card: add --no-tf32"):
        resolve(card, tf32=True)
    card = put_in_card(monkeypatch, (8, 0))
    assert resolve(card) == (set(), {"tf32": True, "bf16": True, "fp16": False, "flash": True})


@pytest.mark.parametrize("line", ["", "--data-dir mine --steps 9", "--model gpt2", "--model nano"])
def test_the_recorded_command_is_the_same_run_on_another_kind_of_device(line, monkeypatch):
    """Without a GPU the model would be another one. Only speed-ups and validation may differ."""
    card = put_in_card(monkeypatch, (8, 0))
    for here, there in ((CPU, card), (card, CPU)):
        typed = config_module.read_flags(line.split(), "")
        config, reasons = config_module.resolve(typed, None, None, here)
        words = shlex.split(report.typed_command(typed, reasons))[2:]
        again, _ = config_module.resolve(config_module.read_flags(words, ""), None, None, there)
        free = ("tf32", "bf16", "fp16", "compile", "flash", "bf16_residual", "eval_tokens")
        assert replace(again, **{name: getattr(config, name) for name in free}) == config


@pytest.mark.parametrize("line", ["", "--no-fp16", "--no-bf16-residual", "--model nano"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), None])
def test_the_recorded_command_is_the_same_run_on_the_same_device(capability, line, monkeypatch):
    on = put_in_card(monkeypatch, capability) if capability else CPU
    typed = config_module.read_flags(line.split(), "")
    config, reasons = config_module.resolve(typed, None, None, on)
    words = shlex.split(report.typed_command(typed, reasons))[2:]
    assert config_module.resolve(config_module.read_flags(words, ""), None, None, on)[0] == config


def test_compile_that_fails_names_what_is_missing(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: None)
    for kind, has_triton, cure in (
        ("cpu", False, "C++ compiler"),
        ("cuda", True, "gcc and python3-dev"),
        ("cuda", False, "triton"),
    ):
        monkeypatch.setattr(device, "find_spec", lambda _, known=has_triton: known)
        reason, told = device.why_not_compile(torch.device(kind))
        assert cure in reason and "--no-compile" in told and "C compiler" in reason


def test_a_gpu_that_torch_cannot_use_is_one_line(monkeypatch, capsys, tmp_path):
    """Its driver is too old, or torch has no code for it, or another process has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # so says NVML
    randn = torch.randn

    def too_old(*_):
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore lines")

    def no_kernel(*args, device=None, **options):
        if device is not None and torch.device(device).type == "cuda":
            raise RuntimeError("CUDA error: no kernel image is available\nmore lines")
        return randn(*args, device=device, **options)

    for put, reason in (
        (lambda: monkeypatch.setattr(torch.cuda, "set_device", too_old), "driver on your system"),
        (lambda: monkeypatch.setattr(torch.cuda, "set_device", lambda _: None), "no kernel image"),
    ):
        put()
        monkeypatch.setattr(torch, "randn", no_kernel)
        assert train_gpt2.main(["--out-dir=x", "--steps=1"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert reason in line and "more lines" not in line and "--device cpu" in line
        monkeypatch.setattr(torch, "randn", randn)
    for reason in ("CUDA out of memory. Tried to", "CUDA-capable device(s) is/are busy"):

        def in_use(*_, reason=reason):
            raise torch.AcceleratorError(reason)

        monkeypatch.setattr(torch.cuda, "set_device", in_use)
        assert train_gpt2.main(["--out-dir=x", "--steps=1"]) == 2
        assert "nvidia-smi" in capsys.readouterr().err
    assert not os.listdir()


def test_a_device_whose_driver_spills_says_that_memory_is_full(monkeypatch):
    shares = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *a: shares.append(a))
    for system, release, spills in (
        ("win32", "11", True),
        ("linux", "5.15.153.1-microsoft-standard-WSL2", True),
        ("linux", "6.8.0", False),
    ):
        shares.clear()
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(device.platform, "release", lambda release=release: release)
        device.forbid_spilling(torch.device("cuda", 0))
        assert shares == ([(0.95 * 0.75, torch.device("cuda", 0))] if spills else [])


def test_compiled_code_of_another_precision_or_other_kernels_has_another_tag(monkeypatch):
    import torch._functorch.config
    import torch.compiler.config

    tags = []
    for dtype, deprioritized in (
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "1"),
    ):
        if deprioritized:
            monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", deprioritized)
        device.tag_compiled_code(dtype)
        tags.append(torch.compiler.config.cache_key_tag)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    device.tag_compiled_code(torch.bfloat16)
    tags.append(torch.compiler.config.cache_key_tag)
    torch.compiler.config.cache_key_tag = ""
    assert len({*tags}) == 4
    monkeypatch.setitem(sys.modules, "torch.compiler.config", None)  # as in torch 2.5
    monkeypatch.delattr(torch.compiler, "config")
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    device.tag_compiled_code(torch.bfloat16)
    assert not torch._functorch.config.enable_autograd_cache


def test_cards_that_differ_only_in_memory_may_work_together(monkeypatch):
    def properties(card):
        return SimpleNamespace(major=8, minor=0, multi_processor_count=card.index // 2)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    cards = [device.rounding(torch.device("cuda", index)) for index in range(3)]
    assert cards[0] == cards[1] != cards[2]


def test_compiled_code_gets_twice_the_micro_batch_where_it_is_small(monkeypatch):
    """The plain network, which is tried first, needs twice the memory."""
    gpu = World(0, 1, torch.device("cuda", 0))
    model = GPT(GPTConfig(4, 2, 1, 1, 4))
    monkeypatch.setattr(fit, "has_moved", lambda *_: False)

    def sizes(most: int, state=None, **flags) -> list[int]:
        config = TrainConfig(warmup_steps=0, seq_len=8, batch_tokens=8 * 48, **flags)
        monkeypatch.setattr(fit, "pass_fits", lambda model, B, *_: most >= B)
        return [*fit.micro_batch_sizes(model, config, gpu, state)]

    assert sizes(5) == [8, 4, 6, 3, 4, 2, 2, 1]  # of 48 sequences
    assert sizes(5, compile=False) == [4, 3, 2, 1]
    assert sizes(50)[:2] == [48, 24]
    assert sizes(5, {"micro_batch_size": 8})[:2] == [8, 8]  # a resume begins with what it had
    assert sizes(5, {"micro_batch_size": 7})[0] == 8  # which does not divide other batches


NO_MEMORY = [
    "CUDA error: out of memory\nCUDA kernel errors might be ...",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
    "MPS backend out of memory (MPS allocated: 5.4 GB)",
    "DefaultCPUAllocator: can't allocate memory: you tried to",
    "DefaultCPUAllocator: not enough memory: you tried to allocate",
    "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
    "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 4 bytes",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
]
OTHERS = ["CUDA error: no kernel image is available for execution", "The NVIDIA driver is too old"]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("2 GiB"), MemoryError(), *map(RuntimeError, NO_MEMORY + OTHERS)],
)
def test_a_lack_of_memory_is_known_in_all_its_words(monkeypatch, capsys, error):
    def fail(*args, **kwargs):
        raise error

    is_memory = str(error) not in OTHERS
    world = World(0, 1, torch.device("cpu"))
    config = TrainConfig(warmup_steps=0)
    model = GPT(GPTConfig(4, 2, 1, 1, 4))
    monkeypatch.setattr(fit, "dummy_pass", fail)
    assert fit.is_out_of_memory(error) == is_memory
    if is_memory:
        assert not fit.pass_fits(model, 1, config, world)
        monkeypatch.setattr(train_gpt2, "set_up_and_train", fail)
        assert train_gpt2.main([]) == 2
        assert "--micro-batch-size" in capsys.readouterr().err
    else:
        with pytest.raises(RuntimeError):
            fit.pass_fits(model, 1, config, world)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is meant")
def test_a_large_freed_tensor_stays_and_compiled_code_has_tanh_of_exponentials():
    """Above 2 GiB too, which a step of 124M at T 1024 needs. In a new process, in which
    train_gpt2.py has started and ended."""
    program = """
import ctypes, torch, train_gpt2
train_gpt2.main(["--steps", "no number"])
import torch._inductor.config
break_of_heap = ctypes.CDLL(None).sbrk
break_of_heap.restype = ctypes.c_void_p
train_gpt2.device.set_allocator(keep_freed=True)
before = break_of_heap(0)
large = torch.empty(3 << 30, dtype=torch.uint8)
del large
print(break_of_heap(0) - before > 2 << 30, torch._inductor.config.cpp.use_decompose_tanh)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


def test_a_processor_has_a_name(tmp_path, monkeypatch):
    capability = torch.backends.cpu.get_cpu_capability()
    for text, name in {
        "processor : 0\nmodel name : Xeon 8 @ 2 GHz\n" * 2: "Xeon 8 @ 2 GHz, ",
        "CPU implementer : 0x41\nCPU part : 0xd0c\n" * 4: "0x41 0xd0c, ",
        "CPU part : 0xd03\n\nCPU part\t: 0xd09\n": "0xd03 0xd09, ",
    }.items():
        monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
        device.CPUINFO.write_text(text)
        assert device.device_name(CPU) == name + capability
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "none")
    assert len(device.device_name(CPU)) > len(capability) + 2


@NEEDS_POSIX
@pytest.mark.parametrize("name", ["$(touch x)", '"; touch x; "', "it's", "-C"])
def test_the_programs_folder_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name / "copy").mkdir(parents=True)
    git = ["git", "-C", tmp_path / name, "-c", "user.name=a", "-c", "user.email=a@b"]
    program = tmp_path / name / "program.py"
    program.touch()
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "program.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    monkeypatch.setattr(device, "REPO", tmp_path / name)
    assert re.fullmatch("[0-9a-f]{40}", device.commit()) and os.listdir() == [name]
    program.write_text("changed")
    assert re.fullmatch("[0-9a-f]{40}-dirty", device.commit()) and os.listdir() == [name]
    monkeypatch.setattr(device, "REPO", tmp_path / name / "copy")
    assert device.commit() == ""  # that repository says nothing about a copy in it


HANGS = pytest.param("/bin/sleep 60", marks=pytest.mark.slow)


@NEEDS_POSIX
@pytest.mark.parametrize("script", [None, "exit 1", HANGS, "printf '\\377'"])
def test_a_git_that_does_not_answer_costs_nothing(tmp_path, script, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "git").chmod(0o755)
    start = time.monotonic()
    assert device.commit() == ""
    assert time.monotonic() - start < 30


def test_a_known_card_has_a_peak():
    for name, peak in {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "Tesla T4": 65,
        "NVIDIA T400": None,
        "NVIDIA GeForce RTX 3090 Ti": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 NVL": 835,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA GB200": 2250,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
        "NVIDIA L40": None,
        "NVIDIA A10G": 70,
        "NVIDIA A10": None,
        "NVIDIA GeForce RTX 4080 SUPER": None,
        "AMD EPYC": None,
    }.items():
        assert device.peak_tflops(name) == peak, name


def test_a_torch_that_is_too_old_is_refused():
    for version in ("2.5.1+cu124", "2.15.0", "3.0.0a0+git1234"):
        device.check_torch(version)
    with pytest.raises(UserError, match="torch 2.4.1 is too old; .* 2.5 or later: pip install"):
        device.check_torch("2.4.1")
