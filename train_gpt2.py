"""Train GPT-2 from tokens on disk to a checkpoint, on one GPU, on many, or on a CPU.
python train_gpt2.py                                             # one GPU, or none
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --data-dir data/mine --out-dir out/mine --resume
python train_gpt2.py --resume --sample-only --prompt "def "      # or --eval-only, or --export DIR
"""

import os
import signal

__launcher__ = os.getppid()  # before torch is imported, which takes longer than torchrun may live
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends an import without a traceback

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dataloader import ShardLoader
from model import GPT, SHAPES, GPTConfig
from support import corpus, device, evaluate, folder, guard, log, ranks, report, text, weights
from support.checkpoint import checkpoints, newest_checkpoint
from support.corpus import TokenFolder
from support.flags import check_flags, flag, groups, known, make_parser, parse, spell, up_to
from support.optimizer import Optimizer
from support.questions import Example, open_examples
from support.ranks import World
from support.synonyms import SYNONYMS
from support.watch import Watcher, due
from support.weights import Source

# ---- Flags, each declared once, with type, default and help. The story begins with main, below
SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad-vocab", "fused")


@dataclass(frozen=True)
class TrainConfig:
    """One run. The defaults are GPT-2 124M's; RECIPES hold what differs for the other models."""

    model: str = flag("gpt2", "recipe; nano where there is no GPU", choices=SHAPES, group="run")
    out_dir: str = flag("", "folder of the run; none: the next free out/001, out/002, ...")
    resume: bool = flag(False, "go on from the run's newest good checkpoint, or start it")
    init_from: str = flag("", "weights to begin with: a folder, checkpoint, or name on the HF hub")
    seed: int = flag(1337, "of the initial weights, the data's order, and samples", 0, 2**64 - 1)
    save_every: int = flag(250, "steps between checkpoints; 0: only at the end", 0)
    keep: int = flag(2, "good checkpoints to keep, and the one with the best validation", 2)
    device: str = flag("auto", "where to train", choices=("auto", "cpu", "cuda", "mps"))
    timeout_s: int = flag(900, "seconds without any progress after which a run ends; 0: never", 0)
    deterministic: bool = flag(False, "the same bits each time on a GPU too, more slowly")

    data_dir: str = flag("", "folder of token shards; none: Python's own source", group="data")
    shuffle: bool = flag(True, "a new order of the sequences in each epoch, not the disk's")
    seq_len: int = flag(1024, "tokens per sequence", 1)
    batch_tokens: int = flag(524_288, "tokens per optimizer step, over all ranks", 1)
    eval_tokens: int = flag(10_485_760, "validation tokens, at most all; 0: none", 0, 2**63 - 1)

    n_layer: int = flag(12, "transformer blocks", 1, group="network")
    n_head: int = flag(12, "attention heads per block", 1)
    n_embd: int = flag(768, "channels of the residual stream", 1)
    dropout: float = flag(0.0, "share of the activations left out in training", 0, 0.99)

    steps: int = flag(50, "optimizer steps", 1, group="optimization")
    warmup_steps: int = flag(715, "steps of linear warm-up, by default at most steps / 5", 0)
    learning_rate: float = flag(6e-4, "peak learning rate", 0)
    cosine: bool = flag(True, "decay the learning rate along a cosine")
    decay_to: float = flag(0.1, "end of the cosine, as a share of the peak", 0, 1, needs="cosine")
    weight_decay: float = flag(0.1, "decay of the matrices; biases and layer norms have none", 0)
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: no limit", 0)
    muon: bool = flag(False, "the blocks' matrices by Muon, all others by AdamW")

    eval_every: int = flag(250, "steps between evaluations; 0: at both ends", 0, group="watching")
    log_every: int = flag(1, "steps between lines of the terminal; log.jsonl has every step", 1)
    hellaswag: str = flag("", "multiple-choice questions, written by prepare_data.py or llm.c")
    tensorboard: bool = flag(False, "write the log for TensorBoard too")
    wandb: bool = flag(False, "write the log for Weights & Biases too")

    num_samples: int = flag(1, "samples each time; 0: none", 0, group="samples")
    sample_tokens: int = flag(200, "tokens of a sample; 0: no samples", 0)
    prompt: str = flag("", "how a sample begins; none: as a document does")
    temperature: float = flag(0.8, "above 1 samples are bolder, below tamer, at 0 greedy", 0)
    top_k: int = flag(50, "draw among so many likeliest tokens; 0: all", 0)

    speed_ups: str = flag("all", "those up to this one alone, as the lecture adds them",
                          choices=("none", *SPEED_UPS, "all"), group="speed-ups")  # fmt: skip
    tf32: bool = flag(True, "speed-up 1: float32 products on the tensor cores")
    bf16: bool = flag(True, "speed-up 2: bfloat16 in the forward pass where it is safe (autocast)")
    compile: bool = flag(True, "speed-up 3: torch.compile")
    flash: bool = flag(True, "speed-up 4: attention in one fused kernel")
    pad_vocab: bool = flag(True, "speed-up 5: an embedding of 50,304 rows instead of 50,257")
    fused: bool = flag(True, "speed-up 6: AdamW in one kernel")
    bf16_residual: bool = flag(False, "the residual stream in bfloat16 too", needs="bf16")
    fp16: bool = flag(False, "float16 and a gradient scaler, for GPUs without bfloat16")

    micro_batch_size: int = flag(0, "sequences per rank and pass; 0: what fits", 0, group="memory")
    recompute: bool = flag(False, "less memory: the backward pass computes each block again")
    loss_chunk_tokens: int = flag(0, "less memory: tokens at a time in the loss; 0: all", 0)

    eval_only: bool = flag(False, "validate the weights, train nothing", group="other modes")
    sample_only: bool = flag(False, "sample from the weights, train nothing")
    export: str = flag("", "new folder for the weights in Hugging Face's format, train nothing")

    def __post_init__(self):
        """ValueError, with the cure, if the flags are out of range or do not fit together."""
        check_flags(self)
        if self.prompt.encode(errors="replace").decode() != self.prompt:
            raise ValueError(f"--prompt {self.prompt!r:.80} is not UTF-8: write it as UTF-8")
        if 0 < self.warmup_steps >= self.steps:
            more = f"--warmup-steps {self.warmup_steps} must be less than --steps {self.steps}"
            raise ValueError(f"{more}: try --warmup-steps {self.steps // 5}")
        own_shape = self.model != "nano" and not self.init_from
        if own_shape and self.seq_len > (most := SHAPES[self.model].seq_len):
            more = f"--seq-len {self.seq_len} is more than the {most} positions of {self.model}"
            raise ValueError(f"{more}: try --seq-len {most}")
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 are two types for the same: leave one out")
        self.shape(vocab_size=1)  # raises if the heads do not divide the channels

    def shape(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(vocab_size, **{name: getattr(self, name) for name in SHAPE_FLAGS})

    def num_micro(self, num_ranks: int) -> int:
        """Micro-batches of each rank in a step; ValueError if that is not a whole number."""
        B = max(1, self.micro_batch_size)
        return ranks.num_micro(self.batch_tokens, B, self.seq_len, num_ranks)


SHAPE_FLAGS = ("seq_len", "n_layer", "n_head", "n_embd", "pad_vocab")
NETWORK_FLAGS = ("flash", "seed", "dropout", "bf16_residual", "recompute", "loss_chunk_tokens")
SAMPLE_FLAGS = ("prompt", "sample_tokens", "temperature", "top_k")
RATE_FLAGS = ("steps", "warmup_steps", "learning_rate", "cosine", "decay_to")
GROUPS = groups(TrainConfig)
# A resumed run keeps FIXED. It may change all others, and tells which: of ROUNDING that they change
# its last bits, but nothing of UNSEEN, which change none of its numbers
FIXED = ("model", "seed", "shuffle", "muon", *SHAPE_FLAGS)
ROUNDING = {*GROUPS["speed-ups"], *GROUPS["memory"], "deterministic"}
ROUNDING -= {"speed_ups", "pad_vocab"}
UNSEEN = {"data_dir", "speed_ups", *GROUPS["run"], *GROUPS["watching"],
          *GROUPS["samples"], *GROUPS["other modes"]} - {*FIXED, *ROUNDING}  # fmt: skip
ONCE = {"out_dir", "resume", "device", "speed_ups", *GROUPS["other modes"]}
RECIPES = {  # GPT's learning rates and batches: Brown et al. 2020, table 2.1; nano's: measured
    "gpt2": {},
    "gpt2-medium": {"learning_rate": 3e-4},
    "gpt2-large": {"learning_rate": 2.5e-4},
    "gpt2-xl": {"learning_rate": 2e-4, "batch_tokens": 1_048_576},
    "nano": {"learning_rate": 8e-3, "batch_tokens": 2048, "steps": 1200, "warmup_steps": 50}
    | {"muon": True, "eval_every": 600, "eval_tokens": 262_144},
}
RECIPES = {model: own | {name: getattr(SHAPES[model], name) for name in SHAPE_FLAGS}
           for model, own in RECIPES.items()}  # fmt: skip
UNSET = {f.name: f.default for f in fields(TrainConfig)}
known_flags = partial(known, TrainConfig, warmup_steps=0)  # those in another run's record
read_flags = partial(parse, make_parser(TrainConfig, __doc__ or "", RECIPES, SYNONYMS))


def parse_args(
    argv: list[str], device_type: str, is_main: bool = True
) -> tuple[TrainConfig, set[str], Source | None]:
    """The run that a command line asks for, the names of the flags that it gives, and the weights
    that it begins with."""
    typed = read_flags(argv)
    for name in ("data_dir", "out_dir", "init_from", "hellaswag", "export"):
        if typed.get(name) == "":
            raise ValueError(f"{spell(name)} is empty: name one, or leave it out")
    given = up_to(typed.get("speed_ups", "all"), SPEED_UPS) | typed
    if typed.get("resume") and not any(map(typed.get, ("eval_only", "sample_only", "export"))):
        out_dir = folder.choose_out_dir(typed.get("out_dir", ""), resume=True)
        own, told = report.goes_on_with(out_dir, given, known_flags, ONCE)
        if told and is_main:
            log.show(told)
        given = own | given
    source = weights.find_source(given, typed, partial(guard.fail, 7, is_main=is_main), known_flags)
    model = given.get("model", "gpt2" if device_type == "cuda" or source else "nano")
    values = {"model": model} | RECIPES[model]
    if source:  # nanoGPT's values for finetuning
        own = {name: getattr(source.shape, name) for name in SHAPE_FLAGS if name != "pad_vocab"}
        values |= own | {"model": source.flags.get("model", "gpt2")}
        values |= {"learning_rate": 3e-5, "batch_tokens": 32_768}
    if device_type != "cuda" and model != "nano":
        values["eval_tokens"] = 8192  # half a minute of a CPU, not hours
    if "data_dir" not in given and not source:
        values["prompt"] = "def "  # Python's own source
    steps = given.get("steps", values.get("steps", TrainConfig.steps))
    values["warmup_steps"] = min(values.get("warmup_steps", TrainConfig.warmup_steps), steps // 5)
    values["bf16"] = not given.get("fp16")
    return TrainConfig(**values | given), set(given), source


# ---- Speed-ups 1, 2, 3 and DDP; 4 and 5 are in model.py, 6 is in make_optimizer


def autocast(config: TrainConfig, device: torch.device):
    dtype = torch.float16 if config.fp16 else torch.bfloat16  # speed-up 2
    return torch.autocast(device.type, dtype, enabled=config.bf16 or config.fp16)


def speed_up(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """The same parameters behind torch.compile and DDP; model stays plain: saved and sampled."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")  # speed-up 1: TF32
    # compiled code for a CPU adds up in an order that varies
    device.set_determinism(config.deterministic or world.device.type == "cpu", config.compile)
    device.set_allocator(world.device, keep=not config.recompute)
    net = torch.compile(model, dynamic=False) if config.compile else model  # speed-up 3
    return DDP(net, gradient_as_bucket_view=True) if world.size > 1 else net


# ---- One step: the optimizer, its learning rate, and what leads to an update


def make_optimizer(model: GPT, config: TrainConfig) -> Optimizer:
    """AdamW as GPT-3 set it (Brown et al. 2020, appendix B); with --muon not for the matrices."""
    decayed, others = model.decay_groups()
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others}]
    options = {"lr": config.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
    options |= {"fused": config.fused or None}  # speed-up 6; without it torch picks its second best
    if config.muon:
        options |= {"matrices": model.matrices(), "bf16": config.bf16}
    return Optimizer(groups, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine from learning_rate at warmup_steps to its share decay_to at
    steps; step counts those already made, left-out ones included."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if not config.cosine:
        return config.learning_rate
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)  # 0 .. 1
    share = config.decay_to + (1 - config.decay_to) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


class StepResult(NamedTuple):
    loss: float  # the mean before the update
    norm: float  # of the gradient
    must_stop: bool  # on some rank
    notice: str  # a word if the update was left out


def train_step(
    state: folder.TrainState, net: nn.Module, config: TrainConfig, world: World, asked: Callable
) -> StepResult:
    """One optimizer step over batch_tokens, at whose end it is asked whether to stop.
    FloatingPointError if loss or norm is not finite on some rank, unless float16 has overflowed."""
    device, num_micro = world.device, config.num_micro(world.size)
    if config.dropout:  # each step and rank its own random numbers: there is no state to save
        key = np.random.SeedSequence([config.seed, state.step, world.rank])
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0]))
    loss_sum, bad = torch.zeros((), device=device), torch.zeros(world.size, device=device)
    for micro_step in range(num_micro):
        world.note(f"micro-step {micro_step + 1}/{num_micro} of step {state.step + 1}")
        batch = state.loader.next_batch()  # pinned for CUDA alone
        x, y = (t.to(device, non_blocking=device.type == "cuda") for t in batch)
        with ranks.gradient_sync(net, enabled=micro_step == num_micro - 1):
            with autocast(config, device):
                loss = net(x, y) / num_micro  # a mean of means: backward() adds gradients up
            state.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    state.scaler.unscale_(state.optimizer)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), config.grad_clip or math.inf)
    bad[world.rank] = ~loss_sum.isfinite()
    stop = torch.full((), float(asked()), device=device)
    totals = world.sum([loss_sum, norm, stop, *bad])
    apply_gradients(state, config, totals[:2].isfinite().all())
    state.loader.read_ahead()
    loss, norm, stop, *bad = totals.tolist()  # with --fused, here alone a step waits for the device
    loss, norm, notice = loss / world.size, norm / world.size, ""
    if not math.isfinite(loss + norm):
        notice = state.leave_out(loss, norm, bad, num_micro)
    state.step += 1
    return StepResult(loss, norm, stop > 0 or (world.size == 1 and asked()), notice)


def apply_gradients(state: folder.TrainState, config: TrainConfig, is_finite: Tensor):
    """Update the weights if the step is finite, which the device itself decides where it can."""
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(state.step, config)
    if config.fused and is_finite.device.type != "mps":  # its kernel leaves out an update where
        state.optimizer.found_inf = 1 - is_finite.float()  # found_inf is 1, and nobody waits
        state.optimizer.step()
    elif is_finite:
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.scaler.update()


# ---- The loop


@dataclass
class Run:
    """What set_up has made, for train."""

    config: TrainConfig
    world: World
    data: TokenFolder
    state: folder.TrainState
    net: nn.Module
    environment: dict
    log: Callable
    progress: log.Progress
    saver: folder.Saver
    watcher: Watcher
    lock: list[IO]  # of out_dir, which the main rank holds


def train(run: Run, signals: guard.Signals) -> int:
    """Train to config.steps: each step is logged, then saved, validated and sampled if due. Returns
    the exit code: 0, or 3 if it was stopped."""
    config, state, world, saver = run.config, run.state, run.world, run.saver
    asked, must_stop = lambda: bool(signals.times) or saver.has_failed, False
    signals.save_first = True
    run.watcher.catch_up()  # a stop waits for it and for one step: else some run would make none
    while not must_stop and state.step < config.steps:
        start = time.perf_counter()
        result = train_step(state, run.net, config, world, asked)
        seconds = time.perf_counter() - start
        log_step(run, result, seconds)
        if due(state.step, config.save_every, config.steps):
            save(run, wait=state.step == config.steps)
        must_stop = result.must_stop or run.watcher.watch(asked)
    if must_stop:
        save(run, wait=True)
        run.log(report.stop_text(Path(config.out_dir), state.step, world.size), stopped=state.step)
        return 3
    run.log(report.end_text(Path(config.out_dir)) if world.is_main else "", done=state.step)
    return 0


def log_step(run: Run, result: StepResult, seconds: float):
    lr = learning_rate(run.state.step - 1, run.config)
    run.progress.step(run.state.step, result.loss, result.norm, lr, seconds, result.notice)


def watched(config: TrainConfig) -> dict[str, int]:
    """How often what is watched is due, by its name in the log; 0: at the end."""
    every = {"val_loss": config.eval_every} if config.eval_tokens else {}
    every |= {"sample": config.eval_every} if config.num_samples * config.sample_tokens else {}
    every |= {"hellaswag_acc": config.eval_every} if config.hellaswag else {}
    return every | {"picture": config.eval_every}


def save(run: Run, wait: bool):
    """Write a checkpoint, by the main rank: all hold the same weights, which is compared first."""
    ranks.check_replicas(run.state.model, run.state.step, run.world)
    run.world.note(f"a save after step {run.state.step}")

    def write():
        own = identity(run.config, run.state.model.config, run.data)
        facts = {"identity": own, "config": asdict(run.config), "environment": run.environment}
        run.saver.save(run.state.state_dict() | facts, wait)

    run.world.from_main(write)


def identity(config: TrainConfig, shape: GPTConfig, data: TokenFolder) -> dict:
    """What must not change while a run goes on: its network, optimizer, data, and their order."""
    facts = {"data_dir": data.fingerprint, "tokenizer": data.tokenizer} | asdict(shape)
    return {name: getattr(config, name) for name in FIXED if name not in SHAPE_FLAGS} | facts


# ---- Starting


def set_up(config: TrainConfig, given: set[str], source: Source | None, world: World) -> Run | None:
    """All that train needs, or None if the run is complete. Every mistake in flags or files raises
    here, ValueError or OSError, before anything of the run is written."""
    config.num_micro(world.size)
    boards = [getattr(log, name)() for name in ("tensorboard", "wandb") if getattr(config, name)]
    world.agree({spell(name): value for name, value in asdict(config).items()})
    out_dir = world.from_main(lambda: folder.choose_out_dir(config.out_dir, config.resume))
    seen = world.from_main(lambda: checkpoints(out_dir))
    world.note("opening the data")
    data, shape = world.from_main(lambda: open_data(config, source))
    examples = open_examples(config.hellaswag, shape.vocab_size, data.tokenizer)
    world.agree({"the data": corpus.fingerprint_here(data.train[0].path.parent)})
    saved = own_state(config, out_dir, data, shape, world) if config.resume else None
    if saved and saved["step"] >= config.steps:
        if world.from_main(partial(log.noted, out_dir, saved["step"])) >= watched(config).keys():
            world.tell(report.end_text(out_dir))
            return None
    initial = source.weights(shape) if source and not saved else None
    world.note("compiling and warming up")
    off = device.why_off(asdict(config), given, world.device)
    config = replace(config, out_dir=str(out_dir), **device.chosen(off, given, world.device))
    lock, size = [], 12 * shape.num_params  # weights and two moments, float32
    world.from_main(lambda: lock.append(folder.take(out_dir, config.keep, size, seen)))
    run = build(config, world, data, shape, initial, examples, lock, boards)
    log_start(run, given, off, bool(saved))
    # The first compiles, if none was tried. In the second DDP rearranges its buckets, as after a
    # process's first backward pass: else a resumed run would sum in another order, to other bits
    for _ in range(2 if world.size > 1 else bool(config.micro_batch_size)):
        made_up_pass(run.net, run.config, world)
    if saved:
        run.state.load_state_dict(saved)
        log_resume(run, saved)
    return run


def open_data(config: TrainConfig, source: Source | None) -> tuple[TokenFolder, GPTConfig]:
    """The data, and the network over its vocabulary, or over that of the weights to begin with;
    ValueError if an id is beyond it."""
    weights_of = (source.tokenizer, source.shape.vocab_size) if source else None
    known = 0 if config.model == "nano" else SHAPES[config.model].vocab_size
    data, vocab_size = corpus.choose(config.data_dir, config.seq_len, known, weights_of)
    return data, config.shape(vocab_size)


def newest_state(out_dir: Path, world: World) -> tuple[Path, dict] | None:
    """The newest good checkpoint, and what it holds, whose flags this program can have."""
    tell = partial(guard.fail, 7, is_main=world.is_main)
    return newest_checkpoint(out_dir, tell, world.gather, lambda s: known_flags(s["config"]))


def own_state(
    config: TrainConfig, out_dir: Path, data: TokenFolder, shape: GPTConfig, world: World
) -> dict | None:
    """What the run goes on from, if there is anything; ValueError if it is another run's."""
    if not (found := newest_state(out_dir, world)):
        return None
    folder.check_identity(found[1], identity(config, shape, data), data, out_dir)
    return found[1]


def build(
    config: TrainConfig, world: World, data: TokenFolder, shape: GPTConfig,
    initial: dict | None, examples: list[Example], lock: list[IO], boards: list[type],
) -> Run:  # fmt: skip
    """The network and everything around it, in the state before the first step."""
    model, net, config = make_net(config, world, shape, initial)
    out_dir = Path(config.out_dir)
    place = (config.micro_batch_size, config.seq_len, world.rank, world.size)
    loader = ShardLoader(data.train, *place, seed=config.seed if config.shuffle else None)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.fp16)
    state = folder.TrainState(model, make_optimizer(model, config), loader, scaler)
    tell = log.make_log(out_dir, world.is_main, [b(out_dir) for b in boards * world.is_main])
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    return Run(
        config, world, data, state, net, device.environment(world.device, world.size), tell,
        log.Progress(
            tell, world.device, config.steps, config.log_every, config.batch_tokens,
            model.flops_per_token() / world.size, device.matmul_tflops(world.device, dtype),
        ),
        folder.Saver(out_dir, config.keep, world.device, tell, partial(guard.fail, 6)),
        Watcher(
            state, net, ShardLoader(data.val, *place), config.eval_tokens, data.tokenizer, examples,
            samples=partial(samples, model, data.tokenizer, config),
            autocast=partial(autocast, config, world.device), world=world, log=tell,
            out_dir=out_dir, every=watched(config), steps=config.steps,
        ),
        lock,
    )  # fmt: skip


def make_net(
    config: TrainConfig, world: World, shape: GPTConfig, initial: dict | None
) -> tuple[GPT, nn.Module, TrainConfig]:
    """The network, plain and sped up, and config with a micro-batch that fits on every rank."""

    def make() -> tuple[GPT, nn.Module]:
        model = GPT(shape, **{name: getattr(config, name) for name in NETWORK_FLAGS})
        if initial:
            model.load_state_dict(initial)
        return model, speed_up(model.to(world.device), config, world)

    def attempt(net: nn.Module, B: int):
        with ranks.gradient_sync(net, enabled=False):  # a rank may fail, and none waits for it
            made_up_pass(net, replace(config, micro_batch_size=B), world)

    if config.micro_batch_size:
        return *make(), config
    B = device.most_sequences(config.num_micro(world.size), config.seq_len, world.device)
    model, net, B = device.fitting(make, attempt, B, world)
    return model, net, replace(config, micro_batch_size=B)


def made_up_pass(net: nn.Module, config: TrainConfig, world: World):
    """Forward and backward on made-up tokens, thrown away."""
    shape = (config.micro_batch_size, config.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
    with autocast(config, world.device):
        loss = net(tokens, tokens.clone())  # two tensors, as in a step: else compiled twice
    loss.backward()
    net.zero_grad(set_to_none=True)


def samples(model: GPT, tokenizer: str, config: TrainConfig, world: World) -> Callable:
    how = {name: getattr(config, name) for name in SAMPLE_FLAGS}
    how |= {"autocast": partial(autocast, config, world.device), "note": world.note}
    return partial(text.samples, model, tokenizer, config.num_samples, config.seed, **how)


def log_start(run: Run, given: set[str], off: dict[str, str], goes_on: bool):
    """The first record: where this runs, every flag, and who chose it."""
    facts = {"environment": run.environment, "flags": asdict(run.config), "off": off}
    facts |= {"tokenizer": run.data.tokenizer, "matmul_tflops": run.progress.matmul_tflops}
    facts |= {"goes_on": goes_on}
    text, record = report.start(facts, given, UNSET, run.state.model, run.state.loader)
    run.log(text, **record)


def log_resume(run: Run, saved: dict):
    """Where the run goes on, which flags are not those it was saved with, and what keeps it from
    being the uninterrupted run bit for bit."""
    step, env = run.state.step, run.environment
    was = UNSET | saved["config"]  # which lacks the flags that a fork has added since
    now = {name: value for name, value in asdict(run.config).items() if name not in UNSEEN}
    changed = report.changes(was | saved["environment"], now, env)
    then = replace(run.config, **{name: was[name] for name in RATE_FLAGS})
    rates = learning_rate(min(step, then.steps), then), learning_rate(step, run.config)
    words = report.resume_text(step, changed, env, ROUNDING, rates)
    run.log(words, resumed=step, changed={name: new for name, (_, new) in changed.items()})


# ---- Without training, and the program


def as_saved(
    config: TrainConfig, given: set[str], source: Source | None, world: World
) -> tuple[TrainConfig, Source]:
    """The weights of --resume or --init-from, and the flags that they were trained with."""
    if config.resume:
        out_dir = world.from_main(lambda: folder.choose_out_dir(config.out_dir, config.resume))
        if not (found := newest_state(out_dir, world)):
            raise ValueError(f"--resume: no good checkpoint in {out_dir}: --out-dir?")
        source = weights.from_run(*found)
    if not source:
        raise ValueError("whose weights? Add --resume, with --out-dir, or --init-from")
    seen = {f.name for f in fields(config)} - {*UNSEEN} | {"data_dir", "prompt"}
    own = {n: v for n, v in source.flags.items() if n in seen and config.resume}
    own = asdict(config) | own | {name: getattr(config, name) for name in given}
    own |= {"compile": False}
    off = {*device.why_off(own, given - {"compile"}, world.device)}
    off |= {"bf16_residual"} if "bf16" in off else set()
    return TrainConfig(**own | dict.fromkeys(off, False)), source


def use_weights(config: TrainConfig, source: Source, world: World) -> int:
    """--eval-only, --sample-only and --export: show what weights are worth, train nothing."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    how, T = ("flash", "bf16_residual", "loss_chunk_tokens"), source.shape.seq_len
    model = GPT(source.shape, **{name: getattr(config, name) for name in how})
    model.load_state_dict(source.weights(source.shape))
    model.to(world.device).train(False)
    if config.export:
        from support.export import export

        records = log.read_log(source.path.parent) if source.flags else []
        world.tell(world.from_main(partial(export, model, source, Path(config.export), records)))
    if config.eval_only:
        asked = replace(config, seq_len=T, model=source.flags.get("model", "gpt2"))
        data = world.from_main(lambda: open_data(asked, source))[0]
        examples = open_examples(config.hellaswag, source.shape.vocab_size, data.tokenizer)
        how = data.val, T, config.eval_tokens, data.tokenizer, examples, world
        how = *how, partial(autocast, config, world.device)
        world.tell(evaluate.report(str(source.path), model, *how))
    if config.sample_only and world.is_main:
        log.show_samples(samples(model, source.tokenizer, config, world)())
    return 0


def main(argv: list[str] | None = None) -> int:
    device.set_environment()
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with guard.stop_signals(is_main) as signals:
            return run_program(sys.argv[1:] if argv is None else argv, signals)
    except (Exception, KeyboardInterrupt) as error:
        code, why = guard.explained(error)
        return guard.fail(code, why, is_main or not (ranks.agreed(error) or code == 130))


def run_program(argv: list[str], signals: guard.Signals) -> int:
    kind = read_flags(argv).get("device", "auto")
    world = ranks.find_world(dict(os.environ), torch.cuda.device_count(), kind)
    config, given, source = parse_args(argv, world.device.type, world.is_main)
    torchrun = __launcher__ if "TORCHELASTIC_RUN_ID" in os.environ else None
    watchdog = guard.Watchdog(config.timeout_s, world.rank, world.size, torchrun)
    with watchdog, ranks.process_group(world, config.timeout_s):
        note = report.Status(watchdog.note, world.is_main and not config.sample_only)
        world = replace(world, note=note, tell=log.show if world.is_main else bool)
        if config.eval_only or config.sample_only or config.export:
            return use_weights(*as_saved(config, given, source, world), world)
        return set_up_and_train(world, signals, config, given, source)


def set_up_and_train(world: World, signals: guard.Signals, *command) -> int:
    """Not in run_program: its frame would hold the DDP until the ranks' group is gone."""
    if not (run := set_up(*command, world)):
        why = f"already complete: --steps {command[0].steps} are done"
        return guard.fail(0, why, world.is_main)
    with run.saver:
        return guard.ended(partial(train, run, signals), world.is_main)


if __name__ == "__main__":
    sys.exit(main())
