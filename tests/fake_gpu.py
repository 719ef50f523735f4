"""Run train_gpt2.py on a GPU that can't compute, on a machine that has none.

    FAKE_GPU=fake_gpu.so python tests/fake_gpu.py GIB MAJOR.MINOR FLAG ...   # or mps for a Mac's

FakeTensorMode runs every operation on shapes and types alone, and what a GPU would say is found
beside it: tensors on two devices in one operation are an error, a wait of the processor for the GPU
is counted with the line that waits, and the memory of all storages is added up, with an
OutOfMemoryError where a card of GIB would have one. With --compile, see fake_compiler.py, the
kernels of the last step are counted too. The last line printed is what was found, as JSON. What
can't be seen here: what kernels compute, speed, NCCL, cuBLAS's workspaces (32 MiB), gaps between
allocations, CUDA's random numbers.

The whole program runs, but for what reads or writes a tensor's numbers: what is saved is not
written, and weights are read before the tensors are faked.
"""

# ruff: noqa: E402

import ctypes
import importlib.util
import json
import linecache
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

TORCH = Path(importlib.util.find_spec("torch").origin).parent  # found, not imported: it would ask
for library in (TORCH / "lib" / "libtorch_cpu.so", os.environ["FAKE_GPU"]):  # for a GPU at once
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt2
from support import checkpoint, plan, run_folder

aten = torch.ops.aten


class Device(TorchDispatchMode):
    """What a GPU of so many bytes would say to the operations inside; kind is cuda or mps."""

    def __init__(self, kind: str, size: float):
        super().__init__()
        self.kind, self.size, self.now, self.peak, self.at_peak = kind, size, 0, 0, ""
        self.waits, self.operations = Counter(), Counter()
        self.launches = []  # name, and bytes read and written
        self.storages = weakref.WeakKeyDictionary()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not keep torch.compile from working."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kinds = {x.device.type for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        if func is aten._local_scalar_dense.default:  # item, int, float and bool of a tensor
            self.wait(args[0])
            return True if args[0].dtype == torch.bool else float(args[0].device.type == "cpu")
        is_copy = func.overloadpacket in (aten.copy_, aten._to_copy)
        # a processor's scalar may stand in a pointwise operation: it is passed to the kernel
        if len(kinds) > 1 and not is_copy and torch.Tag.pointwise not in func.tags:
            raise RuntimeError(f"{func} of tensors on {kinds}")
        out = func(*args, **(kwargs or {}))
        if is_copy and out.device.type == "cpu":
            self.wait(args[1] if func.overloadpacket is aten.copy_ else args[0])
        name = func.overloadpacket.__name__
        self.operations[name] += self.kind in kinds
        if self.kind in kinds and func.namespace == "aten" and not func.is_view:
            inputs = args, {key: x for key, x in (kwargs or {}).items() if key != "out"}
            tensors = [x for x in tree_iter((inputs, out)) if isinstance(x, Tensor)]
            self.launch(name, sum(x.nbytes for x in tensors))
        for x in tree_iter(out):
            if isinstance(x, Tensor) and x.device.type == self.kind:
                self.hold(x, f"{func} {tuple(x.shape)}")
                if self.kind == "mps" and x.dtype in (torch.float64, torch.complex128):
                    raise TypeError(f"{func}: MPS has no {x.dtype}")
        return out

    def launch(self, name: str, num_bytes: int):
        self.launches.append((name, num_bytes))

    def hold(self, x: Tensor, operation: str):
        storage = x.untyped_storage()
        if storage in self.storages:
            return
        size = self.storages[storage] = storage.nbytes()
        if self.now + size > self.size:
            raise torch.OutOfMemoryError(f"CUDA out of memory, for {operation}")
        self.now += size
        weakref.finalize(storage, self.free, size)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, operation

    def free(self, size: int):
        self.now -= size

    def wait(self, x: Tensor):
        """Count a wait for x, by the innermost line of the program."""
        frame = sys._getframe()
        while frame and Path(frame.f_code.co_filename).parent not in (ROOT, ROOT / "support"):
            frame = frame.f_back
        if x.device.type == self.kind and frame:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self.waits[f"{frame.f_code.co_name}: {line.strip()}"] += 1

    def tolist(self, x: FakeTensor) -> list:
        self.wait(x)
        return np.zeros(x.shape).tolist()


class Generator(torch.Generator):
    """Of random numbers, on any device: fake tensors take none."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.asked_for = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.asked_for


def fused_attention(q, k, v, dropout_p=0.0, is_causal=False):
    """What a GPU takes for scaled_dot_product_attention: CUDA's kernels hold no weights."""
    if q.device.type == "mps" or not isinstance(q, FakeTensor):  # the latter with_numbers
        return aten._scaled_dot_product_attention_math(q, k, v, None, dropout_p, is_causal)[0]
    if q.dtype == torch.float32:
        args = q, k, v, None, torch.is_grad_enabled(), dropout_p, is_causal
        return aten._scaled_dot_product_efficient_attention(*args)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def with_numbers(function: Callable) -> Callable:
    """Return the function as it is outside of the modes: its tensors are real."""

    def call(*args):
        with _disable_current_modes():
            return function(*args)

    return call


@contextmanager
def fake_gpu(gib: float, capability: str) -> Iterator[Device]:
    """Inside, all tensors are fake, and there is a GPU of so many GiB: of NVIDIA's with a compute
    capability, or mps."""
    kind = "mps" if capability == "mps" else "cuda"
    device = Device(kind, gib * 2**30)
    major, minor = map(int, capability.split(".")) if kind == "cuda" else (0, 0)

    class Model(train_gpt2.GPT):
        """Made where it is to be, since fake parameters can't move."""

        def __init__(self, *args, **kwargs):
            with torch.device(kind):
                super().__init__(*args, **kwargs)

        def to(self, where: torch.device):
            return self

    def not_written(lock, model, optimizer, state: dict) -> Path:
        checkpoint.optimizer_tensors(model, optimizer)
        return lock.folder / f"step_{state['step']:06d}"

    stand_ins = {
        (torch.cuda, "device_count"): lambda: int(kind == "cuda"),
        (torch.backends.mps, "is_available"): lambda: kind == "mps",
        (torch.cuda, "set_device"): lambda device: None,
        (torch.cuda, "get_device_capability"): lambda device=None: (major, minor),
        (torch.cuda, "get_device_properties"): lambda device=None: SimpleNamespace(
            major=major, minor=minor, multi_processor_count=132
        ),
        (torch.cuda, "get_device_name"): lambda device=None: "a GPU that can't compute",
        (torch.cuda, "synchronize"): lambda device=None: None,
        (torch.mps, "synchronize"): lambda: None,
        (torch.cuda, "empty_cache"): lambda: None,
        (torch.cuda, "reset_peak_memory_stats"): lambda: None,
        (torch.cuda, "max_memory_allocated"): lambda _=None: device.peak,
        (torch.cuda.amp.common, "amp_definitely_not_available"): lambda: False,
        (torch.cuda, "is_bf16_supported"): lambda including_emulation=True: True,
        (FakeTensor, "tolist"): lambda x: device.tolist(x),
        (FakeTensor, "numpy"): lambda x: np.array(device.tolist(x), int),
        (torch, "Generator"): Generator,
        (F, "scaled_dot_product_attention"): fused_attention,
        (train_gpt2, "GPT"): Model,
        (train_gpt2, "read_weights"): with_numbers(train_gpt2.read_weights),
        (plan, "read_weights"): with_numbers(train_gpt2.read_weights),
        (checkpoint.pretrained, "read_weights"): with_numbers(train_gpt2.read_weights),
        (checkpoint, "load_file"): with_numbers(checkpoint.load_file),
        (checkpoint, "save"): not_written,
        (run_folder, "check_disk_space"): lambda *_: None,  # 75 GB for gpt2-xl
        (checkpoint, "check_round_trip"): lambda *_: None,
        (checkpoint, "check_read_back"): lambda *_: None,
    }
    with ExitStack() as stack:
        for (place, name), stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(place, name, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(device)
        yield device


class SplitAsByDDP(nn.Module):
    """Calls a compiled network as DDP does: with an active DDP, Dynamo splits the graph where the
    gradients of the layers fill a bucket, so that their sums over the ranks begin early."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, *args):
        ddp = SimpleNamespace(bucket_bytes_cap=25 * 2**20)  # DDP's default
        with mock.patch.object(DDP, "_active_ddp_module", ddp):
            return self.net(*args)


def main(gib: str, capability: str, *flags: str) -> int:
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as a name
    launches = []  # of the last step
    train_step = train_gpt2.train_step

    def watched_step(run: train_gpt2.Run) -> train_gpt2.StepResult:
        if run.step == run.first_step:
            device.peak = device.now  # as the program does after its trial of a micro-batch
        device.launches.clear()
        result = train_step(run)
        launches[:] = device.launches
        return result

    with fake_gpu(float(gib), capability) as device, ExitStack() as stack:
        stack.enter_context(mock.patch.object(train_gpt2, "train_step", watched_step))
        if "--compile" in flags:
            from fake_compiler import fake_compiler

            stack.enter_context(fake_compiler(device.launch, capability))
        if os.environ.get("FAKE_DDP"):
            speed_up = train_gpt2.speed_up
            split = lambda *args: SplitAsByDDP(speed_up(*args))  # noqa: E731
            stack.enter_context(mock.patch.object(train_gpt2, "speed_up", split))
        elif "--eval-only" not in flags:  # which compiles nothing, and refuses the flag
            flags = ("--no-compile", *flags)
        code = train_gpt2.main([*flags])
    found = {"code": code, "waits": device.waits, "operations": device.operations}
    found |= {"peak_mib": device.peak / 2**20, "at_peak": device.at_peak}
    found["launches"] = launches
    print(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
