"""The largest micro-batch that fits in memory, and what running out of memory looks like."""

import gc
import re
from collections.abc import Iterator

import torch
from torch import nn

from config import TrainConfig
from model import GPT
from support.device import autocast
from support.ending import UserError, reset_watchdog
from support.ranks import World, gradient_sync

SAVE_MEMORY = "add --recompute and --loss-chunk-tokens 1024"


def micro_batch_sizes(
    model: GPT, config: TrainConfig, world: World, saved_size: int | None
) -> Iterator[int]:
    """Yield the micro-batch sizes to try, from large to small: --micro-batch-size alone, or all
    that divide what a rank takes in a step. A resumed run begins with the size that it was saved
    with, because another one changes the last bits."""
    if config.micro_batch_size:
        yield config.micro_batch_size
        return
    num_sequences = config.num_micro_batches(1, world.size)
    # Start on a GPU with the lecture's 64 sequences, on a CPU with 4,096 tokens.
    largest = 64 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    for B in range(min(saved_size or largest, num_sequences), 0, -1):
        if num_sequences % B:
            continue  # a step would not be whole
        # On a GPU try the plain model first, in seconds: compiling for each B would take minutes.
        if world.device.type != "cuda" or pass_fits(model, B, config, world):
            yield B


def does_not_fit(config: TrainConfig) -> UserError:
    if config.micro_batch_size:
        too_much = f"--micro-batch-size {config.micro_batch_size} does not fit in memory: lower it"
    else:
        too_much = "not even one sequence fits in memory: lower --seq-len"
    return UserError(f"{too_much}, or {SAVE_MEMORY}")


def pass_fits(net: nn.Module, B: int, config: TrainConfig, world: World) -> bool:
    """Return whether every rank has the memory for a pass over B sequences: forward and backward in
    addition to the optimizer, or under torch.no_grad() forward alone."""
    optimizer_state: list[torch.Tensor] = []
    fits = True
    try:
        if torch.is_grad_enabled():
            optimizer_state += optimizer_memory(net)
        dummy_pass(net, B, config, world, sync=False)  # a rank that fails makes no other wait
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    optimizer_state.clear()
    if not fits:
        gc.collect()  # frees what the failed pass has left behind
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return all(world.gather(fits))


def optimizer_memory(net: nn.Module) -> list[torch.Tensor]:
    """Return tensors as large as the gradients and AdamW's two moments (Muon has one)."""
    params = list(net.parameters())
    num_moments = 2 * sum(p.numel() for p in params)
    # In one piece, so that what a CPU's allocator keeps of it has room for huge pages. In many
    # pieces, the first step of 124M took a quarter of a second longer.
    moments = torch.empty(num_moments, device=params[0].device)
    return [moments, *map(torch.empty_like, params)]


def dummy_pass(net: nn.Module, B: int, config: TrainConfig, world: World, sync: bool = True):
    """Make a forward and backward pass on B dummy sequences, and throw the gradients away. Under
    torch.no_grad() make a forward pass alone. Raise RuntimeError if a parameter has no gradient."""
    reset_watchdog()
    tokens = torch.zeros((B, config.seq_len), dtype=torch.int64, device=world.device)
    with gradient_sync(net, enabled=sync):
        with autocast(config.dtype, world.device):
            # Two tensors, as in a step: for one it would be compiled a second time.
            loss = net(tokens, tokens.clone())
        if not torch.is_grad_enabled():
            return
        loss.backward()
    for name, p in net.named_parameters():
        if p.grad is None:  # of no use to the network, and fatal to DDP
            raise RuntimeError(f"{name} has no part in the loss")
    net.zero_grad(set_to_none=True)


def explained(error: BaseException) -> BaseException:
    """Return error, or if it is about memory, a UserError with the cure."""
    if not is_out_of_memory(error):
        return error
    cure = f"lower --micro-batch-size, or {SAVE_MEMORY}"
    return UserError(f"a step does not fit in memory: {cure}: {error!s:.200}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory was too small. PyTorch has exception classes for some cases; its
    allocators for CPUs and Macs, cuBLAS, cuDNN, CUDA and NCCL only have words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    pattern = "(?i)out of memory|ALLOC(ATION)?_FAILED|Failed to CUDA [cm]alloc|buffer size"
    pattern += "|t allocate memory|not enough memory"
    return isinstance(error, RuntimeError) and bool(re.search(pattern, str(error)))
