"""Tests ../train_gpt2.py: what a run promises, by whole runs in processes of their own."""

import gc
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    digest,
    finish,
    flags,
    losses,
    questions,
    records,
    run,
    saved_state,
    start_ranks,
    train,
    weights,
)
from safetensors.torch import save_file
from torch._inductor.utils import run_and_get_code

import dataloader
import sample
import train_gpt2
from config import RECIPES, SCHEDULES, TrainConfig
from model import GPT, MLP, SHAPES, GPTConfig
from support import checkpoint, choices, report
from support.checkpoint import checkpoints
from support.cli import spell
from support.device import autocast
from support.ending import printable
from support.pretrained import OUR_KEY, hf_config, hf_weights
from support.ranks import World
from train_gpt2 import learning_rate

SCRIPT = train_gpt2.__file__
KILLED = -signal.SIGKILL if os.name == "posix" else signal.SIGTERM
OF_WEIGHTS = dict.fromkeys(("model", "n_layer", "n_head", "n_embd"))  # flags that weights decide


# ---- The mathematics -----------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_tenth():
    config = TrainConfig(steps=19_073)
    rates = [learning_rate(step, config) for step in (0, 714, 715, 9894, 19_073)]
    assert rates == pytest.approx([6e-4 / 715, 6e-4, 6e-4, 3.3e-4, 6e-5])
    assert learning_rate(9894, replace(config, schedule="constant")) == 6e-4
    to_zero = replace(config, decay_to=0.0)
    rates = [learning_rate(step, to_zero) for step in (714, 9894, 19_073)]
    assert rates == pytest.approx([6e-4, 3e-4, 0])


def test_the_learning_rate_of_wsd_stays_and_falls_along_a_line_over_the_last_fifth():
    config = TrainConfig(steps=1000, warmup_steps=100, schedule="wsd", learning_rate=1.0)
    rates = [learning_rate(step, config) for step in (49, 99, 100, 799, 800, 900, 999)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.55, 0.1045])
    half = replace(config, decay_share=0.5, decay_to=0)
    assert [learning_rate(step, half) for step in (499, 750)] == pytest.approx([1, 0.5])
    for share, last in ((1, 1 / 900), (0, 1)):  # from the warm-up on; never
        whole = replace(config, decay_share=share, decay_to=0)
        assert learning_rate(999, whole) == pytest.approx(last)


def test_every_schedule_has_rates_of_its_own():
    config = TrainConfig(steps=1000, warmup_steps=100)
    schedules = [replace(config, schedule=schedule) for schedule in SCHEDULES]
    rates = {tuple(learning_rate(step, c) for step in range(1000)) for c in schedules}
    assert len(rates) == len(SCHEDULES)


@pytest.mark.parametrize("pad_vocab", [True, False])
def test_decay_groups_are_the_lectures(pad_vocab):
    with torch.device("meta"):
        model = GPT(replace(SHAPES["gpt2"], pad_vocab=pad_vocab))
    groups = model.decay_groups()
    assert [len(group) for group in groups] == [50, 98]
    assert [model.num_elements(group) for group in groups] == [124_318_464, 121_344]
    assert {p for group in groups for p in group} == set(model.parameters())


ONE_AT_A_TIME = [pytest.param(ranks, 1, marks=pytest.mark.slow) for ranks in (1, 4)]


@pytest.mark.parametrize(("ranks", "B"), [(1, 8), (2, 2), (2, 8), *ONE_AT_A_TIME])
def test_micro_batches_and_ranks_change_no_loss(data_dir, once, tmp_path, ranks, B):
    batch = {"batch_tokens": 512}  # 32 sequences
    make = partial(run, data_dir=data_dir, micro_batch_size=4, **batch)
    one = losses(once("32-sequences", make) / "run")
    several = run(tmp_path, data_dir, ranks=ranks, micro_batch_size=B, **batch)
    assert losses(several) == pytest.approx(one, rel=1e-6)


SPEED_UPS = ["--no-flash", "--no-pad-vocab", "--no-fused", "--bf16", "--bf16 --bf16-residual"]
SPEED_UPS += ["--fp16", "--recompute", "--loss-chunk-tokens=5"]


@pytest.mark.parametrize("line", SPEED_UPS)
def test_a_speed_up_changes_no_loss_beyond_its_precision(whole, data_dir, tmp_path, line):
    code, _, err = train([*flags(data_dir=data_dir, out_dir="run"), *line.split()], tmp_path)
    assert code == 0, err
    tolerance = 2e-2 if "16" in line else 1e-5
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=tolerance)


def assert_resumes_to_the_bit(line: list[str], folder: Path, ranks: int, inject=None):
    """Compare a run with one that is killed after 7 steps and resumed."""
    for name, kill_after in (("whole", None), ("killed", 7)):
        code, _, err = train(line, folder / name, ranks, kill_after, inject)
        assert code == (KILLED if kill_after else 0), err
    code, out, err = train([*line, "--resume"], folder / "killed", ranks, inject=inject)
    assert code == 0 and "resumed after step" in out and "not bit for bit" not in out, err
    whole, killed = folder / "whole/run", folder / "killed/run"
    assert losses(killed) == losses(whole) and digest(killed) == digest(whole)


EXACT = {  # the relative difference that ranks and micro-batches may make
    "--recompute --loss-chunk-tokens=5": 1e-6,
    "--no-muon": 1e-6,
    "--no-flash --n-layer=3": 1e-6,  # of three matrices two ranks take two and one
    "--fp16": 1e-2,
    "--bf16 --bf16-residual": 2e-2,
}
FAST = [("--recompute --loss-chunk-tokens=5", 1), ("--no-muon", 1), ("--no-flash --n-layer=3", 2)]
SLOW = {*itertools.product(EXACT, (1, 2)), ("--no-muon", 4), ("--no-flash --n-layer=3", 4)} - {
    *FAST
}
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW)]


@pytest.mark.parametrize(("line", "ranks"), FAST + SLOW)
def test_a_flag_keeps_the_run_exact(data_dir, tmp_path, line, ranks):
    """After a kill, with dropout, to the bit. On other ranks with another micro-batch, without
    dropout, to its precision."""
    command = [*flags(data_dir=data_dir, out_dir="run", micro_batch_size=3), *line.split()]
    assert_resumes_to_the_bit([*command, "--dropout=0.1"], tmp_path, ranks)
    assert train(command, tmp_path / "one")[0] == 0
    assert train([*command, "--micro-batch-size=1"], tmp_path / "other", ranks)[0] == 0
    one, other = losses(tmp_path / "one/run"), losses(tmp_path / "other/run")
    assert other == pytest.approx(one, rel=EXACT[line])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_float16_finds_its_scale_and_keeps_it(data_dir, tmp_path, ranks):
    """The first steps overflow, since the scale begins too large; after a resume it is as it was,
    and so is the number of steps since."""
    line = flags(data_dir=data_dir, out_dir="run", fp16=True)
    assert_resumes_to_the_bit(line, tmp_path, ranks, inject=large_scale)
    whole, killed = tmp_path / "whole/run", tmp_path / "killed/run"
    left_out = [*records(whole, "notice")]
    assert len(left_out) > 2 and left_out == [*range(1, len(left_out) + 1)]
    assert losses(whole)[1] == pytest.approx(math.log(257), rel=0.1)
    assert records(whole, "grad_norm")[1] is None
    scaler = saved_state(whole)["scaler"]
    assert scaler == saved_state(killed)["scaler"]
    assert scaler["scale"] == 2.0 ** (34 - len(left_out))
    assert scaler["_growth_tracker"] == 12 - len(left_out)


def large_scale(rank: int):
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**34)


@pytest.mark.slow
def test_the_micro_batch_is_the_largest_that_every_rank_has_memory_for(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", micro_batch_size=None, batch_tokens=256)
    code, _, err = train(line, tmp_path / "none", 2, inject=partial(little_memory, 0))
    assert code == 2 and "not even one sequence fits" in err
    assert_resumes_to_the_bit(line, tmp_path, 2, inject=partial(little_memory, 4))
    assert saved_state(tmp_path / "whole/run")["micro_batch_size"] == 4
    # A resumed run keeps the size that it has, since another one would change the last bits.
    code, out, err = train([*line, "--resume", "--steps=14"], tmp_path / "whole", 2)
    assert code == 0 and "not bit for bit" not in out, err


def little_memory(most: int, rank: int):
    forward = GPT.forward

    def forward_or_fail(self, idx, targets):
        if len(idx) > most and rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, idx, targets)

    GPT.forward = forward_or_fail


@pytest.mark.slow
def test_compiled_runs_train_evaluate_sample_and_resume(data_dir, tmp_path):
    """To the bit, on two threads, which would add up an embedding's gradient in any order."""
    line = flags(data_dir=data_dir, out_dir="run", batch_tokens=3072, micro_batch_size=192)
    assert train(line, tmp_path / "eager")[0] == 0
    line += ["--compile", "--eval-every=4"]
    assert_resumes_to_the_bit(line, tmp_path, 1, inject=two_threads)
    compiled = tmp_path / "killed/run"
    assert losses(compiled) == pytest.approx(losses(tmp_path / "eager/run"), rel=1e-5)
    assert [*records(compiled, "sample")] == [*records(compiled, "val_loss")][1:] == [4, 8, 12]
    assert not any("_orig_mod" in name for name in weights(compiled))


def two_threads(rank: int):
    torch.set_num_threads(2)


class OutOfResources(Exception):
    __module__ = "triton.runtime.errors"  # one of the errors that torch passes on as they are


def fail_to_compile(rank: int):
    """Have torch.compile chosen, and fail on the last rank when the network is first called."""

    class Compiled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *args):
            if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
                raise RuntimeError("from a launcher") from OutOfResources("shared memory")
            return self.model(*args)

    choices.compiling = lambda config: (True, "it pays")
    torch.compile = lambda model, **_: Compiled(model)


@pytest.mark.filterwarnings("ignore")  # of Dynamo
def test_a_network_without_compile_has_nothing_left_of_a_trial_with_it():
    config = TrainConfig(**TINY | {"compile": True, "loss_chunk_tokens": 16})
    world = World(0, 1, torch.device("cpu"))
    model = GPT(config.shape(257), config.compute_config())
    losses = {"loss", "chunked_loss"}
    train_gpt2.speed_up(model, config, world)
    assert losses <= vars(model).keys()
    assert train_gpt2.speed_up(model, replace(config, compile=False), world) is model
    assert losses.isdisjoint(vars(model))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_that_does_not_compile_is_trained_without(whole, data_dir, tmp_path, ranks):
    line = flags(data_dir=data_dir, out_dir="run")
    code, out, err = train(line, tmp_path, ranks, inject=fail_to_compile)
    assert code == 0, err
    assert "--no-compile: torch can't compile the network (RuntimeError: from a launcher" in out
    assert digest(tmp_path / "run") == digest(whole[ranks])
    code, _, err = train(
        [*line[:-1], "typed", "--compile"], tmp_path, ranks, inject=fail_to_compile
    )
    assert code == 2 and err.count("add --no-compile") == 1, (code, err)


@pytest.mark.slow
def test_compile_asks_and_samples_without_compiling_again(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", compile=True, dropout=0.1)
    asked = ["--hellaswag", str(questions(tmp_path)), "--eval-every", "5"]
    graphs = []
    for name, more in (("plain", []), ("asked", asked)):
        code, _, err = train([*line, *more], tmp_path / name, inject=count_graphs)
        assert code == 0, err
        graphs.append(json.loads((tmp_path / name / "graphs").read_text()))
    plain, asked = tmp_path / "plain/run", tmp_path / "asked/run"
    assert losses(asked) == losses(plain) and digest(asked) == digest(plain)
    assert graphs[0] == graphs[1] and len(graphs[0]) == 12 and graphs[0][0] == graphs[0][-1] > 0


def count_graphs(rank: int):
    """Write how many graphs have been compiled by the end of each step."""
    log_step, counts = train_gpt2.log_step, []

    def log_and_count(*args):
        log_step(*args)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        Path("graphs").write_text(json.dumps(counts))

    train_gpt2.log_step = log_and_count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo and Inductor
@pytest.mark.parametrize("bf16", [False, True])
def test_compiled_code_holds_the_logits_of_one_chunk(bf16):
    """In one graph with the rest, those of all eight were in memory at once."""
    changes = {"compile": True, "bf16": bf16, "loss_chunk_tokens": 16}
    config = TrainConfig(**TINY | changes)
    world = World(0, 1, torch.device("cpu"))
    x, y = torch.randint(257, (2, 8, 16), generator=torch.Generator().manual_seed(1))
    results = []

    def loss_and_gradients(net):
        with autocast(config.dtype, world.device):
            loss = net(x, y)
        loss.backward()
        grads = [p.grad.flatten() for p in net.parameters()]
        results.append(torch.cat([loss.detach().view(1), *grads]))

    torch.compiler.reset()
    loss_and_gradients(GPT(config.shape(257), config.compute_config()))
    model = GPT(config.shape(257), config.compute_config())
    _, codes = run_and_get_code(loss_and_gradients, train_gpt2.speed_up(model, config, world))
    chunks = [len(re.findall(r"= empty_strided_cpu\w*\(\(16, 320\)", code)) for code in codes]
    assert sum(chunks) in (1, 2) and len(codes) == 4, chunks  # forward and backward of net and loss
    assert (results[1] - results[0]).norm() < (1e-2 if bf16 else 1e-5) * results[0].norm()


def test_watching_never_changes_the_run(whole, data_dir, tmp_path):
    often = {"eval_every": 5, "save_every": 2, "keep": 3, "eval_tokens": 100, "num_samples": 2}
    watched = run(tmp_path, data_dir, hellaswag=questions(tmp_path), **often)
    assert losses(watched) == losses(whole[1])
    assert digest(watched) == digest(whole[1])
    assert [*records(watched, "val_loss")] == [0, 5, 10, 12]
    assert [*records(watched, "hellaswag_acc")] == [*records(watched, "sample")] == [5, 10, 12]


def count_read_backs(rank: int):
    """Injection: how many checkpoints this process reads back, in a file."""
    check_read_back, path = checkpoint.check_read_back, Path("read back")

    def counted(*args):
        path.write_text(f"{path.read_text() if path.exists() else ''}{args[0].name} ")
        check_read_back(*args)

    checkpoint.check_read_back = counted


def test_each_process_reads_its_first_save_back_a_resumed_one_too(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", save_every=2)
    assert train(line, tmp_path, kill_after=7, inject=count_read_backs)[0] == KILLED
    assert (tmp_path / "read back").read_text() == "step_000002 "
    assert train([*line, "--resume"], tmp_path, inject=count_read_backs)[0] == 0
    assert (tmp_path / "read back").read_text() == "step_000002 step_000008 "


def note_modes(rank: int):
    """Injection: in which mode the network computes, with and without gradients, in a file."""
    forward, modes = MLP.forward, set()

    def noted(self, x):
        modes.add(f"{'training' if torch.is_grad_enabled() else 'watching'} {self.training}")
        Path("modes").write_text(" ".join(sorted(modes)))
        return forward(self, x)

    MLP.forward = noted


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_evaluations_run_in_evaluation_mode_and_training_in_its_own(data_dir, tmp_path, dropout):
    """Validation, samples and questions, whatever the flags: whoever adds a layer that looks at
    self.training counts on it."""
    asked = {"hellaswag": questions(tmp_path), "steps": 4, "eval_every": 2}
    line = flags(data_dir=data_dir, out_dir="run", dropout=dropout, **asked)
    assert train(line, tmp_path, inject=note_modes)[0] == 0
    assert (tmp_path / "modes").read_text() == "training True watching False"


def test_a_run_learns(whole):
    first, *_, last = losses(whole[1]).values()
    assert first == pytest.approx(math.log(257), rel=0.03) and last < 0.8 * first


# ---- Resume --------------------------------------------------------------------------------------


KILLS = [(1, 1), (1, 7), (2, 6), (3, 4)]
for values in itertools.product((1, 2, 3), range(1, 13)):
    if values not in KILLS:
        KILLS.append(pytest.param(*values, marks=pytest.mark.slow))


@pytest.mark.parametrize(("ranks", "step"), KILLS)
def test_a_run_killed_after_any_step_goes_on_bit_for_bit(whole, data_dir, tmp_path, ranks, step):
    line = [*flags(data_dir=data_dir, out_dir="run", save_every=3), "--resume"]
    code, _, err = train(line, tmp_path, ranks, kill_after=step)
    assert code == KILLED, err
    code, out, err = train(line, tmp_path, ranks)
    saved = (step - 1) // 3 * 3
    begin = f"resumed after step {saved}" if saved else "new"
    assert code == 0 and f"run: run, {begin}\n" in out, err
    assert losses(tmp_path / "run") == losses(whole[ranks])
    assert digest(tmp_path / "run") == digest(whole[ranks])


def other_cpuinfo(text: str, rank: int):
    """Injection: the processor has the same name, but is not the same."""
    Path("cpuinfo").write_text(text)
    train_gpt2.device.CPUINFO = Path("cpuinfo")


CPU = "model name : Intel Xeon\ncpu family : 6\nmodel : 85\ncache size : 1024 KB\nflags : fma avx2"
OTHER_CPUS = {
    "amx_tile instead of none": CPU + " amx_tile",
    "none instead of fma": CPU.replace("fma ", ""),
    "6-143-1024KB instead of 6-85-1024KB": CPU.replace("85", "143"),
}


@pytest.mark.parametrize("change", OTHER_CPUS)
def test_a_resume_names_a_processor_with_the_same_name_and_other_instructions(
    change, data_dir, tmp_path
):
    line = flags(data_dir=data_dir, out_dir="run", steps=3)
    assert train(line, tmp_path, inject=partial(other_cpuinfo, CPU))[0] == 0
    line = [*flags(data_dir=data_dir, out_dir="run", steps=4), "--resume"]
    code, out, err = train(line, tmp_path, inject=partial(other_cpuinfo, OTHER_CPUS[change]))
    assert code == 0 and f"not bit for bit because of processor {change}\n" in out, err


def edit_mlp(rank: int):
    """Injection: model.py has another activation."""
    MLP.forward = lambda mlp, x: mlp.c_proj(mlp.c_fc(x).relu())


def forget_a_branch(rank: int):
    """Injection: a schedule was added, but not its branch."""

    def raise_error(*_):
        raise ValueError("has no branch")

    train_gpt2.learning_rate = raise_error


def test_a_schedule_without_a_branch_fails_before_anything_is_written(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", steps=3)
    code, _, err = train(line, tmp_path, inject=forget_a_branch)
    assert code == 1 and "has no branch" in err and not (tmp_path / "run").exists()


def add_idle_field(rank: int):
    """Injection: pad_vocab, which changes no loss, is a new field that nothing reads."""
    report.changed_fields = lambda config: ["pad_vocab"]


def test_a_field_without_an_effect_is_said(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", steps=3, pad_vocab=False)
    code, out, err = train(line, tmp_path, inject=add_idle_field)
    assert code == 0 and "--pad-vocab does not change what the network computes" in out, err


def test_the_epochs_of_a_resumed_run_count_what_it_has_read(data_dir, tmp_path):
    """Three steps of 192 tokens and three of 96, of an epoch of 142 * 16."""
    line = flags(data_dir=data_dir, out_dir="run", steps=3)
    assert train(line, tmp_path)[0] == 0
    line = flags(data_dir=data_dir, out_dir="run", steps=6, batch_tokens=96, resume=True)
    code, out, err = train(line, tmp_path)
    assert code == 0 and ": 0.38 epochs of 142 sequences" in out, err


def edit_beta2(rank: int):
    """Injection: make_optimizer was edited."""
    make = train_gpt2.make_optimizer

    def edited(*args) -> torch.optim.Optimizer:
        optimizer = make(*args)
        optimizer.defaults["betas"] = (0.8, 0.99)
        return optimizer

    train_gpt2.make_optimizer = edited


@pytest.mark.parametrize("muon", [True, False])
def test_a_resume_says_that_beta2_was_edited(muon, data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", steps=3, muon=muon)
    assert train(line, tmp_path)[0] == 0
    line = ["--resume", "--out-dir=run", "--steps=4"]
    code, out, err = train(line, tmp_path, inject=edit_beta2)
    assert code == 0 and "changed: beta2 0.99 instead of 0.95" in out, err


def test_a_resume_says_that_model_py_was_edited(data_dir, tmp_path, capsys):
    line = flags(data_dir=data_dir, out_dir="run", steps=3)
    assert train(line, tmp_path)[0] == 0
    line = [*flags(data_dir=data_dir, out_dir="run", steps=4), "--resume"]
    code, out, err = train(line, tmp_path, inject=edit_mlp)
    assert code == 0 and "changed: model.py no longer computes what" in out, err
    assert "GPT-2 is changed by an edit of model.py, so transformers will refuse" in out
    assert sample.main([str(tmp_path / "run"), "--prompt=a", "--sample-tokens=2"]) == 0
    assert "model.py does not compute the network of" in capsys.readouterr().err
    code, out, err = train([*line, "--steps=5"], tmp_path)  # the edit is undone
    assert code == 0 and "changed: model.py" in out and "transformers" not in out, err


def test_a_run_of_two_ranks_goes_on_with_one_and_another_micro_batch(whole, data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", save_every=3)
    assert train(line, tmp_path, 2, kill_after=7)[0] == KILLED
    code, out, err = train([*line, "--resume", "--micro-batch-size=4"], tmp_path)
    assert code == 0 and "resumed after step 6" in out, err
    [reasons] = re.findall("not bit for bit because of (.*)", out)
    assert "--micro-batch-size 4 instead of 2" in reasons and "ranks 1 instead of 2" in reasons
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=1e-6)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_saves_and_exits_with_3(data_dir, tmp_path, ranks):
    line = flags(data_dir=data_dir, out_dir="run", steps=2000, save_every=0, log_every=1)
    processes = start_ranks([*line, "--schedule=constant"], tmp_path, ranks)
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and '"loss"' in log.read_text()):
        assert processes[0].is_alive()
        time.sleep(0.02)
    os.kill(processes[-1].pid, signal.SIGTERM)  # one rank hears it, all stop after the same step
    code, out, _ = finish(processes, tmp_path)
    step = max(losses(tmp_path / "run"))
    assert code == 3 and {process.exitcode for process in processes} == {3}
    assert f"stopped after step {step}, which is saved" in out
    launcher = "python" if ranks == 1 else "torchrun --standalone --nproc_per_node=2"
    assert re.search(rf"to continue: {launcher} \S*train_gpt2.py --resume --out-dir run\n", out)
    assert saved_state(tmp_path / "run")["step"] == step < 2000
    assert '"stopped": ' in log.read_text().splitlines()[-1]
    assert (tmp_path / "run/loss.png").exists() == bool(find_spec("matplotlib"))


def snapshot(folder: Path) -> dict[Path, int]:
    """Return when each file was written, but the locks, which each process writes anew."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_finished_run_that_goes_on_says_what_its_rate_does(schedule, data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", schedule=schedule, num_samples=0)
    assert train(line, tmp_path)[0] == 0
    code, out, err = train(["--resume", "--out-dir=run", "--steps=24"], tmp_path)
    assert code == 0, err
    rates = records(tmp_path / "run", "learning_rate")
    said = re.search(r"the learning rate goes up from (\S+) to (\S+),", out)
    assert bool(said) == (schedule != "constant")
    if said:
        assert said.groups() == (f"{rates[12]:.2e}", f"{rates[13]:.2e}")


def test_after_max_hours_a_run_stops_saved_and_the_same_command_goes_on(whole, data_dir, tmp_path):
    line = [*flags(data_dir=data_dir, out_dir="run"), "--resume", "--max-hours"]
    code, out, err = train([*line, "1e-9"], tmp_path)  # nothing is saved yet
    assert code == 130 and err.endswith("stopped because --max-hours is over\n"), err
    code, out, err = train([*line, "1"], tmp_path, inject=hours_end_in_a_step)
    assert code == 3, err
    assert "stopped after step 6, which is saved, because --max-hours 1 is over; to con" in out
    assert json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[-1])["stopped"] == 6
    assert train([*line, "1"], tmp_path)[0] == 0
    assert digest(tmp_path / "run") == digest(whole[1])


def hours_end_in_a_step(rank: int):
    train_step = train_gpt2.train_step

    def end(run):
        if run.step == 5:
            train_gpt2.signals.end_at = 0
        return train_step(run)

    train_gpt2.train_step = end


def busy_when_measured(rank: int):
    train_gpt2.device.matmul_tflops = lambda *_: 1e-9


def test_no_step_is_faster_than_the_matmul_yardstick(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", steps=5)
    assert train(line, tmp_path, inject=busy_when_measured)[0] == 0
    shares = records(tmp_path / "run", "matmul_share").values()
    assert max(shares) == 1 and len(shares) == 5


def test_a_complete_run_is_left_alone_and_made_complete_if_it_was_not(whole, data_dir, tmp_path):
    out_dir = shutil.copytree(whole[1], tmp_path / "run")
    line = [*flags(data_dir=data_dir, out_dir="run"), "--resume"]
    before = snapshot(out_dir)
    code, out, err = train(line, tmp_path)
    assert code == 0 and "already complete" in out and "add --steps 24" in out, err
    code, out, err = train([*line, "--steps=9"], tmp_path)  # as a repeated cell of a notebook does
    assert code == 0 and "already complete" in out, err
    assert snapshot(out_dir) == before
    (out_dir / "summary.json").unlink()  # as if it had been killed in its last evaluation
    code, out, err = train(line, tmp_path)
    assert code == 0 and "step 12/12" not in out, err
    assert records(out_dir, "val_loss") == records(whole[1], "val_loss")
    assert (out_dir / "summary.json").read_text() == (whole[1] / "summary.json").read_text()


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(whole, data_dir, tmp_path):
    out_dir = shutil.copytree(whole[1], tmp_path / "run")
    flip_a_bit(out_dir / "step_000012/model.safetensors")
    line = [*flags(data_dir=data_dir, out_dir="run"), "--resume"]
    code, out, err = train(line, tmp_path)
    assert code == 0 and "resumed after step 10" in out
    assert re.search(r"step_000012/model.safetensors is damaged: .*SHA-256", err)
    assert losses(out_dir) == losses(whole[1]) and digest(out_dir) == digest(whole[1])
    for path in out_dir.glob("step_*/optimizer.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    code, out, err = train(line, tmp_path)
    assert code == 7 and "no checkpoint in run is good" in err


def test_a_torn_last_line_of_the_log_costs_that_line_alone(whole, data_dir, tmp_path):
    shutil.copytree(whole[1], tmp_path / "run")
    with open(tmp_path / "run" / "log.jsonl", "a") as log:
        log.write('{"step": 12, "lo')
    line = [*flags(data_dir=data_dir, out_dir="run", steps=14), "--resume"]
    code, _, err = train(line, tmp_path)
    assert code == 0, err
    assert list(losses(tmp_path / "run")) == list(range(1, 15))
    assert '"lo\n{"time"' in (tmp_path / "run" / "log.jsonl").read_text()


def test_the_optimizer_goes_on_with_the_command_lines_settings(whole, data_dir, tmp_path):
    shutil.copytree(whole[1], tmp_path / "run")
    changes = {"steps": 13, "learning_rate": 0.5, "weight_decay": 0.7, "eval_tokens": 256}
    line = [*flags(data_dir=data_dir, out_dir="run", **changes), "--resume"]
    code, out, err = train(line, tmp_path)
    assert code == 0, err
    was = {"steps": 12, "learning_rate": 0.01, "weight_decay": 0.1, "eval_tokens": 512}
    for name, value in changes.items():
        assert f"{spell(name)} {value} instead of {was[name]}" in out
    schedule = {name: RECIPES["nano"][name] for name in ("schedule", "decay_share", "decay_to")}
    new = TrainConfig(steps=13, warmup_steps=2, learning_rate=0.5, **schedule)
    assert records(tmp_path / "run", "learning_rate")[13] == learning_rate(12, new) > 0.04


def test_resume_needs_no_flag_again(data_dir, tmp_path):
    """The flags that made the run are its own, to the last bit, without its log too."""
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=3e-3, dropout=0.1, flash=False)
    assert train(line, tmp_path)[0] == 0
    whole, expected = losses(tmp_path / "run"), digest(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_000012")
    (tmp_path / "run/log.jsonl").unlink()
    code, out, err = train(["--resume", "--out-dir=run"], tmp_path)
    assert code == 0 and " --learning-rate 0.003 " in out and "not bit for bit" not in out, err
    assert losses(tmp_path / "run") == {11: whole[11], 12: whole[12]}
    assert digest(tmp_path / "run") == expected


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step_*")}


def test_the_newest_checkpoints_and_the_best_are_kept(whole, data_dir, tmp_path):
    assert names(whole[1]) == {"step_000010", "step_000012"}  # --keep 2; the last is the best
    # Here the best one is the first: good weights, and a learning rate that is far too high.
    changes = {"keep": 3, "save_every": 1, "eval_every": 4, "learning_rate": 3.0}
    out_dir = run(tmp_path, data_dir, init_from=whole[1], **changes)
    assert names(out_dir) == {"step_000000", "step_000010", "step_000011", "step_000012"}
    summary = json.loads((out_dir / "summary.json").read_text())
    val_losses = records(out_dir, "val_loss")
    assert summary["best_step"] == 0 and summary["best_val_loss"] == val_losses[0]
    assert summary["val_loss"] == val_losses[12] > val_losses[0]


def test_a_loss_that_is_not_finite_enters_no_weight(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=1e6, save_every=1)
    code, _, err = train(line, tmp_path, 2)
    assert code == 4
    assert re.fullmatch(r"train_gpt2.py: error: step \d+ gave loss .* no update.*\n", err)
    assert (tmp_path / "rank1.err").read_text() == ""
    last = max(losses(tmp_path / "run"))
    assert f"step {last} is saved" in err
    assert (
        "gave loss"
        in json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[-1])["failed"]
    )
    # The one before it is a cure, if there is one.
    assert (f"remove step_{last:06d}" in err) == (len(names(tmp_path / "run")) > 1)
    assert all(t.isfinite().all() for t in weights(tmp_path / "run").values())


def make_loss_nan(rank: int):
    """Injection: an edit of the network gives no number."""
    loss = GPT.loss
    GPT.loss = lambda *args: loss(*args) * math.nan


def test_a_first_loss_that_is_not_finite_is_no_matter_of_the_rate(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", eval_tokens=0)
    code, _, err = train(line, tmp_path, inject=make_loss_nan)
    assert code == 4 and "look at the network, its loss and the data" in err
    assert "--learning-rate" not in err and "remove" not in err


def test_dropout_differs_by_step_and_seed_and_spares_validation(whole, data_dir, tmp_path):
    # Each step is a whole epoch, in one order, and changes nothing.
    still = {"shuffle": False, "batch_tokens": 16 * 142, "learning_rate": 0.0, "steps": 3}
    out_dirs = []
    for name, seed in (("a", 1337), ("b", 1337), ("c", 1)):
        changes = {"dropout": 0.2, "warmup_steps": 0, "micro_batch_size": 142, "seed": seed}
        out_dirs.append(run(tmp_path, data_dir, name, **still | changes))
    a, b, c = map(losses, out_dirs)
    assert a == b != c and len({*a.values()}) == 3
    assert records(out_dirs[0], "val_loss")[0] == pytest.approx(records(whole[1], "val_loss")[0])


# ---- Weights of other runs and programs, --eval-only, sample.py ----------------------------------


def hugging_face_folder(model: GPT, folder: Path) -> Path:
    """Write a model as Hugging Face's tools do: its config.json knows nothing of ours."""
    folder.mkdir(parents=True)
    settings = hf_config(model.config, "unknown")
    del settings[OUR_KEY]
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = hf_weights(model)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_run_goes_on_from_the_weights_of_another(whole, data_dir, tmp_path):
    """From its folder, or from one checkpoint: the first validation is the other's last."""
    for source in (whole[1], checkpoints(whole[1])[0]):
        line = flags(data_dir=data_dir, out_dir="run", init_from=source, steps=2, **OF_WEIGHTS)
        code, _, err = train([*line, "--warmup-steps=1"], tmp_path / source.name)
        assert code == 0, err
        first = records(tmp_path / source.name / "run", "val_loss")[0]
        assert first == records(whole[1], "val_loss")[12]


def test_weights_that_are_trained_already_are_sampled_and_asked_before_the_first_step(
    whole, data_dir, tmp_path
):
    """The baseline of a finetuning. Random weights would only write noise."""
    asked = {"hellaswag": questions(tmp_path), "steps": 2, "warmup_steps": 1}
    for init_from, first in ((whole[1], 0), (None, 2)):
        changes = asked | {"init_from": init_from} | (OF_WEIGHTS if init_from else {})
        out_dir = run(tmp_path, data_dir, f"run{first}", **changes)
        assert min(records(out_dir, "sample")) == min(records(out_dir, "hellaswag_acc")) == first


def test_a_finetuned_run_goes_on_without_its_source(data_dir, tmp_path):
    shape = GPTConfig(257, seq_len=16, n_layer=2, n_head=2, n_embd=32)
    folder = hugging_face_folder(GPT(shape), tmp_path / "hf")
    line = flags(data_dir=data_dir, out_dir="run", init_from=folder, resume=True, **OF_WEIGHTS)
    assert train(line, tmp_path / "whole")[0] == 0
    assert train(line, tmp_path / "killed", kill_after=7)[0] == KILLED
    shutil.rmtree(folder)
    code, _, err = train(line, tmp_path / "killed")
    assert code == 0, err
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")
    assert digest(tmp_path / "killed" / "run") == digest(tmp_path / "whole" / "run")


@pytest.mark.slow
def test_a_small_model_of_hugging_faces_is_finetuned_and_goes_back(data_dir, tmp_path):
    """The loss falls, and transformers samples from the checkpoint."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    config = transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "small")
    changes = {"steps": 60, "learning_rate": 3e-3, "batch_tokens": 1024, "seq_len": 64}
    line = flags(data_dir=data_dir, out_dir="run", init_from="small", **OF_WEIGHTS | changes)
    code, _, err = train([*line, "--dropout=0.1", "--schedule=constant"], tmp_path)
    assert code == 0, err
    first, last = records(tmp_path / "run", "val_loss").values()
    assert last < first - 1
    source = checkpoints(tmp_path / "run")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    prompt = tokenizer("abc", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=True, pad_token_id=256)
    assert tokenizer.decode(ids[0]).startswith("abc") and len(ids[0]) > 5


def test_sample_and_eval_only_say_what_the_run_said(data_dir, tmp_path, capsys):
    asked = {"hellaswag": questions(tmp_path), "prompt": "abc", "num_samples": 2}
    out_dir = run(tmp_path, data_dir, sample_tokens=200, **asked)
    before = snapshot(out_dir)
    capsys.readouterr()
    assert sample.main([str(out_dir), "--prompt=abc", "--num-samples=2"]) == 0
    assert capsys.readouterr().out == printable(records(out_dir, "sample")[12]) + "\n"
    assert train_gpt2.main(["--out-dir", str(out_dir), "--eval-only", "--resume"]) == 0
    out = capsys.readouterr().out
    assert f": loss {records(out_dir, 'val_loss')[12]:.4f}, perplexity" in out
    assert f", hellaswag acc {records(out_dir, 'hellaswag_acc')[12]:.4f}" in out
    assert snapshot(out_dir) == before


def test_init_from_goes_before_the_run_in_out_dir(whole, data_dir, capsys):
    line = ["--eval-only", "--init-from", str(whole[1]), "--out-dir", str(whole[1])]
    assert train_gpt2.main([*line, "--data-dir", str(data_dir)]) == 0
    assert "step_000012: 784 validation tokens: loss" in capsys.readouterr().out


def test_eval_only_says_what_is_assumed_of_shards(whole, data_dir, tmp_path, capsys):
    data = shutil.copytree(data_dir, tmp_path / "data")
    (data / "manifest.json").unlink()
    line = ["--eval-only", "--init-from", str(whole[1]), "--data-dir", str(data)]
    assert train_gpt2.main(line) == 0
    assert "has no manifest.json: assumed bytes tokens\n" in capsys.readouterr().out


def test_sample_continues_each_line_that_is_typed_on_a_terminal(whole, capsys, monkeypatch):
    typed = io.StringIO("abc\nxyz\n")
    typed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", typed)
    assert sample.main([str(whole[1]), "--top-k=1"]) == 0
    first, second = capsys.readouterr().out.split("prompt> ")[1:3]
    assert first.startswith("abc") and second.startswith("xyz") and len(first) > 10


@pytest.mark.slow
def test_each_line_of_a_pipe_is_a_prompt_and_an_empty_one_begins_a_document(whole, tmp_path):
    line = [str(whole[1]), "--top-k=1", "--sample-tokens=9"]
    command = [sys.executable, sample.__file__, *line]
    done = subprocess.run(command, input=b"abc\n\nxyz", capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr.endswith(
        b"reading prompts from stdin, one per line\n"
    )
    first, of_none, third = done.stdout.decode().split("\n---\n")
    assert first.startswith("abc") and third.startswith("xyz") and first[3:] != third[3:]
    typed = sample.main([*line, "--prompt="])
    nothing = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert typed == 0 and nothing.stdout.decode() == of_none + "\n"
    empty = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert (empty.returncode, empty.stdout) == (0, nothing.stdout)
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    latin = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, timeout=60, env=strict)
    assert latin.returncode == 0 and b"--prompt is not UTF-8" in latin.stderr, latin.stderr
    assert latin.stdout == b""  # which has samples and nothing else
    typed = subprocess.run([*command, b"--prompt=caf\xe9"], capture_output=True, timeout=60)
    assert typed.returncode == 2 and b"error: --prompt is not UTF-8" in typed.stderr
    # A notebook on Windows opens a pipe, and writes nothing into it.
    cell = os.environ | {"JPY_PARENT_PID": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cell
    ) as waits:
        assert waits.wait(60) == 0 and waits.stdout.read() == nothing.stdout
    (tmp_path / "prompts").write_text("abc\n\nxyz")
    with open(tmp_path / "prompts") as file:
        from_file = subprocess.run(command, stdin=file, capture_output=True, timeout=60, env=cell)
    assert from_file.stdout == done.stdout


# ---- Data that others wrote ----------------------------------------------------------------------


def npy(tokens: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def bin_of(tokens: np.ndarray) -> bytes:
    return dataloader.shard_header(len(tokens)) + tokens.tobytes()


LAYOUTS = {
    "llm.c": ("edu_fineweb_{}_000001.bin", bin_of),
    "modded-nanogpt": ("fineweb_{}_000001.bin", bin_of),
    "build-nanogpt": ("edufineweb_{}_000001.npy", npy),
    "nanoGPT": ("{}.bin", np.ndarray.tobytes),
}


def lay_out(folder: Path, layout: str) -> Path:
    """Write a folder of random tokens in another project's layout; return its train shard."""
    folder.mkdir()
    name, write = LAYOUTS[layout]
    for seed, split in enumerate(("val", "train")):
        tokens = np.random.default_rng(seed).integers(0, 50257, 5000).astype("<u2")
        (folder / name.format(split)).write_bytes(write(tokens))
    return folder / name.format("train")


def test_the_layouts_of_other_projects_train_alike(tmp_path):
    first, *others = [
        losses(run(tmp_path, lay_out(tmp_path / name, name).parent, f"run {name}", steps=3))
        for name in LAYOUTS
    ]
    assert len(first) == 3 and others == [first] * 3


@pytest.mark.parametrize("change", ["removed", "added", "reordered", "longer", "renamed", "copied"])
def test_a_run_does_not_go_on_with_other_data(change, data_dir, tmp_path):
    own_data = shutil.copytree(data_dir, tmp_path / "own")
    (own_data / "manifest.json").unlink()
    run(tmp_path, own_data, steps=3, warmup_steps=1)
    first, second = own_data / "train_000000.bin", own_data / "train_000001.bin"
    if change == "removed":
        second.unlink()
    if change == "added":
        shutil.copy(own_data / "val_000000.bin", own_data / "train_1.bin")
    if change == "copied":  # which adds nothing
        shutil.copy(first, own_data / "train_000000 (copy).bin")
    if change == "reordered":
        first.rename(own_data / "train_1.bin")
    if change == "longer":
        tokens = np.append(dataloader.open_shard(first).read(0, 1009), 7).astype("<u2")
        first.write_bytes(bin_of(tokens))
    if change == "renamed":
        for shard in own_data.glob("train_*"):
            shard.rename(own_data / f"more_{shard.name}")
    line = flags(data_dir=own_data, out_dir="run", resume=True, steps=6, warmup_steps=1)
    code, out, err = train(line, tmp_path)
    if change in ("renamed", "copied"):
        assert code == 0, err
        said = "left out: train_000000.bin, a copy of train_000000 (copy).bin"
        assert (said in out) == (change == "copied")
    else:
        assert code == 2
        assert_one_line(
            err, "--data-dir .*own differs from the data that the run in run began with: .*"
        )


# ---- The user's mistakes: one line with the flag and the cure, exit code 2, nothing written ------


@pytest.fixture(scope="session")
def wrong_things(once, data_dir) -> Path:
    """A folder with a run, weights of other networks, and data that is damaged."""

    def make(folder: Path):
        run(folder, data_dir, steps=3)
        run(folder, data_dir, "flipped", steps=3)
        flip_a_bit(folder / "flipped/step_000003/model.safetensors")
        for size in (100, 257, 50257):
            shape = GPTConfig(size, seq_len=16, n_layer=2, n_head=2, n_embd=32)
            hugging_face_folder(GPT(shape), folder / f"weights{size}")
        header = dataloader.shard_header(500)
        shards = {"llama": np.array([20240801, 7, 9], "<i4").tobytes(), "none": header}
        shards["beyond"] = header + np.full(500, 60_000, "<u2").tobytes()
        for name, content in shards.items():
            (folder / name).mkdir()
            for split in ("train", "val"):
                (folder / name / f"{split}_0.bin").write_bytes(header + bytes(1000))
            (folder / name / "train_1.bin").write_bytes(content)

    return once("wrong-things", make)


WEIGHTS = "--model gpt2 --seq-len 16 --init-from"
MISTAKES = {
    "--data-dir nowhere": "--data-dir nowhere .*--input",
    "--data-dir run/summary.json": "is not a folder .*--input run/summary.json",
    "--data-dir .": "--data-dir . holds no shards of tokens: .*--input . --data-dir data/",
    "--data-dir none": "none/train_1.bin .*holds 0 tokens; its header says 500",
    "--data-dir llama": "llama/train_1.bin .*starts with 20240801, 7 instead of 20240520, 1",
    "--data-dir beyond --model gpt2": "beyond/train_1.bin .*60000.* 50256",
    "--seq-len 4096 --batch-tokens 8192": "--seq-len 4096 needs .* has 1009",
    "--hellaswag nowhere.jsonl": "nowhere.jsonl",
    f"--hellaswag {'a' * 300}": "there is no such file",
    f"--data-dir {'a' * 300}": "is not a folder of tokens",
    f"--init-from {'a' * 300}/x": "no such file, folder or model",
    f"--out-dir {'a' * 300}": "can't write to --out-dir .*too long",
    f"--out-dir {'a' * 300} --resume": "can't write to --out-dir .*too long",
    "--out-dir run": "--out-dir run holds a run: add --resume, or name another",
    "--out-dir run/step_000003 --resume": "run/step_000003 is a checkpoint: name its run, run$",
    "--out-dir run/summary.json": "--out-dir run/summary.json is not a folder: use another name",
    "--out-dir run/summary.json/run": "--out-dir .*run/summary.json/run",
    "--out-dir run --resume --n-layer 3": "--n-layer 3: run/step_000003 has --n-layer 2: leave it"
    " out, or begin a new run: .* --data-dir .* --n-layer 3 .*--out-dir ANOTHER",
    "--max-hours -1": "--max-hours -1.0 must be at least 0",
    "--prompt FILE:nowhere.txt": "--prompt FILE:nowhere.txt can't be read",
    "--out-dir run --resume --no-pad-vocab": "--no-pad-vocab: the run in run has --pad-vocab",
    "--out-dir run --resume --seed 7": "--seed 7: the run in run has --seed 1337: leave it out"
    ", or begin a new run: .* --data-dir .* --seed 7 .*--out-dir ANOTHER",
    "--out-dir run --resume --no-shuffle": "--no-shuffle: the run in run has --shuffle",
    "--out-dir run --resume --no-muon": "--no-muon: the run in run has --muon: leave it out",
    "--init-from nobody/none": "nobody/none: no such file, folder or model",
    "--init-from flippd/step_000003": "flippd/step_000003: no such .*mean flipped/step_000003",
    "--init-from flippd": "flippd: no such .*did you mean flipped",
    "--data-dir llma": "--data-dir llma is not there; did you mean llama?",
    "--init-from flipped/step_000003": "flipped/step_000003/model.safetensors is damaged",
    f"{WEIGHTS} weights50257": "prepare a new --data-dir with --tokenizer gpt2",
    f"{WEIGHTS} weights257 --n-head 4": "--n-head 4: weights257 has --n-head 2: leave it out",
    f"{WEIGHTS} weights257 --seq-len 64": "--seq-len 64: weights257 has --seq-len 16: leave it out",
    f"{WEIGHTS} weights100": "token 256, but the network only knows 0 to 99",
    "--sample-only": "--sample-only here is a program, sample.py",
}


def assert_one_line(err: str, message: str):
    assert re.fullmatch(rf"train_gpt2.py: error: .*({message}).*\n", err), err


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, data_dir, wrong_things, monkeypatch, capsys):
    monkeypatch.chdir(wrong_things)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = snapshot(wrong_things)
    assert train_gpt2.main([*flags(data_dir=data_dir, out_dir="new"), *line.split()]) == 2
    out, err = capsys.readouterr()
    assert_one_line(err, MISTAKES[line])
    assert out == "" and snapshot(wrong_things) == before and not Path("new").exists()


def test_an_evaluation_without_weights_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main(["--eval-only", "--resume", "--out-dir=new"]) == 2
    assert_one_line(capsys.readouterr().err, "no checkpoint in new: name a run with --out-dir")
    os.makedirs("out/new")
    assert train_gpt2.main(["--eval-only", "--out-dir=new"]) == 2
    assert_one_line(capsys.readouterr().err, "did you mean " + re.escape(str(Path("out/new"))))
    assert train_gpt2.main(["--eval-only", "--out-dir=."]) == 2  # which is there
    assert_one_line(
        capsys.readouterr().err, "no checkpoint in .: name .* weights with --init-from$"
    )


def test_a_missing_library_is_one_line_and_leaves_no_run_behind(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main(flags(data_dir=data_dir, out_dir="run", wandb=True)) == 2
    assert train(flags(data_dir=data_dir, out_dir="run", steps=3), tmp_path)[0] == 0


def test_a_mistake_is_one_line_of_one_rank(data_dir, tmp_path):
    for mistake in ("--data-dir=nowhere", "--batch-tokens=48", "--init-from=.", "--steps=0"):
        line = [*flags(data_dir=data_dir, out_dir="run"), mistake]
        processes = start_ranks(line, tmp_path, 2)
        code, out, err = finish(processes, tmp_path)
        assert code == 2 and processes[1].exitcode == 2 and out == ""
        assert_one_line(err + (tmp_path / "rank1.err").read_text(), "--|config.json")
        assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_resume_from_the_first_checkpoint_does_not_write_it_again(whole, data_dir, tmp_path):
    changes = {"init_from": whole[1], "steps": 2, "keep": 3, "warmup_steps": 1}
    line = flags(data_dir=data_dir, out_dir="run", **OF_WEIGHTS | changes)
    assert train(line, tmp_path)[0] == 0
    shutil.rmtree(tmp_path / "run/step_000002")  # as if the run had been killed before it
    card = tmp_path / "run/step_000000/README.md"
    card.write_text("my own words")
    code, out, err = train([*line, "--resume"], tmp_path)
    assert code == 0 and "resumed after step 0" in out, err
    assert card.read_text() == "my own words"


@pytest.mark.parametrize("name", ["hellaswag", "data_dir", "init_from", "out_dir"])
def test_a_pipe_or_an_empty_folder_is_refused(name, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("odd pipe")
    os.mkdir("odd folder")
    for odd in sorted(os.listdir()):
        if (name, odd) == ("out_dir", "odd folder"):
            continue
        changes = {"data_dir": data_dir, "out_dir": "new", name: odd}
        assert train_gpt2.main(flags(**changes | (OF_WEIGHTS if name == "init_from" else {}))) == 2
        assert_one_line(capsys.readouterr().err, odd)
    assert sorted(os.listdir()) == ["odd folder", "odd pipe"]


@pytest.mark.slow
def test_the_largest_numbers_train(data_dir, tmp_path):
    large = ("steps", "eval_tokens", "save_every", "eval_every", "log_every", "sample_tokens")
    large += ("top_k", "loss_chunk_tokens", "seed", "temperature", "grad_clip")
    most = dict.fromkeys(large, 2**31 - 1) | {"warmup_steps": 2**31 - 2}
    code, _, err = train(flags(data_dir=data_dir, out_dir="run", **most), tmp_path, kill_after=2)
    assert code == KILLED and err == "" and list(losses(tmp_path / "run")) == [1, 2]


# ---- As a user starts it -------------------------------------------------------------------------


@pytest.mark.slow
def test_without_docstrings_and_asserts_it_trains_and_refuses(data_dir, tmp_path):
    run = flags(data_dir=data_dir, out_dir="run", steps=3)
    lines = ((["--help"], 0), (["--steps=--"], 2), ([*run, b"--prompt=\xff"], 2), (run, 0))
    for line, code in lines:
        command = [sys.executable, "-OO", SCRIPT, *line]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True)
        assert done.returncode == code, done.stderr
        assert len(done.stderr.splitlines()) == bool(code)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="hides the compiler by PATH")
def test_compile_without_a_compiler_is_refused_with_the_cure(data_dir, tmp_path):
    env = os.environ | {"PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, SCRIPT, *flags(data_dir=data_dir, compile=True)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--compile fails (" in done.stderr and "install a C++ compiler" in done.stderr


@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_has_ended_holds_nothing(data_dir, tmp_path, monkeypatch):
    """No cycle: else its log would stay open, and on a GPU its memory be taken. Python warns of
    files that are closed by being forgotten."""
    monkeypatch.chdir(tmp_path)
    train, runs = train_gpt2.train, []

    def note_and_train(run):
        runs.append(weakref.ref(run))
        return train(run)

    monkeypatch.setattr(train_gpt2, "train", note_and_train)
    monkeypatch.setattr(train_gpt2.log, "draw_losses", lambda *_: None)  # matplotlib has cycles
    gc.collect()
    gc.disable()
    try:
        assert train_gpt2.main(flags(data_dir=data_dir, out_dir="run", steps=4)) == 0
        assert runs[0]() is None
    finally:
        gc.enable()
