"""What updates the weights: AdamW, and Muon for the matrices that are named for it. With
fused, a step whose found_inf is 1 changes nothing."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from support.checkpoint import MOMENTUM

BETA = 0.95  # of Muon's momentum, as Jordan has it
MOST = 1 << 25  # numbers that are made orthogonal at a time: 128 MiB, and six times that in between


class Optimizer(torch.optim.AdamW):
    """AdamW of groups, but for those of their parameters that are named matrices: these get Muon's
    update, computed in bfloat16 or float32, with the first group's learning rate and decay."""

    def __init__(
        self, groups: list[dict], matrices: Iterable[Tensor] = (), bf16: bool = False, **options
    ):
        super().__init__(groups, **options)
        self.matrices = dict.fromkeys(matrices)  # in their order
        self.dtype = torch.bfloat16 if bf16 else torch.float32

    def __setstate__(self, state: dict):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's wants a step of each parameter

    @torch.no_grad()
    def step(self):
        grads = {p: p.grad for p in self.matrices if p.grad is not None}
        shapes = defaultdict(list)
        for p in grads:
            shapes[p.shape].append(p)
            p.grad = None  # AdamW passes it by
        super().step()
        for params in shapes.values():
            count = max(1, MOST // params[0].numel())
            for some in (params[n : n + count] for n in range(0, len(params), count)):
                self.muon(some, torch.stack([grads[p] for p in some]))

    def muon(self, params: list[Tensor], grads: Tensor):
        """The update of matrices of one shape (Jordan et al. 2024, "Muon: an optimizer for hidden
        layers"), as large as AdamW's is (Liu et al. 2025, "Muon is scalable for LLM training"), so
        that both go by one learning rate: p -= lr * (decay * p + 0.2 * sqrt(longer side) * O)."""
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for p in params:
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        buffers = [self.state[p][MOMENTUM] for p in params]
        momentum = torch.stack(buffers)
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            grads = torch.where(found_inf > 0, momentum, grads)  # keeps the momentum as it is
            lr = lr * (1 - found_inf)
        momentum.lerp_(grads, 1 - BETA)
        updates = orthogonal(grads.lerp_(momentum, BETA), self.dtype)  # Nesterov's momentum
        kept, size = 1 - lr * decay, lr * 0.2 * math.sqrt(max(params[0].shape))
        for p, buffer, new, update in zip(params, buffers, momentum, updates, strict=True):
            buffer.copy_(new)
            p.mul_(kept).sub_(update.mul_(size))


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """For each of these matrices (n, rows, columns) about the nearest one whose singular values are
    all 1, by five steps of a Newton-Schulz iteration in dtype (Jordan et al. 2024, who found the
    three numbers). In float32 those above a 500th of the matrix's norm end between 0.68 and 1.21.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.transpose(1, 2) if is_tall else x).float()
