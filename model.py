"""GPT-2 in one file of PyTorch: the network, its initial weights, and what it can be asked: the
loss, how likely an answer is, and what comes next.

Shapes in the comments:
    B  sequences in a batch               nh  attention heads (n_head)
    T  tokens in a sequence (<= seq_len)  hs  channels of one head, C / nh
    C  channels of the residual stream    V   rows of the embedding, padding included

Parameter names (wte, wpe, h, ln_1, c_attn, ...) are OpenAI's, so that their weights load by name.

Sources:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
    https://github.com/openai/gpt-2/blob/master/src/model.py
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the network: what a checkpoint must agree with. The defaults are GPT-2 124M."""

    vocab_size: int = 50257  # 256 bytes, 50,000 merges and <|endoftext|>
    seq_len: int = 1024  # positions that have a learned embedding
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    pad_vocab: bool = True

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not f.type or (f.type is int and value < 1):
                raise ValueError(f"{f.name} {value} is not a whole number above 0")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}:"
                f" try --n-embd {math.ceil(self.n_embd / self.n_head) * self.n_head}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the embedding. Speed-up 5: vocab_size in multiples of 64 (50257 -> 50304),
        since matrix products on a GPU are faster in tiles that divide evenly."""
        return math.ceil(self.vocab_size / 64) * 64 if self.pad_vocab else self.vocab_size

    @property
    def num_params(self) -> int:
        """Weights of the network, padded rows included."""
        C = self.n_embd
        return (self.num_rows + self.seq_len + 2) * C + self.n_layer * (12 * C + 13) * C


SHAPES = {  # layers, heads and channels: Radford et al. 2019, table 2, with OpenAI's released heads
    "gpt2": GPTConfig(),  # 124M parameters
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1,558M
    "nano": GPTConfig(vocab_size=257, seq_len=128, n_layer=4, n_head=4, n_embd=128),  # 0.8M, bytes
}


# for answers and samples, each of another shape: cuDNN's attention would plan each for a second
# (https://github.com/modelscope/FunASR/issues/3704)
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal attention as the paper writes it, three (B, nh, T, hs) -> (B, nh, T, hs); holds all
    (B, nh, T, T) weights in memory. q may be the last T of more positions."""
    B, nh, T, hs = q.shape
    past = k.shape[-2] - T
    future = q.new_full((T, past + T), -math.inf).triu(1 + past)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (B * nh, T, hs), and past + T for k and v
    # as part of the product, scale and mask cost no pass of their own where nothing is compiled
    weights = torch.baddbmm(future, q, k.transpose(1, 2), alpha=1 / math.sqrt(hs)).softmax(dim=-1)
    return (F.dropout(weights, dropout) @ v).view(B, nh, T, hs)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Speed-up 4: the same in one fused kernel, never holding the (T, T) weights (Dao et al. 2022).
    Of more positions q may be the last one alone, which sees them all."""
    is_causal = q.shape[-2] > 1
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool, dropout: float):
        super().__init__()
        self.n_head, self.dropout = config.n_head, dropout
        self.attend = flash_attention if flash else attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k and v of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: dict | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, nh, T, hs)
        if cache is not None:
            past = cache.get(self, (k[:, :, :0], v[:, :, :0]))
            k, v = cache[self] = [torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True)]
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # GPT-2 was trained with the tanh form
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool, dropout: float):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, flash, dropout)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: dict | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), cache))
        return x + self.drop(self.mlp(self.ln_2(x)))


class ChunkedLoss(torch.autograd.Function):
    """Cross-entropy over a linear head for chunk tokens at a time, each with its gradients at once:
    the logits and their gradient, the largest tensors of all, never exist whole. Exact but for the
    order in which the chunks' parts of the weight's gradient are added up, in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int):
        """x (N, C), weight (V, C), bias (V,), which gets no gradient, and targets (N,) -> the mean
        loss, (). x and the products are of autocast's type where it is on."""
        kind, loss = x.device.type, torch.zeros((), device=x.device)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, w = x.to(dtype), weight.to(dtype)
        chunk = min(chunk, 4096) if dtype == torch.float16 else chunk  # it holds sums to 65,504
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        rows = torch.arange(len(w), device=x.device)
        for a in range(0, len(x), chunk):
            part, ids = x[a : a + chunk], targets[a : a + chunk, None]
            log_probs = F.linear(part, w, bias).float().log_softmax(dim=-1)  # (chunk, V)
            loss -= log_probs.gather(1, ids).sum()
            # less 1 at the targets, so that a compiler makes one kernel of it: a scatter would not
            dlogits = log_probs.exp_().add_(ids == rows, alpha=-1).to(dtype)
            dx[a : a + chunk] = dlogits @ w  # not divided by N yet: float16 could not hold it
            if dtype == dw.dtype:
                dw.addmm_(dlogits.t(), part)
            else:
                dw += dlogits.t() @ part
        ctx.save_for_backward(dx, dw)
        return loss / len(x)

    @staticmethod
    def backward(ctx, dloss: Tensor):
        dx, dw = ctx.saved_tensors
        scale = dloss / len(dx)
        return dx.mul_(scale), dw.mul_(scale), None, None, None  # no second copy of the largest


class GPT(nn.Module):
    """GPT-2, its initial weights drawn from seed alone. The other arguments say how it is computed
    and change no checkpoint: flash picks the attention; dropout is the share of the activations
    that training leaves out; bf16_residual keeps the residual stream in bfloat16; recompute holds
    each block's input alone for the backward pass, which computes the block again; with
    loss_chunk_tokens the head sees so many tokens at a time."""

    def __init__(self, config: GPTConfig, flash: bool = True, seed: int = 0, dropout: float = 0.0,
                 bf16_residual: bool = False, recompute: bool = False,
                 loss_chunk_tokens: int = 0):  # fmt: skip
        super().__init__()
        self.config, self.drop = config, nn.Dropout(dropout)
        self.bf16_residual, self.recompute = bf16_residual, recompute
        self.loss_chunk_tokens = loss_chunk_tokens
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.num_rows, config.n_embd),
            "wpe": nn.Embedding(config.seq_len, config.n_embd),
            "h": nn.ModuleList(Block(config, flash, dropout) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.num_rows, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one tensor, two uses
        self.init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, rng: torch.Generator):
        """Biases 0, layer norms 1, matrices N(0, 0.02); the last matrix of each residual branch is
        smaller by sqrt(branches), so that their sum starts at unit scale (GPT-2, section 2.3).
        Padded rows are 0 and draw no random number: the other weights do not depend on them."""
        branches = 2 * self.config.n_layer
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif name == "transformer.wte.weight":
                p.zero_()[: self.config.vocab_size].normal_(std=0.02, generator=rng)
            elif p.dim() == 2:
                is_branch_end = name.endswith("c_proj.weight")
                p.normal_(std=0.02 / math.sqrt(branches if is_branch_end else 1), generator=rng)

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters with weight decay, matrices and embeddings, and those without."""
        params = list(self.parameters())
        return [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]

    def matrices(self) -> list[nn.Parameter]:
        """The weights of the blocks' linear maps, in the order in which they stand among the
        decayed ones: behind the embeddings."""
        return [p for p in self.transformer.h.parameters() if p.dim() >= 2]

    def num_elements(self, params: list[nn.Parameter]) -> int:
        """The size of params, without the padded rows."""
        wte = self.transformer.wte.weight
        return sum((p[: self.config.vocab_size] if p is wte else p).numel() for p in params)

    def flops_per_token(self) -> int:
        """Multiplications and additions of forward and backward for one token, after Chowdhery et
        al. 2022 (PaLM), appendix B: 6 per weight, 12 * T * C per attention layer, and none for the
        position embedding, which is looked up."""
        T, C = self.config.seq_len, self.config.n_embd
        return 6 * (self.config.num_params - T * C) + self.config.n_layer * 12 * T * C

    def features(self, idx: Tensor, cache: dict | None = None, past: int = 0) -> Tensor:
        """What the head reads the next token from: idx (B, T) -> (B, T, C). With a cache, idx goes
        on from the past tokens whose keys and values it holds; those of idx are added to it."""
        T = past + idx.shape[1]
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than seq_len {self.config.seq_len}")
        pos = torch.arange(past, T, device=idx.device)
        x = self.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        x = x.bfloat16() if self.bf16_residual else x
        again = self.recompute and torch.is_grad_enabled()
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x, cache)
        return self.transformer.ln_f(x)

    def padding_bias(self, x: Tensor) -> Tensor | None:
        """What is added to the logits that are made of x: (V,), -inf for the padded rows. They have
        no part in the loss, so padding changes the speed but not the mathematics."""
        if not self.config.pad_vocab:
            return None
        ids = torch.arange(self.config.num_rows, device=x.device)
        is_padding = ids >= self.config.vocab_size
        return torch.zeros_like(ids, dtype=x.dtype).masked_fill(is_padding, -math.inf)

    def head(self, x: Tensor) -> Tensor:
        """Logits of the next token: (..., C) -> (..., V)."""
        return F.linear(x, self.lm_head.weight, self.padding_bias(x))

    def logits(self, idx: Tensor) -> Tensor:
        """Next-token logits at every position: idx (B, T) -> (B, T, V)."""
        return self.head(self.features(idx))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets, in nats per token: two (B, T) -> ()."""
        x, targets = self.features(idx).flatten(0, 1), targets.flatten()
        if not (chunk := self.loss_chunk_tokens):
            return F.cross_entropy(self.head(x), targets)
        if torch.is_grad_enabled():
            return ChunkedLoss.apply(x, self.lm_head.weight, self.padding_bias(x), targets, chunk)
        parts = zip(x.split(chunk), targets.split(chunk), strict=True)
        return sum(F.cross_entropy(self.head(a), b, reduction="sum") for a, b in parts) / len(x)

    @torch.no_grad()
    def answer_losses(self, rows: list[tuple[Tensor, int]]) -> Tensor:
        """For each row, tokens (T,) of which the last so many are the answer, the sum of the losses
        of the answer's tokens: (len(rows),). The head sees these positions alone, and of a row too
        long for the network the beginning is left out. A first token has no loss."""
        rows = [(tokens[-self.config.seq_len - 1 :], count) for tokens, count in rows]
        rows = [(tokens, min(count, len(tokens) - 1)) for tokens, count in rows]
        idx = nn.utils.rnn.pad_sequence([t[:-1] for t, _ in rows], batch_first=True)  # (B, T)
        with sdpa_kernel(ANY_SHAPE):
            x = self.features(idx)
        x = torch.cat([x[b, len(t) - 1 - n : len(t) - 1] for b, (t, n) in enumerate(rows)])
        targets = torch.cat([t[len(t) - n :] for t, n in rows])
        losses = F.cross_entropy(self.head(x).float(), targets, reduction="none")
        return torch.stack([part.sum() for part in losses.split([n for _, n in rows])])

    @torch.no_grad()
    def generate(
        self, idx: Tensor, rng: torch.Generator, temperature: float, top_k: int
    ) -> Iterator[Tensor]:
        """The tokens (B, 1) that follow idx (B, T), one after the other, without an end; never one
        of the padding. When seq_len tokens are full, the older half is forgotten: the cached keys
        hold their positions, so the others are read anew."""
        cache, past = {}, 0
        new = idx[:, -self.config.seq_len :]
        while True:
            with sdpa_kernel(ANY_SHAPE):
                x = self.features(new, cache, past)[:, -1]  # (B, C)
            past += new.shape[1]
            logits = self.head(x)[:, : self.config.vocab_size].float()
            new = pick(logits, rng, temperature, top_k)
            yield new
            idx = torch.cat([idx, new], dim=1)
            if past == self.config.seq_len:
                cache, past, new = {}, 0, idx[:, -(self.config.seq_len // 2 or 1) :]


def pick(logits: Tensor, rng: torch.Generator, temperature: float, top_k: int) -> Tensor:
    """A token for each row of logits (B, V), as (B, 1): at temperature 0 the likeliest, else drawn
    among the top_k likeliest (0: all). ValueError if the weights overflow."""
    if not logits.amax().isfinite():
        raise ValueError("the network's weights overflow: it can't tell a next token")
    if temperature < torch.finfo(torch.float32).tiny:  # to divide by it would overflow
        return logits.argmax(dim=-1, keepdim=True)
    top, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # falling
    probs = ((top - top[:, :1]) / temperature).softmax(dim=-1)
    return ids.gather(1, torch.multinomial(probs, 1, generator=rng))
