"""Train GPT-2 on token shards and save checkpoints, on one GPU, several GPUs or a CPU.
python train_gpt2.py                                             # one GPU, or a CPU
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --resume --out-dir out/mine
"""

import os
import signal
import sys
from contextlib import suppress

import config as flags  # `config` is a run's TrainConfig
from support.cli import RunError, UserError, report, spell

if __name__ == "__main__":
    # Until the first step, Ctrl-C ends the process at once. Python's own handler would wait until
    # a connection to other ranks or a compilation has finished. nohup's SIG_IGN stays.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A waiting OpenMP thread spins 300,000 times by default, which would take the core of another
    # rank's thread. torch reads this variable once, when it is imported.
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Answer --help before torch is imported. main() reads the flags again, and reports errors.
    with suppress(UserError):
        flags.read_flags(sys.argv[1:], __doc__ or "")

import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

import evaluate
from config import TrainConfig
from dataloader import GPT2_TOKENS, ShardError, ShardLoader, open_folder
from model import GPT, ComputeConfig, GPTConfig
from support import checkpoint, device
from support.log import Log, find_tracker
from support.muon import MuonAdamW
from support.tokenizer import find_tokenizer
from support.world import DONE, INTERRUPTED, STOPPED, Stop, World, connected, ignore_signals

STARTED_AT = time.monotonic()

# ---- The speed-ups of the lecture ----------------------------------------------------------------
#
# 1 TF32           set_backends, below             4 flash attention    flash_attention in model.py
# 2 BF16 autocast  autocast in support/device.py   5 padded vocabulary  num_rows in model.py
# 3 torch.compile  speed_up, below                 6 fused AdamW        make_optimizer, below
#
# Gradient accumulation is in train_step, DDP in speed_up and train_step.


def set_backends(config: TrainConfig, world: World):
    """Set torch's global switches. Call this before the first matrix product."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")  # speed-up 1: TF32
    # Make every CPU deterministic: compiled code would otherwise sum in a varying order.
    on_cpu = world.device.type == "cpu"
    device.set_determinism(config.deterministic or on_cpu)
    if config.compile:
        # Up to 2.11, torch's cache of compiled code overlooks autocast's dtype (pytorch#181564).
        torch.compiler.config.cache_key_tag = config.dtype
    # Keeping freed memory fragments it, and whoever uses --recompute has little to spare.
    if on_cpu and not config.recompute:
        device.keep_freed_memory()


def speed_up(model: GPT, config: TrainConfig, world: World) -> tuple[nn.Module, TrainConfig]:
    """Return model wrapped in torch.compile and DDP, which share its parameters, and the config
    with a micro-batch that fits in memory. We save, load and sample the plain model, so that
    parameter names in checkpoints have no `_orig_mod.` or `module.` prefix, and inputs of other
    shapes trigger no recompilation."""
    net: nn.Module = model
    if config.compile:
        if world.device.type == "cuda":
            # Try sizes before compiling, which would take half a minute for each. What fits now
            # also fits when it is compiled, as that needs less memory.
            config = device.fit(model, config, world)
            if world.is_main:
                print("compiling the network: half a minute the first time, 10 s after that")
        # Every training batch has the same shape, so code for dynamic shapes would gain nothing.
        net = torch.compile(model, dynamic=False)  # type: ignore[assignment]  # speed-up 3
    if world.size > 1:
        # Gradients that are views into DDP's buckets avoid a second copy in memory.
        net = DDP(net, gradient_as_bucket_view=True)
    config = device.fit(net, config, world)
    # After its first backward pass, DDP rebuilds its buckets and then sums in another order. Do
    # this now, or a resumed run would differ from an uninterrupted one in the last bits.
    for _ in range(2 if world.size > 1 else 0):
        device.dummy_pass(net, config, world)
    return net, config


# ---- The optimizer and its learning rate ---------------------------------------------------------


def make_optimizer(model: GPT, config: TrainConfig, world: World) -> torch.optim.Optimizer:
    """Return AdamW as in GPT-3 (Brown et al. 2020, appendix B). --muon uses Muon for matrices."""
    # Don't decay layer-norm gains (they belong near 1) or biases (too few to matter).
    decayed, others = model.decay_groups()
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # Beside Muon, AdamW trains only embeddings and vectors: 0.99 beat 0.95 (benchmarks/README.md).
    betas = (config.beta1, 0.99 if config.muon else 0.95)
    # Speed-up 6. With None instead of False, torch picks the fastest unfused implementation. Each
    # step sets the rate.
    options: dict = {"betas": betas, "fused": config.fused or None}
    if config.muon:
        return MuonAdamW(groups, model.matrices(), config.bf16, world, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate for a step, counted from 0: a linear warm-up, then the schedule.
    cosine and wsd (warm-up, stable, decay) end at decay_to * learning_rate."""
    if step < config.warmup_steps:
        # step + 1, because a rate of 0 would waste the first step
        return config.learning_rate * (step + 1) / config.warmup_steps
    remaining = config.steps - config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / remaining  # 0 .. 1
        height = 0.5 * (1 + math.cos(math.pi * progress))  # 1 .. 0
    elif config.schedule == "wsd":
        decay_steps = max(1, min(round(config.decay_share * config.steps), remaining))
        height = min(1, (config.steps - step) / decay_steps)  # 1, then linearly down to 0
    elif config.schedule == "constant":
        height = 1
    else:
        raise ValueError(f"--schedule {config.schedule} has no branch in learning_rate")
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * height)


# ---- A run and its state -------------------------------------------------------------------------


class Run:
    """All that training needs, for a new run or a resumed one."""

    def __init__(self, typed: dict, saved: dict, world: World):
        """Get ready to train. `saved` holds the flags in the --config file. Anything that may fail
        on a single rank goes through world.together, which raises the error on every rank, so that
        none waits for a rank that has ended."""
        self.world = world
        self.machine = device.machine(world)  # what affects the bits besides the flags
        self.step = self.previous_end = 0  # steps done, and --steps of the process before
        self.val_losses: dict[int, float] = {}  # by step
        out_dir = world.on_main(checkpoint.find_run, typed)  # None for a new run
        config, given, state = world.together(self.read, typed, saved, out_dir)
        world.check_same("the flags", config)
        world.check_same("the data", self.data.fingerprint)
        world.check_same("the checkpoints", state.get("step"))

        config, measured = device.choose(config, given, world)
        set_backends(config, world)
        # With the same seed, every rank draws the same initial weights.
        model = GPT(self.shape, ComputeConfig(**config.fields_of(ComputeConfig)), config.seed)
        if self.weights:
            world.together(checkpoint.load_weights, model, self.weights.folder)
        self.model = model.to(world.device)  # the plain module
        device.check_causality(model, config.dtype, world.device)
        # What the training loop calls: model, wrapped in torch.compile and DDP.
        self.net, config = speed_up(model, config, world)
        self.config = config
        self.loader.B = self.val_loader.B = config.micro_batch_size
        self.optimizer = make_optimizer(model, config, world)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.fp16)
        if state:
            self.restore(state)
        else:
            out_dir = world.on_main(checkpoint.make_folder, config.out_dir)
        self.out_dir = out_dir
        self.log = Log(out_dir, vars(config), self.step, world.is_main)
        record_start(self, state.get("flags", {}), measured)

    def read(self, typed: dict, saved: dict, out_dir: Path | None) -> tuple:
        """Read all inputs, and keep what the run needs from them. Return the config, the flags that
        are given, and the state of the run in out_dir, if any. Raise UserError or ShardError if the
        inputs don't fit together."""
        state: dict = {}
        source = (saved | typed).get("init_from")
        if out_dir:
            source, state = checkpoint.load_newest(out_dir)  # where the weights are, too
            saved = state["flags"]
            flags.check_fixed(typed, saved)
        taken = flags.to_take(saved, device.device_name(self.world.device))
        self.weights = checkpoint.find_weights(str(source)) if source else None
        config = flags.resolve(typed, taken, self.weights, self.world)
        flags.make_python_source(Path(config.data_dir))
        self.data = data = open_folder(Path(config.data_dir))
        if state and state["data"] != data.fingerprint:
            raise UserError(f"--data-dir {data.folder} holds other tokens than the run began with")
        vocab_size = data.vocab_size
        if self.weights:
            self.weights.check_tokens(data)
            vocab_size = self.weights.shape.vocab_size
        elif config.model != "nano" and data.folder.name.startswith("stdlib-"):
            vocab_size = GPT2_TOKENS  # to have GPT-2's size and speed
        seed = config.seed if config.shuffle else None
        B, T = config.micro_batch_size, config.seq_len
        self.loader = ShardLoader(data.train, B, T, self.world.rank, self.world.size, seed)
        self.val_loader = ShardLoader(data.val, B, T)
        self.shape = GPTConfig(vocab_size, **config.fields_of(GPTConfig))
        self.tokenizer = find_tokenizer(data.folder, data.tokenizer)  # None if it is not here
        self.questions = evaluate.open_questions(config.hellaswag, self.tokenizer, vocab_size)
        if config.wandb:
            find_tracker()  # raises if there is none
        return config, taken | typed, state

    def state(self) -> dict:
        """Return all that a resume needs besides the weights: numbers, strings, lists and dicts,
        and `tensors` by name. Randomness has no state, as it depends only on the seed and step."""
        return {
            "step": self.step,
            "position": self.loader.position,  # the loader's whole state
            "tensors": checkpoint.optimizer_tensors(self.optimizer),
            "scaler": self.scaler.state_dict(),  # the loss scale of --fp16
            "val_losses": self.val_losses,
            "flags": flags.to_save(self.config, self.machine),
            "data": self.data.fingerprint,
        }

    def restore(self, state: dict):
        """Restore what state() returned, except its flags and data, which read() has used. The
        weights are already loaded, in the same way as with --init-from."""
        self.step, self.previous_end = state["step"], state["flags"]["steps"]
        self.loader.position = state["position"]
        checkpoint.load_optimizer(self.optimizer, state["tensors"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.val_losses = {int(step): loss for step, loss in state["val_losses"].items()}


def record_start(run: Run, saved: dict, measured: str):
    """Write config.json and the first record of the log, and print what this run is, how its
    speed-ups were measured, and what has changed since the checkpoint whose flags are `saved`."""
    config, data, machine, loader = run.config, run.data, run.machine, run.loader
    size, now = run.world.size, flags.to_save(config, machine)
    if run.world.is_main:
        (run.out_dir / "config.tmp").write_bytes(checkpoint.as_json(now))
        os.replace(run.out_dir / "config.tmp", run.out_dir / "config.json")
    num_tokens = len(loader) * loader.T
    num_epochs = config.steps * config.batch_tokens / num_tokens
    decayed, others = run.model.decay_groups()
    num_params = sum(p.numel() for p in run.model.weights().values())
    num_others = sum(p.numel() for p in others)
    speed_ups = [spell(name)[2:] for name in flags.SPEED_UPS if getattr(config, name)]
    lines = [
        f"run: {run.out_dir}, {f'resumed after step {run.step:,}' if saved else 'new'}",
        f"data: {data.folder}, {data.tokenizer}: {num_epochs:.2f} epochs of {num_tokens:,} tokens",
        f"model: {config.model}, {num_params:,} parameters: {len(decayed)} tensors"
        f" ({num_params - num_others:,}) with weight decay, {len(others)} ({num_others:,}) without",
        f"optimizer: {'Muon for the matrices, AdamW for the rest' if config.muon else 'AdamW'}",
        f"device: {size} x {machine['device']}, torch {machine['torch']}",
        f"speed-ups: {', '.join(speed_ups) or 'none'}{measured}",
        f"step: {config.batch_tokens:,} tokens = ranks {size} x micro-batches"
        f" {config.num_micro_batches(size)} x sequences {loader.B} x tokens {loader.T}",
        *(flags.changes(saved, now) if saved else ()),
    ]
    if num_epochs > 5:
        lines.append(f"{num_epochs:.0f} epochs may be too many: watch the validation loss")
    if not run.tokenizer:
        lines.append(f"{data.tokenizer}'s vocabulary is not here: no samples, no bits per byte")
    names = {"data": data.fingerprint, "tokenizer": data.tokenizer}
    run.log.record("\n".join(lines), flags=now, **names, resumed=run.step, process=os.getpid())


def save(run: Run):
    """Compare the weights of all ranks, and write a checkpoint on the main rank."""
    world = run.world
    # The averaged loss would not show that a rank's weights have drifted, say on a faulty GPU.
    # Integers sum without rounding, so that one different bit changes the sum.
    weights = [p.detach() for p in run.model.parameters()]
    bits = torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in weights])
    world.check_same("the weights", bits.tolist())
    if not nn.utils.get_total_norm(weights).isfinite():
        raise RunError(f"after step {run.step} the weights are not finite: nothing was saved")
    # A background thread would have to copy everything first, to gain 2 s per 250 steps.
    tokenizer, name = run.tokenizer, run.data.tokenizer
    world.on_main(checkpoint.save, run.out_dir, run.model, run.state(), tokenizer, name)
    world.on_main(checkpoint.rotate, run.out_dir, run.step, run.config.keep, run.val_losses)
    run.log.record(saved=run.step)


# ---- The training --------------------------------------------------------------------------------


def train_step(run: Run, stop: Stop) -> tuple[float, float, bool]:
    """Take one step: forward and backward over batch_tokens tokens, then one update. Return the
    mean loss of these tokens, the gradient's norm before clipping, and whether any rank was asked
    to stop. If the loss or the gradient is not finite, raise RunError on every rank before any
    weight changes. With --fp16, if the gradient overflows, only skip the update."""
    config, world = run.config, run.world
    num_micro_batches = config.num_micro_batches(world.size)
    position = run.loader.position
    # Dropout depends on (seed, step, rank), so there is no generator state to save and restore.
    torch.manual_seed(evaluate.random_seed(config.seed, run.step, world.rank))

    shared = torch.zeros(3, device=world.device)  # loss, norm of the gradient, whether to stop
    for i in range(num_micro_batches):
        x, y = device.to_device(run.loader.next_batch(), world.device)
        # DDP averages the gradients during backward, but only the last micro-batch needs this. DDP
        # decides in forward whether to average, so forward, too, must be inside the context.
        with device.gradient_sync(run.net, enabled=i == num_micro_batches - 1):
            with device.autocast(config.dtype, world.device):
                # Divide, because backward adds up the gradients of all micro-batches.
                loss = run.net(x, y) / num_micro_batches
            run.scaler.scale(loss).backward()
        shared[0].add_(loss.detach())
    run.loader.prefetch()  # while the GPU computes

    # With --fp16, the gradients are scaled up. Undo the scaling before taking their norm.
    run.scaler.unscale_(run.optimizer)
    # Log the norm even with --grad-clip 0: a jump in it often precedes divergence.
    shared[1] = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)
    shared[2] = bool(stop)

    # One small all-reduce carries everything that the ranks must agree on. inf and nan survive a
    # sum, so every rank sees them. Only tolist() makes a step wait for the device.
    mean_loss, mean_norm, stop_share = (s / world.size for s in world.sum(shared).tolist())

    # With --fp16 an overflow is normal: there is no update, and the scaler halves its scale. At a
    # scale of 1 this no longer helps.
    may_overflow = config.fp16 and run.scaler.get_scale() > 1
    if not math.isfinite(mean_loss) or not (math.isfinite(mean_norm) or may_overflow):
        run.loader.position = position  # the step was not taken
        save(run)
        text = f"step {run.step + 1} has loss {mean_loss} and gradient norm {mean_norm}"
        raise RunError(f"{text}: no update; step {run.step} is saved; lower --learning-rate")
    if math.isfinite(mean_norm):
        # Set the rate at each step, because a scheduler object would be more state to save.
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.step, config)
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()  # frees them; the next pass writes instead of adding
    run.step += 1
    return mean_loss, mean_norm, stop_share > 0


def train(run: Run) -> int:
    """Train up to config.steps. Return the exit code: DONE, or STOPPED after a signal."""
    config = run.config
    stop = Stop(STARTED_AT + 3600 * (config.max_hours or math.inf))

    def is_due(every: int) -> bool:  # 0: only at the beginning and the end
        return run.step in (0, config.steps) or (every > 0 and run.step % every == 0)

    first_step = run.step + 1  # always printed: it shows that all is well, and how long steps take
    log_every = config.log_every or math.ceil(config.steps / 20)
    # The loss of random weights must be near ln(vocab_size), or something is wrong. A resumed run
    # repeats an evaluation that is due, because the previous process may have died during it. That
    # process also evaluated at its own last step, which may not be due under a larger --steps.
    eval_due = is_due(config.eval_every) or run.step == run.previous_end
    must_stop = eval_due and evaluate_now(run, stop)
    while run.step < config.steps and not must_stop:
        started = time.perf_counter()
        loss, grad_norm, must_stop = train_step(run, stop)
        seconds = time.perf_counter() - started
        log_step(run, loss, grad_norm, seconds, run.step == first_step or is_due(log_every))

        # Save before evaluating, so that no step is lost if the evaluation fails or is killed, and
        # the checkpoint with the best validation loss is always on disk.
        if must_stop or is_due(config.eval_every) or is_due(config.save_every):
            save(run)
        if is_due(config.eval_every) and not must_stop:
            must_stop = evaluate_now(run, stop)
    if not must_stop:
        run.log.record(f"done: {run.step:,} steps; python sample.py {run.out_dir}", done=run.step)
        return DONE
    if not run.step:
        run.log.record("stopped before the first step: there is nothing to save", interrupted=0)
        return INTERRUPTED
    run.log.record(f"stopped: step {run.step} is saved; --resume continues", stopped=run.step)
    return STOPPED


def log_step(run: Run, loss: float, grad_norm: float, seconds: float, is_printed: bool):
    """Log a step. `seconds` does not include saving."""
    rate, tokens_per_s = learning_rate(run.step - 1, run.config), run.config.batch_tokens / seconds
    text = f"step {run.step}/{run.config.steps} | loss {loss:.4f} | lr {rate:.2e} |"
    text += f" norm {grad_norm:.3f} | {1000 * seconds:.0f} ms | {tokens_per_s:,.0f} tokens/s"
    record: dict = {"step": run.step, "loss": loss, "learning_rate": rate}
    record |= {"ms": 1000 * seconds, "tokens_per_s": tokens_per_s}
    if run.world.device.type == "cuda":
        record["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    if peak := device.peak_tflops(run.machine["device"]):
        tflops = tokens_per_s * run.model.flops_per_token() / run.world.size / 1e12
        record["mfu"] = tflops / peak
        text += f" | {record['mfu']:.0%} MFU"
    # None if the gradient overflowed float16, because JSON has no inf.
    record["grad_norm"] = grad_norm if math.isfinite(grad_norm) else None
    run.log.record(text if is_printed else "", **record)


def evaluate_now(run: Run, stop: Stop) -> bool:
    """Validate, answer questions and sample. Evaluations use their own loader and generator, so
    they never change a run. Return whether any rank was asked to stop: then nothing is recorded,
    and the resumed run repeats the evaluation."""
    config, world, model = run.config, run.world, run.model
    figures, text = dict[str, float](), ""
    run.net.eval()
    if config.eval_tokens:
        loader, tokenizer = run.val_loader, run.tokenizer
        figures = evaluate.validate(run.net, model, loader, tokenizer, config, world, stop)
    if run.step or config.init_from:  # random weights would produce only noise
        if run.questions:
            figures |= evaluate.answers(model, run.questions, config.dtype, world, stop)
        if run.tokenizer and world.is_main:
            text = evaluate.samples(model, run.tokenizer, config, stop)
    run.net.train()
    if any(world.gather(bool(stop))):
        return True
    if config.eval_tokens:
        run.val_losses[run.step] = figures["val_loss"]
    after = f"after step {run.step}:"
    if figures:
        run.log.record(f"{after} {evaluate.format_metrics(figures)}", step=run.step, **figures)
    if text:
        run.log.record(f"sample {after}\n{text}", step=run.step, sample=text)
    return False


@record  # torchrun shows the traceback of the rank that failed first
def main(argv: list[str]) -> int:
    try:
        typed, saved = flags.read_flags(argv, __doc__ or "")
        with connected(typed.get("device", "")) as world:
            try:  # here, so that what a run holds is freed before the ranks disconnect
                return train(Run(typed, saved, world))
            except (RunError, ShardError, OSError) as error:
                return report(error)
    except UserError as error:
        return report(error)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore  # some can't show every character
    exit_code = main(sys.argv[1:])
    ignore_signals()  # a late one must not change the exit code
    sys.exit(exit_code)
