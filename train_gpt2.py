"""Train GPT-2 from tokens on disk to a checkpoint, on one GPU, on many, or on a CPU.

python train_gpt2.py                                             # one GPU, or none
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --data-dir data/mine --out-dir out/mine --resume
python train_gpt2.py --data-dir data/mine --init-from gpt2       # finetune OpenAI's weights
python train_gpt2.py --resume --sample-only --prompt "def "      # or --eval-only, or --export DIR
python train_gpt2.py --help
"""

import os

__launcher__ = os.getppid()  # before torch is imported, which takes longer than torchrun may live

import hashlib
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dataloader import (
    VOCAB_SIZES,
    ShardLoader,
    TokenFolder,
    missing_vocab,
    open_folder,
)
from model import GPT, SHAPES, GPTConfig
from support.checkpoint import checkpoints, is_good, newest_checkpoint, save_checkpoint
from support.device import (
    bf16_kinds,
    environment,
    free_memory,
    largest_that_fits,
    matmul_tflops,
    peak_memory_mib,
    set_allocator,
    why_not_compile,
)
from support.files import DISK_ERRORS, locked
from support.flags import check_limits, check_types, flag, make_parser, parse, spell
from support.guard import Signals, Watchdog, explained, fail, stop_signals
from support.log import (
    draw_loss,
    in_words,
    logged,
    make_log,
    noted,
    profiled,
    read_log,
    show,
    spike,
    tensorboard,
)
from support.questions import Example, choice_losses, open_examples, right_answers
from support.ranks import (
    SharedAdamW,
    World,
    agreed,
    check_replicas,
    find_world,
    gradient_sync,
    process_group,
)
from support.text import bytes_per_token, codec, stream
from support.weights import Source, export, from_run, read_source

# --------------------------------------------------------------------------------------------------
# Flags: each is declared once, here, with its type, default, unit and help


@dataclass(frozen=True)
class TrainConfig:
    """One run. The defaults are GPT-2 124M's; RECIPES hold what differs for the other models."""

    model: str = flag("gpt2", "recipe; nano is the default where there is no GPU", choices=SHAPES)
    data_dir: str = flag("", "folder of token shards; none: Python's own source, prepared at once")
    out_dir: str = flag("", "folder of the run; none: the next free out/001, out/002, ...")
    resume: bool = flag(False, "go on from the run's newest good checkpoint, or start it")
    init_from: str = flag("", "begin with the weights in this folder of Hugging Face's format, or"
                          " checkpoint of nanoGPT, build-nanogpt or here, or of this name on the"
                          " Hugging Face hub")  # fmt: skip
    seed: int = flag(1337, "seed of the initial weights, of the data's order and of samples", 0,
                     2**64 - 1)  # fmt: skip
    shuffle: bool = flag(True, "a new order of the sequences in each epoch, not the disk's")

    n_layer: int = flag(12, "transformer blocks", 1)
    n_head: int = flag(12, "attention heads per block", 1)
    n_embd: int = flag(768, "channels of the residual stream", 1)
    seq_len: int = flag(1024, "tokens per sequence", 1)
    dropout: float = flag(0.0, "share of the activations left out in training", 0, 0.99)

    micro_batch_size: int = flag(0, "sequences per forward pass and rank; 0: what fits", 0)
    batch_tokens: int = flag(524_288, "tokens per optimizer step, over all ranks", 1)
    steps: int = flag(50, "optimizer steps", 1)
    warmup_steps: int = flag(715, "steps of linear warm-up, by default at most steps / 5", 0)
    learning_rate: float = flag(6e-4, "peak learning rate", 0)
    cosine: bool = flag(True, "decay the learning rate to a tenth, along a cosine")
    weight_decay: float = flag(0.1, "decay of the matrices; biases and layer norms have none", 0)
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: no limit", 0)

    eval_every: int = flag(250, "steps between validations; 0: only at both ends", 0)
    eval_tokens: int = flag(10_485_760, "validation tokens, at most all there are", 1, 2**63 - 1)
    save_every: int = flag(250, "steps between checkpoints; 0: only at the end", 0)
    keep: int = flag(2, "good checkpoints to keep, and the one with the best validation", 2)
    check_every: int = flag(100, "steps between checks that all ranks hold the same weights", 1)
    skip_nonfinite: int = flag(0, "steps to leave out, not applied, whose loss is not finite", 0)
    deterministic: bool = flag(False, "the same bits each time on a GPU too, more slowly")
    timeout_s: int = flag(900, "seconds without any progress after which a run ends; 0: never", 0)
    hellaswag: str = flag("", "multiple-choice questions, written by prepare_data.py or llm.c")
    hellaswag_every: int = flag(0, "steps between asking them; 0: only at the end", 0)
    sample_every: int = flag(0, "steps between samples; 0: only at the end", 0)
    num_samples: int = flag(1, "samples each time", 1)
    sample_tokens: int = flag(200, "tokens of a sample", 1)
    prompt: str = flag("", "how a sample begins; none: as a document does")
    temperature: float = flag(0.8, "above 1 samples are bolder, below tamer, at 0 greedy", 0)
    top_k: int = flag(50, "draw among so many likeliest tokens; 0: all", 0)
    top_p: float = flag(1.0, "draw among the fewest tokens that have this share", 0, 1)
    tensorboard: bool = flag(False, "write the log for TensorBoard too")

    eval_only: bool = flag(False, "validate the --resume or --init-from weights, train nothing")
    sample_only: bool = flag(False, "sample from these weights, train nothing")
    export: str = flag("", "new folder for these weights in Hugging Face's format, train nothing")

    tf32: bool = flag(True, "speed-up 1: float32 products on the tensor cores")
    bf16: bool = flag(True, "speed-up 2: bfloat16 in the forward pass where it is safe (autocast)")
    compile: bool = flag(True, "speed-up 3: torch.compile")
    flash: bool = flag(True, "speed-up 4: attention in one fused kernel")
    pad_vocab: bool = flag(True, "speed-up 5: an embedding of 50,304 rows instead of 50,257")
    fused: bool = flag(True, "speed-up 6: AdamW in one kernel")
    compile_mode: str = flag("default", "max-autotune takes minutes more to find faster kernels",
                             choices=("default", "max-autotune-no-cudagraphs"))  # fmt: skip
    bf16_residual: bool = flag(False, "the residual stream in bfloat16 too, with --bf16")
    fp16: bool = flag(False, "float16 and a gradient scaler, for GPUs without bfloat16")
    recompute: bool = flag(False, "less memory: the backward pass computes each block again")
    loss_chunk_tokens: int = flag(0, "less memory: tokens at a time in the loss; 0: all", 0)
    zero: bool = flag(False, "less memory: each rank holds its part of AdamW's state alone")
    profile: bool = flag(
        False, "write what the third step does (or the last), for chrome://tracing"
    )

    def __post_init__(self):
        check_limits(self)
        if self.prompt.encode(errors="replace").decode() != self.prompt:
            raise ValueError(f"--prompt {self.prompt!r:.80} is not UTF-8: write it as UTF-8")
        if 0 < self.warmup_steps >= self.steps:
            more = f"--warmup-steps {self.warmup_steps} must be less than --steps {self.steps}"
            raise ValueError(f"{more}: try --warmup-steps {self.steps // 5}")
        most = (
            SHAPES[self.model].seq_len if self.model != "nano" and not self.init_from else math.inf
        )
        if self.seq_len > most:
            more = f"--seq-len {self.seq_len} is more than the {most} positions of {self.model}"
            raise ValueError(f"{more}: try --seq-len {most}")
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 are two types for the same: leave one out")
        if self.bf16_residual and not self.bf16:
            cure = "leave out --fp16" if self.fp16 else "add it"
            raise ValueError(f"--bf16-residual needs --bf16: {cure}")
        if self.compile_mode != "default" and not self.compile:
            raise ValueError(f"--compile-mode {self.compile_mode} needs --compile: add it")
        if self.hellaswag_every and not self.hellaswag:
            more = f"--hellaswag-every {self.hellaswag_every} asks the questions of no file"
            raise ValueError(f"{more}: add --hellaswag FILE")
        self.shape(vocab_size=1)  # raises if the heads do not divide the channels

    def shape(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(vocab_size, **{name: getattr(self, name) for name in SHAPE_FLAGS})

    def num_micro(self, num_ranks: int) -> int:
        """Micro-batches of each rank in a step; ValueError if a rank would be left with a part, or
        has no other one to share with."""
        if self.zero and num_ranks == 1:
            raise ValueError("--zero shares out among ranks, this is 1: use torchrun, or leave it")
        B, T = max(1, self.micro_batch_size), self.seq_len
        per_pass = B * T * num_ranks
        if self.batch_tokens % per_pass:
            below = self.batch_tokens // per_pass * per_pass
            near = f"{below} or {below + per_pass}" if below else f"{per_pass}"
            raise ValueError(
                f"--batch-tokens {self.batch_tokens} is not a multiple of {per_pass} ="
                f" --micro-batch-size {B} * --seq-len {T} * {num_ranks} ranks:"
                f" try --batch-tokens {near}"
            )
        return self.batch_tokens // per_pass


SHAPE_FLAGS = ("seq_len", "n_layer", "n_head", "n_embd", "pad_vocab")
NETWORK_FLAGS = ("flash", "seed", "dropout", "bf16_residual", "recompute", "loss_chunk_tokens")
# What a resumed run may not change, what it may without a word, and what makes it differ in the
# last bits; it may change all other flags and is told which
FIXED = ("model", "seed", "shuffle", *SHAPE_FLAGS)
UNSEEN = ("data_dir", "out_dir", "resume", "init_from", "eval_every", "eval_tokens", "save_every",
          "keep", "check_every", "timeout_s", "hellaswag", "hellaswag_every", "sample_every",
          "num_samples", "sample_tokens", "prompt", "temperature", "top_k", "top_p", "tensorboard",
          "eval_only", "sample_only", "export", "profile")  # fmt: skip
ROUNDING = ("micro_batch_size", "tf32", "bf16", "compile", "flash", "fused", "deterministic",
            "compile_mode", "bf16_residual", "fp16", "recompute", "loss_chunk_tokens")  # fmt: skip
RECIPES = {  # GPT's learning rates and batches: Brown et al. 2020, table 2.1; nano's: measured
    "gpt2": {},
    "gpt2-medium": {"learning_rate": 3e-4},
    "gpt2-large": {"learning_rate": 2.5e-4},
    "gpt2-xl": {"learning_rate": 2e-4, "batch_tokens": 1_048_576},
    "nano": {"learning_rate": 4e-3, "batch_tokens": 2048, "steps": 1200, "warmup_steps": 50}
    | {"eval_every": 600, "eval_tokens": 262_144},
}


def recipe(model: str) -> dict:
    """The flags that a model sets."""
    return {name: getattr(SHAPES[model], name) for name in SHAPE_FLAGS} | RECIPES[model]


def default_text(name: str, default) -> str:
    """A flag's default in words, with the models whose recipe has another."""
    own = {model: recipe(model).get(name, default) for model in RECIPES}
    others = [f"{model} {value}" for model, value in own.items() if value != default]
    return "; ".join(["none" if default == "" else str(default), *others])


def parse_args(argv: list[str], device_type: str) -> tuple[TrainConfig, set[str]]:
    """The run that a command line asks for, and the names of the flags that it gives."""
    description = (__doc__ or "").partition("\n")[0]
    given = parse(make_parser(TrainConfig, description, default_text), argv)
    for name in ("data_dir", "out_dir", "init_from", "hellaswag", "export"):
        if given.get(name) == "":
            raise ValueError(f"{spell(name)} is empty: name one, or leave it out")
    if given.get("init_from") and given.get("resume") and given.get("out_dir"):
        own = next(filter(is_good, checkpoints(Path(given["out_dir"]))), None)
        given["init_from"] = str(own or given["init_from"])  # one that has begun needs no other
    source = find_source(given["init_from"]) if given.get("init_from") else None
    model = given.get("model", "gpt2" if device_type == "cuda" or source else "nano")
    values = {"model": model} | recipe(model)
    if source:
        values |= shape_of(source, given)
    if device_type != "cuda" and model != "nano":
        values["eval_tokens"] = 8192  # half a minute of a CPU, not hours
    if "data_dir" not in given and not source:
        values["prompt"] = "def "  # Python's own source
    steps = given.get("steps", values.get("steps", TrainConfig.steps))
    warmup_steps = values.get("warmup_steps", TrainConfig.warmup_steps)
    values["warmup_steps"] = min(warmup_steps, steps // 5)
    if given.get("fp16"):
        values["bf16"] = False
    return TrainConfig(**values | given), set(given)


def shape_of(source: Source, given: dict) -> dict:
    """The flags that other weights set, for finetuning them; ValueError if the command line asks
    for another shape."""
    shape = asdict(source.shape)
    if "model" in given:
        raise ValueError(
            f"--model {given['model']}: the shape is that of --init-from; leave it out"
        )
    for name in ("n_layer", "n_head", "n_embd"):
        if given.get(name, shape[name]) != shape[name]:
            why = f"{spell(name)} {given[name]}: {source.path} has {shape[name]}"
            raise ValueError(f"{why}; leave it out")
    if given.get("seq_len", 1) > shape["seq_len"]:
        why = f"--seq-len {given['seq_len']} is more than the {shape['seq_len']} positions"
        raise ValueError(f"{why} of {source.path}: try --seq-len {shape['seq_len']}")
    shape = {name: shape[name] for name in SHAPE_FLAGS if name != "pad_vocab"}
    model = source.flags.get("model", "gpt2")
    return shape | {"model": model, "learning_rate": 3e-5, "batch_tokens": 32_768}  # nanoGPT's


@lru_cache
def find_source(name: str) -> Source:
    """The weights of --init-from; a name that is neither folder nor file is one on the hub."""
    if name in ("resume", "scratch"):
        raise ValueError(f"--init-from {name}: write --resume to go on, or neither to start")
    try:
        is_main = os.environ.get("RANK", "0") == "0"
        source = read_source(name, partial(fail, 7, is_main=is_main))
        return replace(source, flags=known_flags(source.flags))
    except ValueError as error:
        raise ValueError(f"--init-from {name}: {error}") from None


def known_flags(found: dict) -> dict:
    """What another run's flags say of those that this program has; ValueError if no run of this
    program can have them."""
    known = check_types(TrainConfig, found)
    TrainConfig(**{"warmup_steps": 0} | known)  # raises if they do not fit together
    return known


def why_off(config: TrainConfig, given: set[str], device: torch.device) -> dict[str, str]:
    """The speed-ups that this device does without, and why; ValueError if the command line asks for
    one that can't be had."""
    why, cuda, is_nano = {}, device.type == "cuda", config.model == "nano"
    kinds = bf16_kinds(device, Path("/proc/cpuinfo"))
    if not cuda or torch.cuda.get_device_capability(device) < (8, 0):
        why["tf32"] = f"needs an NVIDIA GPU of 2020 or later, this is {device}"
        if "tf32" in given and config.tf32:
            raise ValueError(f"--tf32 {why['tf32']}: leave it out")
        if not kinds or (is_nano and "amx_bf16" not in kinds):
            why["bf16"] = "gains nothing where the hardware lacks it, nor without AMX for nano"
    bf16 = config.bf16 and ("bf16" in given or "bf16" not in why)
    # ms per layer for 1,024 tokens of 124M, plain and flash: T 256 8, 16; 512 15, 21; 1024 29, 26
    if bf16 and "amx_bf16" in kinds and config.seq_len <= 512:
        why["flash"] = "is slower in bfloat16 on a CPU with AMX up to a --seq-len of 512"
    if not cuda or is_nano:
        why["compile"] = "takes longer than it saves for nano, and without a GPU"
    wanted = config.compile and ("compile" in given or "compile" not in why)
    if wanted and (cause := why_not_compile(device)):
        if "compile" in given:
            raise ValueError(f"--compile {cause}; or leave it out")
        why["compile"] = cause
    return {name: text for name, text in why.items() if name not in given}


# --------------------------------------------------------------------------------------------------
# State: all that a run needs to go on from where it stopped


@dataclass
class TrainState:
    model: GPT
    optimizer: torch.optim.Optimizer
    loader: ShardLoader
    scaler: torch.amp.GradScaler  # of --fp16; else it does nothing
    step: int = 0
    skipped: list[str] = field(default_factory=list)  # steps that were not applied, and why
    val_losses: dict[int, float] = field(default_factory=dict)  # by step: which checkpoint is best

    def state_dict(self) -> dict:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": self.scaler.state_dict(),
            "position": self.loader.position,
            "skipped": list(self.skipped),
            "val_losses": dict(self.val_losses),
        }

    def load_state_dict(self, saved: dict):
        """Go on from saved. Learning rate, betas and decay stay the command line's: PyTorch's own
        load would bring back the old ones."""
        self.step, self.skipped = saved["step"], list(saved["skipped"])
        self.val_losses = dict(saved["val_losses"])
        self.model.load_state_dict(saved["model"])
        groups = torch.optim.AdamW.state_dict(self.optimizer)["param_groups"]
        self.optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        if scaler := saved.get("scaler"):  # there is none without --fp16
            self.scaler.load_state_dict(scaler)
        self.loader.position = saved["position"]


def identity(config: TrainConfig, shape: GPTConfig, data: TokenFolder) -> dict:
    """What must not change while a run goes on: its network, its data, their order."""
    order = {name: getattr(config, name) for name in FIXED if name not in SHAPE_FLAGS}
    facts = {"data_dir": data.fingerprint, "tokenizer": data.tokenizer}
    return order | facts | asdict(shape)


def check_identity(saved: dict, wanted: dict, out_dir: Path):
    """ValueError if the flags or the data ask for another run than the one that was saved."""
    for name, value in wanted.items():
        if saved.get(name) != value:
            why = f"{spell(name)}: the run in {out_dir} has {saved.get(name)}, this one {value}"
            raise ValueError(f"{why}; give it as it was, or another --out-dir")


# --------------------------------------------------------------------------------------------------
# Optimization, and what is measured beside it


def make_optimizer(model: GPT, config: TrainConfig, world: World) -> torch.optim.AdamW:
    """AdamW as GPT-3 set it (Brown et al. 2020, appendix B)."""
    decayed, others = model.decay_groups()
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    options = {"lr": config.learning_rate, "betas": (0.9, 0.95), "fused": config.fused}
    shared = config.zero and world.size > 1
    return SharedAdamW(groups, world, **options) if shared else torch.optim.AdamW(groups, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine from learning_rate at warmup_steps to a tenth of it at steps;
    step counts the updates already made."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if not config.cosine:
        return config.learning_rate
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)  # 0 .. 1
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def autocast(config: TrainConfig, device: torch.device):
    dtype = torch.float16 if config.fp16 else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=config.bf16 or config.fp16)


def speed_up(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """The same parameters behind torch.compile and DDP; model stays plain: saved and sampled."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    is_cpu = world.device.type == "cpu"
    # on a CPU only compiled code adds up in an order that varies; the switch costs a step nothing,
    # but would keep max-autotune from timing any kernel
    ordered = config.deterministic or (is_cpu and config.compile_mode == "default")
    torch.use_deterministic_algorithms(ordered)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it serves to find bugs
    if config.deterministic:  # which cuBLAS is only with a workspace of fixed size
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if is_cpu:
        set_allocator(keep=not config.recompute)
    mode = config.compile_mode
    net = torch.compile(model, dynamic=False, mode=mode) if config.compile else model
    return DDP(net, gradient_as_bucket_view=True) if world.size > 1 else net


def warm_up(net: nn.Module, config: TrainConfig, world: World, vocab_size: int):
    """Throw-away passes on made-up tokens. The first compiles, and finds out whether the memory
    suffices. The second lets DDP rearrange its buckets, which it does after the first backward pass
    of a process and which changes how sums round: without it a resumed run would differ in the last
    bit."""
    for _ in range(1 if world.size == 1 else 2):
        made_up_pass(net, config, world, vocab_size)


def made_up_pass(net: nn.Module, config: TrainConfig, world: World, vocab_size: int):
    shape = (config.micro_batch_size, config.seq_len)
    tokens = torch.arange(math.prod(shape), device=world.device).view(shape) % vocab_size
    with autocast(config, world.device):
        loss = net(tokens, tokens.clone())  # two tensors, as in a step: else compiled twice
    loss.backward()
    net.zero_grad(set_to_none=True)


def later_memory(model: GPT, config: TrainConfig, world: World) -> list[Tensor]:
    """As much memory as a step holds besides a pass: gradients, and AdamW's moments."""
    share = world.size if config.zero else 1
    moments = 2 * sum(p.numel() for p in model.parameters()) // share
    gradients = [torch.empty_like(p) for p in model.parameters()]
    return [*gradients, torch.empty(moments, device=world.device)]


def micro_batch_that_fits(model: GPT, config: TrainConfig, world: World) -> int:
    """For a rank's part of a step: on a GPU at most 64 sequences, halved until a pass of the plain
    model finds memory; elsewhere 4,096 tokens."""
    sequences = config.num_micro(world.size)  # of one rank, since micro_batch_size is 0
    _held = later_memory(model, config, world)

    def try_pass(B: int):
        if world.device.type == "cuda":
            one = replace(config, micro_batch_size=B)
            made_up_pass(model, one, world, model.config.vocab_size)

    most = 64 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    return largest_that_fits(sequences, most, try_pass)


def train_step(
    state: TrainState, net: nn.Module, config: TrainConfig, world: World, must_stop: Callable
) -> tuple[float, float, bool, str]:
    """One optimizer step over batch_tokens: the mean loss before it, the gradient's norm, whether
    any rank must_stop, which is asked at its end, and a word if the step was left out.
    FloatingPointError if it must not be: its loss or its norm is not finite on some rank."""
    device, num_micro = world.device, config.num_micro(world.size)
    if config.dropout:  # each step and rank its own random numbers: there is no state to save
        key = np.random.SeedSequence([config.seed, state.step, world.rank])
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0]))
    loss_sum, bad = torch.zeros((), device=device), torch.zeros(world.size, device=device)
    for micro_step in range(num_micro):
        world.note(f"micro-step {micro_step + 1} of step {state.step + 1}")
        batch = state.loader.next_batch()  # pinned for CUDA alone
        x, y = (t.to(device, non_blocking=device.type == "cuda") for t in batch)
        with gradient_sync(net, enabled=micro_step == num_micro - 1):
            with autocast(config, device):
                loss = net(x, y) / num_micro  # a mean of means: backward() adds gradients up
            state.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    state.scaler.unscale_(state.optimizer)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), config.grad_clip or math.inf)
    bad[world.rank] = ~loss_sum.isfinite()
    asked = torch.full((), float(must_stop()), device=device)
    totals = world.sum([loss_sum, norm, asked, *bad])
    apply_gradients(state, config, totals[:2].isfinite().all())
    state.loader.read_ahead()
    loss, norm, stop, *bad = totals.tolist()  # here alone a step waits for the device
    loss, norm = loss / world.size, norm / world.size
    left_out = "" if math.isfinite(loss + norm) else leave_out(state, config, loss, norm, bad)
    state.step += 1
    return loss, norm, stop > 0, left_out


def apply_gradients(state: TrainState, config: TrainConfig, is_finite: Tensor):
    """Update the weights if the step is finite, which the device itself decides where it can."""
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(state.step, config)
    if config.fused and is_finite.device.type != "mps":
        state.optimizer.found_inf = 1 - is_finite.float()
        state.optimizer.step()
    elif is_finite:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.scaler.update()


def leave_out(
    state: TrainState, config: TrainConfig, loss: float, norm: float, bad: list[float]
) -> str:
    """Why a step was not applied; FloatingPointError if there have been enough of them. bad says of
    each rank whether its own loss was not finite. A gradient that float16 can't hold is none of
    them: the scaler has halved the scale, and finds its place again after a resume."""
    if config.fp16 and math.isfinite(loss) and (scale := state.scaler.get_scale()) >= 1:
        return f"not applied: the gradient overflows float16, its scale is {scale:.0f} now"
    ranks = ", ".join(str(rank) for rank, is_bad in enumerate(bad) if is_bad) or "none alone"
    end = state.loader.position
    why = (
        f"step {state.step + 1} gave loss {loss} (rank: {ranks}) and gradient norm {norm}, on"
        f" sequences {end - config.batch_tokens // config.seq_len:,} to {end - 1:,}: not applied"
    )
    state.skipped.append(why)
    if len(state.skipped) > config.skip_nonfinite:
        raise FloatingPointError(
            f"{why}, the weights are those of step {state.step}; try a --learning-rate below"
            f" {config.learning_rate}, or --skip-nonfinite {len(state.skipped)}"
        )
    return why


@torch.no_grad()
def evaluate(
    model: GPT, net: nn.Module, loader: ShardLoader, config: TrainConfig, world: World
) -> float:
    """Mean loss in nats per token over the first eval_tokens of loader, whatever B and the ranks
    are: each rank takes every size-th sequence. What fills no micro-batch goes through model, since
    net is compiled for one shape."""
    num_sequences = eval_sequences(loader, config)
    mine = range(world.rank, num_sequences, world.size)

    def own_losses() -> Tensor:
        loss_sum = torch.zeros((), device=world.device)
        for start in range(0, len(mine), loader.B):
            world.note("validation")
            numbers = mine[start : start + loader.B]
            x, y = (t.to(world.device) for t in loader.batch(numbers))
            with autocast(config, world.device):
                loss = (net if len(numbers) == loader.B else model)(x, y)
            loss_sum += loss * len(numbers)
        return loss_sum

    with no_dropout(net, config):
        return world.sum([world.together(own_losses)]).item() / num_sequences


def eval_sequences(loader: ShardLoader, config: TrainConfig) -> int:
    return max(1, min(config.eval_tokens // loader.T, len(loader)))


@contextmanager
def no_dropout(net: nn.Module, config: TrainConfig) -> Iterator[None]:
    """Inside, net leaves nothing out; a change of mode without need would have it compiled anew."""
    net.train(not config.dropout)
    try:
        yield
    finally:
        net.train()


def answer(
    model: GPT, examples: list[Example], tokenizer: str, config: TrainConfig, world: World
) -> dict[str, float]:
    """The shares of right answers, in each of the three ways to count them. Each rank takes its
    share of the examples."""
    mine = range(world.rank, len(examples), world.size)

    def own_answers() -> dict[str, int]:
        text, cast = codec(tokenizer), partial(autocast, config, world.device)
        losses = choice_losses(model, examples, mine, world.device, cast, world.note)
        return right_answers([examples[i] for i in mine], losses, text and text.decode)

    with no_dropout(model, config):
        right = world.together(own_answers)
    totals = world.sum([torch.tensor(n, device=world.device) for n in right.values()]).tolist()
    return {n: total / len(examples) for n, total in zip(right, totals, strict=True)}


# --------------------------------------------------------------------------------------------------
# The run


@dataclass
class Run:
    """What set_up has made, for train."""

    config: TrainConfig
    world: World
    data: TokenFolder
    state: TrainState
    net: nn.Module
    val_loader: ShardLoader
    log: Callable
    environment: dict
    matmul_tflops: float
    examples: list[Example] = field(default_factory=list)  # of --hellaswag
    seconds: list[float] = field(default_factory=list)  # of each step of this process
    losses: list[float] = field(default_factory=list)
    held: list[IO] = field(default_factory=list)  # the lock of out_dir
    writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    saving: Future | None = None
    copies: dict = field(default_factory=dict)  # what saves in the background are written from

    @property
    def in_background(self) -> bool:
        """Whether checkpoints are written beside the training: a CPU has its hands full."""
        return self.world.device.type != "cpu"

    @property
    def lost_a_save(self) -> bool:
        return bool(self.saving and self.saving.done() and self.saving.exception())


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps, and after the last one, is to be done now."""
    return step >= last or (every > 0 and step % every == 0)


def prepare_own_source(tokenizer: str) -> Path:
    """The folder of the corpus that needs no download: written now, if it is not there yet."""
    folder = Path("data", f"stdlib-{tokenizer}")
    if not folder.exists():
        print(f"no --data-dir: preparing Python's own source in {folder}", flush=True)
        program = [sys.executable, Path(__file__).with_name("prepare_data.py")]
        subprocess.run([*program, "--data-dir", folder, "--tokenizer", tokenizer])
    return folder  # whoever wrote it: another run may have been faster


def open_data(config: TrainConfig, source: Source | None) -> tuple[TokenFolder, GPTConfig]:
    """The data, and the network over its vocabulary, or over that of the weights to begin with;
    ValueError if an id is beyond it."""
    as_bytes = source.tokenizer == "bytes" if source else config.model == "nano" or missing_vocab()
    data = open_folder(Path(config.data_dir or prepare_own_source("bytes" if as_bytes else "gpt2")))
    for shards in (data.train, data.val):
        ShardLoader(shards, 1, config.seq_len)  # raises if no shard holds a sequence
    vocab_size = SHAPES[config.model].vocab_size
    if source:
        vocab_size = source.shape.vocab_size
        check_tokenizer(data, source.tokenizer, config)
    elif config.model == "nano":
        vocab_size = VOCAB_SIZES.get(data.tokenizer, VOCAB_SIZES["gpt2"])
    check_ids(data, vocab_size)
    return data, config.shape(vocab_size)


def check_tokenizer(data: TokenFolder, wanted: str, config: TrainConfig):
    """ValueError if the weights know other tokens than the data has."""
    if {data.tokenizer, wanted} == {"bytes", "gpt2"}:
        why = (
            f"--data-dir {config.data_dir} holds {data.tokenizer} tokens, the weights know {wanted}"
        )
        raise ValueError(f"{why}: prepare the data with --tokenizer {wanted}")


def check_ids(data: TokenFolder, vocab_size: int):
    """ValueError if a token of the data is beyond the vocabulary."""
    if data.largest_id is None or data.largest_id >= vocab_size:
        for shard in data.train + data.val:
            if (largest := shard.largest_id()) >= vocab_size:
                why = f"{shard.path} holds token {largest}, the network knows {vocab_size}"
                raise ValueError(f"{why}: prepare the data again with its --tokenizer")


def choose_out_dir(config: TrainConfig) -> Path:
    """The folder of the run, not made yet; ValueError if it holds a run that --resume must own."""
    if not config.out_dir:
        names = [path.name for path in Path("out").glob("[0-9]*")]
        used = [int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)]
        newest = max(used, default=0)
        return Path("out", f"{newest if newest and config.resume else newest + 1:03d}")
    path = Path(config.out_dir)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out-dir {path} is a file: name a folder")
    if path.is_dir() and not config.resume and (checkpoints(path) or (path / "log.jsonl").exists()):
        raise ValueError(f"--out-dir {path} holds a run: add --resume, or name another folder")
    return path


def sample_text(
    model: GPT, tokenizer: str, config: TrainConfig, world: World, number: int
) -> Iterator[str]:
    """Sample number of a model, piece by piece, from the same random numbers each time."""
    seed = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)[0]
    rng = torch.Generator(world.device).manual_seed(int(seed))
    how = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
    cast = partial(autocast, config, world.device)
    for piece in stream(model, tokenizer, config.prompt, config.sample_tokens, rng, cast, **how):
        world.note("a sample")
        yield piece


def sample(run: Run):
    model, config, world, step = run.state.model, run.config, run.world, run.state.step

    def texts() -> list[str]:
        numbers = range(config.num_samples)
        return ["".join(sample_text(model, run.data.tokenizer, config, world, n)) for n in numbers]

    with no_dropout(model, config):
        text = "\n---\n".join(world.together(texts))
    run.log(f"sample after step {step}:\n{text}", step=step, sample=text)


def newest_state(out_dir: Path, world: World) -> tuple[Path, dict] | None:
    """The newest good checkpoint and what it holds, if there is any checkpoint; exit 7 if none is
    good."""
    report = partial(fail, 7, is_main=world.is_main)
    check = lambda saved: known_flags(saved["config"])  # noqa: E731
    found = newest_checkpoint(out_dir, report, world.gather, check)
    if not found and world.from_main(lambda: checkpoints(out_dir)):
        why = f"error: --resume: no good checkpoint in {out_dir}"
        raise SystemExit(fail(7, why, world.is_main))
    return found


def own_state(
    config: TrainConfig, out_dir: Path, data: TokenFolder, shape: GPTConfig, world: World
) -> dict | None:
    """What the run goes on from, if there is anything; ValueError if it is another run's."""
    if not (found := newest_state(out_dir, world)):
        return None
    saved, wanted = found[1], identity(config, shape, data)
    if ":" not in f"{saved['identity'].get('data_dir')}":  # an older version saved it
        wanted["data_dir"] = data.old_fingerprint()
    check_identity(saved["identity"], wanted, out_dir)
    # an older version had only the log to tell the best checkpoint by
    return {"val_losses": logged(out_dir, "val_loss")} | saved


def is_complete(config: TrainConfig, out_dir: Path, step: int, world: World) -> bool:
    """Whether all steps are done, and all that is due after the last one."""
    done = world.from_main(partial(noted, out_dir, step))
    return step >= config.steps and not to_watch(config, step, done)


def set_up(config: TrainConfig, given: set[str], world: World) -> Run | None:
    """All that train needs, or None if the run is complete. Every mistake in flags or files raises
    here, ValueError or OSError, before anything of the run is written."""
    config.num_micro(world.size)
    if config.tensorboard:
        tensorboard()  # is it there?
    world.agree({spell(name): value for name, value in asdict(config).items()} | code_digest())
    out_dir = world.from_main(lambda: choose_out_dir(config))
    world.note("opening the data")
    source = find_source(config.init_from) if config.init_from else None
    data, shape = world.from_main(lambda: open_data(config, source))
    examples = open_examples(config.hellaswag, shape.vocab_size, data.tokenizer)
    world.agree({"the data": data_digest(data)})
    saved = own_state(config, out_dir, data, shape, world) if config.resume else None
    if saved and is_complete(config, out_dir, saved["step"], world):
        return None
    weights = source.weights(shape) if source and not saved else None
    find_source.cache_clear()  # its tensors have been used
    off = why_off(config, given, world.device)
    config = replace(config, out_dir=str(out_dir), **{name: False for name in off})
    held = []  # for as long as this process lives
    world.from_main(lambda: held.append(take(out_dir, config, shape)))
    world.note("compiling and warming up")
    run = build(config, world, data, shape, weights)
    run.held, run.examples = held, examples
    log_start(run, given, off)
    warm_up(run.net, run.config, world, shape.vocab_size)
    if saved:
        run.state.load_state_dict(saved)
        log_resume(run, saved)
    return run


def use_weights(config: TrainConfig, given: set[str], world: World) -> int:
    """--eval-only, --sample-only and --export: show what weights are worth, train nothing."""
    source = whose_weights(config, world)
    own = {n: v for n, v in source.flags.items() if n not in UNSEEN} if config.resume else {}
    shown = ("data_dir", "eval_tokens", "prompt") if config.resume else ()
    own |= {n: source.flags[n] for n in shown if n in source.flags}
    own |= {n: getattr(config, n) for n in given} | {"compile": False, "compile_mode": "default"}
    config = replace(config, **own)
    off = {*why_off(config, given - {"compile"}, world.device)}
    off |= {"bf16_residual"} if "bf16" in off else set()
    config = replace(config, **{n: False for n in off})
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    how = ("flash", "bf16_residual", "loss_chunk_tokens")
    model = GPT(source.shape, **{n: getattr(config, n) for n in how})
    model.load_state_dict(source.weights(source.shape))
    find_source.cache_clear()  # its tensors have been used
    model.to(world.device).train(False)
    if config.export:
        world.from_main(partial(export_to, Path(config.export), model, source))
    if config.eval_only:
        evaluate_only(model, source, config, world)
    if config.sample_only and world.is_main:
        sample_only(model, source, config, world)
    return 0


def whose_weights(config: TrainConfig, world: World) -> Source:
    """Those of --resume or --init-from. A run that goes on meanwhile may remove its checkpoints, so
    each is read once."""
    if not config.resume:
        if not config.init_from:
            raise ValueError("whose weights? Add --resume, with --out-dir, or --init-from")
        return find_source(config.init_from)
    out_dir = world.from_main(lambda: choose_out_dir(config))
    if not (found := newest_state(out_dir, world)):
        raise ValueError(f"--resume: no good checkpoint in {out_dir}: --out-dir?")
    source = from_run(*found)
    return replace(source, flags=known_flags(source.flags))


def export_to(folder: Path, model: GPT, source: Source):
    export(model, source, folder, read_log(source.path.parent) if source.flags else [])
    show(f"wrote {folder}: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def sample_only(model: GPT, source: Source, config: TrainConfig, world: World):
    for number in range(config.num_samples):
        for text in sample_text(model, source.tokenizer, config, world, number):
            show(text, end="")
        show("\n---" if number + 1 < config.num_samples else "")


def evaluate_only(model: GPT, source: Source, config: TrainConfig, world: World):
    shape = source.shape
    config = replace(config, seq_len=shape.seq_len, model=source.flags.get("model", "gpt2"))
    data = world.from_main(lambda: open_data(config, source))[0]
    examples = open_examples(config.hellaswag, shape.vocab_size, data.tokenizer)
    B = max(1, 4096 // shape.seq_len)
    loader = ShardLoader(data.val, B, shape.seq_len, world.rank, world.size)
    loss = evaluate(model, model, loader, config, world)
    num_sequences = eval_sequences(loader, config)
    figures = validation(loss, bytes_per_token(loader, num_sequences, data.tokenizer))
    count = num_sequences * shape.seq_len
    texts = [f"{source.path}, {count:,} validation tokens: {in_words(figures)}"]
    if examples:
        figures = answer(model, examples, data.tokenizer, config, world)
        texts.append(f"{len(examples):,} questions: {in_words(figures)}")
    if world.is_main:
        show("\n".join(texts))


def code_digest() -> dict[str, str]:
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("train_gpt2", "model", "dataloader")]
    files += sorted(here.glob("support/*.py"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def data_digest(data: TokenFolder) -> str:
    """Of the data as this rank's machine has it, or why it can't be read there."""
    try:
        return open_folder(data.train[0].path.parent).fingerprint
    except (OSError, ValueError) as error:
        return str(error)


def take(out_dir: Path, config: TrainConfig, shape: GPTConfig) -> IO:
    """Make the run's folder this process's own. OSError if another one has it, if its log is not in
    it, or if the disk has too little room for its checkpoints."""
    log = out_dir / "log.jsonl"
    if log.is_symlink() or (log.exists() and not log.is_file()):
        raise OSError(
            f"{log} is a link, or no file: a run writes into its own folder; move it away"
        )
    size = 12 * shape.num_params  # weights and two moments, float32
    num_more = max(1, config.keep + 2 - len(checkpoints(out_dir)))
    there = next(
        path for path in (out_dir.absolute(), *out_dir.absolute().parents) if path.exists()
    )
    if (free := shutil.disk_usage(there).free) < num_more * size:
        room = f"{num_more * size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise OSError(f"--out-dir {out_dir}: {num_more} more checkpoints need {room}: name another")
    lock = locked(out_dir)
    for path in [*out_dir.glob("checkpoint_*.pt.tmp"), *out_dir.glob("loss.png.tmp")]:
        path.unlink()  # of a process that died
    return lock


def build(
    config: TrainConfig, world: World, data: TokenFolder, shape: GPTConfig, weights: dict | None
) -> Run:
    """The network and everything around it, in the state before the first step."""
    model, net, config = make_net(config, world, shape, weights)
    place = config.micro_batch_size, config.seq_len, world.rank, world.size
    loader = ShardLoader(data.train, *place, seed=config.seed if config.shuffle else None)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.fp16)
    state = TrainState(model, make_optimizer(model, config, world), loader, scaler)
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    rate = matmul_tflops(world.device, dtype)
    board = tensorboard()(config.out_dir) if config.tensorboard and world.is_main else None
    log = make_log(Path(config.out_dir), world.is_main, board)
    env = environment(world.device, world.size)
    return Run(config, world, data, state, net, ShardLoader(data.val, *place), log, env, rate)


def make_net(
    config: TrainConfig, world: World, shape: GPTConfig, weights: dict | None
) -> tuple[GPT, nn.Module, TrainConfig]:
    """The network, plain and sped up, and config with a micro-batch that fits. One that was chosen
    by plain passes is halved for as long as a rank has no memory for what was made of them;
    OutOfMemoryError if nothing fits."""
    is_chosen = not config.micro_batch_size
    while True:
        model = GPT(shape, **{name: getattr(config, name) for name in NETWORK_FLAGS})
        if weights:
            model.load_state_dict(weights)
        model.to(world.device)
        net = speed_up(model, config, world)
        B = config.micro_batch_size
        B = B or world.from_main(partial(micro_batch_that_fits, model, config, world))
        config = replace(config, micro_batch_size=B)
        if not is_chosen or fits(model, net, config, world):
            return model, net, config
        if B == 1:
            raise torch.OutOfMemoryError("not even one sequence")
        if world.is_main:
            show(f"--micro-batch-size {B} does not fit after all: trying {B // 2}")
        config = replace(config, micro_batch_size=B // 2)
        del model, net  # and their memory
        free_memory()


def fits(model: GPT, net: nn.Module, config: TrainConfig, world: World) -> bool:
    """Whether every rank has the memory for a pass. Found out before the ranks average gradients:
    one that fails there would leave the others waiting."""
    try:
        _held = later_memory(model, config, world)
        with gradient_sync(net, enabled=False):
            made_up_pass(net, config, world, model.config.vocab_size)
        found = True
    except torch.OutOfMemoryError:
        found = False
    return all(world.gather(found))


def log_start(run: Run, given: set[str], off: dict[str, str]):
    """The first record: where this runs, every flag, and who chose it."""
    config, model, loader = run.config, run.state.model, run.state.loader
    env, flags = run.environment, asdict(config)
    (a, num_a), (b, num_b) = ((len(g), model.num_elements(g)) for g in model.decay_groups())
    unused = sum(s.num_tokens for s in loader.shards) - len(loader) * config.seq_len
    epochs = config.steps * config.batch_tokens / (len(loader) * config.seq_len)
    chosen = [f.name for f in fields(config) if f.name not in given and flags[f.name] != f.default]
    lines = [
        f"{config.model}: {num_a + num_b:,} parameters; weight decay on {a} tensors with {num_a:,},"
        f" none on {b} with {num_b:,}; AdamW {'fused' if config.fused else 'plain'}",
        f"{env['ranks']} x {env['device_name'] or env['device']}, torch {env['torch']}:"
        f" {run.matmul_tflops:.3g} TFLOP/s in matrix products",
        f"{len(loader):,} sequences of {config.seq_len} {run.data.tokenizer} tokens: {epochs:.2f}"
        f" epochs in {config.steps:,} steps, {unused:,} tokens unused",
        "chosen: " + " ".join(f"{spell(name)}={flags[name]}" for name in chosen),
        *(f"off: {spell(name)} {text}" for name, text in off.items()),
    ]
    run.log("\n".join(lines), environment=env, flags=flags, chosen=chosen, off=off, epochs=epochs,
            unused_tokens=unused, matmul_tflops=run.matmul_tflops)  # fmt: skip


def log_resume(run: Run, saved: dict):
    """Where the run goes on, which flags are not those it was saved with, and what keeps it from
    being the uninterrupted run bit for bit."""
    flags, env = asdict(run.config), run.environment
    was = saved["config"] | saved["environment"]
    now = {name: flags[name] for name in flags if name not in UNSEEN}
    # older versions, which wrote no digest, had other names for processors
    names = ("torch", "threads", "ranks", *(["device_name"] if "digest" in saved else []))
    now |= {name: env[name] for name in names if was.get(name)}
    changed = {name: value for name, value in now.items() if was.get(name) != value}
    texts = {n: f"{spell(n) if n in flags else n} {v} instead of {was.get(n)}"
             for n, v in changed.items()}  # fmt: skip
    told = [text for name, text in texts.items() if name in flags and name not in ROUNDING]
    inexact = [text for name, text in texts.items() if name not in flags or name in ROUNDING]
    step, rates = run.state.step, ("steps", "warmup_steps", "learning_rate", "cosine")
    then = replace(run.config, **{name: was[name] for name in rates if name in was})
    before, here = learning_rate(min(step, then.steps), then), learning_rate(step, run.config)
    told += [f"the learning rate is {here:.2e}, it was {before:.2e}"] if here != before else []
    reasons = [f"not bit for bit because of {', '.join(inexact)}"] if inexact else []
    unsure = (
        [] if "digest" in saved else ["its checkpoint has no digest: an older version wrote it"]
    )
    text = ", ".join([f"resumed after step {step}", *told, *reasons, *unsure])
    run.log(text, resumed=step, changed=changed)


def train(run: Run, signals: Signals) -> int:
    """Train to config.steps: each step is logged, then saved, validated and sampled if due. Returns
    the exit code: 0, or 3 if it was stopped."""
    config, state, world = run.config, run.state, run.world
    signals.save_first = True
    if state.step == 0:
        validate(run)
    else:  # what the process before this one did not come to
        done = world.from_main(partial(noted, Path(config.out_dir), state.step))
        names = to_watch(config, state.step, done)
        if "val_loss" in done and state.step < config.steps:
            names = ["val_loss", *names]  # again: a log does not say which is best
        watch(run, names)
    while state.step < config.steps:
        asked = lambda: bool(signals.times) or run.lost_a_save  # noqa: E731
        with profile(run):
            start = time.perf_counter()
            *figures, stop, notice = train_step(state, run.net, config, world, asked)
            figures += [notice, time.perf_counter() - start]
        log_step(run, *figures)
        saving = stop or due(state.step, config.save_every, config.steps)
        if saving or due(state.step, config.check_every, config.steps):
            check_replicas(state.model, state.step, world)
        if saving:
            save(run, wait=stop or state.step == config.steps)
        if stop and state.step < config.steps:
            run.log(f"stopped by a signal after step {state.step}; go on with the same command,"
                    f" --resume --out-dir {config.out_dir}", stopped=state.step)  # fmt: skip
            return 3
        watch(run, to_watch(config, state.step, set()))
    return 0


def log_step(run: Run, loss: float, norm: float, notice: str, seconds: float):
    config, step, finite = run.config, run.state.step, math.isfinite(loss + norm)
    run.seconds.append(seconds)
    tokens_per_s = config.batch_tokens / seconds
    tflops = tokens_per_s * run.state.model.flops_per_token() / run.world.size / 1e12  # of a rank
    lr, mfu = learning_rate(step - 1, config), tflops / run.matmul_tflops
    left = timedelta(seconds=int(np.mean(run.seconds[-100:]) * (config.steps - step)))
    notice = notice or spike(run.losses, loss)
    run.losses += [loss] * finite
    run.log(
        f"step {step}/{config.steps} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} |"
        f" {1000 * seconds:.0f} ms | {tokens_per_s:,.0f} tokens/s | {mfu:.0%} MFU | {left} left"
        f"{' | ' * bool(notice)}{notice}",
        step=step, loss=loss if math.isfinite(loss) else None,
        grad_norm=norm if math.isfinite(norm) else None,
        learning_rate=lr, ms=1000 * seconds, mfu=mfu, tokens_per_s=tokens_per_s, tflops=tflops,
        peak_mib=peak_memory_mib(run.world.device), **({"notice": notice} if notice else {}),
    )  # fmt: skip


def profile(run: Run):
    """With --profile, the third step of this process is looked into, or the last of a shorter
    one."""
    step, num_done = run.state.step + 1, len(run.seconds)
    is_it = num_done == 2 or (num_done < 2 and step == run.config.steps)
    if not (run.config.profile and is_it and run.world.is_main):
        return nullcontext()
    path = Path(run.config.out_dir, f"trace_{step:06d}.json")
    return profiled(path, run.world.device.type == "cuda", run.log, step)


def save(run: Run, wait: bool):
    run.world.note(f"a save after step {run.state.step}")
    state = run.state.state_dict()  # on all ranks: --zero needs them
    run.world.from_main(partial(save_state, run, state, wait))


def save_state(run: Run, state: dict, wait: bool):
    """Write a checkpoint of state, the main rank's, since all ranks hold the same. With a
    GPU it is written from a copy while the training goes on, unless it is to be waited for. OSError
    if it can't be written, or if the one before could not, which does not keep this one from it."""
    config = run.config
    saved = state | {
        "identity": identity(config, run.state.model.config, run.data),
        "config": asdict(config),
        "environment": run.environment,
    }
    failed = run.saving and run.saving.exception()  # waits for it
    run.saving = run.writer.submit(
        write, run, copied(saved, run.copies) if run.in_background else saved
    )
    if wait or failed or not run.in_background:
        run.saving.result()
    if failed:
        raise failed


def copied(saved, copies: dict):
    """The same with its tensors copied to the computer's memory, into copies: those of the save
    before, since new memory takes longer to get than to fill. A tied tensor has one copy."""
    if isinstance(saved, dict):
        return {name: copied(value, copies) for name, value in saved.items()}
    if not isinstance(saved, Tensor):
        return saved
    key = saved.data_ptr(), saved.shape, saved.dtype
    if key not in copies:  # pinned: a GPU writes there itself
        copies[key] = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
    return copies[key].copy_(saved)


def write(run: Run, saved: dict):
    start = time.perf_counter()
    path = save_checkpoint(Path(run.config.out_dir), saved, run.config.keep)
    seconds = time.perf_counter() - start
    run.log(f"saved {path}", saved=saved["step"], path=str(path), save_s=seconds)


def validate(run: Run):
    loader, world = run.val_loader, run.world
    loss = evaluate(run.state.model, run.net, loader, run.config, world)
    if math.isfinite(loss):
        run.state.val_losses[run.state.step] = loss
    count = partial(bytes_per_token, loader, eval_sequences(loader, run.config), run.data.tokenizer)
    figures = validation(loss, world.together(count))
    run.log(f"validation after step {run.state.step}: {in_words(figures)}",
            step=run.state.step, **figures)  # fmt: skip


def validation(val_loss: float, bytes_per_token: float) -> dict[str, float]:
    """A validation's loss, in nats per token, in the other units that people compare."""
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    if bytes_per_token:
        figures["bits_per_byte"] = val_loss / math.log(2) / bytes_per_token
    return figures


def quiz(run: Run):
    step = run.state.step
    figures = answer(run.state.model, run.examples, run.data.tokenizer, run.config, run.world)
    text = f"{len(run.examples):,} questions after step {step}: {in_words(figures)}"
    run.log(text, step=step, **{f"hellaswag_{name}": value for name, value in figures.items()})


def draw(run: Run):
    """The run's losses in loss.png, where matplotlib is installed."""
    path, is_main = Path(run.config.out_dir, "loss.png"), run.world.is_main
    is_drawn = run.world.together(partial(draw_loss, path) if is_main else lambda: None)
    text = f"drew {path}" if is_drawn else "no loss.png: pip install matplotlib"
    run.log(text, step=run.state.step, picture=str(path) if is_drawn else "")


WATCHED = {  # by the name in the record: what does it, and how often; the picture only at the end
    "val_loss": (validate, "eval_every"),
    "sample": (sample, "sample_every"),
    "hellaswag_acc": (quiz, "hellaswag_every"),
    "picture": (draw, ""),
}


def to_watch(config: TrainConfig, step: int, done: set[str]) -> list[str]:
    """What is due after step and not done, by the names of WATCHED."""
    done = done if config.hellaswag else done | {"hellaswag_acc"}
    return [name for name, (_, every) in WATCHED.items()
            if name not in done and due(step, getattr(config, every, 0), config.steps)]  # fmt: skip


def watch(run: Run, names: list[str]):
    """Do these of WATCHED. No run ends for it: of what fails one line tells, and the next resume
    tries it again."""
    for name in names:
        try:
            WATCHED[name][0](run)
        except Exception as error:
            if not agreed(error):  # the log can't be written, or another rank is lost
                raise
            why = f"no {name} after step {run.state.step}: {type(error).__name__}: {error!s:.200}"
            run.log(" ".join(why.split()), step=run.state.step, failed=name)


def main(argv: list[str] | None = None) -> int:
    # Before the first tensor and the first compiling, since torch reads each once. Huge pages for
    # large tensors save a CPU 3 % of a step of 124M; tanh made of exponentials, in what is compiled
    # for a CPU, 8 % of a compiled step of nano (its absolute error is 2e-7)
    for name in ("THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CPP_USE_DECOMPOSE_TANH"):
        os.environ.setdefault(name, "1")
    is_main = os.environ.get("RANK", "0") == "0"
    if hasattr(sys.stdout, "reconfigure"):  # a sample may hold what a terminal can't show
        sys.stdout.reconfigure(errors="replace")
    try:
        with stop_signals(is_main) as signals:
            return run_program(sys.argv[1:] if argv is None else argv, signals)
    except (OSError, ValueError) as error:
        code = 6 if getattr(error, "errno", None) in DISK_ERRORS else 2
        return fail(code, f"error: {error}", is_main or not agreed(error))
    except (RuntimeError, MemoryError) as error:
        return fail(*explained(error), True)
    except SystemExit as end:  # somebody has said why
        return end.code
    except KeyboardInterrupt:
        return fail(130, "stopped by a signal before it could save", is_main)


def run_program(argv: list[str], signals: Signals) -> int:
    world = find_world(dict(os.environ), torch.cuda.device_count())
    config, given = parse_args(argv, world.device.type)
    torchrun = __launcher__ if "TORCHELASTIC_RUN_ID" in os.environ else None
    watchdog = Watchdog(config.timeout_s, world.rank, world.size, torchrun)
    with watchdog, process_group(world):
        world = replace(world, note=watchdog.note)
        if config.eval_only or config.sample_only or config.export:
            return use_weights(config, given, world)
        return set_up_and_train(config, given, world, signals)


def set_up_and_train(config: TrainConfig, given: set[str], world: World, signals: Signals) -> int:
    run = set_up(config, given, world)
    if run is None:
        return fail(0, f"already complete: --steps {config.steps} are done", world.is_main)
    try:
        return train(run, signals)
    except ValueError as error:
        raise AssertionError("a bug, no mistake of yours: please report it") from error
    except ArithmeticError as error:
        return fail(4, f"error: {error}", world.is_main)
    except OSError as error:
        if run.saving and run.saving.exception() is error:
            run.saving = None  # it is told here
        return fail(6, f"error: {error}", world.is_main or not agreed(error))
    finally:
        run.writer.shutdown()
        if run.saving and run.saving.exception():
            fail(6, f"error: {run.saving.exception()}", True)


if __name__ == "__main__":
    sys.exit(main())
