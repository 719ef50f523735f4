"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") in one file of
PyTorch: the network, its initial weights, the loss, and generation. Parameter names (wte, wpe, h,
ln_1, c_attn, ...) are OpenAI's, so that their weights load by name:
https://github.com/openai/gpt-2/blob/master/src/model.py

Shapes in the comments:
    B  sequences in a batch               nh  attention heads (n_head)
    T  tokens in a sequence (<= seq_len)  hs  channels of one head, C / nh
    C  channels of the residual stream    V   rows of the embedding, including padding"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the network, which determines the names and sizes of all parameters. Checkpoints
    store every field. If an older checkpoint lacks a field, its default (GPT-2 124M's) applies."""

    vocab_size: int = 50257  # 256 bytes, 50,000 merges and <|endoftext|>
    seq_len: int = 1024  # longest sequence; each position has a learned embedding
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    pad_vocab: bool = True

    def __post_init__(self):
        """Raise ValueError if the fields, which may come from a file, are not a valid network."""
        sizes = self.vocab_size, self.seq_len, self.n_layer, self.n_head, self.n_embd
        if not all(type(n) is int and 0 < n < 1 << 24 for n in sizes) or self.n_embd % self.n_head:
            raise ValueError(f"a size is out of range, or n_head does not divide n_embd: {self}")

    @property
    def num_rows(self) -> int:
        """The embedding's row count. Speed-up 5 rounds vocab_size up to a multiple of 64 (50257 to
        50304), as GPUs multiply matrices in tiles, and partial tiles cost as much as full ones."""
        return math.ceil(self.vocab_size / 64) * 64 if self.pad_vocab else self.vocab_size


@dataclass(frozen=True)
class ComputeConfig:
    """How the network is computed. The format of checkpoints does not depend on these settings."""

    flash: bool = True  # speed-up 4
    dropout: float = 0.0  # probability of zeroing an activation during training
    bf16_residual: bool = False  # keep the residual stream in bfloat16, not in float32
    recompute: bool = False  # store only each block's input, and recompute the rest in backward
    loss_chunk_tokens: int = 0  # tokens per chunk of the loss; 0: all at once
    compile: bool = False  # speed-up 3: the caller compiles the network, and GPT the chunked loss


# These suit inputs whose length changes with each call. cuDNN is left out, because it spends
# about a second planning for each new shape (https://github.com/modelscope/FunASR/issues/3704).
VARLEN_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Return causal attention, unfused: q (B, nh, T, hs) -> (B, nh, T, hs). If k and v have more
    positions than q, q holds the last T. All weights, (B, nh, T, T), are in memory."""
    T, hs = q.shape[-2:]
    past = k.shape[-2] - T
    future = q.new_full((T, past + T), -math.inf).triu(1 + past)
    keys = k.flatten(0, 1).transpose(1, 2)  # (B * nh, hs, past + T)
    # Without torch.compile, scaling and masking inside baddbmm saves two passes over the scores.
    scores = torch.baddbmm(future, q.flatten(0, 1), keys, alpha=1 / math.sqrt(hs))
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights @ v.flatten(0, 1)).view(q.shape)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Speed-up 4: compute attention in one fused kernel, which never stores the (T, T) weights (Dao
    et al. 2022). If k has more positions than q, q must hold only the last one, which sees all."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[-2] > 1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, compute: ComputeConfig):
        super().__init__()
        self.config = config
        self.dropout = compute.dropout
        self.attend = flash_attention if compute.flash else attention
        self.parts = [config.n_embd] * 3  # rows of q, k and v, which Muon orthogonalizes separately
        self.c_attn = nn.Linear(config.n_embd, sum(self.parts))
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: dict | None = None) -> Tensor:
        """Map x (B, T, C) to (B, T, C). cache maps each attention module to the keys and values of
        the positions before x, (B, nh, past, hs) each, and receives the keys and values of x."""
        B, T, C = x.shape
        hs = C // self.config.n_head  # q, k and v become (B, nh, T, hs)
        parts = self.c_attn(x).split(self.parts, dim=-1)
        q, k, v = [part.view(B, T, -1, hs).transpose(1, 2) for part in parts]
        if cache is not None:
            if self in cache:
                past_k, past_v = cache[self]
                k = torch.cat([past_k, k], dim=2)
                v = torch.cat([past_v, v], dim=2)
            cache[self] = k, v
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
    def __init__(self, config: GPTConfig, compute: ComputeConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, compute)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(compute.dropout)

    def forward(self, x: Tensor, cache: dict | None = None) -> Tensor:
        # Autocast's layer norms return float32. Cast here, because DDP splits the compiled graph
        # after them: in the next graph, a cast would read twice the bytes, 2.4 % of an H100's step.
        x = x + self.drop(self.attn(self.ln_1(x).to(x.dtype), cache))
        return x + self.drop(self.mlp(self.ln_2(x).to(x.dtype)))


class Transformer(nn.Module):
    """The layers of the network, under OpenAI's names. GPT.features connects them."""

    def __init__(self, config: GPTConfig, compute: ComputeConfig):
        super().__init__()
        self.wte = nn.Embedding(config.num_rows, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config, compute) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)


class GPT(nn.Module):
    """GPT-2. The initial values of a parameter depend only on the seed, its name and its shape."""

    def __init__(self, config: GPTConfig, compute: ComputeConfig | None = None, seed: int = 0):
        super().__init__()
        self.config = config
        self.compute = compute or ComputeConfig()
        self.transformer = Transformer(config, self.compute)
        self.drop = nn.Dropout(self.compute.dropout)
        self.lm_head = nn.Linear(config.n_embd, config.num_rows, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one tensor, two uses
        if self.compute.compile and self.compute.loss_chunk_tokens:
            # Compiled together, all chunks' softmax would be one kernel, with all logits in memory.
            self.chunked_loss = torch.compiler.disable(self.chunked_loss)  # type: ignore
            self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore
        self.init_weights(seed)

    def init_weights(self, seed: int):
        """Set biases to 0, and draw matrices from N(0, 0.02). Divide the last matrix of each
        residual branch by sqrt(number of branches), so that the scale of the residual stream does
        not depend on depth (GPT-2, section 2.3). Padded rows are 0 and use no random numbers, so
        padding changes no other weight. LayerNorm gains keep their PyTorch default, 1."""
        nn.init.zeros_(self.transformer.wte.weight)
        for name, p in self.weights().items():
            # With one generator per name, adding, removing or moving a parameter changes no other.
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() == 2:
                is_last = name.endswith("c_proj.weight")
                divisor = math.sqrt(2 * self.config.n_layer) if is_last else 1
                p.normal_(std=0.02 / divisor, generator=rng)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by name, as views that leave out padded rows."""
        weights = {name: p.detach() for name, p in self.named_parameters()}
        rows = weights["transformer.wte.weight"]
        return weights | {"transformer.wte.weight": rows[: self.config.vocab_size]}

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with weight decay (matrices and embeddings) and those without."""
        params = list(self.parameters())
        return [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]

    def matrices(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Return the weights that Muon updates, each with the row counts of the matrices in it."""
        attentions = [m for m in self.modules() if isinstance(m, CausalSelfAttention)]
        parts = {attn.c_attn.weight: attn.parts for attn in attentions}
        matrices = [p for p in self.transformer.h.parameters() if p.dim() >= 2]
        return [(p, parts.get(p, [len(p)])) for p in matrices]

    def flops_per_token(self) -> int:
        """Return both passes' FLOPs per token: 6 per weight (wpe is only looked up), and
        12 * T * C per attention layer (Chowdhery et al. 2022, PaLM, appendix B)."""
        multiplied = [p.numel() for name, p in self.named_parameters() if "wpe" not in name]
        attention_flops = 12 * self.config.seq_len * self.config.n_embd
        return 6 * sum(multiplied) + self.config.n_layer * attention_flops

    def features(self, idx: Tensor, cache: dict | None = None, past: int = 0) -> Tensor:
        """Return the final hidden states: idx (B, T) -> (B, T, C). cache holds `past` tokens."""
        end = past + idx.shape[1]
        if end > self.config.seq_len:
            raise ValueError(f"{end} tokens exceed seq_len {self.config.seq_len}")
        pos = torch.arange(past, end, device=idx.device)
        x = self.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        if self.compute.bf16_residual:
            x = x.bfloat16()
        for block in self.transformer.h:
            if self.compute.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, cache)
        return self.transformer.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """Return the next token's logits, which are -inf for padded rows: (..., C) -> (..., V).
        Padding thus changes the speed but not the loss, and padded rows have a gradient of 0."""
        bias = None
        if self.config.pad_vocab:
            ids = torch.arange(self.config.num_rows, device=x.device)
            bias = torch.where(ids < self.config.vocab_size, 0.0, -math.inf).to(x.dtype)
        return F.linear(x, self.lm_head.weight, bias)

    def logits(self, idx: Tensor) -> Tensor:
        """Return next-token logits at every position: idx (B, T) -> (B, T, V)."""
        return self.head(self.features(idx))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token: idx and targets (B, T) -> ()."""
        x = self.features(idx).flatten(0, 1)  # (B * T, C)
        targets = targets.flatten()
        if 0 < self.compute.loss_chunk_tokens < len(x):
            return self.chunked_loss(x, targets)
        return self.loss(x, targets, "mean")

    def chunked_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of x (N, C) with only one chunk's logits in memory, since the logits
        and their gradient are the largest tensors of a step. Backward computes them again."""
        size = self.compute.loss_chunk_tokens
        chunks = zip(x.split(size), targets.split(size), strict=True)
        losses = [checkpoint(self.loss, *chunk, "sum", use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / len(x)

    def loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(self.head(x), targets, reduction=reduction)

    @torch.no_grad()
    def generate(
        self, idx: Tensor, rng: torch.Generator, temperature: float, top_k: int
    ) -> Iterator[Tensor]:
        """Yield the tokens (B, 1) that follow idx (B, T), one at a time, forever. When all seq_len
        positions are full, drop the older half and recompute the rest: cached keys can't move."""
        idx = idx[:, -self.config.seq_len :]
        cache: dict = {}
        past = 0  # the number of tokens in it
        while True:
            with sdpa_kernel(VARLEN_BACKENDS):
                x = self.features(idx[:, past:], cache, past)[:, -1]  # (B, C)
            logits = self.head(x)[:, : self.config.vocab_size].float()  # padding is never drawn
            new = sample_token(logits, rng, temperature, top_k)
            yield new
            past = idx.shape[1]
            idx = torch.cat([idx, new], dim=1)
            if past == self.config.seq_len:
                idx, cache, past = idx[:, -max(1, past // 2) :], {}, 0


def sample_token(logits: Tensor, rng: torch.Generator, temperature: float, top_k: int) -> Tensor:
    """Return a token (B, 1) for each row of logits (B, V): the likeliest at temperature 0, else
    drawn from the top_k likeliest (0: from all). Raise FloatingPointError if logits overflow."""
    if not logits.amax().isfinite():
        raise FloatingPointError("the logits overflow, so no next token can be drawn")
    if temperature < 1e-20:  # dividing by it might overflow
        return logits.argmax(dim=-1, keepdim=True)
    top, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # largest first
    probs = ((top - top[:, :1]) / temperature).softmax(dim=-1)
    return ids.gather(1, torch.multinomial(probs, 1, generator=rng))
