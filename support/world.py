"""The ranks (processes) of a run, how they connect and agree, and how a run is asked to stop."""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# DDP imports this module, whose functions have the group of all ranks as a default argument. If it
# were imported after the ranks connect, it would keep their group, and the threads of gloo, until
# Python ends; a thread that frees a tensor at that moment aborts the process.
import torch.distributed.nn.functional
from torch import Tensor

from dataloader import ShardError
from support.cli import RunError, UserError

Result = TypeVar("Result")

DONE, STOPPED, INTERRUPTED = 0, 3, 130  # exit codes, besides those of RunError and UserError
TIMEOUT = timedelta(minutes=30)  # a collective that takes longer fails, and ends its rank
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")  # the last: Windows
SAME_SIGNAL_S = 2
# How many processes srun, Open MPI, and MPICH or Intel MPI have started.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


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

    def together(self, function: Callable[..., Result], *args) -> Result:
        """Call function(*args), which must not be collective, on every rank, and return this
        rank's result. If it raises a RunError on some ranks, raise the lowest one's on all."""
        result = failure = None
        try:
            result = function(*args)
        except (RunError, ShardError) as error:
            failure = str(error), getattr(error, "exit_code", UserError.exit_code)
        failures = self.gather(failure)
        for rank, failed in enumerate(failures):
            if failed:
                text = failed[0] if rank == 0 else f"on rank {rank}: {failed[0]}"
                raise (UserError if failed[1] == UserError.exit_code else RunError)(text)
        return result  # type: ignore[return-value]  # nothing failed

    def check_same(self, what: str, value: Any):
        """Raise RunError if this value differs among the ranks."""
        values = self.gather(value)
        others = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if others:
            text = f"{what} of rank {', '.join(others)} differ from those of rank 0"
            raise RunError(f"{text}: nothing was saved")


def find_world(kind: str) -> World:
    """Return this process's place among the ranks, with a device of this kind ("": the best).
    Raise UserError if torchrun's variables are incomplete, or if there is no such device."""
    env = {name: value for name, value in os.environ.items() if value}
    for name in ("WORLD_SIZE", *LAUNCHERS):
        if "RANK" not in env and env.get(name, "1") != "1":
            text = f"{name} is {env[name]}, but RANK is not set: start the ranks with torchrun"
            raise UserError(f"{text} (docs/reference.md has a script for SLURM)")
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    local_rank = int(env.get("LOCAL_RANK", 0))
    if not kind:
        kind = "mps" if torch.backends.mps.is_available() and size == 1 else "cpu"
        kind = "cuda" if torch.cuda.is_available() else kind
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            text = f"there is no GPU {local_rank}: PyTorch sees {torch.cuda.device_count()}"
            raise UserError(f"{text}; run python -m torch.utils.collect_env")
        kind = f"cuda:{local_rank}"
    try:
        device = torch.device(kind)
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch has many ways to say so
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"PyTorch can't use --device {kind}: {reason}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(rank, size, device)


def connect(world: World):
    """Connect the ranks. Raise UserError if they can't find each other."""
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # its torch comes without libuv
    try:
        # After a restart, torchrun's store still has the old ranks' addresses, so use a new prefix.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    except (dist.DistError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(f"the ranks can't connect at {address}: {error!s:.200}") from error


@contextmanager
def connected(kind: str) -> Iterator[World]:
    """Find this process's World, connect its ranks, and yield it."""
    try:
        world = find_world(kind)
        if world.size > 1:
            connect(world)
    except UserError as error:
        error.is_of_one_rank = True
        raise
    try:
        yield world
    finally:
        if world.size > 1:
            gc.collect()  # frees each DDP; one that outlives the group may hang, or abort Python
            dist.destroy_process_group()


def ignore_signals():
    for name in STOP_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class Stop:
    """Is true after a signal to stop, or when --max-hours are over. The first signal lets the step
    finish; a later one ends the program at once. What comes within two seconds of the first is
    the same signal, since terminals, SLURM and systemd signal torchrun and every rank, and torchrun
    then signals the ranks again. A signal that was ignored at the start, as by nohup, stays so."""

    def __init__(self, end_at: float):
        self.end_at = end_at  # time.monotonic()
        self.signalled_at: float | None = None
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, *_):
        now = time.monotonic()
        if self.signalled_at is None:
            self.signalled_at = now
            with suppress(OSError):  # os.write, as the signal may have interrupted a print
                os.write(2, b"\nfinishing and saving this step; a second signal ends at once\n")
        elif now - self.signalled_at > SAME_SIGNAL_S:
            os._exit(INTERRUPTED)

    def __bool__(self) -> bool:
        return self.signalled_at is not None or time.monotonic() > self.end_at
