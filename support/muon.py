"""One optimizer: Muon for the matrices of the blocks, and AdamW for all other parameters."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from support.world import World

MOMENTUM = 0.95  # Jordan's value
ROW_BETA = 0.95  # NorMuon's beta2
RMS = 0.2  # target size of an update, typical of AdamW (Liu et al.)
MAX_ENTRIES = 1 << 25  # the most a rank orthogonalizes at a time, in 7 * 128 MiB of memory


class MuonAdamW(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") uses the orthogonal matrix
    nearest to the momentum. As in NorMuon (Li et al. 2025, arXiv 2510.05491), each row is divided
    by the RMS of its past updates. The result is scaled to the size of AdamW's updates (Liu et al.
    2025, "Muon is scalable for LLM training"), so that one learning rate suits both:
    p -= lr * (weight_decay * p + 0.2 * update / RMS(update))."""

    def __init__(self, groups: list, matrices: list[tuple], bf16: bool, world: World, **options):
        """Take AdamW's groups and options. `matrices` are Muon's weights with their row counts."""
        super().__init__(groups, **options)
        self.matrices = matrices
        self.dtype = torch.bfloat16 if bf16 else torch.float32  # of orthogonalization
        self.world = world

    @torch.no_grad()
    def step(self):
        by_shape = defaultdict(list)
        for p, rows in self.matrices:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
                state["row_moment"] = p.new_zeros(len(p), 1)  # mean square of each row's updates
            tensors = p, p.grad, state["momentum_buffer"], state["row_moment"]
            views = [tensor.split(rows) for tensor in tensors]
            for matrix in zip(*views, strict=True):
                by_shape[matrix[0].shape].append(matrix)
            p.grad = None  # so that AdamW skips it
        super().step()
        for shape, matrices in by_shape.items():
            batch_size = max(1, MAX_ENTRIES // shape.numel()) * self.world.size
            for start in range(0, len(matrices), batch_size):
                self.update(matrices[start : start + batch_size])

    def update(self, matrices: list[tuple[Tensor, ...]]):
        """Update matrices (weight, gradient, momentum, row moment) that have the same shape."""
        group = self.param_groups[0]
        weights, grads, momenta, row_moments = map(list, zip(*matrices, strict=True))
        # A _foreach_ function handles all matrices in a few GPU kernels instead of one for each.
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        torch._foreach_lerp_(grads, momenta, MOMENTUM)  # Nesterov's momentum
        updates = self.orthogonal(grads)  # (n, rows, columns)
        norms = updates.norm(dim=2, keepdim=True, dtype=torch.float32)
        moments = torch.stack(row_moments).lerp_(norms.square() / updates.shape[2], 1 - ROW_BETA)
        torch._foreach_copy_(row_moments, list(moments))
        # Scale the rows first, then each whole matrix to the target size, in one factor per row.
        scales = 1 / moments.sqrt().clamp(min=1e-10)  # (n, rows, 1)
        sizes = (norms * scales).norm(dim=1, keepdim=True).clamp(min=1e-10)  # (n, 1, 1)
        scales *= group["lr"] * RMS * math.sqrt(updates[0].numel()) / sizes
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, list(updates * scales))

    def orthogonal(self, tensors: list[Tensor]) -> Tensor:
        """Orthogonalize tensors of one shape: return (n, rows, columns). Each rank does a part."""
        rank, size = self.world.rank, self.world.size
        if size == 1:
            return orthogonalize(torch.stack(tensors), self.dtype)
        share = math.ceil(len(tensors) / size)
        of_rank = tensors[rank * share : (rank + 1) * share]  # the last ranks may have fewer
        results = tensors[0].new_zeros((size, share, *tensors[0].shape), dtype=self.dtype)
        if of_rank:
            results[rank, : len(of_rank)] = orthogonalize(torch.stack(of_rank), self.dtype)
        self.world.gather_rows(results)
        return results.flatten(0, 1)[: len(tensors)]


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return roughly the nearest orthogonal matrices, (n, rows, columns) in dtype. In float32,
    singular values above 1/500 of the matrix's norm end up between 0.68 and 1.21."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):  # Newton-Schulz steps with Jordan's coefficients
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.mT if is_tall else x
