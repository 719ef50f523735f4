"""The processes of a run: who they are, how they meet, agree and compare."""

import gc
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from support.device import check_gpu
from support.guard import fail


@dataclass(frozen=True)
class World:
    """The processes of this run, as torchrun started them; without torchrun, one."""

    rank: int
    size: int
    device: torch.device
    note: Callable[[str], None] = lambda phase: None  # tells the watchdog what happens now
    tell: Callable[[str], None] = lambda text: None  # shows it to people, on the main rank alone

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[Tensor]) -> Tensor:
        """Each value added up over the ranks, in one all-reduce: (len(values),), float32."""
        packed = torch.stack([value.float() for value in values])
        if self.size > 1:
            dist.all_reduce(packed)
        return packed

    def gather(self, value) -> list:
        """The value of each rank, on all of them."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def agree(self, facts: dict):
        """ValueError, on every rank, if one of them has other facts than the main one."""
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs.get(name) != value:
                    why = f"{name} is {theirs.get(name)} on rank {rank} and {value} on rank 0"
                    error = ValueError(f"{why}: start all ranks with the same")
                    error.is_agreed = True
                    raise error

    def together(self, function: Callable):
        """What function, which talks to no other rank, returns on this one. If it fails on one of
        them, every rank has an error: its own, or one that names the rank."""
        result = found = None
        try:
            result = function()
        except Exception as error:  # also a bug: what comes after a save may not cost the run
            found = error
        texts = self.gather(found and f"{type(found).__name__}: {found}")
        if any(texts):
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
            found = found or OSError(f"on rank {rank}: {text}")
            found.is_agreed = True
            raise found
        return result

    def from_main(self, function: Callable):
        """What function returns on the main rank, or the user's mistake that it raises there, on
        every rank."""
        result = [None]
        if self.is_main:
            try:
                result = [function()]
            except (OSError, ValueError) as error:
                result = [error]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        if isinstance(result[0], Exception):
            result[0].is_agreed = True  # every rank raises it, one reports it
            raise result[0]
        return result[0]


def agreed(error: Exception) -> bool:
    """Whether every rank has this error."""
    return getattr(error, "is_agreed", False)


def num_micro(batch_tokens: int, B: int, T: int, num_ranks: int) -> int:
    """Passes of each rank over B sequences of T tokens in a step of batch_tokens; ValueError if
    that is not a whole number."""
    count, rest = divmod(batch_tokens, per_pass := B * T * num_ranks)
    if rest:
        why = f"is not a multiple of {per_pass} = --micro-batch-size {B} * --seq-len {T}"
        below = f"{batch_tokens - rest} or " if count else ""
        cure = f"try --batch-tokens {below}{batch_tokens - rest + per_pass}"
        raise ValueError(f"--batch-tokens {batch_tokens} {why} * {num_ranks} ranks: {cure}")
    return count


def find_world(env: dict[str, str], num_gpus: int, kind: str = "auto") -> World:
    """This process's place among the ranks, and its device, the best there is or of a kind;
    ValueError if they do not fit."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in env]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{', '.join(missing)} not set, others of torchrun's are: set all or none")
    for name in [*names, "LOCAL_WORLD_SIZE"]:
        if not re.fullmatch("[0-9]{1,6}", env.get(name, "0")):
            raise ValueError(f"{name} is {env[name]:.40}, no number of ranks: use torchrun")
    rank, local_rank, size = (int(env.get(*pair)) for pair in zip(names, (0, 0, 1), strict=True))
    if not 0 <= rank < size:
        raise ValueError(f"RANK {rank} must be less than WORLD_SIZE {size}: use torchrun")
    if kind == "cuda" and not num_gpus:
        raise ValueError("--device cuda: PyTorch sees no GPU: see python benchmarks/doctor.py")
    has_mps = torch.backends.mps.is_available() and size == 1
    if kind == "mps" and not has_mps:
        raise ValueError("--device mps: PyTorch sees no GPU of Apple's for one process")
    if kind in ("cpu", "mps") or not num_gpus:
        is_mps = has_mps and kind != "cpu"
        return World(rank, size, torch.device("mps" if is_mps else "cpu"))
    local_size = int(env.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if local_rank >= local_size:
        raise ValueError(f"LOCAL_RANK {local_rank} must be less than LOCAL_WORLD_SIZE {local_size}")
    if local_size > num_gpus:
        seen = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '(not set)')}"
        raise ValueError(
            f"--nproc_per_node={local_size} is more than the {num_gpus} GPUs here ({seen}):"
            f" try --nproc_per_node={num_gpus}"
        )
    return World(rank, size, torch.device("cuda", local_rank))


def meet(backend: str, timeout: timedelta):
    """Connect the ranks; ValueError if they can't find each other. torchrun keeps its store when it
    restarts them, and in it the addresses of those that died: hence the prefix."""
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # a dead torchrun's is gone
            where = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", ""))
            try:
                socket.create_connection(where, timeout=60).close()
            except OSError:
                raise SystemExit(fail(5, "error: torchrun has died", True)) from None
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        who = {"rank": rank, "world_size": size, "timeout": timeout}
        dist.init_process_group(backend, store=store, **who)
    except (dist.DistError, ValueError) as error:
        where = " ".join(f"{n}={os.environ.get(n)}" for n in ("MASTER_ADDR", "MASTER_PORT"))
        raise ValueError(f"the ranks can't meet at {where}: {error!s:.200}") from error


@contextmanager
def process_group(world: World, timeout_s: int) -> Iterator[None]:
    """Inside, the ranks can talk to each other. ValueError if this one's GPU can't be used. NCCL
    ends a process that waits for ten minutes, and gloo after thirty, unless they are told to wait
    longer than the watchdog, which says in what."""
    if world.device.type == "cuda":
        check_gpu(world.device)
        torch.cuda.set_device(world.device)
    if world.size > 1:
        patience = timedelta(seconds=timeout_s + 60) if timeout_s else timedelta(days=365)
        meet("nccl" if world.device.type == "cuda" else "gloo", patience)
    try:
        yield
    finally:
        if world.size > 1:
            gc.collect()  # a DDP that outlives the group makes the process abort when it ends
            dist.destroy_process_group()


def gradient_sync(net: nn.Module, enabled: bool):
    """Whether forward and backward passes inside average the gradients over the ranks."""
    return nullcontext() if enabled or not isinstance(net, DDP) else net.no_sync()


def check_replicas(model: nn.Module, step: int, world: World):
    """ArithmeticError, on every rank, if one of them holds other weights than most, or weights that
    are not finite."""
    world.note(f"a comparison of the weights after step {step}")
    weights = [p.detach() for p in model.parameters()]
    bits = torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in weights]).tolist()
    all_finite = bool(torch.stack([p.isfinite().all() for p in weights]).all())
    digests = world.gather((bits, all_finite))
    most = max(digests, key=digests.count)
    others = [str(rank) for rank, digest in enumerate(digests) if digest != most]
    if others or not most[1]:
        what = f"rank {', '.join(others)} holds other weights than the others"
        why = what if others else "the weights are not finite"
        raise ArithmeticError(f"after step {step} {why}: a fault of a machine; nothing was saved")
