"""Train GPT-2 from tokens on disk to a checkpoint, on one GPU, on many, or on a CPU.

python train_gpt2.py                                             # one GPU, or none
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --data-dir data/mine --out-dir out/mine --resume
python train_gpt2.py --data-dir data/mine --init-from gpt2       # finetune OpenAI's weights
python train_gpt2.py --resume --sample-only --prompt "def "      # or --eval-only, or --export DIR
python train_gpt2.py --help
"""

import argparse
import codecs
import ctypes
import difflib
import errno
import gc
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel as DDP

from dataloader import (
    VOCAB_SIZES,
    Example,
    ShardLoader,
    TokenFolder,
    locked,
    missing_vocab,
    open_folder,
    read_examples,
    vocab_files,
    whole_file,
)
from model import GPT, SHAPES, GPTConfig, Source, hf_config, hf_weights, read_source

# --------------------------------------------------------------------------------------------------
# Flags: each is declared once, here, with its type, default, unit and help


def flag(
    default, help: str, least: float = -math.inf, most: float = sys.float_info.max, choices=None
):
    limits = {"least": least, "most": most, "choices": choices}
    return field(default=default, metadata={"help": help} | limits)


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
    seed: int = flag(1337, "seed of the initial weights, of the data's order and of samples", 0)
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
    eval_tokens: int = flag(10_485_760, "validation tokens, at most all there are", 1)
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
        for f in fields(self):
            value, least, most = getattr(self, f.name), f.metadata["least"], f.metadata["most"]
            if isinstance(value, int | float) and not least <= value <= most:
                limit = f" and at most {most}" if most < sys.float_info.max else ""
                why = f"must be a number of at least {least}{limit}"
                raise ValueError(f"{spell(f.name)} {value} {why}")
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
HF_TOKENIZER = {  # of GPT-2, as tokenizer_config.json says it
    "tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024,
} | dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")  # fmt: skip
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


def spell(name: str) -> str:
    return "--" + name.replace("_", "-")


def recipe(model: str) -> dict:
    """The flags that a model sets."""
    return {name: getattr(SHAPES[model], name) for name in SHAPE_FLAGS} | RECIPES[model]


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake as every other one of this program is: ValueError, one line, the cure."""

    def error(self, message: str):
        unknown = re.search(r"unrecognized arguments: (--\S+)", message)
        near = unknown and difflib.get_close_matches(unknown[1], self._option_string_actions, 1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"{message}; {hint}")


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for f in fields(TrainConfig):
        kind = {"action": BooleanOptionalAction} if f.type is bool else {"type": f.type}
        kind |= {"choices": list(f.metadata["choices"])} if f.metadata["choices"] else {}
        text = f"{f.metadata['help']} (default: {default_text(f.name, f.default)})"
        parser.add_argument(spell(f.name), default=argparse.SUPPRESS, help=text, **kind)
    return parser


def default_text(name: str, default) -> str:
    """A flag's default in words, with the models whose recipe has another."""
    own = {model: recipe(model).get(name, default) for model in RECIPES}
    others = [f"{model} {value}" for model, value in own.items() if value != default]
    return "; ".join(["none" if default == "" else str(default), *others])


def parse_args(argv: list[str], device_type: str) -> tuple[TrainConfig, set[str]]:
    """The run that a command line asks for, and the names of the flags that it gives. Takes
    nanoGPT's spelling too: --batch_tokens=4096 --compile=False."""
    plain = [re.sub(r"^--[\w-]+", lambda m: m[0].replace("_", "-"), arg) for arg in argv]
    plain = [re.sub(r"^--([\w-]+)=False$", r"--no-\1", arg) for arg in plain]
    given = vars(
        make_parser().parse_args([re.sub(r"^(--[^=]+)=True$", r"\1", arg) for arg in plain])
    )
    for name in ("data_dir", "out_dir", "init_from", "hellaswag", "export"):
        if given.get(name) == "":
            raise ValueError(f"{spell(name)} is empty: name one, or leave it out")
    if given.get("init_from") and given.get("resume") and given.get("out_dir"):
        own = newest_checkpoint(Path(given["out_dir"]))  # a run that has begun needs no other
        given["init_from"] = str(own or given["init_from"])
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
    path = Path(name)
    if path.is_dir() and (newest := newest_checkpoint(path)):
        path = newest
    if name in ("resume", "scratch"):
        raise ValueError(f"--init-from {name}: write --resume to go on, or neither to start")
    if not path.exists():
        path = downloaded(name)
    try:
        if zipfile.is_zipfile(path):  # as torch.save writes it
            check_archive(path)
        return read_source(path.parent if path.suffix == ".safetensors" else path)
    except ValueError as error:
        raise ValueError(f"--init-from {name}: {error}") from None


def downloaded(name: str) -> Path:
    """The folder of a model on the Hugging Face hub; ValueError with the cure if there is none."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except ImportError:
        why = "no such folder; to download it: pip install huggingface_hub"
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = (
            f"no such folder, and it can't be downloaded ({str(error).partition(chr(10))[0]:.200})"
        )
    cure = f"hf download {name} --local-dir {name.replace('/', '-')}, where there is a network"
    raise ValueError(f"--init-from {name}: {why}; or {cure}")


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


def bf16_kinds(device: torch.device, cpuinfo: Path) -> set[str]:
    """How a CPU multiplies bfloat16 itself, as Linux names it (avx512_bf16, amx_bf16, or bf16 of an
    Arm): a step of GPT-2 124M is 1.8 times as fast, with AMX one of nano 1.6 times."""
    has_any = device.type == "cpu" and cpuinfo.exists()
    return set(re.findall(r"\w*bf16\b", cpuinfo.read_text())) if has_any else set()


def why_not_compile(device: torch.device) -> str:
    """Nothing where torch.compile works, tried on a small piece; else the cause and the cure."""
    x = torch.randn(8, 8, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: nn.functional.gelu(x).sum(), dynamic=False)(x).backward()
    except Exception as error:  # Dynamo, Inductor, Triton or a C++ compiler, each in its own way
        cure = "triton (triton-windows)" if device.type == "cuda" else "a C++ compiler (g++)"
        return f"fails here ({type(error).__name__}: {error!s:.200}): install {cure}"
    return ""


# --------------------------------------------------------------------------------------------------
# Ranks: the only lines of this file that know how many processes there are


@dataclass(frozen=True)
class World:
    """The processes of this run, as torchrun started them; without torchrun, one."""

    rank: int
    size: int
    device: torch.device
    note: Callable[[str], None] = lambda phase: None  # tells the watchdog what happens now

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[Tensor]) -> Tensor:
        """Each value added up over the ranks, in one all-reduce: (len(values),), float32."""
        packed = torch.stack([value.float() for value in values])
        if self.size > 1:
            dist.all_reduce(packed)
        return packed

    def gather(self, value) -> list:
        """The value of each rank, on all of them."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def agree(self, facts: dict):
        """ValueError, on every rank, if one of them has other facts than the main one."""
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs[name] != value:
                    why = f"{name} is {theirs[name]} on rank {rank} and {value} on rank 0"
                    error = ValueError(f"{why}: start all ranks with the same")
                    error.is_agreed = True
                    raise error

    def from_main(self, function: Callable):
        """What function returns on the main rank, or the user's mistake that it raises there, on
        every rank."""
        result = [None]
        if self.is_main:
            try:
                result = [function()]
            except (OSError, ValueError) as error:
                result = [error]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        if isinstance(result[0], Exception):
            result[0].is_agreed = True  # every rank raises it, one reports it
            raise result[0]
        return result[0]


def find_world(env: dict[str, str], num_gpus: int) -> World:
    """This process's place among the ranks, and its device; ValueError if the two do not fit."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in env]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{', '.join(missing)} not set, others of torchrun's are: set all or none")
    rank, local_rank, size = (int(env.get(*pair)) for pair in zip(names, (0, 0, 1), strict=True))
    if not 0 <= rank < size:
        raise ValueError(f"RANK {rank} must be less than WORLD_SIZE {size}: use torchrun")
    if not num_gpus:
        mps = torch.backends.mps.is_available() and size == 1
        return World(rank, size, torch.device("mps" if mps else "cpu"))
    local_size = int(env.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if local_size > num_gpus:
        seen = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '(not set)')}"
        raise ValueError(
            f"--nproc_per_node={local_size} is more than the {num_gpus} GPUs here ({seen}):"
            f" try --nproc_per_node={num_gpus}"
        )
    return World(rank, size, torch.device("cuda", local_rank))


def meet(backend: str):
    """Connect the ranks; ValueError if they can't find each other. torchrun keeps its store when it
    restarts them, and in it the addresses of those that died: hence the prefix."""
    try:
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (dist.DistError, ValueError) as error:
        where = " ".join(f"{n}={os.environ.get(n)}" for n in ("MASTER_ADDR", "MASTER_PORT"))
        raise ValueError(f"the ranks can't meet at {where}: {error!s:.200}") from error


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Inside, the ranks can talk to each other."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size > 1:
        meet("nccl" if world.device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        gc.collect()  # a DDP that outlives the group makes the process abort when it ends
        if world.size > 1:
            dist.destroy_process_group()


def gradient_sync(net: nn.Module, enabled: bool):
    """Whether forward and backward passes inside average the gradients over the ranks."""
    return nullcontext() if enabled or not isinstance(net, DDP) else net.no_sync()


class SharedAdamW(torch.optim.AdamW):
    """AdamW whose moments are dealt out to the ranks: each updates its own parameters, and gets the
    others from theirs (ZeRO, stage 1: Rajbhandari et al. 2020). All ranks call state_dict, and the
    main one gets what AdamW on one rank would give. torch's ZeroRedundancyOptimizer holds its part
    twice after load_state_dict, and leaves the steps on the CPU, where the fused AdamW fails."""

    def __init__(self, groups: list[dict], world: World, **options):
        super().__init__(groups, **options)
        self.world, self.params = world, [p for group in groups for p in group["params"]]
        loads, self.owners, self.collected = [0] * world.size, {}, {}
        for p in sorted(self.params, key=Tensor.numel, reverse=True):
            self.owners[p] = loads.index(min(loads))
            loads[self.owners[p]] += p.numel()

    def step(self):
        for p in self.params:
            if self.owners[p] != self.world.rank:
                p.grad = None
        super().step()
        works = [dist.broadcast(p.detach(), self.owners[p], async_op=True) for p in self.params]
        for work in works:
            work.wait()

    def state_dict(self) -> dict:
        found = super().state_dict()
        if not self.state:  # on no rank: nothing was updated yet
            return found
        step = next(iter(self.state.values()))["step"]
        for i, p in enumerate(self.params):
            moments = {n: self.state.get(p, {}).get(n, torch.empty_like(p)) for n in MOMENTS}
            for moment in moments.values():
                dist.broadcast(moment, self.owners[p])
            for name, value in {"step": step, **moments}.items() if self.world.is_main else ():
                new = torch.empty_like(value, device="cpu")  # the same memory for each save
                self.collected.setdefault(i, {}).setdefault(name, new).copy_(value)
        return found | {"state": self.collected}

    def load_state_dict(self, saved: dict):
        own = [i for i, p in enumerate(self.params) if self.owners[p] == self.world.rank]
        own = {i: saved["state"][i] for i in own if i in saved["state"]}
        super().load_state_dict(saved | {"state": own})


MOMENTS = ("exp_avg", "exp_avg_sq")

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

    def state_dict(self) -> dict:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": self.scaler.state_dict(),
            "position": self.loader.position,
            "skipped": list(self.skipped),
        }

    def load_state_dict(self, saved: dict):
        """Go on from saved. Learning rate, betas and decay stay the command line's: PyTorch's own
        load would bring back the old ones."""
        self.step, self.skipped = saved["step"], list(saved["skipped"])
        self.model.load_state_dict(saved["model"])
        groups = torch.optim.AdamW.state_dict(self.optimizer)["param_groups"]
        self.optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        if scaler := saved.get("scaler"):  # there is none without --fp16
            self.scaler.load_state_dict(scaler)
        self.loader.position = saved["position"]


PARTS = ("step", "model", "optimizer", "position", "skipped", "identity", "config", "environment")


def checkpoints(out_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    paths = [path for path in out_dir.glob("checkpoint_*.pt") if path.stem[11:].isdigit()]
    return sorted(filter(Path.is_file, paths), key=lambda path: int(path.stem[11:]), reverse=True)


def save_checkpoint(out_dir: Path, saved: dict, keep: int) -> Path:
    """Write saved and read it again, then remove older checkpoints: never one of the newest keep
    good ones, nor the one with the best validation. OSError if it can't be written."""
    path = out_dir / f"checkpoint_{saved['step']:06d}.pt"
    try:
        with whole_file(path) as f:
            write_archive(saved, f)
            check_archive(Path(f.name))
    except (OSError, ValueError) as error:
        free = f"{shutil.disk_usage(out_dir).free / 1e9:.1f} GB are free"
        raise OSError(f"{path} can't be written: {error}; {free}") from None
    rotate(out_dir, path, keep)
    return path


def rotate(out_dir: Path, path: Path, keep: int):
    """Remove the checkpoints before path but for the newest keep good ones, itself counted, and the
    best."""
    paths, num_good = checkpoints(out_dir), 1
    older = paths[paths.index(path) + 1 :]  # a later one is damaged, or it would be newest
    while older and num_good < keep:
        num_good += is_good(older.pop(0))
    with suppress(OSError):  # the new one is safe, whatever becomes of an old one
        for old in {*older} - {best_checkpoint(out_dir)}:
            old.unlink()


def write_archive(saved: dict, file: IO):
    try:
        torch.save(saved, file)
    except RuntimeError as error:  # tells only a position; what Python raised stands behind it
        raise (error.__context__ or OSError(str(error))) from None
    file.flush()


def best_checkpoint(out_dir: Path) -> Path | None:
    """The one of those that were validated whose loss was the least."""
    found = {r["step"]: r["val_loss"] for r in read_log(out_dir) if "val_loss" in r}
    losses = {path: found.get(int(path.stem[11:]), math.nan) for path in checkpoints(out_dir)}
    finite = {path: loss for path, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=finite.get, default=None)


def check_archive(path: Path):
    """ValueError unless path is a whole archive of plain parts: torch.load would load a flipped bit
    as if nothing were wrong, and unpack a small part to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, so not written by torch.save")
            if bad := archive.testzip():
                raise ValueError(f"the CRC-32 of its {bad} is wrong")
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None


def is_good(path: Path) -> bool:
    try:
        check_archive(path)
    except Exception:  # as in read_checkpoint
        return False
    return True


def read_checkpoint(path: Path) -> dict:
    """What save_checkpoint wrote; ValueError if it is damaged or holds numbers that are not
    finite."""
    try:
        check_archive(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if missing := {*PARTS} - saved.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}: another program wrote it")
        moments = [tensor for entry in saved["optimizer"].values() for tensor in entry.values()]
        if not all(tensor.isfinite().all() for tensor in [*saved["model"].values(), *moments]):
            raise ValueError("it holds numbers that are not finite")
        if saved["step"] != int(path.stem[11:]):
            raise ValueError(f"it is of step {saved['step']}")
        return saved
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make any reader fail in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is damaged: {why}") from error


def newest_checkpoint(out_dir: Path) -> Path | None:
    """The newest checkpoint that is good, if there is one. Each damaged one is named."""
    for path in checkpoints(out_dir):
        try:
            read_checkpoint(path)
            return path
        except ValueError as error:
            fail(7, f"{error}; trying the one before it", True)
    return None


def identity(config: TrainConfig, shape: GPTConfig, data: TokenFolder) -> dict:
    """What must not change while a run goes on: its network, its data, their order."""
    order = {name: getattr(config, name) for name in FIXED if name not in SHAPE_FLAGS}
    facts = {"data_dir": data.fingerprint(), "tokenizer": data.tokenizer}
    return order | facts | asdict(shape)


def check_identity(saved: dict, wanted: dict, out_dir: Path):
    """ValueError if the flags or the data ask for another run than the one that was saved."""
    for name, value in wanted.items():
        if saved.get(name) != value:
            why = f"{spell(name)}: the run in {out_dir} has {saved.get(name)}, this one {value}"
            raise ValueError(f"{why}; give it as it was, or another --out-dir")


# --------------------------------------------------------------------------------------------------
# Optimization, and what is measured beside it


class Codec(NamedTuple):
    """Between text and ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[int], bytes]  # of one id


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


def set_allocator(keep: bool):
    """Let glibc keep large freed tensors for the next ones. It would return each to the system,
    which then clears every page anew: a sixth of a CPU's step of GPT-2 124M. Not where memory is
    short: what is kept has gaps."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return  # another system's allocator
    if keep:
        mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
    else:
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, bytes: each larger tensor gets one


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


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def later_memory(model: GPT, config: TrainConfig, world: World) -> list[Tensor]:
    """As much memory as a step holds besides a pass: gradients, and AdamW's moments."""
    share = world.size if config.zero else 1
    moments = 2 * sum(p.numel() for p in model.parameters()) // share
    gradients = [torch.empty_like(p) for p in model.parameters()]
    return [*gradients, torch.empty(moments, device=world.device)]


def micro_batch_that_fits(model: GPT, config: TrainConfig, world: World) -> int:
    """The largest power of two that divides a rank's part of a step and fits: on a GPU 64
    sequences, halved until a pass of the plain model finds memory; elsewhere 4,096 tokens."""
    sequences = config.num_micro(world.size)  # of one rank, since micro_batch_size is 0
    limit = 64 if world.device.type == "cuda" else max(1, 4096 // config.seq_len)
    B = math.gcd(sequences, 1 << (limit.bit_length() - 1))
    _held = later_memory(model, config, world)
    while world.device.type == "cuda" and B > 1:
        try:
            made_up_pass(model, replace(config, micro_batch_size=B), world, model.config.vocab_size)
            break
        except torch.OutOfMemoryError:
            B //= 2
        finally:
            free_memory()
    return B


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


def check_replicas(model: GPT, step: int, world: World):
    """ArithmeticError, on every rank, if one of them holds other weights than most, or weights that
    are not finite."""
    world.note(f"a comparison of the weights after step {step}")
    weights = [p.detach() for p in model.parameters()]
    bits = torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in weights]).tolist()
    all_finite = bool(torch.stack([p.isfinite().all() for p in weights]).all())
    digests = world.gather((bits, all_finite))
    most = max(digests, key=digests.count)
    others = [str(rank) for rank, digest in enumerate(digests) if digest != most]
    if others or not most[1]:
        what = f"rank {', '.join(others)} holds other weights than the others"
        why = what if others else "the weights are not finite"
        raise ArithmeticError(f"after step {step} {why}: a fault of a machine; nothing was saved")


@torch.no_grad()
def evaluate(
    model: GPT, net: nn.Module, loader: ShardLoader, config: TrainConfig, world: World
) -> float:
    """Mean loss in nats per token over the first eval_tokens of loader, whatever B and the ranks
    are: each rank takes every size-th sequence. What fills no micro-batch goes through model, since
    net is compiled for one shape."""
    num_sequences = max(1, min(config.eval_tokens // loader.T, len(loader)))
    mine = range(world.rank, num_sequences, world.size)
    loss_sum = torch.zeros((), device=world.device)
    net.train(not config.dropout)  # a change of mode would have net compiled anew
    for start in range(0, len(mine), loader.B):
        world.note("validation")
        numbers = mine[start : start + loader.B]
        x, y = (t.to(world.device) for t in loader.batch(numbers))
        with autocast(config, world.device):
            loss = (net if len(numbers) == loader.B else model)(x, y)
        loss_sum += loss * len(numbers)
    net.train()
    return world.sum([loss_sum]).item() / num_sequences


def choice_losses(
    model: GPT, examples: list[Example], mine: range, config: TrainConfig, world: World
) -> list[np.ndarray]:
    """For each choice of examples mine the sum of the losses of its tokens, in nats. Choices of
    about the same length share a pass, the longest first."""
    rows = [(n, j, np.concatenate([examples[i].context, choice])) for n, i in enumerate(mine)
            for j, choice in enumerate(examples[i].choices)]  # fmt: skip
    rows.sort(key=lambda row: len(row[2]))
    losses = [np.zeros(len(examples[i].choices)) for i in mine]
    per_pass = 16384 if world.device.type == "cuda" else 2048  # tokens
    model.train(not config.dropout)
    while rows:
        world.note("multiple choice")
        count = max(1, per_pass // len(rows[-1][2]))
        batch, rows = rows[-count:], rows[:-count]
        tokens = [torch.from_numpy(row.astype(np.int64)).to(world.device) for _, _, row in batch]
        counts = [len(examples[mine[n]].choices[j]) for n, j, _ in batch]
        with autocast(config, world.device):
            sums = model.answer_losses(list(zip(tokens, counts, strict=True))).tolist()
        for (n, j, _), value in zip(batch, sums, strict=True):
            losses[n][j] = value
    model.train()
    return losses


def answer(
    model: GPT, examples: list[Example], text: Codec | None, config: TrainConfig, world: World
) -> dict[str, float]:
    """The shares of the examples whose likeliest choice is the right one: by the sum of its tokens'
    log-probabilities (acc), by their mean, as in llm.c (acc_norm), and by the sum over the number
    of characters, as in the lm-evaluation-harness (acc_norm_chars, where there is a vocabulary).
    Each rank takes its share of the examples."""
    mine = range(world.rank, len(examples), world.size)
    sizes = {"acc": lambda choice: 1, "acc_norm": len}
    if text:  # less the space before it
        sizes["acc_norm_chars"] = lambda choice: max(
            1, len(b"".join(map(text.decode, choice.tolist())).decode("utf-8", "replace")) - 1
        )
    right = dict.fromkeys(sizes, 0.0)
    for i, losses in zip(mine, choice_losses(model, examples, mine, config, world), strict=True):
        for name, size in sizes.items():
            norms = [size(choice) for choice in examples[i].choices]
            right[name] += int((losses / norms).argmin()) == examples[i].label
    counts = [torch.tensor(count, device=world.device) for count in right.values()]
    totals = world.sum(counts).tolist()
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
    return step == last or (every > 0 and step % every == 0)


def make_log(config: TrainConfig, is_main: bool) -> Callable:
    """log(text, **record): a line on the terminal and the record in log.jsonl, by the main rank."""
    path = Path(config.out_dir, "log.jsonl")
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    file = open(path, "a", encoding="utf-8") if is_main else None
    board = tensorboard()(config.out_dir) if config.tensorboard and is_main else None
    if file and torn:
        file.write("\n")

    def log(text: str, **record):
        if file:
            show(text)
            try:
                file.write(json.dumps({"time": time.time()} | record) + "\n")
                file.flush()
            except OSError as error:
                error.filename = str(path)  # Python names the file only when it is opened
                raise
        for name, value in record.items() if board and "step" in record else ():
            if isinstance(value, float):
                board.add_scalar(name, value, record["step"])
        if board:
            board.flush()

    return log


def tensorboard() -> type:
    """What writes for TensorBoard into a folder; ValueError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs a library: pip install tensorboard") from None
    return SummaryWriter


def show(text: str, end: str = "\n"):
    """Print, as long as there is somebody to read it."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_log(out_dir: Path) -> list[dict]:
    """The records of a run; a line that a kill has torn is left out."""
    path, records = out_dir / "log.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def prepare_own_source(tokenizer: str) -> Path:
    """The folder of the corpus that needs no download: written now, if it is not there yet."""
    folder = Path("data", f"stdlib-{tokenizer}")
    if not folder.exists():
        print(f"no --data-dir: preparing Python's own source in {folder}", flush=True)
        program = [sys.executable, Path(__file__).with_name("prepare_data.py")]
        subprocess.run([*program, "--data-dir", folder, "--tokenizer", tokenizer])
    return folder  # whoever wrote it: another run may have been faster


def open_data(config: TrainConfig) -> tuple[TokenFolder, GPTConfig]:
    """The data, and the network over its vocabulary; ValueError if an id is beyond it."""
    source = find_source(config.init_from) if config.init_from else None
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


def open_examples(path: str, vocab_size: int, tokenizer: str) -> list[Example]:
    """The questions of --hellaswag, where there are any; ValueError if they are in other tokens."""
    examples = read_examples(Path(path)) if path else []
    ids = [int(part.max()) for example in examples for part in (example.context, *example.choices)]
    largest = max(ids, default=0)
    if largest >= min(vocab_size, VOCAB_SIZES.get(tokenizer, vocab_size)) or (
        examples and tokenizer == "gpt2" and largest < 256
    ):
        why = f"--hellaswag {path}: its largest token is {largest}, the data's are of {tokenizer}"
        raise ValueError(f"{why}; write it again with --tokenizer {tokenizer}")
    return examples


def choose_out_dir(config: TrainConfig) -> Path:
    """The folder of the run, not made yet; ValueError if it holds a run that --resume must own."""
    if not config.out_dir:
        used = [int(path.name) for path in Path("out").glob("[0-9]*") if path.name.isdigit()]
        newest = max(used, default=0)
        return Path("out", f"{newest if newest and config.resume else newest + 1:03d}")
    path = Path(config.out_dir)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out-dir {path} is a file: name a folder")
    if path.is_dir() and not config.resume and (checkpoints(path) or (path / "log.jsonl").exists()):
        raise ValueError(f"--out-dir {path} holds a run: add --resume, or name another folder")
    return path


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of square matrix products on this device, measured for a quarter of a second."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    (a @ a)[0, 0].item()
    start = time.perf_counter()
    for products in count(1):
        (a @ a)[0, 0].item()  # waits for the device
        if (seconds := time.perf_counter() - start) > 0.25:
            return products * 2 * n**3 / seconds / 1e12


def peak_memory_mib(device: torch.device) -> float | None:
    """Of the device, or of this process where the device has no memory of its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac, else KiB
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def environment(world: World) -> dict:
    """What a result depends on besides the flags."""
    is_cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if is_cuda else platform.processor()
    status, head = subprocess.getstatusoutput(f'git -C "{Path(__file__).parent}" rev-parse HEAD')
    return {
        "commit": "" if status else head, "torch": str(torch.__version__), "numpy": np.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": str(world.device.type), "device_name": name,
        "threads": torch.get_num_threads(), "ranks": world.size,
    }  # fmt: skip


def codec(tokenizer: str) -> Codec | None:
    """None where this machine lacks what it takes."""
    if tokenizer == "bytes":
        return Codec(str.encode, lambda i: bytes([i]) if i < 256 else b"<|endoftext|>")
    if tokenizer != "gpt2" or missing_vocab():
        return None
    try:
        import tiktoken
    except ImportError:
        return None
    gpt2 = tiktoken.get_encoding("gpt2")
    return Codec(gpt2.encode_ordinary, lambda i: gpt2.decode_bytes([i]) if i < 50257 else b"")


def stream(
    model: GPT, tokenizer: str, config: TrainConfig, world: World, number: int
) -> Iterator[str]:
    """Sample number of a model, piece by piece: the prompt and what it goes on with, from the same
    random numbers each time."""
    text, device = codec(tokenizer), world.device
    end_of_text = min(VOCAB_SIZES.get(tokenizer, 1), model.config.vocab_size) - 1  # before each
    ids = list(text.encode(config.prompt)) if text and config.prompt else [end_of_text]
    seed = np.random.SeedSequence([config.seed, number]).generate_state(1, np.uint64)[0]
    rng = torch.Generator(device).manual_seed(int(seed))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be half a character
    yield config.prompt if text else "no vocabulary here for --prompt, nor to read this: "
    how = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
    tokens = model.generate(torch.tensor([ids], device=device), rng, **how)
    for _ in range(config.sample_tokens):
        world.note("a sample")
        with autocast(config, device):  # not around the yield: whoever reads this goes on in it
            i = int(next(tokens))
        yield decoder.decode(text.decode(i)) if text else f"{i} "
    yield decoder.decode(b"", final=True)


def sample(run: Run):
    model, config, step = run.state.model, run.config, run.state.step
    model.train(not config.dropout)
    texts = ["".join(stream(model, run.data.tokenizer, config, run.world, n))
             for n in range(config.num_samples)]  # fmt: skip
    model.train()
    text = "\n---\n".join(texts)
    run.log(f"sample after step {step}:\n{text}", step=step, sample=text)


def newest_state(out_dir: Path, world: World) -> dict | None:
    """What the newest good checkpoint holds, if there is any checkpoint; exit 7 if none is good."""
    path = world.from_main(lambda: newest_checkpoint(out_dir))
    if not path and checkpoints(out_dir):
        why = f"error: --resume: no good checkpoint in {out_dir}"
        raise SystemExit(fail(7, why, world.is_main))
    return read_checkpoint(path) if path else None


def set_up(config: TrainConfig, given: set[str], world: World) -> Run | None:
    """All that train needs, or None if the run is complete. Every mistake in flags or files raises
    here, ValueError or OSError, before anything of the run is written."""
    config.num_micro(world.size)
    if config.tensorboard:
        tensorboard()  # is it there?
    world.agree({spell(name): value for name, value in asdict(config).items()} | code_digest())
    out_dir = world.from_main(lambda: choose_out_dir(config))
    world.note("opening the data")
    data, shape = world.from_main(lambda: open_data(config))
    examples = open_examples(config.hellaswag, shape.vocab_size, data.tokenizer)
    world.agree({"the beginning of each shard": beginnings(data)})
    saved = newest_state(out_dir, world) if config.resume else None
    if saved:
        check_identity(saved["identity"], identity(config, shape, data), out_dir)
        if saved["step"] >= config.steps:
            return None
    is_source = config.init_from and not saved
    weights = find_source(config.init_from).weights(shape) if is_source else None
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
    name = config.init_from
    if config.resume:
        name = str(world.from_main(lambda: newest_checkpoint(choose_out_dir(config))) or "")
        if not name:
            raise ValueError(
                f"--resume: no good checkpoint in {choose_out_dir(config)}: --out-dir?"
            )
    if not name:
        raise ValueError("whose weights? Add --resume, with --out-dir, or --init-from")
    source = find_source(name)
    own = {n: v for n, v in source.flags.items() if n not in UNSEEN} if config.resume else {}
    own |= {n: source.flags[n] for n in ("data_dir", "eval_tokens", "prompt") if config.resume}
    own |= {n: getattr(config, n) for n in given} | {"compile": False, "compile_mode": "default"}
    config = replace(config, **own)
    off = {*why_off(config, given - {"compile"}, world.device)}
    off |= {"bf16_residual"} if "bf16" in off else set()
    config = replace(config, init_from=name, **{n: False for n in off})
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    how = ("flash", "bf16_residual", "loss_chunk_tokens")
    model = GPT(source.shape, **{n: getattr(config, n) for n in how})
    model.load_state_dict(source.weights(source.shape))
    model.to(world.device).train(False)
    if config.export:
        world.from_main(partial(export, model, source, Path(config.export)))
    if config.eval_only:
        evaluate_only(model, source, config, world)
    if config.sample_only and world.is_main:
        sample_only(model, source, config, world)
    return 0


def sample_only(model: GPT, source: Source, config: TrainConfig, world: World):
    for number in range(config.num_samples):
        for text in stream(model, source.tokenizer, config, world, number):
            show(text, end="")
        show("\n---" if number + 1 < config.num_samples else "")


def evaluate_only(model: GPT, source: Source, config: TrainConfig, world: World):
    shape = source.shape
    config = replace(config, seq_len=shape.seq_len, model=source.flags.get("model", "gpt2"))
    data = world.from_main(lambda: open_data(config))[0]
    examples = open_examples(config.hellaswag, shape.vocab_size, data.tokenizer)
    B = max(1, 4096 // shape.seq_len)
    loader = ShardLoader(data.val, B, shape.seq_len, world.rank, world.size)
    figures = validation(evaluate(model, model, loader, config, world), data)
    count = min(config.eval_tokens, len(loader) * shape.seq_len)
    texts = [f"{source.path}, {count:,} validation tokens: {in_words(figures)}"]
    if examples:
        figures = answer(model, examples, codec(data.tokenizer), config, world)
        texts.append(f"{len(examples):,} questions: {in_words(figures)}")
    if world.is_main:
        show("\n".join(texts))


def export(model: GPT, source: Source, folder: Path):
    """Write a network in Hugging Face's format; OSError if the folder is there."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError("--export needs a library: pip install safetensors") from None
    if folder.exists():
        raise FileExistsError(f"--export {folder} exists: name a new folder")
    end_of_text = VOCAB_SIZES[source.tokenizer] - 1 if source.tokenizer in VOCAB_SIZES else None
    settings = hf_config(model.config, end_of_text)
    tokens = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    texts = {"config.json": settings, "generation_config.json": tokens}
    texts = {name: json.dumps(content, indent=2) for name, content in texts.items()}
    texts["README.md"] = card(source, folder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as unfinished:
        new = Path(unfinished, folder.name)
        new.mkdir()
        if source.tokenizer == "gpt2" and not missing_vocab():
            for path, name in zip(vocab_files(), ("merges.txt", "vocab.json"), strict=True):
                shutil.copy(path, new / name)
            texts["tokenizer_config.json"] = json.dumps(HF_TOKENIZER)
        for name, text in texts.items():
            (new / name).write_text(text + "\n", encoding="utf-8")
        try:
            save_file(hf_weights(model), new / "model.safetensors", {"format": "pt"})
        except Exception as error:  # safetensors has its own
            raise OSError(f"--export {folder} can't be written: {error}") from None
        os.rename(new, folder)
    show(f"wrote {folder}: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def card(source: Source, name: str) -> str:
    """The README of an exported network, with its run's last figures."""
    lines = [f"# {name}", "", f"GPT-2, written by train_gpt2.py from {source.path}.", ""]
    if source.tokenizer == "bytes":
        lines += ["Its tokens are the bytes of the text, 0 to 255; 256 comes before each text.", ""]
    wanted = ("loss", "val_loss", "perplexity", "bits_per_byte", "hellaswag_acc_norm")
    is_run = source.path in checkpoints(source.path.parent)
    step, last = int(source.path.stem[11:]) if is_run else 0, {}
    for record in read_log(source.path.parent) if is_run else ():
        if record.get("step", math.inf) <= step:
            last |= {n: (record["step"], record[n]) for n in wanted if record.get(n) is not None}
    lines += ["| figure | step | value |", "|---|--:|--:|"] if last else []
    lines += [f"| {n} | {step:,} | {value:.4f} |" for n, (step, value) in last.items()]
    return "\n".join(lines)


def code_digest() -> dict[str, str]:
    files = [
        Path(__file__).with_name(f"{name}.py") for name in ("train_gpt2", "model", "dataloader")
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def beginnings(data: TokenFolder) -> str:
    """A digest of the data as this rank's machine has it, or why it can't be read there."""
    try:
        return data.fingerprint()
    except OSError as error:
        return str(error)


def take(out_dir: Path, config: TrainConfig, shape: GPTConfig) -> IO:
    """Make the run's folder this process's own. OSError if another one has it, or if the disk has
    too little room for its checkpoints."""
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
    log, env = make_log(config, world.is_main), environment(world)
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
    now |= {name: env[name] for name in ("torch", "device_name", "threads", "ranks")}
    changed = {name: value for name, value in now.items() if was.get(name) != value}
    texts = {n: f"{spell(n) if n in flags else n} {v} instead of {was.get(n)}"
             for n, v in changed.items()}  # fmt: skip
    told = [text for name, text in texts.items() if name in flags and name not in ROUNDING]
    inexact = [text for name, text in texts.items() if name not in flags or name in ROUNDING]
    reasons = [f"not bit for bit because of {', '.join(inexact)}"] if inexact else []
    text = ", ".join([f"resumed after step {run.state.step}", *told, *reasons])
    run.log(text, resumed=run.state.step, changed=changed)


@dataclass
class Signals:
    """SIGINT, SIGTERM and SIGUSR1 since the start. Once there are steps to save, the first one ends
    the run after its step; before, and a second one, at once."""

    times: list[float] = field(default_factory=list)
    save_first: bool = False


@contextmanager
def stop_signals(is_main: bool) -> Iterator[Signals]:
    """Note the signals that come inside. A second one counts when it comes two seconds after the
    first: torchrun passes on to its ranks what the terminal has already sent them. A terminal that
    closes stops nothing, but torchrun, which passes that on too and then kills its ranks."""
    signals, is_torchrun = Signals(), "TORCHELASTIC_RUN_ID" in os.environ

    def note(number, frame):
        times = signals.times
        times.append(time.monotonic())
        if not signals.save_first or times[-1] - times[0] > 2:
            raise KeyboardInterrupt  # Python ignores it in a destructor: hence the list
        if is_main and len(times) == 1:
            with suppress(OSError):  # not by print, which the signal may have interrupted
                os.write(2, b"train_gpt2.py: finishing this step and saving it; again: end now\n")

    handlers = dict.fromkeys(("SIGINT", "SIGTERM", "SIGUSR1"), note) | {
        "SIGHUP": note if is_torchrun else signal.SIG_IGN
    }
    here = {getattr(signal, n): h for n, h in handlers.items() if hasattr(signal, n)}  # not Windows
    before = {number: signal.signal(number, handler) for number, handler in here.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watchdog(threading.Thread):
    """Ends the process with exit code 5 when nothing has happened for timeout_s, and says where.
    Among several ranks already GRACE_S after a signal, which a rank that waits for another one
    can't act on, and when torchrun has died, whose ranks would go on for ever. Seconds are counted,
    not read from a clock, so that a process that was stopped and continued is not late."""

    GRACE_S = 20  # torchrun's is 30

    def __init__(self, timeout_s: int, world: World):
        super().__init__(daemon=True)
        self.timeout_s, self.world, self.ended = timeout_s or math.inf, world, threading.Event()
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.signals, self.wakeup = socket.socketpair()
        self.signals.setblocking(False)
        self.wakeup.setblocking(False)
        self.note("the start")

    def note(self, phase: str):
        self.phase, self.idle_s = phase, 0

    def __enter__(self):
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        self.start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(-1)
        self.ended.set()
        self.join()
        self.signals.close()
        self.wakeup.close()

    def run(self):
        limit_s, why = self.timeout_s, "(--timeout-s)"
        while not self.ended.wait(1):
            self.idle_s += 1
            with suppress(BlockingIOError):
                if self.signals.recv(1) and self.world.size > 1:
                    limit_s, why, self.idle_s = self.GRACE_S, "after a signal", 0
            if self.idle_s > (self.timeout_s if self.phase.startswith("a save") else limit_s):
                self.end(f"no progress for {self.idle_s} s {why} in {self.phase}")
            if self.parent and os.getppid() != self.parent:
                self.end(f"torchrun has died in {self.phase}")

    def end(self, why: str):
        try:
            fail(5, f"error: rank {self.world.rank}: {why}; --resume goes on", True)
            sys.stderr.flush()
        finally:  # also if nobody can be told
            os._exit(5)


def train(run: Run, signals: Signals) -> int:
    """Train to config.steps: each step is logged, then saved, validated and sampled if due. Returns
    the exit code: 0, or 3 if it was stopped."""
    config, state, world = run.config, run.state, run.world
    signals.save_first = True
    if state.step == 0:
        validate(run)
    while state.step < config.steps:
        asked = lambda: bool(signals.times) or run.lost_a_save  # noqa: E731
        with profiled(run):
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
        if due(state.step, config.eval_every, config.steps):
            validate(run)
        if due(state.step, config.sample_every, config.steps):
            sample(run)
        if run.examples and due(state.step, config.hellaswag_every, config.steps):
            quiz(run)
    if world.is_main:
        draw_loss(Path(config.out_dir))
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


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """With --profile, around the third step of this process: a Chrome trace of it in the run's
    folder, and its ten largest kernels with their shares of the time."""
    step, num_done = run.state.step + 1, len(run.seconds)
    is_it = num_done == 2 or (num_done < 2 and step == run.config.steps)
    if not (run.config.profile and is_it and run.world.is_main):
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    path = Path(run.config.out_dir, f"trace_{step:06d}.json")
    profiler.export_chrome_trace(str(path))
    is_cuda = run.world.device.type == "cuda"
    times = {
        event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total)
        for event in profiler.key_averages()
        if event.device_type == (DeviceType.CUDA if is_cuda else DeviceType.CPU)
        and not event.is_user_annotation  # a span around kernels
    }
    largest = sorted(times, key=times.get, reverse=True)[:10]
    shares = {name: times[name] / sum(times.values()) for name in largest}
    lines = [f"{share:6.1%}  {name:.80}" for name, share in shares.items()]
    run.log("\n".join([f"step {step} in {path}:", *lines]), profiled=step, shares=shares)


def spike(losses: list[float], loss: float) -> str:
    """A word on a loss that is far above those before it."""
    recent = losses[-100:]
    if len(recent) < 20:
        return ""
    sigmas = (loss - np.mean(recent)) / max(np.std(recent), 1e-3)
    text = f"SPIKE: {sigmas:.0f} standard deviations above the last {len(recent)} losses"
    return text if sigmas > 6 else ""


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
    loss = evaluate(run.state.model, run.net, run.val_loader, run.config, run.world)
    figures = validation(loss, run.data)
    run.log(f"validation after step {run.state.step}: {in_words(figures)}",
            step=run.state.step, **figures)  # fmt: skip


def validation(val_loss: float, data: TokenFolder) -> dict[str, float]:
    """A validation's loss, in nats per token, in the other units that people compare."""
    figures = {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700))}
    if data.bytes_per_token:
        figures["bits_per_byte"] = val_loss / math.log(2) / data.bytes_per_token
    return figures


def in_words(figures: dict[str, float]) -> str:
    names = {"val_loss": "loss"}
    return ", ".join(f"{names.get(n, n).replace('_', ' ')} {v:.4f}" for n, v in figures.items())


def quiz(run: Run):
    step, both = run.state.step, codec(run.data.tokenizer)
    figures = answer(run.state.model, run.examples, both, run.config, run.world)
    text = f"{len(run.examples):,} questions after step {step}: {in_words(figures)}"
    run.log(text, step=step, **{f"hellaswag_{name}": value for name, value in figures.items()})


def draw_loss(out_dir: Path):
    """The run's losses in loss.png, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = (figure := Figure()).add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for name, style in (("loss", "-"), ("val_loss", "o-")):
        values = {
            r["step"]: r[name] for r in read_log(out_dir) if name in r
        }  # the last, after a resume
        axes.plot(list(values), list(values.values()), style, label=name)
    axes.legend()
    with whole_file(out_dir / "loss.png") as f:
        figure.savefig(f, format="png")


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
    except KeyboardInterrupt:
        return fail(130, "stopped by a signal before it could save", is_main)


DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)  # no mistake of the command


def run_program(argv: list[str], signals: Signals) -> int:
    world = find_world(dict(os.environ), torch.cuda.device_count())
    config, given = parse_args(argv, world.device.type)
    with Watchdog(config.timeout_s, world) as watchdog, process_group(world):
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


def agreed(error: Exception) -> bool:
    """Whether every rank has this error."""
    return getattr(error, "is_agreed", False)


def explained(error: Exception) -> tuple[int, str]:
    """The exit code and the words for what PyTorch reports as a RuntimeError, if it is known."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "t allocate memory" in str(error):
        cure = "lower --micro-batch-size, or add --recompute"
        return 2, f"error: a step does not fit the memory: {cure}: {error}"
    if re.search("gloo|NCCL|peer", str(error)):
        return 5, f"error: lost another rank: {error!s:.300}"
    raise error


def fail(code: int, why: str, is_main: bool) -> int:
    """Say why on one line, from one rank, and return the exit code."""
    if is_main:
        print("train_gpt2.py:", *why.split(), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
