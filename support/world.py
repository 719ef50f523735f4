"""The ranks (processes) of a run, how they connect and agree, and how a run is asked to stop."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# DDP imports this. After the ranks connect, the default arguments in it would keep their group and
# gloo's threads until Python exits, and a thread that frees a tensor then aborts the process.
import torch.distributed.nn.functional
from torch import Tensor

from dataloader import ShardError
from support.cli import RunError, UserError

DONE, STOPPED, INTERRUPTED = 0, 3, 130  # exit codes, besides those of RunError and UserError
LAUNCHERS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
STOP_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGBREAK")  # the last: Windows
STOP_SIGNALS = [number for number in signal.Signals if number.name in STOP_NAMES]


class World(NamedTuple):
    """A process's place among torchrun's ranks, which must all call the same methods in order."""

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
        parts = list(rows.view(torch.uint8))  # as some versions of gloo can't gather bfloat16
        dist.all_gather(parts, parts[self.rank].clone())

    def gather(self, value: Any) -> list:
        """Return the values of all ranks on every rank. Each rank waits for all others."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, function: Callable, *args) -> Any:
        """Call function(*args), which must not be collective, on every rank, and return this
        rank's result. If it fails on some ranks, raise the lowest one's error on all of them."""
        result = failure = None
        try:
            result = function(*args)
        except (RunError, ShardError, OSError) as error:
            kind = UserError if isinstance(error, UserError | ShardError) else RunError
            failure = kind(f"on rank {self.rank}: {error}" if self.rank else str(error))
        for failed in self.gather(failure):
            if failed:
                raise failed
        return result

    def on_main(self, function: Callable, *args) -> Any:
        """Call function(*args) on the main rank alone, and return its result on every rank."""
        return self.gather(self.together(lambda: function(*args) if self.is_main else None))[0]

    def check_same(self, what: str, value: Any):
        """Raise RunError if this value differs among the ranks."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RunError(f"{what} of rank {rank} differ from rank 0's: nothing was saved")


def find_world(kind: str) -> World:
    """Return this process's World, on a device of this kind ("": the best). Or raise UserError."""
    for name in LAUNCHERS:
        count = os.getenv(name, "1")  # of processes
        if count != "1" and "RANK" not in os.environ:
            raise UserError(f"{name} is {count} without RANK: use torchrun (docs/reference.md)")
    rank, size = int(os.getenv("RANK", 0)), int(os.getenv("WORLD_SIZE", 1))
    has_mps = torch.backends.mps.is_available() and size == 1
    kind = kind or ("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.getenv('LOCAL_RANK', 0)}"
    try:
        device = torch.device(kind)
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch has many ways to say so
        raise UserError(f"PyTorch can't use --device {kind}: {error!s:.200}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(rank, size, device)


def connect(world: World):
    """Connect the ranks. Raise UserError if they can't find each other."""
    os.environ.setdefault("USE_LIBUV", "0" if os.name == "nt" else "1")  # Windows's torch lacks it
    try:
        # After a restart, torchrun's store still has the old ranks' addresses, so use a new prefix.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.getenv("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        # A collective that takes longer fails, and ends its rank. nccl's own limit is 10 minutes.
        limit = timedelta(minutes=30)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, ValueError) as error:
        address = f"{os.getenv('MASTER_ADDR')}:{os.getenv('MASTER_PORT')}"
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
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Stop:
    """Is true after a signal to stop, or once --max-hours are over. A later signal ends the program
    at once, unless it follows within two seconds: terminals, SLURM and systemd signal torchrun and
    every rank, and torchrun signals the ranks again. Signals that nohup ignores stay ignored."""

    def __init__(self, end_at: float):
        self.end_at = end_at  # time.monotonic()
        self.signalled_at: float | None = None
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, *_):
        if self.signalled_at is None:
            self.signalled_at = time.monotonic()
            with suppress(OSError):  # os.write, as the signal may have interrupted a print
                os.write(2, b"\nfinishing and saving this step; a second signal ends at once\n")
        elif time.monotonic() - self.signalled_at > 2:
            os._exit(INTERRUPTED)

    def __bool__(self) -> bool:
        return self.signalled_at is not None or time.monotonic() > self.end_at
