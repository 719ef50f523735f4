"""The ranks (processes) of a run: how they connect, add and compare values, and end together."""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

# DDP imports this module, whose functions have the group of all ranks as a default argument. If it
# were imported after the ranks connect, it would keep their group, and the threads of gloo, until
# Python ends; a thread that frees a tensor at that moment aborts the process.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from support import ending
from support.ending import NumericalError, RunError, UserError, tell_torchrun, watchdog

Result = TypeVar("Result")

# The number of processes that srun, Open MPI, MPICH and Intel MPI, or MVAPICH has started.
LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """This process's place among torchrun's ranks. Without torchrun, it is the only rank. All
    methods are collective: all ranks must call the same ones in the same order."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum values, (n,) float32, over the ranks in place by one all-reduce, and return them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather_rows(self, rows: Tensor):
        """Fill rows, (ranks, ...), in place. Rank i contributes row i."""
        # Use bytes, as some versions of gloo can't gather bfloat16.
        parts = list(rows.view(torch.uint8))
        dist.all_gather(parts, parts[self.rank].clone())

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all ranks on every rank. Each rank waits for all others."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def call_on_main(self, function: Callable[..., Result], *args) -> Result:
        """Call function(*args) on the main rank, and return its result on every rank. If the
        call raises an error, every rank ends, and the main rank prints the reason."""
        result = self.call_on_all(lambda: function(*args) if self.is_main else None)
        return self.gather(result)[0]  # type: ignore[return-value]  # rank 0's value is a Result

    def call_on_all(self, function: Callable[..., Result], *args) -> Result:
        """Call function(*args) on every rank, and return this rank's result. If the call fails on
        any rank, every rank ends, and the lowest rank that failed prints the reason."""
        if self.size == 1:
            return function(*args)
        result = error = None
        try:
            result = function(*args)
        except Exception as raised:  # raised below, after all ranks know of it
            error = raised
        failure = (ending.exit_code_of(error) or 1, str(error)) if error else None
        for rank, failed in enumerate(self.gather(failure)):
            if error and rank == self.rank:
                raise error
            if failed:
                code, text = failed
                tell_torchrun(f"error: {text}")
                sys.exit(code)
        return result  # type: ignore[return-value]  # no rank failed, so this is a result

    def end_all(self, error: RunError):
        """Raise error, which all ranks have, on the main rank. Exit the others with its code."""
        if self.is_main:
            raise error
        tell_torchrun(f"error: {error}")
        sys.exit(error.exit_code)

    def check_same(self, values: dict):
        """Raise UserError if any named value differs from the main rank's."""
        main_values, *others = self.gather(values)
        for rank, theirs in enumerate(others, 1):
            for name, value in main_values.items():
                if theirs[name] != value:
                    text = f"{name} is {theirs[name]} on rank {rank} and {value} on rank 0"
                    self.end_all(UserError(f"{text}: all ranks must agree"))


def find_world(env: dict[str, str], num_gpus: int, kind: str = "auto") -> World:
    """Return this process's place among the ranks, with a device of this kind ("auto": the best).
    Raise UserError if torchrun's variables are invalid, or if there is no such device."""
    env = {name: value for name, value in env.items() if value}  # some programs set empty ones
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in env]
    if missing and env.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"{', '.join(missing)} not set, but torchrun sets all three: use torchrun")
    # The script of a SLURM job has SLURM_NTASKS, too, but only srun's processes have a step.
    in_script = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
    for name in LAUNCHERS if len(missing) == 3 else ():
        if env.get(name, "1") != "1" and not (in_script and name == "SLURM_NTASKS"):
            text = f"{name} is {env[name]}, and each process would train alone: start torchrun, one"
            text += " on each machine (docs/reference.md shows how under SLURM)"
            raise UserError(f"{text}, or unset {name} to train in a single process")
    try:
        rank, local_rank = int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0))
        size, local_size = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
    except ValueError as error:
        raise UserError(f"RANK and the like must be integers ({error}): use torchrun") from error
    if not 0 <= rank < size or local_rank < 0:
        raise UserError(f"RANK {rank} or LOCAL_RANK {local_rank} is wrong for WORLD_SIZE {size}")

    can_use_mps = torch.backends.mps.is_available() and size == 1
    if kind == "cuda" and not num_gpus:
        raise UserError("--device cuda: PyTorch sees no GPU: run python benchmarks/doctor.py")
    if kind == "mps" and not can_use_mps:
        raise UserError("--device mps: there is no Apple GPU for this process: leave --device out")
    if kind in ("auto", "cuda") and num_gpus:
        local_size = max(local_size, local_rank + 1)
        if local_size > num_gpus:
            visible = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '(not set)')}"
            text = f"--nproc_per_node={local_size} exceeds the {num_gpus} GPUs ({visible})"
            raise UserError(f"{text}: try --nproc_per_node={num_gpus}")
        return World(rank, size, torch.device("cuda", local_rank))
    return World(rank, size, torch.device("mps" if can_use_mps and kind != "cpu" else "cpu"))


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Connect the ranks. Raise UserError if they can't find each other."""
    if world.size == 1:
        yield
        return
    if world.device.type == "cuda" and not dist.is_nccl_available():  # as on Windows
        raise UserError("several GPUs need NCCL, which this torch lacks: use one GPU, or Linux")
    store = connect("nccl" if world.device.type == "cuda" else "gloo")
    try:
        yield
    except BaseException as error:
        share_reason(error, store)
        raise
    finally:
        free_networks()
        dist.destroy_process_group()
        if world.is_main and sys.exc_info()[0] and not has_agent_store():
            # This process serves the store, from which the others read the reason.
            phase, ending.signals.phase = ending.signals.phase, ending.Phase.LEAVING
            time.sleep(1)
            ending.signals.phase = phase


def free_networks():
    """Free every DDP, also if an exception is on its way, whose traceback holds the variables of
    the functions that it has left. A DDP that outlives the process group is the last to hold it:
    freeing it waits for gloo's threads while it keeps the GIL, which those may need, so that the
    process hangs; or Python's end aborts the process."""
    error = sys.exc_info()[1]
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()


def has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(backend: str) -> dist.Store:
    # Leave hangs to the watchdog: it shows stacks, and it does not count time in which the process
    # is stopped. gloo and NCCL do, and would give up after a long pause.
    limit = timedelta(days=365)
    watchdog.reset()
    try:
        # After a restart, torchrun's store still has the old ranks' addresses, so use a new prefix.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        return store
    except (dist.DistError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        text = f"the ranks can't connect at {address} ({error!s:.200})"
        raise UserError(f"{text}: is the port free, and MASTER_ADDR right?") from error
    finally:
        watchdog.stop()  # preparing data on the main rank may take long


def share_reason(error: BaseException, store: dist.Store):
    """Tell the other ranks why this one ends. If another rank ended first, end for its reason
    instead: it may be why this one lost its connection, or got a signal from torchrun."""
    own = first = [ending.exit_code_of(error), str(error)]
    with suppress(dist.DistError):  # the rank that serves the store is gone
        if own[0] is not None:  # sets it only if it is absent, and returns what is there
            first = json.loads(store.compare_set("reason", "", json.dumps(own)))
        elif isinstance(error, RuntimeError) and store.check(["reason"]):
            first = json.loads(store.get("reason"))
    if first == own:
        return  # this rank was first, or error is a bug: the caller raises it
    if first[0] == ending.INTERRUPTED:
        raise KeyboardInterrupt from error
    tell_torchrun(f"error: {first[1]}")
    sys.exit(first[0])


def gradient_sync(net: nn.Module, enabled: bool) -> AbstractContextManager:
    """Return a context in which backward averages gradients over the ranks only if enabled."""
    return net.no_sync() if isinstance(net, DDP) and not enabled else nullcontext()


def check_ranks_agree(model: nn.Module, step: int, world: World):
    """Raise NumericalError unless the weights are finite and the same on all ranks."""
    weights = [p.detach() for p in model.parameters()]
    # Sum the bits as integers, without rounding, so that one different bit changes the sum.
    sums = torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in weights]).tolist()
    all_finite = bool(torch.stack([p.sum() for p in weights]).isfinite().all())
    results = world.gather((sums, all_finite))
    most_common = max(results, key=results.count)
    others = [str(rank) for rank, result in enumerate(results) if result != most_common]
    reason = "" if most_common[1] else "the weights are not finite"
    if others:
        reason = f"the weights differ on rank {', '.join(others)}"
    if reason:
        world.end_all(NumericalError(f"after step {step} {reason}; nothing was saved"))
