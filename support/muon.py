"""Muon for the matrices of the blocks, AdamW for all other parameters, as one optimizer."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95  # Jordan's value
# Numbers that are made orthogonal at a time: 128 MiB in float32, and six times that in between.
MAX_NUMBERS = 1 << 25


class MuonAdamW(torch.optim.AdamW):
    """AdamW for the parameters in groups, except for those in matrices, which Muon updates. Muon
    (Jordan et al. 2024, "Muon: an optimizer for hidden layers") replaces the update of a matrix by
    the nearest orthogonal one. It is scaled to the size of AdamW's updates (Liu et al. 2025, "Muon
    is scalable for LLM training"), so one learning rate serves both: p -= lr * (weight_decay * p +
    0.2 * sqrt(longer side) * O)."""

    def __init__(self, groups: list[dict], matrices: Iterable[Tensor], bf16: bool, **options):
        """options are AdamW's. With bf16 the matrices are made orthogonal in bfloat16."""
        super().__init__(groups, **options)
        self.matrices = list(matrices)
        self.dtype = torch.bfloat16 if bf16 else torch.float32

    def __setstate__(self, state: dict):
        # Called by load_state_dict. AdamW's own would look for a step of each parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self):
        matrix_grads = {}
        by_shape = defaultdict(list)
        for p in self.matrices:
            if p.grad is not None:
                matrix_grads[p] = p.grad
                by_shape[p.shape].append(p)
                p.grad = None  # so that AdamW skips it
        super().step()
        for shape, params in by_shape.items():
            count = max(1, MAX_NUMBERS // shape.numel())
            for start in range(0, len(params), count):
                batch = params[start : start + count]
                self.update_matrices(batch, torch.stack([matrix_grads[p] for p in batch]))

    def update_matrices(self, params: list[Tensor], grads: Tensor):
        """Update matrices of one shape, given their gradients (n, rows, columns)."""
        lr = self.param_groups[0]["lr"]
        weight_decay = self.param_groups[0]["weight_decay"]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        momentum = torch.stack(buffers).lerp_(grads, 1 - MOMENTUM)
        for buffer, new in zip(buffers, momentum, strict=True):
            buffer.copy_(new)
        updates = orthogonalize(grads.lerp_(momentum, MOMENTUM), self.dtype)  # Nesterov's momentum
        scale = lr * 0.2 * math.sqrt(max(params[0].shape))
        for p, update in zip(params, updates, strict=True):
            p.mul_(1 - lr * weight_decay).sub_(update.mul_(scale))


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, for matrices (n, rows, columns), roughly the nearest ones whose singular values are
    all 1, float32. Five steps of a Newton-Schulz iteration in dtype; the coefficients are Jordan's.
    In float32, singular values above a 500th of the matrix's norm end between 0.68 and 1.21."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    x = x.transpose(1, 2) if is_tall else x
    return x.float()
