"""How to find the largest micro-batch that fits in memory, and recognize a lack of memory."""

import gc
import re
from collections.abc import Iterator
from traceback import walk_tb

import torch
from torch import nn

from config import TrainConfig, has_moved
from model import GPT
from support.device import autocast
from support.ending import UserError, watchdog
from support.ranks import World, gradient_sync

NO_MEMORY = "out of memory"
COMPILER = "torch._inductor", "triton"
SAVE_MEMORY = "add --recompute and --loss-chunk-tokens 1024"


def micro_batch_sizes(
    model: GPT, config: TrainConfig, world: World, state: dict | None
) -> Iterator[int]:
    """Yield the micro-batch sizes to try, largest first. If --micro-batch-size is set, yield only
    that size; otherwise, every divisor of the number of sequences per rank and step. A resumed run
    tries none larger than the size in state, because another one changes the last bits."""
    if config.micro_batch_size:
        yield config.micro_batch_size
        return
    num_sequences = config.num_micro_batches(1, world.size)
    # Start with 64 sequences on a GPU, as in the lecture, or with 4,096 tokens on a CPU.
    is_gpu = world.device.type == "cuda"
    largest = 64 if is_gpu else max(1, 4096 // config.seq_len)
    if state and not has_moved(state, world.device):
        largest = state["micro_batch_size"]
        if num_sequences % largest == 0:
            yield largest  # without a trial of the plain model, in which it may not fit
    for B in range(min(largest, num_sequences), 0, -1):
        if num_sequences % B:
            continue  # a step must be a whole number of passes
        # On a GPU, try the plain model first: compiling for each B takes minutes, not seconds.
        if is_gpu and not pass_fits(model, B, config, world):
            continue
        # Compiled code needs about half of the memory, and passes over fewer than 16 sequences are
        # slow: by our estimate, twice as many make a step 3% faster.
        if is_gpu and config.compile and B < 16 and num_sequences % (2 * B) == 0:
            yield 2 * B
        yield B


class CompileError(UserError):
    """torch can't compile the network on some rank's machine."""


def does_not_fit(config: TrainConfig) -> UserError:
    too_much = "not even one sequence fits in memory: lower --seq-len"
    if config.micro_batch_size:
        too_much = f"--micro-batch-size {config.micro_batch_size} does not fit in memory: lower it"
    return UserError(f"{too_much}, or {SAVE_MEMORY}")


def pass_fits(net: nn.Module, B: int, config: TrainConfig, world: World) -> bool:
    """Return whether a pass over B sequences fits in memory on every rank. With gradients enabled,
    memory for backward and the optimizer's state must fit, too. Raise CompileError if the network
    can't be compiled on some rank."""
    held: list[torch.Tensor] = []  # stands in for the gradients and the optimizer's state
    problem = ""
    try:
        if torch.is_grad_enabled():
            # Hold AdamW's two moments (Muon has one) in one piece, so that huge pages fit if a
            # CPU's allocator keeps it. With many pieces, 124M's first step took 0.25 s longer.
            num_moments = 2 * sum(p.numel() for p in net.parameters())
            held.append(torch.empty(num_moments, device=world.device))
            held.extend(torch.empty_like(p) for p in net.parameters())
        dummy_pass(net, B, config, world, sync=False)  # so no rank waits for a failed rank
    except Exception as error:
        if is_out_of_memory(error):
            problem = NO_MEMORY
        elif is_of_compiler(error):
            problem = f"{type(error).__name__}: {error!s:.200}"
        else:
            raise
    held.clear()
    if problem:
        gc.collect()  # frees what the failed pass left behind
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    problems = [found for found in world.gather(problem) if found]
    for found in problems:
        if found != NO_MEMORY:
            raise CompileError(found)
    return not problems


def dummy_pass(net: nn.Module, B: int, config: TrainConfig, world: World, sync: bool = True):
    """Run forward and backward on B dummy sequences, and discard the gradients. Under
    torch.no_grad(), run only forward. Raise RuntimeError if a parameter has no gradient."""
    watchdog.reset()
    tokens = torch.zeros((B, config.seq_len), dtype=torch.int64, device=world.device)
    with gradient_sync(net, enabled=sync):
        with autocast(config.dtype, world.device):
            # Pass two tensors, as a step does, because passing one twice would force a recompile.
            loss = net(tokens, tokens.clone())
        if not torch.is_grad_enabled():
            return
        loss.backward()
    for name, p in net.named_parameters():
        if p.grad is None:  # it is useless, and DDP would fail
            raise RuntimeError(f"{name} gets no gradient")
    net.zero_grad(set_to_none=True)


def is_of_compiler(error: BaseException) -> bool:
    """Return whether error comes from torch.compile, whose parts (Dynamo, Inductor, Triton and the
    C++ compiler) share no class of exceptions."""
    while error.__cause__:
        error = error.__cause__
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    modules.append(type(error).__module__)
    return any(name.startswith(COMPILER) for name in modules)


def check_memory(error: BaseException, eval_only: bool):
    """Raise UserError with the cure if error means that memory ran out."""
    if is_out_of_memory(error):
        cure = f"lower --micro-batch-size, or {SAVE_MEMORY}"
        if eval_only:
            cure = "add --loss-chunk-tokens 1024, or end other programs that use it"
        raise UserError(f"memory ran out: {cure}: {error!s:.200}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether error means that memory ran out. PyTorch has exception classes for some cases;
    for CPUs, Macs, cuBLAS, cuDNN, CUDA and NCCL only the message says so."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    pattern = "(?i)out of memory|ALLOC(ATION)?_FAILED|Failed to CUDA [cm]alloc|buffer size"
    pattern += "|t allocate memory|not enough memory"
    return isinstance(error, RuntimeError) and bool(re.search(pattern, str(error)))
