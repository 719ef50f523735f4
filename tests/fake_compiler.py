"""Lets torch.compile work on fake_gpu.py's GPU that can't compute. Inductor generates its code for
a card, and the code runs, but its kernels do nothing. So a compiled run makes and frees the
tensors that it would on a GPU, and what each kernel reads and writes is known.

Needs triton (pip install triton). It fits the torch of requirements.txt: Inductor's insides, which
it replaces, change from version to version.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import partitioners
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes import fuse_attention, pad_mm
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

# By compute capability: a card's name, multiprocessors, shared memory for a block in bytes, and
# threads of a multiprocessor, from NVIDIA's data sheets and CUDA's tables.
CARDS = {
    "7.5": ("Tesla T4", 40, 65536, 1024),
    "8.0": ("NVIDIA A100-SXM4-80GB", 108, 166912, 2048),
    "8.9": ("NVIDIA GeForce RTX 4090", 128, 101376, 1536),
    "9.0": ("NVIDIA H100 80GB HBM3", 132, 232448, 2048),
    "10.0": ("NVIDIA B200", 148, 232448, 2048),
    "12.0": ("NVIDIA GeForce RTX 5090", 170, 101376, 1536),
}


def properties_of(capability: str) -> dict:
    """Return what Inductor and Triton ask of a card."""
    name, multiprocessors, shared_memory, threads = CARDS[capability]
    major, minor = map(int, capability.split("."))
    return {
        "name": name,
        "major": major,
        "minor": minor,
        "multi_processor_count": multiprocessors,
        "total_memory": 80 * 2**30,
        "L2_cache_size": 50 * 2**20,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": threads,
        "max_threads_per_block": 1024,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": shared_memory,
        "shared_memory_per_multiprocessor": shared_memory + 1024,
        "warp_size": 32,
        "gcnArchName": "",
    }


class Kernel:
    """One of Triton's, which does nothing."""

    def __init__(self, launch: Callable[[str, int], None], name: str, source: str):
        self.launch = launch
        self.name = name
        # What Inductor reckons: each element that the kernel needs is read once, and what it
        # overwrites is read and written.
        gigabytes = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)[1]
        self.num_bytes = round(1e9 * float(gigabytes))

    def run(self, *args, **kwargs):
        self.launch(self.name, self.num_bytes)


class Driver:
    """Takes the place of Triton's driver."""

    def __init__(self, capability: str):
        _, multiprocessors, shared_memory, _ = CARDS[capability]
        limits = {"max_shared_mem": shared_memory, "warpSize": 32}
        limits["multiprocessor_count"] = multiprocessors
        self.utils = SimpleNamespace(get_device_properties=lambda _: limits)
        self.target = GPUTarget("cuda", int(capability.replace(".", "")), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self):
        return torch.cuda


def empty_strided(size: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def reinterpret(x: Tensor, size: tuple, stride: tuple, offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


def generated_module(graph: GraphLowering) -> ModuleType:
    """Return the code that Inductor generates for a graph."""
    code, _ = graph.codegen()
    module = ModuleType("generated")
    module.__file__ = "generated"
    exec(code.value, module.__dict__)
    # Otherwise in C++, past the dispatcher, so that no mode would see the tensors.
    module.empty_strided_cuda = empty_strided
    module.reinterpret_tensor = reinterpret
    module.copy_if_misaligned = lambda x: x
    return module


@contextmanager
def fake_compiler(launch: Callable[[str, int], None], capability: str) -> Iterator[None]:
    """Inside, torch.compile works for the GPU of fake_gpu.py. launch is called for each launch of a
    kernel of Triton's, with its name and the bytes that it reads and writes."""
    folder = os.environ.get("FAKE_KERNELS")

    def compile_kernel(_, name: str, source: str, **options) -> Kernel:
        if folder:
            Path(folder, f"{len(os.listdir(folder)):03}-{name}.py").write_text(source)
        return Kernel(launch, name, source)

    properties = SimpleNamespace(**properties_of(capability))
    rng_state = torch.zeros(16, dtype=torch.uint8)
    stand_ins = {
        (GraphLowering, "compile_to_module"): generated_module,
        (AsyncCompile, "triton"): compile_kernel,
        (AsyncCompile, "wait"): lambda *_: None,
        # They look for patterns with the help of examples, which would run.
        (fuse_attention, "_sfdp_init"): lambda *_, **__: None,
        (pad_mm, "_pad_mm_init"): lambda *_, **__: None,
        # Recomputed attention would get the random numbers' state, though it drops nothing.
        (partitioners, "has_recomputable_rng_ops"): lambda _: False,
        (torch.version, "cuda"): "13.0",
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "is_initialized"): lambda: True,
        (torch.cuda, "_lazy_init"): lambda: None,
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "get_device_properties"): lambda _=None: properties,
        (torch.cuda, "get_rng_state"): lambda: rng_state,
        (torch.cuda, "set_rng_state"): lambda _: None,
        (torch.cuda, "synchronize"): lambda _=None: None,
        (torch.cuda, "_exchange_device"): lambda _: 0,
        (torch.cuda, "_maybe_exchange_device"): lambda _: 0,
        (CudaInterface, "is_available"): lambda: True,
        (CudaInterface, "current_device"): lambda: 0,
        (CudaInterface, "get_device_properties"): lambda _=None: properties,
        (CudaInterface, "get_compute_capability"): lambda _=None: int(capability.replace(".", "")),
        (CudaInterface, "get_raw_stream"): lambda _: 0,
        (CudaInterface, "synchronize"): lambda _=None: None,
        (CudaInterface.Worker, "current_device"): lambda: 0,
        (CudaInterface.Worker, "get_device_properties"): lambda _=None: properties,
        # Since is_available, FakeTensorMode and the loader would ask for a real GPU.
        (FakeTensorMode, "avoid_device_init"): True,
        (Tensor, "pin_memory"): lambda x: x,
        # A PyTorch that was built without CUDA does not have these.
        (torch._C, "_cuda_getCurrentRawStream"): lambda _: 0,
        (torch._C, "_cuda_getDevice"): lambda: 0,
        (torch._C, "_cuda_getDeviceCount"): lambda: 1,
        (torch._C, "_cuda_setDevice"): lambda _: None,
        (torch._C, "_cuda_exchangeDevice"): lambda _: 0,
        (torch._C, "_cuda_maybeExchangeDevice"): lambda _: 0,
        (torch._C, "_cuda_isInBadFork"): lambda: False,
        (torch._C, "_cuda_synchronize"): lambda: None,
    }
    with ExitStack() as stack:
        for (place, name), stand_in in stand_ins.items():
            if place in (CudaInterface, CudaInterface.Worker):
                stand_in = staticmethod(stand_in)
            stack.enter_context(mock.patch.object(place, name, stand_in, create=True))
        # Compiled here and now: no other process has these stand-ins, and no cache their results.
        changes = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False}
        changes["joint_graph_constant_folding"] = False  # it would run what it folds
        changes["profile_bandwidth"] = True  # writes kernel_num_gb into each kernel's source
        stack.enter_context(torch._inductor.config.patch(changes))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        triton.runtime.driver.set_active(Driver(capability))
        yield
