"""Train GPT-2 on token shards and save checkpoints, on one GPU, several GPUs or a CPU.
python train_gpt2.py                                             # one GPU, or a CPU
torchrun --standalone --nproc_per_node=8 train_gpt2.py           # eight GPUs
python train_gpt2.py --data-dir data/mine --out-dir out/mine --resume
"""

# `uv run train_gpt2.py` reads this and needs nothing else installed.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "tiktoken==0.14.0",
#     "tqdm==4.70.1", "safetensors==0.8.0", "tokenizers==0.23.3",
# ]
# ///

import os
import sys

from support import cores, ending

if __name__ == "__main__":
    ending.guard_imports()

# By default, a waiting OpenMP thread spins 300,000 times, which occupies a core. On an idle machine
# this saves up to a fifth of a step. If other programs need the cores, it costs far more: with four
# of them on two cores, a step of nano took 2,100 ms, and 380 ms with a lower count. torch reads
# this variable once, when it is imported.
if (os.environ.get("LOCAL_WORLD_SIZE") or "1") != "1" or cores.busy_share() > 0.25:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import math
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from config import TrainConfig, read_flags
from dataloader import ShardLoader
from model import GPT
from support import device, evaluate, fit, log, report, run_folder
from support.cli import spell
from support.ending import NumericalError, Phase, UserError, signals
from support.files import FolderLock
from support.muon import MuonAdamW
from support.plan import Plan, check_can_save, check_files_agree, is_complete, make_plan
from support.pretrained import formula_loss, load_weights, read_weights
from support.ranks import World, check_ranks_agree, find_world, gradient_sync, process_group
from support.run import Run, draw, finish, restore, save, stop, update_card, vote_to_stop

# ---- The speed-ups of the lecture ----------------------------------------------------------------
#
# 1 TF32             set_backends, below         4 flash attention    flash_attention in model.py
# 2 BF16 autocast    autocast in device.py       5 padded vocabulary  num_rows in model.py
# 3 torch.compile    speed_up, below             6 fused AdamW        make_optimizer, below
#
# Gradient accumulation is in train_step, DDP in speed_up and train_step.


def set_backends(config: TrainConfig, world: World):
    """Set torch's global switches. Call this before the first matrix product."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")  # speed-up 1: TF32
    # Make every CPU deterministic: compiled code would otherwise sum in a varying order.
    on_cpu = world.device.type == "cpu"
    device.set_determinism(config.deterministic or on_cpu, config.compile)
    if config.compile:
        device.tag_compiled_code(config.dtype)
    if on_cpu:
        device.set_allocator(keep_freed=not config.recompute)
    elif world.device.type == "cuda":
        device.forbid_spilling(world.device)


def speed_up(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """Return model wrapped in torch.compile and DDP, which share its parameters. We save, load
    and sample the plain model, so that parameter names in checkpoints have no `_orig_mod.` or
    `module.` prefix, and inputs of other shapes trigger no recompilation."""
    net: nn.Module = model
    for name in ("chunked_loss", "loss"):
        vars(model).pop(name, None)  # what an earlier call set below
    if config.compile:
        # Every training batch has the same shape, so code for dynamic shapes would gain nothing.
        net = torch.compile(model, dynamic=False)  # type: ignore[assignment]  # speed-up 3
    if config.compile and config.loss_chunk_tokens:
        # These alone change the plain model: without them, Inductor would compute all chunks'
        # softmax in one kernel, with all logits in memory.
        model.chunked_loss = torch.compiler.disable(model.chunked_loss)  # type: ignore
        model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore
    if torch.__version__.startswith("2.5."):
        # Dynamo 2.5 can't split a graph with recomputed blocks at DDP's buckets; 2.6 can.
        torch._dynamo.config.optimize_ddp = not config.recompute
    # Gradients that are views into DDP's buckets avoid a second copy in memory.
    return DDP(net, gradient_as_bucket_view=True) if world.size > 1 else net


# ---- The optimizer and its learning rate ---------------------------------------------------------


def make_optimizer(model: GPT, config: TrainConfig, world: World) -> torch.optim.Optimizer:
    """Return AdamW as in GPT-3 (Brown et al. 2020, appendix B). --muon uses Muon for matrices."""
    # Don't decay layer-norm gains (they belong near 1) or biases (too few to matter).
    decayed, others = model.decay_groups()
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, 0.95)
    # Speed-up 6. With None instead of False, torch picks the fastest unfused implementation.
    options: dict = {"lr": config.learning_rate, "betas": betas, "fused": config.fused or None}
    if config.muon:
        return MuonAdamW(groups, model.matrices(), config.bf16, world, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate for a step, counted from 0: a linear warm-up, then the schedule.
    cosine and wsd (warm-up, stable, decay) end at decay_to * learning_rate."""
    if step < config.warmup_steps:
        # step + 1, because a rate of 0 would waste the first step
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)  # 0 .. 1
        height = 0.5 * (1 + math.cos(math.pi * progress))  # 1 .. 0
    elif config.schedule == "wsd":
        longest = config.steps - config.warmup_steps
        decay_steps = max(1, min(round(config.decay_share * config.steps), longest))
        height = min(1, (config.steps - step) / decay_steps)  # 1, then linearly down to 0
    else:
        raise ValueError(f"--schedule {config.schedule} has no branch in learning_rate")
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * height)


# ---- One step ------------------------------------------------------------------------------------


class StepResult(NamedTuple):
    loss: float  # mean over the step's tokens on all ranks, before the update
    grad_norm: float  # before clipping
    notice: str  # why there was no update; empty if there was one


def train_step(run: Run) -> StepResult:
    """Take one step: forward and backward over batch_tokens tokens, then one update. If the loss or
    the gradient is not finite, raise NumericalError on every rank before any weight changes.
    With --fp16, if the gradient overflows, only skip the update."""
    config, world = run.config, run.world
    num_micro_batches = config.num_micro_batches(run.loader.B, world.size)
    if config.dropout:
        # Reseed from (seed, step, rank), so that there is no generator state to save and restore.
        torch.manual_seed(evaluate.random_seed(config.seed, run.step, world.rank))

    loss_of_rank = torch.zeros((), device=world.device)
    started = time.perf_counter()
    for i in log.progress(range(num_micro_batches), f"step {run.step + 1}", world.is_main):
        ending.watchdog.reset()
        x, y = evaluate.to_device(run.loader.next_batch(), world.device)
        # DDP averages the gradients during backward, but only the last micro-batch needs this. DDP
        # decides in forward whether to average, so both passes must be inside the context.
        with gradient_sync(run.net, enabled=i == num_micro_batches - 1):
            with device.autocast(config.dtype, world.device):
                # Divide, because backward adds up the gradients of all micro-batches.
                loss = run.net(x, y) / num_micro_batches
            run.scaler.scale(loss).backward()
        loss_of_rank += loss.detach()
        if i == 1 and run.step == run.first_step:
            device.wait(world.device)
            report.warn_if_slow(run, (time.perf_counter() - started) / 2 * num_micro_batches)
    run.loader.prefetch()  # while the GPU computes

    # With --fp16, the gradients are scaled up. Undo the scaling before taking their norm.
    run.scaler.unscale_(run.optimizer)
    # Log the norm even with --grad-clip 0: a jump in it often precedes divergence.
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)

    # One small all-reduce carries everything that the ranks must agree on. inf and nan survive a
    # sum, so every rank sees them. Only tolist() makes a step wait for the device. torch.full fills
    # the tensor on the device, whereas torch.tensor would wait for a copy from the CPU.
    stop_vote = torch.full((), float(signals.received), device=world.device)
    votes = torch.stack([loss_of_rank, grad_norm.float(), stop_vote])
    loss_sum, norm_sum, num_stop_votes = world.sum(votes).tolist()
    mean_loss, mean_norm = loss_sum / world.size, norm_sum / world.size
    run.must_stop = num_stop_votes > 0

    notice = ""
    if math.isfinite(mean_loss) and math.isfinite(mean_norm):
        # Set the rate at each step, because a scheduler object would be more state to save.
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.step, config)
        run.scaler.step(run.optimizer)
    elif config.fp16 and math.isfinite(mean_loss) and run.scaler.get_scale() > 1:
        # This is normal: the initial scale is too high, and later the scaler retries higher ones.
        notice = "no update: the gradient overflowed float16, so the loss scale is halved"
    else:
        raise_not_finite(run, mean_loss, mean_norm, float(loss_of_rank))
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)  # frees them; the next pass writes instead of adding
    run.step += 1
    return StepResult(mean_loss, mean_norm, notice)


def raise_not_finite(run: Run, loss: float, grad_norm: float, loss_of_rank: float):
    """Save the run as it was before this step, then raise NumericalError."""
    config = run.config
    # All ranks saw the same sums, so every rank gets here and collectives still work.
    losses = run.world.gather(loss_of_rank)
    ranks = [str(rank) for rank, value in enumerate(losses) if not math.isfinite(value)]
    # The weights were not updated, so they are good. Rewind the loader so that no step is lost.
    end = run.loader.position
    run.loader.position -= config.batch_tokens // config.seq_len
    if run.saved_step != run.step:
        save(run)
    where = f" (not finite on rank {', '.join(ranks)})" if ranks else ""
    text = (
        f"step {run.step + 1} gave loss {loss}{where}"
        f" and gradient norm {grad_norm}, on sequences {run.loader.position:,} to {end - 1:,}:"
        f" no update; step {run.step} is saved"
    )
    cure = f"begin a new run with a --learning-rate below {config.learning_rate}"
    if len(run_folder.checkpoints(run.out_dir)) > 1:
        cure += f", or remove step_{run.step:06d}, whose weights would give the same loss again,"
        cure += " and repeat with --resume and a lower rate"
    if run.step == 0:
        cure = "the weights are the initial ones, so look at the network, its loss and the data"
    if math.isfinite(loss) and run.world.device.type == "cuda" and config.flash:
        # cuDNN's attention was the cause in kyutai-labs/pocket-tts#264.
        cure += "; if that does not help, try TORCH_CUDNN_SDPA_DEPRIORITIZED=1, which avoids cuDNN"
    run.world.end_all(NumericalError(f"{text}; {cure}"))


# ---- The loop ------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Train up to config.steps. Return the exit code: DONE, or STOPPED after a signal."""
    config = run.config
    if config.init_from and run.saved_step < 0:
        save(run)  # so that a short run can convert other formats
    vote_to_stop(run)  # a signal may have come since the checkpoint was loaded
    # The loss of random weights must be near ln(vocab_size), or something is wrong. A resumed run
    # repeats an evaluation that is due, because the previous process may have died during it.
    evaluate_if_due(run)
    while run.step < config.steps and not run.must_stop:
        signals.phase = Phase.UNSAVED  # from here on, a signal waits for the step and its save
        started = time.perf_counter()
        result = train_step(run)
        log_step(run, result, time.perf_counter() - started)

        # Save before evaluating, so that no step is lost if the evaluation fails or is killed, and
        # the checkpoint with the best validation loss is always on disk.
        save_due = is_due(run.step, config.save_every, config.steps)
        eval_due = is_due(run.step, config.eval_every, config.steps)
        if run.must_stop or save_due or eval_due:
            save(run)
        evaluate_if_due(run)
    if run.must_stop and signals.phase is Phase.STARTING:  # nothing is saved
        raise KeyboardInterrupt  # Python has dropped the first one, or only another rank got one
    if run.must_stop:
        return stop(run)
    finish(run)
    return ending.DONE


def is_due(step: int, every: int, last_step: int) -> bool:
    """Return whether an action is due: every `every` steps (0: never), and after the last step."""
    return step == last_step or (every > 0 and step % every == 0)


def log_step(run: Run, result: StepResult, seconds: float):
    """Log a step, and print a line if one is due. `seconds` does not include saving."""
    config, step = run.config, run.step
    run.log.recent_seconds.append(seconds)
    tokens_per_s = config.batch_tokens / seconds
    tflops = tokens_per_s * run.model.flops_per_token() / run.world.size / 1e12
    # If a step seems faster than products alone, the machine was busy when those were measured.
    run.environment["matmul_tflops"] = max(tflops, run.environment["matmul_tflops"])
    record = {
        "step": step,
        "loss": result.loss,
        # None if the gradient overflowed float16, because JSON has no inf.
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "learning_rate": learning_rate(step - 1, config),
        "ms": 1000 * seconds,
        "tokens_per_s": tokens_per_s,
        "tflops": tflops,
        # Fraction of this device's measured matmul rate, for devices without a published peak.
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
    text += f" | {run.log.time_left(config.steps - step)} left"
    if result.notice:
        record["notice"] = result.notice
        text += f" | {result.notice}"
    run.log.record(**record)
    # Always print a process's first step: it shows that all is well and how long a run will take.
    is_first = step == run.first_step + 1
    log_every = config.log_every or math.ceil(config.steps / 20)
    line_is_due = is_first or result.notice or is_due(step, log_every, config.steps)
    run.log.print_step(text, bool(line_is_due))
    if log.is_drawn(step, config.steps):
        run.losses[step] = result.loss


def evaluate_if_due(run: Run):
    """Validate, sample and answer questions before the first step, after the last, and every
    eval_every steps. Evaluations use their own loader and generator, so they never change a run.
    A stop signal cuts an evaluation short, and the resumed run repeats it."""
    config, world, tokenizer = run.config, run.world, run.data.tokenizer
    repeats_last = run.began_at_old_end and run.step == run.first_step
    due = run.step == 0 or repeats_last or is_due(run.step, config.eval_every, config.steps)
    if run.must_stop or not due:
        return
    if config.eval_tokens:
        figures = evaluate.validate(run.net, run.model, run.val_loader, tokenizer, config, world)
        vote_to_stop(run)
        if run.must_stop:
            return
        # Record only saved steps, so that the best one is on disk. A nan can't be the best loss.
        if run.saved_step == run.step and math.isfinite(figures["val_loss"]):
            run.val_losses[run.step] = figures["val_loss"]
            update_card(run)
        run.log.record(step=run.step, **figures)
        run.log.print(f"validation after step {run.step}: {evaluate.format_metrics(figures)}")
        report.warn_if_overfitting(run)
    if run.step == 0 and not config.init_from:
        return  # random weights would produce only noise
    if config.num_samples:
        text = evaluate.samples(run.model, tokenizer, config) if world.is_main else ""
        vote_to_stop(run)
        if run.must_stop:
            return
        run.log.record(step=run.step, sample=text)
        run.log.print(f"sample after step {run.step}:\n{text}")
    if run.questions:
        shares = evaluate.answers(run.model, run.questions, config, world)
        vote_to_stop(run)
        if run.must_stop:
            return
        run.log.record(step=run.step, **shares)
        run.log.print(f"questions after step {run.step}: {evaluate.format_metrics(shares)}")
    draw(run)
    vote_to_stop(run)  # the other ranks wait for the drawing here, not in a step that is timed


# ---- Starting: the main rank makes the plan, then all ranks act ----------------------------------


def make_model(plan: Plan, world: World) -> GPT:
    """Return the network on the CPU, with random weights or the weights in plan.start."""
    config = plan.config
    # With the same seed, every rank draws the same initial weights.
    model = GPT(config.shape(plan.vocab_size), config.compute_config(), config.seed)
    if plan.start:
        load_weights(model, plan.pretrained or world.call_on_all(read_weights, plan.start))
        check_ranks_agree(model, plan.state["step"] if plan.state else 0, world)
    return model


def fit_micro_batch(model: GPT, plan: Plan, world: World) -> tuple[nn.Module, int]:
    """Return the sped-up network, and --micro-batch-size or the largest size that fits. Raise
    CompileError if the network can't be compiled."""
    config = plan.config
    if config.compile and world.is_main:
        log.show("compiling the network: about half a minute the first time, 10 s after that")
    for B in fit.micro_batch_sizes(model, config, world, plan.state):
        net = world.call_on_all(speed_up, model, config, world)  # DDP may run out of memory
        if fit.pass_fits(net, B, config, world):
            return net, B
        del net
        torch.compiler.reset()  # frees the compiled code
    raise fit.does_not_fit(config)


def build_net(model: GPT, plan: Plan, typed: dict, world: World) -> tuple[Plan, nn.Module, int]:
    """Return the plan, the sped-up network and its micro-batch size. If torch can't compile the
    network on some rank, the plan is one without --compile, unless the user typed that."""
    try:
        return plan, *fit_micro_batch(model, plan, world)
    except fit.CompileError as error:
        failure = str(error)
    # We are outside the except, where the error would keep the failed network in memory.
    if "compile" in typed:
        raise UserError(f"--compile fails ({failure}): add --no-compile")
    torch.compiler.reset()
    reasons = {flag: reason for flag, reason in plan.reasons.items() if flag != "--compile"}
    reasons["--no-compile"] = f"torch can't compile the network ({failure})"
    plan = plan._replace(config=replace(plan.config, compile=False), reasons=reasons)
    return plan, *fit_micro_batch(model, plan, world)


def set_up(typed: dict, lock: FolderLock, world: World) -> Run | None:
    """Return a run that is ready to train, or None if it is already complete. call_on_main calls a
    function on the main rank and returns its result on every rank. The rest runs on every rank."""
    out_dir = lock.folder
    plan = world.call_on_main(make_plan, typed, out_dir, lock, world)
    config, data, state = plan.config, plan.data, plan.state
    check_files_agree(plan, world)
    if world.call_on_main(is_complete, plan, out_dir):
        if state and world.is_main:
            show_complete(state["step"], config.steps)
        return None
    learning_rate(config.warmup_steps, config)  # raises if the schedule has no branch

    # Build the network, and find a micro-batch that fits.
    set_backends(config, world)
    model = make_model(plan, world)
    world.call_on_main(check_can_save, model, plan, out_dir)
    world.call_on_main(run_folder.begin, out_dir, lock, plan.is_new)
    if typed.get("resume") and not state and world.is_main:
        log.show(f"{out_dir} holds no checkpoint to resume from, so a new run begins")
    model.to(world.device)
    plan, net, B = build_net(model, plan, typed, world)
    config = plan.config

    world.call_on_main(lock.check)
    # Start Weights & Biases before the log, so that a failure comes before anything is logged.
    wandb_run = None
    if config.wandb:
        wandb_run = world.call_on_all(log.start_wandb, out_dir, asdict(config), world.is_main)
    T, rank, size = config.seq_len, world.rank, world.size
    run = Run(
        config=config,
        world=world,
        out_dir=out_dir,
        lock=lock,
        log=log.Log(lock, world.is_main, wandb_run),
        environment=device.environment(world.device, world.size, config.dtype)
        | {"formula": formula_loss()},
        data=data,
        val_loader=ShardLoader(data.val, B, T, rank, size),
        questions=plan.questions,
        net=net,
        model=model,
        optimizer=make_optimizer(model, config, world),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.fp16),
        loader=ShardLoader(data.train, B, T, rank, size, config.seed if config.shuffle else None),
    )
    if state and plan.start:
        restore(run, plan.start, state)
    # After its first backward pass, DDP rebuilds its buckets and then sums in another order. Do
    # this now, or a resumed run would differ from an uninterrupted one in the last bits.
    for _ in range(2 if world.size > 1 else 0):
        fit.dummy_pass(net, B, config, world)
    report.print_start(run, typed, plan.reasons, state)
    if state and 0 < run.step < config.steps:
        report.warn_if_rate_jumps(run, last_rate(state, config), learning_rate(run.step, config))
    return run


def show_complete(num_done: int, num_steps: int):
    more = f"to continue training, add --steps {2 * num_done}"
    log.show(f"already complete: {num_done:,} steps are done, and --steps is {num_steps:,}; {more}")


def last_rate(state: dict, config: TrainConfig) -> float:
    """Return the learning rate of the last step before a checkpoint, by the flags it was saved
    with."""
    saved = {name: state["config"][name] for name in asdict(config) if name in state["config"]}
    return learning_rate(state["step"] - 1, replace(config, **saved))


def evaluate_only(typed: dict, world: World) -> int:
    """Evaluate a run, or the weights of --init-from. Print the result and write nothing."""
    out_dir = Path(typed.get("out_dir", ""))
    if "init_from" not in typed:
        out_dir = world.call_on_main(run_folder.choose_out_dir, typed.get("out_dir", ""), True)
    # One evaluation is too short for compiling to pay off.
    plan = world.call_on_main(make_plan, typed | {"compile": False}, out_dir, None, world)
    check_files_agree(plan, world)
    set_backends(plan.config, world)
    model = make_model(plan, world).to(world.device)
    text = evaluate.evaluate_weights(model, plan.data, plan.questions, plan.config, world)
    if any(world.gather(signals.received)):
        raise KeyboardInterrupt  # Python has dropped the first one, so the evaluation was cut short
    if world.is_main:
        log.show("\n".join([*plan.data.notes, f"{plan.start}: {text}"]))
    return ending.DONE


def run_program(typed: dict) -> int:
    device.check_torch(torch.__version__)
    world = find_world(dict(os.environ), torch.cuda.device_count(), typed.get("device", "auto"))
    if world.device.type == "cuda":
        device.check_gpu(world.device)
    with process_group(world):
        # With different commands, ranks would wait forever; different devices round differently.
        command = {spell(f.name): typed.get(f.name, "not typed") for f in fields(TrainConfig)}
        world.check_same(command | {"the processor or GPU": device.rounding(world.device)})
        try:
            if typed.get("eval_only"):
                return evaluate_only(typed, world)
            return set_up_and_train(typed, world)
        except Exception as error:
            fit.check_memory(error, bool(typed.get("eval_only")))
            raise


def set_up_and_train(typed: dict, world: World) -> int:
    # This is a separate function so that run and its DDP are freed before the process group ends.
    name, resume = typed.get("out_dir", ""), typed.get("resume", False)
    lock = FolderLock(world.call_on_main(run_folder.choose_out_dir, name, resume))
    if resume:
        world.call_on_main(run_folder.check_nothing_is_meant, lock, typed)
    run = None
    try:
        run = set_up(typed, lock, world)
        return train(run) if run else ending.DONE
    except Exception as error:
        lock.check()  # raises DiskError if the folder was moved, which explains the error
        if run:
            with suppress(OSError, ValueError):  # the disk may be full, or the log closed
                run.log.record(failed=f"{type(error).__name__}: {error!s:.300}")
        raise
    finally:
        if world.is_main:
            run_folder.leave(lock.folder)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code. Only a bug or a hang shows a traceback."""
    ending.program = "train_gpt2.py"
    device.set_environment()
    try:
        typed = read_flags(sys.argv[1:] if argv is None else argv, __doc__ or "")
    except UserError as error:
        if ending.is_main_rank():  # every rank gets the same error
            ending.print_error(f"error: {error}")
        ending.tell_torchrun(f"error: {error}")
        return error.exit_code
    try:
        with signals:
            if typed.get("max_hours"):
                signals.end_at = ending.STARTED_AT + 3600 * typed["max_hours"]
            return run_program(typed)
    except (Exception, KeyboardInterrupt) as error:
        exit_code = ending.report(error)
        if exit_code is None:
            raise
        return exit_code
    finally:
        signals.end_at = math.inf
        ending.watchdog.stop()


if __name__ == "__main__":
    ending.ignore_signals()
    sys.exit(main())
