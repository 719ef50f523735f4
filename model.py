"""GPT-2 in one file of PyTorch: the network, its initial weights, and sampling from it.

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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        if self.n_embd % self.n_head:
            raise ValueError(
                f"--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}:"
                f" try --n-embd {math.ceil(self.n_embd / self.n_head) * self.n_head}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the embedding: vocab_size, padded to a multiple of 64 (50257 -> 50304): matrix
        products on a GPU are faster in tiles that divide evenly."""
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


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the paper writes it, three (B, nh, T, hs) -> (B, nh, T, hs); holds all
    (B, nh, T, T) weights in memory."""
    T, hs = q.shape[-2:]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    weights = (q @ k.transpose(-2, -1)) / math.sqrt(hs)  # (B, nh, T, T)
    return weights.masked_fill(future, -math.inf).softmax(dim=-1) @ v  # (B, nh, T, hs)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function in one fused kernel, never holding the (T, T) weights (Dao et al. 2022)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.n_head = config.n_head
        self.attend = flash_attention if flash else attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k and v of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in qkv)  # (B, nh, T, hs)
        y = self.attend(q, k, v)
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
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, flash)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2, its initial weights drawn from seed alone. flash picks the attention: it changes speed
    and memory, not the checkpoint."""

    def __init__(self, config: GPTConfig, flash: bool = True, seed: int = 0):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.num_rows, config.n_embd),
            "wpe": nn.Embedding(config.seq_len, config.n_embd),
            "h": nn.ModuleList(Block(config, flash) for _ in range(config.n_layer)),
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

    def features(self, idx: Tensor) -> Tensor:
        """What the head reads the next token from: idx (B, T) -> (B, T, C)."""
        T = idx.shape[1]
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than seq_len {self.config.seq_len}")
        pos = torch.arange(T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits of the next token: (..., C) -> (..., V), -inf for the padded rows: they have no
        part in the loss, so padding changes the speed but not the mathematics."""
        ids = torch.arange(self.config.num_rows, device=x.device)
        is_padding = ids >= self.config.vocab_size  # (V,)
        bias = torch.zeros_like(ids, dtype=x.dtype).masked_fill(is_padding, -math.inf)
        return F.linear(x, self.lm_head.weight, bias if self.config.pad_vocab else None)

    def logits(self, idx: Tensor) -> Tensor:
        """Next-token logits at every position: idx (B, T) -> (B, T, V)."""
        return self.head(self.features(idx))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets, in nats per token: two (B, T) -> ()."""
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, idx: Tensor, num_tokens: int, temperature: float, top_k: int, rng: torch.Generator
    ) -> Tensor:
        """idx (B, T) with num_tokens sampled tokens after it, each among the top_k likeliest of the
        vocabulary, never of its padding. Beyond seq_len tokens the oldest are forgotten."""
        for _ in range(num_tokens):
            x = self.features(idx[:, -self.config.seq_len :])[:, -1]  # (B, C)
            logits = self.head(x)[:, : self.config.vocab_size].float() / temperature
            top, ids = logits.topk(min(top_k, self.config.vocab_size))  # (B, top_k)
            pick = torch.multinomial(top.softmax(dim=-1), 1, generator=rng)  # (B, 1)
            idx = torch.cat([idx, ids.gather(1, pick)], dim=1)
        return idx

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters with weight decay, matrices and embeddings, and those without."""
        params = list(self.parameters())
        return [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]

    def num_elements(self, params: list[nn.Parameter]) -> int:
        """The size of params, without the padded rows."""
        padded = self.transformer.wte.weight[self.config.vocab_size :]
        in_params = any(p is self.transformer.wte.weight for p in params)
        return sum(p.numel() for p in params) - padded.numel() * in_params

    def flops_per_token(self) -> int:
        """Multiplications and additions of forward and backward for one token, after Chowdhery et
        al. 2022 (PaLM), appendix B: 6 per weight, 12 * T * C per attention layer, and none for the
        position embedding, which is looked up."""
        config, wpe = self.config, self.transformer.wpe.weight
        num_weights = sum(p.numel() for p in self.parameters()) - wpe.numel()
        return 6 * num_weights + config.n_layer * 12 * config.seq_len * config.n_embd
