"""Train GPT-2 from tokens on disk to a checkpoint, on one GPU, on many, or on a CPU.
python train_gpt2.py                                             # one GPU, or none
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --data-dir data/mine --out-dir out/mine --resume
python train_gpt2.py --out-dir out/mine --sample-only --prompt "def "      # or --eval-only
"""

import os
import signal
import sys

# With -P or PYTHONSAFEPATH=1 Python does not search the script's folder.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# OpenMP's threads spin while they wait for each other, by default for 300,000 turns. On a busy
# machine they then take the cores from the very threads that they wait for: beside four busy
# programs on two cores a step of nano took 2,100 ms, and 380 ms with this. Beside none, it costs
# 2 % of a step. Read once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from support.errors import end_with_torchrun

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
    end_with_torchrun()

import codecs
import gc
import math
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dataloader import VOCAB_SIZES, ShardError, ShardLoader
from model import GPT, SHAPES, Computation, GPTConfig
from support import checkpoint, corpus, device, errors, evaluate, logger
from support.cli import KEEP, ONCE, ROUNDS, check_limits, flag, parse, spell, typed_as
from support.distributed import World, check_ranks_agree, find_world, gradient_sync, process_group
from support.errors import UserError
from support.evaluate import Example, open_examples
from support.files import whole_file
from support.muon import MuonAdamW
from support.pretrained import Pretrained, load_weights, read
from support.synonyms import SYNONYMS
from support.tokenizer import (
    as_json,
    load_tokenizer,
    provide_vocab,
    require_tokenizer,
    token_lengths,
)

# ---- Flags: each is declared once, here. Start reading at main, at the end -----------------------

SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad-vocab", "fused")  # in the lecture's order
UP_TO = ("none", *SPEED_UPS, "all")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class TrainConfig:
    """One run. The defaults are GPT-2 124M's; RECIPES hold what differs for the other models.
    on_resume says whether a resumed run may change a flag. KEEP: no, since it would be another
    network, or other data. ROUNDS: yes, and the last bits of the result may change. FREE (the
    default): yes. ONCE: the flag is for one command, not for the run."""

    model: str = flag(
        "gpt2", "recipe (default: gpt2 on a GPU, else nano)", KEEP, choices=SHAPES, group="run"
    )
    out_dir: str = flag("", "folder of the run (default: next free out/NNN)", ONCE)
    resume: bool = flag(False, "continue from the run's newest good checkpoint, or start it", ONCE)
    init_from: str = flag("", "initial weights: folder, file or name on the hub", KEEP)
    seed: int = flag(1337, "seed of the weights, the data order and samples", KEEP)
    save_every: int = flag(250, "steps between checkpoints; each evaluation saves one too")
    # Two, so that there is one to go back to should the newest be damaged.
    keep: int = flag(2, "keep the newest N checkpoints, plus the best one", min=1)
    device: str = flag("auto", "where to train", ONCE, choices=DEVICES)
    deterministic: bool = flag(False, "bit-for-bit on GPUs too (slower)", ROUNDS)

    # Without --data-dir it trains on the source of Python's own standard library: no download.
    data_dir: str = flag("", "folder of token shards (default: Python's own source)", group="data")
    shuffle: bool = flag(True, "a new order of the sequences in each epoch", KEEP)
    seq_len: int = flag(1024, "tokens per sequence", KEEP, min=1)
    # 2**19: GPT-3's half a million for this size, and a power of two for the GPU (the lecture's).
    batch_tokens: int = flag(524_288, "tokens per optimizer step, over all ranks", min=1)
    # 20 batches: the published curve of build-nanogpt is over as many tokens.
    eval_tokens: int = flag(10_485_760, "validation tokens, capped at the whole split; 0: none")

    # The defaults are those of the recipe, --model: these flags are for shapes of your own.
    n_layer: int = flag(12, "transformer blocks", KEEP, min=1, group="network")
    n_head: int = flag(12, "attention heads per block", KEEP, min=1)
    n_embd: int = flag(768, "channels of the residual stream", KEEP, min=1)
    dropout: float = flag(0.0, "probability of zeroing an activation", max=0.99)

    # 50 steps are the lecture's. One pass over 10 billion tokens is 19,073 steps.
    steps: int = flag(50, "optimizer steps", min=1, group="optimization")
    # 375 million tokens, as GPT-3 had.
    warmup_steps: int = flag(715, "steps of linear warm-up; if not typed, at most steps / 5")
    learning_rate: float = flag(6e-4, "peak learning rate; with --muon its default is by width")
    cosine: bool = flag(True, "decay the learning rate along a cosine")
    decay_to: float = flag(0.1, "final rate, as a fraction of the peak", max=1)
    weight_decay: float = flag(0.1, "weight decay, of matrices and embeddings")
    grad_clip: float = flag(1.0, "clip the gradient to this norm; 0: off")
    beta1: float = flag(0.9, "AdamW's beta1 (default: 0.9, with --muon 0.8)", max=0.999)
    muon: bool = flag(False, "Muon for the blocks' matrices, AdamW for the rest", KEEP)

    # An evaluation validates, samples, and answers the questions of --hellaswag.
    eval_every: int = flag(250, "steps between evaluations; 0: at both ends", group="logs")
    log_every: int = flag(0, "steps between lines; 0: every step on a terminal, else 20 a run")
    hellaswag: str = flag("", "JSON-lines file of questions, like HellaSwag's or ARC's")
    wandb: bool = flag(False, "write the log for Weights & Biases too")

    # Samples use their own random numbers, so they never change a run.
    num_samples: int = flag(1, "samples at each evaluation; 0: none", group="samples")
    sample_tokens: int = flag(200, "tokens of a sample", min=1)
    prompt: str = flag("", "text to continue (default: the start of a document)")
    temperature: float = flag(0.8, "sampling temperature; 0: greedy")
    top_k: int = flag(50, "draw among the k likeliest tokens; 0: among all")

    # All are on, except those that make this device slower: see device.speed_ups_off.
    speed_ups: str = flag(
        "all", "turn on those up to this one, and no others", choices=UP_TO, group="speed-ups"
    )
    tf32: bool = flag(True, "speed-up 1: float32 products on the tensor cores", ROUNDS)
    bf16: bool = flag(True, "speed-up 2: bfloat16 where it is safe (autocast)", ROUNDS)
    compile: bool = flag(True, "speed-up 3: torch.compile", ROUNDS)
    flash: bool = flag(True, "speed-up 4: attention in one fused kernel", ROUNDS)
    # The only speed-up that a resume can't change: the optimizer's state has its sizes.
    pad_vocab: bool = flag(True, "speed-up 5: 50,304 embedding rows, not 50,257", KEEP)
    fused: bool = flag(True, "speed-up 6: AdamW in one kernel", ROUNDS)
    # By the code generated for an H100 it saves an eighth of all memory traffic. What that brings
    # is not measured yet.
    bf16_residual: bool = flag(
        False, "the residual stream in bfloat16 too (default: on GPUs)", ROUNDS
    )
    fp16: bool = flag(False, "float16, for GPUs without bfloat16", ROUNDS)

    # With --recompute --loss-chunk-tokens 1024, 64 sequences of 124M fit in 8 GB instead of 4.
    recompute: bool = flag(False, "save memory: compute blocks twice", ROUNDS, group="memory")
    micro_batch_size: int = flag(0, "sequences per pass; 0: what fits", ROUNDS)
    loss_chunk_tokens: int = flag(0, "compute the loss N tokens at a time; 0: all at once", ROUNDS)

    eval_only: bool = flag(False, "evaluate weights, train nothing", ONCE, group="other modes")
    sample_only: bool = flag(False, "sample from weights, train nothing", ONCE)

    def __post_init__(self):
        """Raise UserError, with the cure, if flags are out of range or do not fit together."""
        check_limits(TrainConfig, vars(self))
        if 0 < self.warmup_steps >= self.steps:
            cure = f"try --warmup-steps {self.steps // 5}"
            raise UserError(f"--warmup-steps must be below --steps {self.steps}: {cure}")
        if self.n_embd % self.n_head:
            n_head = min(self.n_head, 1024)
            while self.n_embd % n_head:
                n_head -= 1
            n_embd = math.ceil(self.n_embd / self.n_head) * self.n_head
            cure = f"try --n-head {n_head}, or --n-embd {n_embd}"
            raise UserError(f"--n-head {self.n_head} must divide --n-embd {self.n_embd}: {cure}")
        if self.prompt.encode(errors="replace").decode() != self.prompt:
            raise UserError("--prompt is not UTF-8 text: type it again")
        if self.bf16 and self.fp16:
            raise UserError("--bf16 and --fp16 exclude each other: add --no-bf16 or --no-fp16")
        if self.bf16_residual and not self.bf16:
            raise UserError("--bf16-residual needs --bf16: add it, or --no-bf16-residual")

    def shape(self, vocab_size: int) -> GPTConfig:
        # Each field of GPTConfig must be a flag: one that is forgotten fails here, at the start.
        names = [f.name for f in fields(GPTConfig) if f.name != "vocab_size"]
        return GPTConfig(vocab_size, **{name: getattr(self, name) for name in names})

    def computation(self) -> Computation:
        return Computation(**{f.name: getattr(self, f.name) for f in fields(Computation)})

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return the forward and backward passes of each rank in a step. Raise UserError if the
        batch is not a multiple of what all ranks take in one pass."""
        B = max(1, self.micro_batch_size)  # 0: not chosen yet, and then 1 must divide the batch
        tokens_per_pass = B * self.seq_len * num_ranks
        count, remainder = divmod(self.batch_tokens, tokens_per_pass)
        if remainder:
            nearest = max(1, count) * tokens_per_pass
            raise UserError(
                f"--batch-tokens {self.batch_tokens} is not a multiple of {tokens_per_pass} ="
                f" --micro-batch-size {B} * --seq-len {self.seq_len} * {num_ranks} ranks:"
                f" try --batch-tokens {nearest}"
            )
        return count


# Learning rates and batches of the GPT-2 sizes: Brown et al. 2020 (GPT-3), table 2.1. nano's were
# measured, by the validation loss after its 1,200 steps.
RECIPES: dict[str, dict] = {
    "gpt2": {},
    "gpt2-medium": {"learning_rate": 3e-4},
    "gpt2-large": {"learning_rate": 2.5e-4},
    "gpt2-xl": {"learning_rate": 2e-4, "batch_tokens": 1_048_576},
    "nano": {
        "learning_rate": 8e-3,
        "batch_tokens": 2048,
        "steps": 1200,
        "warmup_steps": 50,
        "muon": True,
        "eval_every": 600,
        "eval_tokens": 262_144,
    },
}
SHAPE_FLAGS = ("seq_len", "n_layer", "n_head", "n_embd")
for _model, _recipe in RECIPES.items():
    _recipe.update({name: getattr(SHAPES[_model], name) for name in SHAPE_FLAGS})


def muon_learning_rate(n_embd: int) -> float:
    """Return the peak learning rate of --muon for a network of this width. It was measured from
    128 to 512 channels (benchmarks/README.md), and is extrapolated beyond."""
    rate = 8e-3 * min(1, 128 / n_embd) ** 0.8
    return float(f"{rate:.2g}")  # no more is known of it


# A small rate and batch, since the weights are good already: nanoGPT's values for finetuning.
FINETUNE = {"learning_rate": 3e-5, "batch_tokens": 32_768}


def read_flags(argv: list[str]) -> dict:
    """Return the flags that a command line gives, by name."""
    recipes = RECIPES | {"--init-from": FINETUNE}
    typed = parse(TrainConfig, __doc__ or "", recipes, SYNONYMS, argv)
    for name in ("data_dir", "out_dir", "init_from", "hellaswag"):
        if typed.get(name) == "":  # such as an unset variable of a shell script
            raise UserError(f"{spell(name)} is empty: name one, or leave it out")
    num_prompts = sum(arg == "--prompt" or arg.startswith("--prompt=") for arg in argv)
    if num_prompts > 1:  # of other flags the last one counts, so that "$@" may end a script's own
        raise UserError(
            f"--prompt is typed {num_prompts} times: type one, or pipe them in as lines"
        )
    return typed


def resolve(
    typed: dict, state: dict | None, source: Pretrained | None, on: torch.device
) -> tuple[TrainConfig, dict[str, str]]:
    """Return the flags of the run, and why some speed-ups are off, by name. typed is what
    given_flags returns. The run begins with the weights in source; a resumed one also has the
    state of its checkpoint."""
    # What somebody has asked for, now or when the run was started. It wins over everything else, or
    # is refused.
    explicit = {}
    for f in fields(TrainConfig):
        # From the checkpoint, never from log.jsonl: a damaged log must not change a run.
        if state and f.metadata["on_resume"] == KEEP:
            explicit[f.name] = state["config"].get(f.name, f.default)
    explicit |= typed
    from_weights = flags_of_weights(source, explicit)
    default_model = {"model": "gpt2" if on.type == "cuda" else "nano"}
    model = (default_model | from_weights | explicit)["model"]
    recipe = {"model": model} | RECIPES[model]
    seq_len = (recipe | from_weights | explicit)["seq_len"]
    from_muon = {}
    if (recipe | explicit).get("muon"):
        n_embd = (recipe | from_weights | explicit)["n_embd"]
        # beta1 is AdamW's, for all but the blocks' matrices. There 0.8 was better than 0.9.
        from_muon = {"beta1": 0.8, "learning_rate": muon_learning_rate(n_embd)}
    off = device.speed_ups_off(on, model, seq_len, explicit)
    from_device = flags_of_device(on, model, off, explicit)

    # Each layer overrides those before it. Below them all are the defaults of TrainConfig.
    flags = recipe | from_muon | from_weights | from_device | explicit
    if "warmup_steps" not in explicit:
        # A short run could not warm up for 715 steps. A fifth of it is the lecture's 10 of 50.
        steps = flags.get("steps", TrainConfig.steps)
        flags["warmup_steps"] = min(flags.get("warmup_steps", TrainConfig.warmup_steps), steps // 5)
    return TrainConfig(**flags), off


def given_flags(typed: dict, state: dict | None) -> dict:
    """Return the flags that were typed, now or for earlier processes of this run. --speed-ups is
    expanded into the flags that it turns on and off."""
    saved = state["typed"] if state else {}
    from_speed_ups = {}
    if "speed_ups" in typed:
        names = [name.replace("-", "_") for name in SPEED_UPS]
        replaced = (*names, "bf16_residual")  # which needs bf16
        saved = {name: value for name, value in saved.items() if name not in replaced}
        num_on = UP_TO.index(typed["speed_ups"])
        from_speed_ups = dict.fromkeys(names[num_on:], False)
        if 0 < num_on <= len(names):
            # Those before it stay on where the device has them. The one that is named is required.
            from_speed_ups[names[num_on - 1]] = True
        if state:
            from_speed_ups.pop("pad_vocab", None)  # a resume can't change it
    lasting = [f.name for f in fields(TrainConfig) if f.metadata["on_resume"] != ONCE]
    # Typed, not resolved: on another device the defaults of that device hold.
    saved = {name: value for name, value in saved.items() if name in lasting}
    return saved | from_speed_ups | typed


def flags_of_weights(source: Pretrained | None, explicit: dict) -> dict:
    """Return the flags that the weights decide. Raise UserError if a given one disagrees."""
    if source is None:
        return {}
    flags = asdict(source.shape)
    del flags["vocab_size"], flags["pad_vocab"]
    # A shape that no recipe has takes GPT-2 124M's recipe.
    flags["model"] = "gpt2"
    for name, shape in SHAPES.items():
        if all(getattr(shape, key) == flags[key] for key in ("n_layer", "n_head", "n_embd")):
            flags["model"] = name
    for name, value in flags.items():
        wanted = explicit.get(name, value)
        if name == "model" or (name == "seq_len" and wanted < value):
            continue  # allowed: another recipe, or fewer positions than the weights have
        if wanted != value:
            has = f"{source.path} has {typed_as(name, value)}"
            raise UserError(f"{typed_as(name, wanted)}: {has}: leave it out")
    return flags | FINETUNE if explicit.get("init_from") else flags


def flags_of_device(on: torch.device, model: str, off: dict, explicit: dict) -> dict:
    """Return the flags that this device has other defaults for."""
    flags = dict.fromkeys(off, False)
    if explicit.get("fp16"):
        flags["bf16"] = False
    elif on.type == "cuda" and "bf16" in off:
        flags["fp16"] = True  # a T4 or V100 has float16 in hardware
    has_bf16 = (flags | explicit).get("bf16", TrainConfig.bf16)
    # The lecture's rungs keep the residual stream in float32. So do others' weights, in which it
    # may hold values that are too large to be added up in bfloat16.
    keeps_float32 = explicit.get("speed_ups", "all") != "all" or explicit.get("init_from")
    if on.type == "cuda" and model != "nano" and has_bf16 and not keeps_float32:
        flags["bf16_residual"] = True
    if on.type != "cuda" and model != "nano":
        flags["eval_tokens"] = 8192  # half a minute of a CPU, not hours
    if not explicit.get("data_dir") and not explicit.get("init_from"):
        flags["prompt"] = "def "  # the data is Python's own source
    return flags


# ---- Speed-ups 1, 2, 3 and DDP; 4 and 5 are in model.py, 6 is in make_optimizer ------------------


def autocast(config: TrainConfig, on: torch.device):
    """Speed-up 2: matrix products and attention in 16 bits; sums, norms and the loss in 32."""
    return torch.autocast(on.type, dtype_of(config), enabled=config.bf16 or config.fp16)


def dtype_of(config: TrainConfig) -> torch.dtype:
    if config.fp16:
        return torch.float16
    return torch.bfloat16 if config.bf16 else torch.float32


def set_backends(config: TrainConfig, on: torch.device):
    """Set what holds for all of torch, before the first matrix product."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")  # speed-up 1: TF32
    # Code compiled for a CPU adds up in an order that varies, unless it must be deterministic.
    device.set_determinism(config.deterministic or on.type == "cpu", config.compile)
    if on.type == "cpu":
        device.set_allocator(keep_freed=not config.recompute)


def speed_up(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """Return the same parameters behind torch.compile and DDP. model itself stays plain, except for
    its loss in chunks. It is what is saved, loaded and sampled: so no checkpoint has `_orig_mod.`
    or `module.` in its names, and odd shapes do not compile anew."""
    # Every training batch has one shape, so nothing is gained by code for all shapes.
    net = torch.compile(model, dynamic=False) if config.compile else model  # speed-up 3
    if config.compile and config.loss_chunk_tokens:
        model.loss = torch.compile(model.loss, dynamic=False)  # by itself: see chunked_loss
    if torch.__version__.startswith("2.5."):
        # Its Dynamo can't split a graph with recomputed blocks at DDP's buckets. That of 2.6 can.
        torch._dynamo.config.optimize_ddp = not config.recompute
    # Gradients as views into DDP's buckets: no second copy of them in memory.
    return DDP(net, gradient_as_bucket_view=True) if world.size > 1 else net


# ---- The optimizer and its learning rate ---------------------------------------------------------


def make_optimizer(model: GPT, config: TrainConfig, world: World) -> torch.optim.Optimizer:
    """Return AdamW as GPT-3 set it (Brown et al. 2020, appendix B); with --muon, Muon updates the
    blocks' matrices instead."""
    # Decay pulls weights to 0. A layer norm's gain belongs near 1, and biases are few.
    decayed, others = model.decay_groups()
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # Speed-up 6. Without it None, not False: torch then picks its second best implementation.
    betas = (config.beta1, 0.95)
    options = {"lr": config.learning_rate, "betas": betas, "fused": config.fused or None}
    if config.muon:
        return MuonAdamW(groups, model.matrices(), config.bf16, world, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate for step index `step`: a linear warm-up, then a cosine from learning_rate at
    warmup_steps down to decay_to * learning_rate at steps."""
    if step < config.warmup_steps:
        # step + 1, so that the first step is not wasted on a rate of 0
        return config.learning_rate * (step + 1) / config.warmup_steps
    if not config.cosine:
        return config.learning_rate
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)  # 0 .. 1
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 .. 0
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * cosine)


# ---- One step ------------------------------------------------------------------------------------


# The functions below take the whole run instead of ten arguments. There is one Run in a process.
@dataclass
class Run:
    """A run: first what stays, then what each step changes, which a checkpoint holds."""

    config: TrainConfig
    typed: dict  # the flags that were typed, now or for earlier processes of this run
    world: World
    out_dir: Path
    lock: FileLock  # keeps other runs out of out_dir
    signals: errors.StopSignals
    log: logger.Logger
    environment: dict  # torch, processor, ranks, ...: what a result depends on besides the flags
    data: corpus.TokenFolder
    val_loader: ShardLoader
    questions: list[Example]
    net: nn.Module  # what the loop calls: model, compiled and in DDP

    model: GPT  # the plain module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing without --fp16
    loader: ShardLoader  # of the training data
    step: int = 0  # steps made
    saved_step: int = -1  # of the newest checkpoint
    losses: dict[int, float] = field(default_factory=dict)  # by step, for loss.png
    val_losses: dict[int, float] = field(default_factory=dict)  # by step


class StepResult(NamedTuple):
    loss: float  # mean over all tokens of the step, on all ranks, before the update
    grad_norm: float  # before clipping
    notice: str  # why there was no update; empty if there was one
    stop: bool  # some rank was asked to stop: the same on every rank


def train_step(run: Run) -> StepResult:
    """Make one step: forward and backward over batch_tokens tokens, and one update. Raise
    NumericalError on every rank, before any weight changes, if the loss or the gradient is not
    finite."""
    config = run.config
    world = run.world
    num_micro_batches = config.num_micro_batches(world.size)
    if config.dropout:
        # A function of (seed, step, rank), so there is no generator state to save and restore.
        torch.manual_seed(random_seed(config.seed, run.step, world.rank))

    loss_of_rank = torch.zeros((), device=world.device)
    started = time.perf_counter()
    for i in logger.progress(range(num_micro_batches), f"step {run.step + 1}", world.is_main):
        errors.reset_watchdog()
        x, y = to_device(run.loader.next_batch(), world.device)
        # DDP averages the gradients during backward. Only the last micro-batch needs that, and
        # DDP decides in forward whether to: so both passes are inside.
        with gradient_sync(run.net, enabled=i == num_micro_batches - 1):
            with autocast(config, world.device):
                # Divided here, because backward adds the gradients of all micro-batches up.
                loss = run.net(x, y) / num_micro_batches
            run.scaler.scale(loss).backward()
        loss_of_rank += loss.detach()
        if i == 1:
            logger.warn_if_slow(run, (time.perf_counter() - started) / 2 * num_micro_batches)
    run.loader.read_ahead()  # the disk works while the GPU does

    # With --fp16 the gradients are scaled up. Undo that before their norm is taken.
    run.scaler.unscale_(run.optimizer)
    # Computed without --grad-clip too, for the log: a jump in it often precedes a divergence.
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)

    # One small all-reduce carries everything that the ranks must agree on. An inf or nan survives
    # a sum, so every rank sees those of all. tolist() is the one place where a step waits for the
    # device.
    # full, not tensor: that would copy the number from the CPU, and wait.
    stop_vote = torch.full((), float(run.signals.received), device=world.device)
    figures = torch.stack([loss_of_rank, grad_norm.float(), stop_vote])
    loss_sum, norm_sum, num_votes = world.sum(figures).tolist()
    mean_loss = loss_sum / world.size
    mean_norm = norm_sum / world.size

    notice = ""
    if math.isfinite(mean_loss) and math.isfinite(mean_norm):
        # Set before each step rather than by a scheduler, which would be one more state to save.
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.step, config)
        run.scaler.step(run.optimizer)
    elif config.fp16 and math.isfinite(mean_loss) and run.scaler.get_scale() > 1:
        # Normal for a scaler: it starts too high, and tries higher scales again later.
        notice = "not applied: the gradient overflows float16, so its scale is halved"
    else:
        raise_not_finite(run, mean_loss, mean_norm, float(loss_of_rank))
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)  # frees them: the next pass need not add to zeros
    run.step += 1
    return StepResult(mean_loss, mean_norm, notice, stop=num_votes > 0)


def random_seed(*numbers: int) -> int:
    """Return a seed for torch that depends on all of these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def to_device(batch: tuple, on: torch.device) -> tuple:
    # The loader pins memory for CUDA, which then copies it while it computes.
    non_blocking = on.type == "cuda"
    return tuple(tensor.to(on, non_blocking=non_blocking) for tensor in batch)


def raise_not_finite(run: Run, loss: float, grad_norm: float, loss_of_rank: float):
    config = run.config
    # Every rank comes here, since all have seen the same sums. So they can still talk.
    losses = run.world.gather(loss_of_rank)
    ranks = [str(rank) for rank, value in enumerate(losses) if not math.isfinite(value)]
    # The weights are good: nothing was updated. With the loader set back, no step is lost.
    end = run.loader.position
    run.loader.position -= config.batch_tokens // config.seq_len
    if run.saved_step != run.step:
        save(run)
    run.world.raise_on_all(
        errors.NumericalError(
            f"step {run.step + 1} gave loss {loss} (not finite on rank"
            f" {', '.join(ranks) or 'none'}) and gradient norm {grad_norm}, on sequences"
            f" {run.loader.position:,} to {end - 1:,}: not applied; step {run.step} is saved: try"
            f" --resume with a --learning-rate below {config.learning_rate}"
        )
    )


# ---- The loop ------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Train up to config.steps. Return the exit code: DONE, or STOPPED after a signal."""
    config = run.config
    if run.step == 0 and config.init_from:
        save(run)  # others' weights as a checkpoint: so a run of one step converts them
    # Before the first step: the loss must be near ln(vocab_size), or something is wrong. After a
    # resume: the process before this one may have died in an evaluation, so it is made again.
    evaluate_if_due(run)
    while run.step < config.steps:
        # From here on a signal waits for the step, and for the save that follows.
        run.signals.has_unsaved_steps = True
        started = time.perf_counter()
        result = train_step(run)
        log_step(run, result, time.perf_counter() - started)

        # Save before evaluating: whatever fails or is killed below costs no step. And so the
        # checkpoint with the best validation is always on the disk.
        save_due = is_due(run.step, config.save_every, config.steps)
        if result.stop or save_due or is_due(run.step, config.eval_every, config.steps):
            save(run)
            # Asked again, since a signal may have come during the save.
            if any(run.world.gather(run.signals.received)):
                return stop(run)
        evaluate_if_due(run)
    finish(run)
    return errors.DONE


# The last step is always due, so that a run ends with a checkpoint and its evaluation.
def is_due(step: int, every: int, last_step: int) -> bool:
    """Return whether something that is done every so many steps, and after the last one, is due."""
    return step == last_step or (every > 0 and step % every == 0)


def log_step(run: Run, result: StepResult, seconds: float):
    """Log the figures of a step. The clock covers the step alone, not saves or evaluations."""
    config, step = run.config, run.step
    tokens_per_s = config.batch_tokens / seconds
    tflops = tokens_per_s * run.model.flops_per_token() / run.world.size / 1e12
    record = {
        "step": step,
        "loss": result.loss,
        # JSON has no inf, which a step that overflows float16 has.
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "learning_rate": learning_rate(step - 1, config),
        "ms": 1000 * seconds,
        "tokens_per_s": tokens_per_s,
        "tflops": tflops,
        # Of what this device reaches in matrix products alone: a yardstick for cards, and CPUs,
        # whose data sheet is not known.
        "matmul_share": tflops / run.environment["matmul_tflops"],
        "peak_mib": device.peak_memory_mib(run.world.device),
    }
    text = (
        f"step {step}/{config.steps} | loss {result.loss:.4f} | lr {record['learning_rate']:.2e} |"
        f" norm {result.grad_norm:.3f} | {1000 * seconds:.0f} ms | {tokens_per_s:,.0f} tokens/s |"
        f" {record['matmul_share']:.0%} of matmul"
    )
    peak = device.peak_tflops(run.environment["device_name"])
    if peak:
        record["mfu"] = tflops / peak
        text += f", {tflops / peak:.0%} MFU"
    text += f" | {run.log.time_left(seconds, config.steps - step)} left"
    if result.notice:
        record["notice"] = result.notice
        text += f" | {result.notice}"
    run.log.record(**record)
    # The first line of a process always comes: it says that all is well, and how long it will take.
    is_first = len(run.log.recent_seconds) == 1
    log_every = config.log_every or logger.default_interval(config.steps)
    if is_first or result.notice or is_due(step, log_every, config.steps):
        run.log.print(text)
    if logger.is_drawn(step, config.steps):
        run.losses[step] = result.loss


# ---- Evaluations: they have their own loader and random numbers, and change nothing --------------


def evaluate_if_due(run: Run):
    config = run.config
    if run.step > 0 and not is_due(run.step, config.eval_every, config.steps):
        return
    # Killed anywhere below, the next process makes the evaluation again: see train.
    if config.eval_tokens:
        figures = validate(
            run.model, run.net, run.val_loader, run.data.tokenizer, config, run.world
        )
        # Record only saved steps, so that the best one is on the disk. A nan can't be the best.
        if run.saved_step == run.step and math.isfinite(figures["val_loss"]):
            run.val_losses[run.step] = figures["val_loss"]
        run.log.record(step=run.step, **figures)
        run.log.print(f"validation after step {run.step}: {evaluate.in_words(figures)}")
        logger.warn_if_overfitting(run)
    if run.step == 0:
        return  # no samples of untrained weights
    if config.num_samples and run.world.is_main:
        write_samples(run)
    if run.questions:
        shares = answers(run.model, run.questions, config, run.world)
        run.log.record(step=run.step, **shares)
        run.log.print(f"questions after step {run.step}: {evaluate.in_words(shares)}")
    draw_losses(run)
    # All ranks wait here, outside of a step, so that a signal stops all of them at once.
    run.world.gather(None)


def draw_losses(run: Run):
    if not run.world.is_main:
        return
    title = f"{run.config.model}, {run.config.steps:,} steps of {run.config.batch_tokens:,} tokens"
    try:
        logger.draw_losses(run.out_dir / "loss.png", title, run.losses, run.val_losses)
    except Exception as error:  # a picture is no reason to end a run
        run.log.print(f"no loss.png: {error}")


@torch.no_grad()
def validate(
    model: GPT,
    net: nn.Module,
    loader: ShardLoader,
    tokenizer: str,
    config: TrainConfig,
    world: World,
) -> dict[str, float]:
    """Return the mean loss over the first eval_tokens tokens of loader, in several units: the same
    tokens for any micro-batch size and number of ranks."""
    # Sequences are dealt out one by one, so the ranks' shares differ by one at most, and their sum
    # does not depend on how many ranks there are.
    num_sequences = num_val_sequences(config, loader)
    mine = range(world.rank, num_sequences, world.size)
    lengths = token_lengths(tokenizer)
    num_bytes = None if lengths is None else 0  # of the text that the targets stand for
    loss_sum = torch.zeros((), device=world.device)
    with evaluate.dropout_off(net):
        for start in logger.progress(range(0, len(mine), loader.B), "validation", world.is_main):
            errors.reset_watchdog()
            numbers = mine[start : start + loader.B]
            batch = loader.batch(numbers)
            if lengths is not None:
                num_bytes += int(lengths[batch[1].numpy()].sum())
            x, y = to_device(batch, world.device)
            # net is compiled for full batches: a shorter last one goes through the plain model.
            network = net if len(numbers) == loader.B else model
            with autocast(config, world.device):
                loss_sum += network(x, y) * len(numbers)
    val_loss = world.sum(loss_sum.view(1)).item() / num_sequences
    # Bytes are gathered as whole numbers: the float32 of an all-reduce ends at 2**24. On another
    # machine a rank may have no tokenizer to count with.
    counts = world.gather(num_bytes)
    total_bytes = 0 if None in counts else sum(counts)
    return evaluate.in_units(val_loss, total_bytes / (num_sequences * loader.T))


def num_val_sequences(config: TrainConfig, loader: ShardLoader) -> int:
    return max(1, min(config.eval_tokens // loader.T, len(loader)))


def write_samples(run: Run):
    texts = []
    try:
        with evaluate.dropout_off(run.model):
            for number in range(run.config.num_samples):
                pieces = sample(run.model, run.data.tokenizer, run.config, number)
                texts.append("".join(pieces))
    except (FloatingPointError, UserError) as error:
        texts.append(f"(no sample: {error})")  # no reason to end a run
    text = "\n---\n".join(texts)
    run.log.record(step=run.step, sample=text)
    run.log.print(f"sample after step {run.step}:\n{text}")


def sample(model: GPT, tokenizer_name: str, config: TrainConfig, number: int) -> Iterator[str]:
    """Yield sample `number` piece by piece: the prompt, and what the network continues it with. Its
    random numbers depend on (seed, number) alone."""
    tokenizer = require_tokenizer(tokenizer_name)
    size = model.config.vocab_size
    on = model.lm_head.weight.device
    # A generator of its own: the samples of a run do not depend on when they are drawn.
    rng = torch.Generator(on).manual_seed(random_seed(config.seed, number))
    # Without a prompt it begins as every document does, with <|endoftext|>.
    ids = tokenizer.encode(config.prompt) or [min(VOCAB_SIZES[tokenizer_name], size) - 1]
    if max(ids) >= size:
        raise UserError(f"--prompt: token {max(ids)}, the network knows 0 to {size - 1}")
    yield config.prompt
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    beginning = torch.tensor([ids], device=on)
    tokens = model.generate(beginning, rng, config.temperature, config.top_k)
    for _ in range(config.sample_tokens):
        errors.reset_watchdog()
        with autocast(config, on):  # not around the yield: it would hold for whoever reads this
            token = int(next(tokens))
        yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)


def answers(
    model: GPT, examples: list[Example], config: TrainConfig, world: World
) -> dict[str, float]:
    """Return the shares of right answers, in each way to count them. The ranks share the work."""
    mine = examples[world.rank :: world.size]
    with evaluate.dropout_off(model), autocast(config, world.device):
        losses = evaluate.choice_losses(model, mine, world.device)
    shares = {}
    for name, count in evaluate.right_answers(mine, losses).items():
        shares[f"hellaswag_{name}"] = sum(world.gather(count)) / len(examples)
    return shares


# ---- Saving, and the end -------------------------------------------------------------------------


def save(run: Run):
    """Write a checkpoint, by the main rank: all hold the same weights, which is compared first."""
    errors.reset_watchdog()
    # A rank that drifts away, as by a faulty GPU, would be invisible in the averaged loss.
    check_ranks_agree(run.model, run.step, run.world)
    run.world.from_main(write_checkpoint, run)
    run.saved_step = run.step
    run.signals.has_saved = True
    run.signals.has_unsaved_steps = False


def write_checkpoint(run: Run):
    started = time.perf_counter()
    # Synchronously: a copy for a background thread would save some two seconds of 250 steps.
    path = checkpoint.save(run.out_dir, run.model, run.optimizer, state_of(run))
    if not run.signals.has_saved:  # the first one of this process
        checkpoint.check_readable(path, run.model, run.optimizer)
    checkpoint.rotate(run.out_dir, run.step, run.config.keep, run.val_losses)
    run.log.record(saved=run.step, path=str(path), save_s=time.perf_counter() - started)
    if run.step:
        run.log.print(f"saved {path}")


def state_of(run: Run) -> dict:
    """Return what state.json holds: all that a resume needs besides weights and moments."""
    # No generator state: whatever is random is a function of the seed and the step.
    return {
        "step": run.step,
        "position": run.loader.position,  # the loader's whole state
        "scaler": run.scaler.state_dict(),  # the loss scale of --fp16
        "losses": run.losses,
        "val_losses": run.val_losses,
        "typed": run.typed,
        "config": asdict(run.config),
        "environment": run.environment,
        "tokenizer": run.data.tokenizer,
        "data": run.data.fingerprint,
    }


def restore(run: Run, path: Path, state: dict):
    """Load all but the weights. The learning rate and decay stay the command line's."""
    checkpoint.load_optimizer(path, run.model, run.optimizer)
    run.step = run.saved_step = state["step"]
    run.loader.position = state["position"]
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    # JSON's keys are text.
    run.losses = {int(step): loss for step, loss in state["losses"].items()}
    run.val_losses = {int(step): loss for step, loss in state["val_losses"].items()}
    # A checkpoint is written before it is validated. Of the last one, summary.json has the result.
    summary = checkpoint.read_summary(run.out_dir)
    if summary.get("steps") == run.step and "val_loss" in summary:
        run.val_losses[run.step] = summary["val_loss"]
    run.signals.has_saved = True


def stop(run: Run) -> int:
    """Say how to continue a run that a signal stopped, and return its exit code."""
    run.signals.is_over = True
    program = "python" if run.world.size == 1 else "torchrun (as before)"
    draw_losses(run)
    run.log.record(stopped=run.step)  # the last record: a job's script looks for it
    command = f"{program} train_gpt2.py --resume --out-dir {shlex.quote(str(run.out_dir))}"
    run.log.print(f"stopped after step {run.step}, which is saved; to continue: {command}")
    return errors.STOPPED


def finish(run: Run):
    """Write summary.json, which says that the run is complete, and the last lines."""
    run.signals.is_over = True
    if not run.world.is_main:
        return
    # Written after the last evaluation: a run that was killed in it is not complete.
    path = run.out_dir / f"step_{run.step:06d}"
    summary = {"steps": run.step, "checkpoint": path.name}
    folder = shlex.quote(str(run.out_dir))
    text = f"done: {run.step:,} steps"
    sample = f"sample: python train_gpt2.py --out-dir {folder} --sample-only"
    if run.val_losses:
        best = min(run.val_losses, key=run.val_losses.get)
        summary["val_loss"] = run.val_losses[max(run.val_losses)]
        summary["best_step"] = best
        summary["best_val_loss"] = run.val_losses[best]
        text += f", validation {summary['val_loss']:.4f}"
        text += f", best {summary['best_val_loss']:.4f} after step {best:,}"
        if best != run.step:
            best_path = shlex.quote(str(path.with_name(f"step_{best:06d}")))
            sample += f"\nof the best: python train_gpt2.py --init-from {best_path} --sample-only"
    checkpoint.rotate(run.out_dir, run.step, run.config.keep, run.val_losses)
    with whole_file(run.out_dir / checkpoint.SUMMARY) as f:
        f.write(as_json(summary))
    run.log.record(done=run.step)
    curves = f"curves: python benchmarks/plot.py {folder}"
    run.log.print(f"{text}; written: {path}\n{sample}\n{curves}")


# ---- --eval-only and --sample-only ---------------------------------------------------------------


def use_weights(typed: dict, world: World) -> int:
    """Evaluate or sample a run's newest checkpoint, or --init-from. Nothing is written."""
    out_dir = None
    if "init_from" not in typed:
        out_dir = world.from_main(checkpoint.choose_out_dir, typed.get("out_dir", ""), True)
    _, state, source = read_start(typed, out_dir, world)
    if source is None:
        cure = "name a run by --out-dir, or --init-from"
        world.raise_on_all(UserError(f"no checkpoint in {out_dir}: {cure}"))
    # The flags that the run was given (precision, data, prompt) hold here too, unless typed again.
    # Each sample has another length, so compiling would not pay.
    prompt_typed = "prompt" in typed
    typed = {"compile": False} | given_flags(typed, state)
    # Resolved by the main rank, so that it is the one to report a mistake.
    config, _ = world.from_main(resolve, typed, state, source, world.device)
    set_backends(config, world.device)
    model = GPT(source.shape, config.computation()).eval()
    load_weights(model, source)
    model.to(world.device)
    if config.eval_only:
        evaluate_weights(model, source, config, world)
    if config.sample_only and world.is_main:
        if logger.is_terminal(sys.stdin):
            errors.print_error(f"sampling from {source.path}")
        config = replace(config, num_samples=max(1, config.num_samples))  # the run may have none
        try:
            sample_weights(model, source.tokenizer, config, ask=not prompt_typed)
        except FloatingPointError as error:
            raise UserError(f"{source.path} can't be sampled: {error}") from error
    return errors.DONE


def evaluate_weights(model: GPT, source: Pretrained, config: TrainConfig, world: World):
    """Print the loss over --eval-tokens, and the shares of right answers to --hellaswag."""
    data, _, questions = world.from_main(open_data, config, source)
    # Enough to keep a device busy, if it fits.
    B = 32 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    with torch.no_grad():
        while B > 1 and not pass_fits(model, model, replace(config, micro_batch_size=B), world):
            B //= 2
    loader = ShardLoader(data.val, B, config.seq_len, world.rank, world.size)
    figures = {}
    if config.eval_tokens:
        figures |= validate(model, model, loader, data.tokenizer, config, world)
    if questions:
        figures |= answers(model, questions, config, world)
    if world.is_main:
        text = evaluate.in_words(figures) or "nothing to do: add --eval-tokens or --hellaswag"
        if config.eval_tokens:
            num_tokens = num_val_sequences(config, loader) * loader.T
            text = f"{num_tokens:,} validation tokens: {text}"
        logger.show(f"{source.path}: {text}")


def sample_weights(model: GPT, tokenizer: str, config: TrainConfig, ask: bool):
    """Print --num-samples of --prompt, or if asked to, of each prompt that is typed or piped in."""
    is_first = True
    for prompt in read_prompts(config.prompt) if ask else [config.prompt]:
        try:
            config = replace(config, prompt=prompt)
        except UserError as error:  # not UTF-8
            logger.show(str(error))
            continue
        for number in range(config.num_samples):
            if not is_first and (number or not logger.is_terminal(sys.stdin)):
                logger.show("---")
            is_first = False
            for piece in sample(model, tokenizer, config, number):
                logger.show(piece, end="")
            logger.show("")


def read_prompts(default: str) -> Iterator[str]:
    """Yield what is typed on a terminal, line after line until Ctrl-D, or each line of a pipe or
    file on stdin. Yield default where there is none, and for a notebook's pipe."""
    on_terminal = logger.is_terminal(sys.stdin)
    if on_terminal:
        errors.print_error("type the beginning of a text, or Ctrl-D to end")
    else:
        # Asked of the kind of file, since reading from others may wait forever. So may the pipe
        # that a notebook opens and never writes to.
        kind = stat.S_IFMT(os.fstat(0).st_mode) if sys.stdin else 0
        is_unused_pipe = kind == stat.S_IFIFO and logger.in_notebook()
        if is_unused_pipe:
            errors.print_error("in a notebook prompts come by --prompt, or from a file: < FILE")
        if is_unused_pipe or kind not in (stat.S_IFIFO, stat.S_IFREG):
            yield default
            return
        errors.print_error("no --prompt: reading prompts from stdin, one a line")
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # judged by TrainConfig
    is_empty = True
    while True:
        errors.stop_watchdog()  # waiting for the user is not a hang
        try:
            prompt = input("prompt> " if on_terminal else "")
        except EOFError:
            if on_terminal:
                logger.show("")  # Ctrl-D leaves the cursor behind "prompt> "
            elif is_empty:
                yield default
            return
        is_empty = False
        yield prompt


# ---- Starting ------------------------------------------------------------------------------------


def set_up(typed: dict, world: World, signals: errors.StopSignals) -> Run | None:
    """Return a run that is ready to train; None if it is complete. Every mistake in flags or files
    raises UserError here, before anything of a new run is written."""
    # The folder. One with a run in it is locked at once, so that nobody else adds a checkpoint.
    resume = typed.get("resume", False)
    out_dir = world.from_main(checkpoint.choose_out_dir, typed.get("out_dir", ""), resume)
    lock = FileLock(out_dir / checkpoint.LOCK)
    is_new = not world.from_main(out_dir.exists)
    if not is_new:
        world.from_main(checkpoint.take_folder, out_dir, lock, is_new)

    # What it begins with, and with that, its flags.
    path, state, source = read_start(typed, out_dir, world)
    typed = given_flags(typed, state)
    config, off = world.from_main(resolve, typed, state, source, world.device)
    config = replace(config, out_dir=str(out_dir))
    world.from_main(config.num_micro_batches, world.size)  # raises

    # The data, which every rank must see alike.
    data, vocab_size, questions = world.from_main(open_data, config, source)
    # Each rank reads its own files: on another machine they may differ, or be missing.
    here = world.on_all(corpus.open_folder, data.folder)
    world.check_same({"the data": here.fingerprint})
    if state:
        world.from_main(check_same_run, state, config, data)
        if is_complete(state, config, out_dir):
            if world.is_main:
                made = f"{state['step']:,} steps are done"
                logger.show(f"already complete: {made}, and --steps is {config.steps:,}")
            return None

    # The network, and a micro-batch that fits.
    set_backends(config, world.device)
    model = make_model(config, vocab_size, source)
    if source:
        check_ranks_agree(model, state["step"] if state else 0, world)
    if not path:
        world.from_main(checkpoint.check_saveable, model, data.tokenizer, out_dir)
    world.from_main(checkpoint.check_disk_space, out_dir, model, config.keep)
    if is_new:
        world.from_main(checkpoint.take_folder, out_dir, lock, is_new)
    model.to(world.device)
    net, config = fit_micro_batch(model, config, world, state)

    # The run. Weights & Biases comes first: it may fail, and then there is no run yet.
    wandb_run = logger.start_wandb(out_dir) if config.wandb and world.is_main else None
    place = (config.micro_batch_size, config.seq_len, world.rank, world.size)
    run = Run(
        config=config,
        typed=typed,
        world=world,
        out_dir=out_dir,
        lock=lock,
        signals=signals,
        log=logger.Logger(out_dir, world.is_main, wandb_run),
        environment=device.environment(world.device, world.size, dtype_of(config)),
        data=data,
        val_loader=ShardLoader(data.val, *place),
        questions=questions,
        net=net,
        model=model,
        optimizer=make_optimizer(model, config, world),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.fp16),
        loader=ShardLoader(data.train, *place, seed=config.seed if config.shuffle else None),
    )
    if state:
        restore(run, path, state)
    # After its first backward pass DDP rebuilds its gradient buckets, and adds up in another order
    # from then on. So every process does that before it trains, or a resumed run would differ from
    # the uninterrupted one in the last bits.
    for _ in range(2 if world.size > 1 else 0):
        dummy_pass(net, config, world)
    logger.log_start(run, off, state)
    return run


def read_start(
    typed: dict, out_dir: Path | None, world: World
) -> tuple[Path | None, dict | None, Pretrained | None]:
    """Return what a run begins with, None for what there is not: its newest checkpoint, the state
    in it, and its weights or those of --init-from."""
    path = world.from_main(checkpoint.newest, out_dir) if out_dir else None
    if path:
        # On another machine there may be another checkpoint of this name, or a part of one.
        world.check_same({"the checkpoint": checkpoint.fingerprint_here(path)})
        state = world.from_main(checkpoint.read_state, path)
        world.from_main(provide_vocab, path)
        return path, state, world.on_all(read, path)
    if "init_from" in typed:
        weights = world.from_main(checkpoint.find_weights, typed["init_from"])
        world.from_main(provide_vocab, weights)
        return None, None, world.on_all(read, weights)
    return None, None, None


def open_data(
    config: TrainConfig, source: Pretrained | None
) -> tuple[corpus.TokenFolder, int, list[Example]]:
    """Return the data, the vocabulary size of a network over it, and the questions of --hellaswag.
    Without --data-dir the data is Python's own source, which is prepared here if need be."""
    folder = config.data_dir
    if not folder:
        # Weights know one tokenizer. Without them the large models prefer GPT-2's tokens, if
        # Python's own source is there in them, or can be prepared.
        if source:
            wants_gpt2 = source.tokenizer != "bytes"
        elif config.model == "nano":
            wants_gpt2 = False
        else:
            wants_gpt2 = os.path.exists("data/stdlib-gpt2") or load_tokenizer("gpt2")
        folder = corpus.own_source("gpt2" if wants_gpt2 else "bytes")
    try:
        data = corpus.open_folder(Path(folder))
    except ShardError as error:  # now it is the user's mistake, later the disk's
        raise UserError(str(error)) from error
    # --model gpt2 on bytes keeps its 50,257 rows, so that its size and speed are GPT-2's.
    vocab_size = SHAPES[config.model].vocab_size
    if source:
        vocab_size = source.shape.vocab_size
    elif config.model == "nano":
        vocab_size = VOCAB_SIZES.get(data.tokenizer, VOCAB_SIZES["gpt2"])
    corpus.check_data(data, config.seq_len, source.tokenizer if source else "", vocab_size)
    return data, vocab_size, open_examples(config.hellaswag, vocab_size, data.tokenizer)


def is_complete(state: dict, config: TrainConfig, out_dir: Path) -> bool:
    """Return whether a run has made all its steps, and its last evaluation."""
    if state["step"] == config.steps:
        return checkpoint.read_summary(out_dir).get("steps") == config.steps
    return state["step"] > config.steps


def make_model(config: TrainConfig, vocab_size: int, source: Pretrained | None) -> GPT:
    """Return the network, on the CPU, with the weights in source or new ones."""
    # Every rank draws the same initial weights from the same seed.
    model = GPT(config.shape(vocab_size), config.computation(), config.seed)
    if source:
        load_weights(model, source)
    return model


def check_same_run(state: dict, config: TrainConfig, data: corpus.TokenFolder):
    """Raise UserError if flags or data ask for another run than the one that was saved."""
    for f in fields(TrainConfig):
        saved = state["config"].get(f.name, f.default)
        current = getattr(config, f.name)
        if f.metadata["on_resume"] == KEEP and saved != current:
            has = "none" if saved == "" else typed_as(f.name, saved)
            text = f"{typed_as(f.name, current)}: the run in {config.out_dir} has {has}"
            raise UserError(f"{text}: leave it out, or name another --out-dir")
    # The fingerprint is of the tokens, not of names: a folder may have moved.
    if data.fingerprint != state["data"]:
        raise UserError(f"--data-dir {data.folder} has other tokens than the run began with")


def fit_micro_batch(
    model: GPT, config: TrainConfig, world: World, state: dict | None
) -> tuple[nn.Module, TrainConfig]:
    """Return net, and config with the micro-batch: the one given, or the largest that divides what
    a rank takes in a step, and for which every rank has the memory of a pass, beside that of the
    optimizer. A resumed run begins with the size it had: another one changes the last bits."""
    if config.micro_batch_size:
        net = speed_up(model, config, world)
        dummy_pass(net, config, world, sync=False)  # compiles
        return net, config
    num_sequences = config.num_micro_batches(world.size)
    # Where to begin: on a GPU with the lecture's 64 sequences, on a CPU with 4,096 tokens.
    most = 64 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    if state:
        most = state["config"]["micro_batch_size"]
    for B in range(min(most, num_sequences), 0, -1):
        if num_sequences % B:
            continue  # a step would not be whole
        config = replace(config, micro_batch_size=B)
        # A GPU tries the plain model first, in seconds: compiling for each B would take minutes.
        if world.device.type == "cuda" and not pass_fits(model, model, config, world):
            continue
        net = speed_up(model, config, world)
        if pass_fits(net, model, config, world):
            return net, config
        del net
        torch.compiler.reset()  # frees what was compiled
    cure = "lower --seq-len, or add --recompute and --loss-chunk-tokens 1024"
    raise UserError(f"not even one sequence fits in memory: {cure}")


def pass_fits(net: nn.Module, model: GPT, config: TrainConfig, world: World) -> bool:
    """Return whether every rank has the memory of a pass: forward and backward in addition to the
    optimizer, or with torch.no_grad() forward alone."""
    held = []
    fits = True
    try:
        if torch.is_grad_enabled():
            held += device.optimizer_memory(model)
        dummy_pass(net, config, world, sync=False)  # one rank may fail, and none waits for it
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        fits = False
    held.clear()
    if not fits:
        gc.collect()  # what the failed pass has left behind
    device.empty_cache()
    return all(world.gather(fits))


def dummy_pass(net: nn.Module, config: TrainConfig, world: World, sync: bool = True):
    """Make a forward and backward pass on dummy tokens, and throw its gradients away. Without
    gradients it is a forward pass."""
    errors.reset_watchdog()
    shape = (config.micro_batch_size, config.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    with gradient_sync(net, enabled=sync):
        with autocast(config, world.device):
            loss = net(tokens, tokens.clone())  # two tensors, as in a step: else it compiles twice
        if not torch.is_grad_enabled():
            return
        loss.backward()
    for name, p in net.named_parameters():
        if p.grad is None:  # of no use to the network, and fatal to DDP
            raise RuntimeError(f"{name} has no part in the loss")
    net.zero_grad(set_to_none=True)


# ---- The program ---------------------------------------------------------------------------------


def run_program(typed: dict, signals: errors.StopSignals) -> int:
    device.check_torch(torch.__version__)
    world = find_world(dict(os.environ), torch.cuda.device_count(), typed.get("device", "auto"))
    with process_group(world):
        # Ranks that were started with different commands would wait for each other forever, and
        # different kinds of devices do not round alike.
        command = {spell(f.name): typed.get(f.name, "not typed") for f in fields(TrainConfig)}
        world.check_same(command | {"the processor or GPU": device.device_name(world.device)})
        if typed.get("eval_only") or typed.get("sample_only"):
            return use_weights(typed, world)
        return set_up_and_train(typed, world, signals)


def set_up_and_train(typed: dict, world: World, signals: errors.StopSignals) -> int:
    # A function of its own, so that run and its DDP are freed before the process group ends.
    run = set_up(typed, world, signals)
    if run is None:
        return errors.DONE
    try:
        return train(run)
    except KeyboardInterrupt:
        # A signal outside of a step, as in a validation. If every step is saved, nothing is lost.
        if signals.has_unsaved_steps or not signals.has_saved:
            raise
        return stop(run)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code. Only a bug or a hang shows a traceback."""
    device.set_environment()
    is_main = os.environ.get("RANK", "0") == "0"
    signals = errors.StopSignals(is_main)
    try:
        typed = read_flags(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        if is_main:  # every rank has it
            errors.print_error(f"error: {error}")
        errors.tell_torchrun(f"error: {error}")
        return error.exit_code
    try:
        with signals:
            return run_program(typed, signals)
    except (errors.RunError, ShardError) as error:
        errors.report(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        if is_main and signals.has_unsaved_steps:
            errors.print_error("stopped by a signal; steps since the last checkpoint are not saved")
        elif is_main:
            errors.print_error("stopped by a signal")
        return errors.INTERRUPTED
    except Exception as error:
        if signals.received and signals.has_saved and not is_main:
            return errors.STOPPED  # the main rank has stopped before this one, which lost it
        if device.is_out_of_memory(error):
            cure = "lower --micro-batch-size, or add --recompute and --loss-chunk-tokens 1024"
            errors.report(f"error: a step does not fit in memory: {cure}: {error!s:.200}")
            return UserError.exit_code
        if isinstance(error, OSError) and error.errno in errors.DISK_ERRNOS:
            errors.report(f"error: {error}")
            return errors.DiskError.exit_code
        raise
    finally:
        errors.stop_watchdog()


if __name__ == "__main__":
    # main handles signals, and leaves them as they are here: nothing may change the exit code of a
    # run that has saved all.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.exit(main())
