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
    digest,
    finish,
    flags,
    losses,
    program,
    questions,
    records,
    run,
    start_ranks,
    train,
    weights,
)

import dataloader
import train_gpt2
from model import GPT, SHAPES, GPTConfig
from support.checkpoint import checkpoints, read_checkpoint
from support.export import hf_config, hf_weights
from support.log import printable
from train_gpt2 import TrainConfig, learning_rate

ROOT = Path(train_gpt2.__file__).parent


# --------------------------------------------------------------------------------------------------
# The mathematics


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_tenth():
    config = TrainConfig(steps=19_073)
    rates = [learning_rate(step, config) for step in (0, 714, 715, 9894, 19_073)]
    assert rates == pytest.approx([6e-4 / 715, 6e-4, 6e-4, 3.3e-4, 6e-5])
    assert learning_rate(9894, replace(config, cosine=False)) == 6e-4
    to_zero = replace(config, decay_to=0.0)
    assert (
        learning_rate(9894, to_zero) == pytest.approx(3e-4) and learning_rate(714, to_zero) == 6e-4
    )
    assert learning_rate(19_073, to_zero) == 0


@pytest.mark.parametrize("pad_vocab", [True, False])
def test_decay_groups_are_the_lectures(pad_vocab):
    with torch.device("meta"):
        model = GPT(replace(SHAPES["gpt2"], pad_vocab=pad_vocab))
    groups = model.decay_groups()
    assert [len(group) for group in groups] == [50, 98]
    assert [model.num_elements(group) for group in groups] == [124_318_464, 121_344]
    assert {p for group in groups for p in group} == set(model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_and_ranks_change_no_loss(data_dir, once, tmp_path, ranks):
    batch = {"batch_tokens": 512, "steps": 20, "warmup_steps": 4}  # 32 sequences
    make = partial(run, data_dir=data_dir, micro_batch_size=4, **batch)
    one = losses(once("32-sequences", make) / "run")
    for B in (1, 2, 8):
        several = run(tmp_path, data_dir, f"B{B}", ranks, micro_batch_size=B, **batch)
        assert losses(several) == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"flash": False}, {"pad_vocab": False}, {"fused": False}, {"bf16": True}, {"fp16": True},
     {"bf16_residual": True, "bf16": True}, {"recompute": True}, {"loss_chunk_tokens": 5}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_speed_up_changes_no_loss_beyond_its_precision(whole, data_dir, tmp_path, changes):
    tolerance = 2e-2 if {"bf16", "fp16"} & {*changes} else 1e-5
    assert losses(run(tmp_path, data_dir, **changes)) == pytest.approx(
        losses(whole[1]), rel=tolerance
    )


BEYOND = {  # the lecture: flags, and the relative difference that ranks and micro-batches may make
    "fp16": ({"fp16": True}, 1e-2),
    "bf16_residual": ({"bf16_residual": True, "bf16": True}, 2e-2),
    "memory": ({"recompute": True, "loss_chunk_tokens": 5}, 1e-6),
    "adamw": ({"muon": False}, 1e-6),
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("memory", 2), ("adamw", 1)]
    + [
        pytest.param(name, ranks, marks=pytest.mark.slow)
        for name, ranks in [("fp16", 1), ("fp16", 2), ("bf16_residual", 2), ("memory", 1)]
        + [("adamw", 2), ("adamw", 4)]
    ],
)
def test_a_flag_keeps_the_run_exact(data_dir, tmp_path, ranks, name):
    """After a kill, to the bit; on other ranks with another micro-batch, to its precision."""
    changes, tolerance = BEYOND[name]
    line = flags(data_dir=data_dir, out_dir="run", dropout=0.1, **changes)
    assert train(line, tmp_path / "whole", ranks)[0] == 0
    assert train(line, tmp_path / "killed", ranks, kill_after=7)[0] not in range(8)
    assert train([*line, "--resume"], tmp_path / "killed", ranks)[0] == 0
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")
    assert digest(tmp_path / "killed" / "run") == digest(tmp_path / "whole" / "run")
    one, other = (
        losses(run(tmp_path, data_dir, f"B{B}", n, micro_batch_size=B, **changes))
        for n, B in ((1, 1), (ranks, 3))
    )
    assert other == pytest.approx(one, rel=tolerance)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_float16_finds_its_scale_and_keeps_it(data_dir, tmp_path, ranks):
    """The first steps overflow, since the scale begins too large; after a resume it is as it was,
    and so is the number of steps since."""
    line = [*flags(data_dir=data_dir, out_dir="run", fp16=True, keep=3), "--resume"]
    code, out, err = train(line, tmp_path / "whole", ranks, inject=large_scale)
    assert code == 0, err
    left_out = re.findall(
        r"step (\d+)/.* not applied: the gradient overflows float16, .* (\d+) now", out
    )
    assert len(left_out) > 2 and left_out[0] == ("1", str(2**33))
    saved = read_checkpoint(tmp_path / "whole" / "run" / "checkpoint_000005.pt")
    assert saved["scaler"]["scale"] == 2.0 ** (34 - sum(int(step) <= 5 for step, _ in left_out))
    assert train(line, tmp_path / "killed", ranks, kill_after=7, inject=large_scale)[
        0
    ] not in range(8)
    assert train(line, tmp_path / "killed", ranks, inject=large_scale)[0] == 0
    whole, killed = (tmp_path / name / "run" for name in ("whole", "killed"))
    assert losses(killed) == losses(whole) and digest(killed) == digest(whole)
    logged = records(whole, "loss"), records(whole, "grad_norm")
    assert logged[0][1] == pytest.approx(math.log(257), rel=0.1) and logged[1][1] is None
    scalers = [read_checkpoint(checkpoints(d)[0])["scaler"] for d in (whole, killed)]
    assert scalers[0] == scalers[1] and scalers[0]["_growth_tracker"] == 12 - len(left_out)


def large_scale(rank: int):
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**34)


def test_a_micro_batch_that_does_not_fit_after_all_is_halved(data_dir, tmp_path):
    """As when compiled passes need more than plain ones, on one rank alone."""
    line = flags(data_dir=data_dir, out_dir="run", micro_batch_size=None, batch_tokens=512)
    code, out, err = train(line, tmp_path, 2, inject=partial(little_memory, 4))
    assert code == 0, err
    tried = re.findall(r"--micro-batch-size (\d+) does not fit after all: trying (\d+)", out)
    assert tried == [("16", "8"), ("8", "4")] and "--micro-batch-size=4" in out
    code, _, err = train(line, tmp_path / "none", 2, inject=partial(little_memory, 0))
    assert code == 2 and "lower --micro-batch-size, or add --recompute: not even one" in err


def little_memory(most: int, rank: int):
    forward = GPT.forward

    def forward_or_fail(self, idx, targets):
        if len(idx) > most and rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, idx, targets)

    GPT.forward = forward_or_fail


def two_threads(rank: int):
    torch.set_num_threads(2)


@pytest.mark.slow
def test_compiled_runs_train_evaluate_sample_and_resume(data_dir, tmp_path):
    """To the bit, on two threads, which would add up an embedding's gradient in any order."""
    line = flags(data_dir=data_dir, out_dir="run", batch_tokens=3072, micro_batch_size=192)
    assert train(line, tmp_path)[0] == 0
    eager = losses((tmp_path / "run").rename(tmp_path / "eager"))
    line += ["--compile", "--eval-every=4"]
    assert train(line, tmp_path, inject=two_threads)[0] == 0
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    assert losses(whole) == pytest.approx(eager, rel=1e-5)
    assert train(line, tmp_path, kill_after=7, inject=two_threads)[0] not in range(8)
    code, out, err = train([*line, "--resume"], tmp_path, inject=two_threads)
    assert code == 0, err
    assert "resumed after step 5" in out and "sample after step 12" in out
    assert losses(tmp_path / "run") == losses(whole)
    assert digest(tmp_path / "run") == digest(whole)
    assert not any("_orig_mod" in name for name in weights(tmp_path / "run"))


@pytest.mark.slow
def test_compile_asks_and_samples_without_compiling_again(data_dir, tmp_path):
    asked = {"hellaswag": questions(tmp_path), "eval_every": 5}
    line = flags(data_dir=data_dir, out_dir="run", compile=True, dropout=0.1)
    code, _, err = train(line, tmp_path / "plain", inject=count_graphs)
    assert code == 0, err
    code, _, err = train([*line, *flags_of(asked)], tmp_path / "asked", inject=count_graphs)
    assert code == 0, err
    assert losses(tmp_path / "asked" / "run") == losses(tmp_path / "plain" / "run")
    assert digest(tmp_path / "asked" / "run") == digest(tmp_path / "plain" / "run")
    plain, asked = (json.loads((tmp_path / n / "graphs").read_text()) for n in ("plain", "asked"))
    assert plain == asked and len(plain) == 12 and plain[0] == plain[-1] > 0


def flags_of(values: dict) -> list[str]:
    return [word for n, value in values.items() for word in (train_gpt2.spell(n), str(value))]


def count_graphs(rank: int):
    """Writes how many graphs have been compiled by the end of each step."""
    log_step, counts = train_gpt2.log_step, []

    def log_and_count(*args):
        log_step(*args)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        Path("graphs").write_text(json.dumps(counts))

    train_gpt2.log_step = log_and_count


def test_watching_never_changes_the_run(whole, data_dir, tmp_path):
    often = {"eval_every": 1, "save_every": 2, "keep": 3, "eval_tokens": 100}
    asked = {"hellaswag": questions(tmp_path), "num_samples": 2}
    watched = run(tmp_path, data_dir, **often, **asked)
    assert losses(watched) == losses(whole[1])
    assert digest(watched) == digest(whole[1])
    assert len(records(watched, "val_loss")) == 13 and len(records(watched, "sample")) == 12
    assert list(records(watched, "hellaswag_acc")) == list(range(1, 13))


def test_a_run_learns(whole):
    first, *_, last = losses(whole[1]).values()
    assert first == pytest.approx(math.log(257), rel=0.03) and last < 0.8 * first


# --------------------------------------------------------------------------------------------------
# Resume


def kill_and_resume(whole, data_dir, folder, ranks, step, inject=None):
    line = flags(data_dir=data_dir, out_dir="run", save_every=3)
    code, _, err = train([*line, "--resume"], folder, ranks, kill_after=step, inject=inject)
    assert code not in range(8), err
    code, out, err = train([*line, "--resume"], folder, ranks, inject=inject)
    assert code == 0, err
    assert losses(folder / "run") == losses(whole[ranks])  # bit for bit
    assert digest(folder / "run") == digest(whole[ranks])


@pytest.mark.parametrize(("ranks", "step"), [(1, 1), (1, 7), (2, 6), (3, 4)])
def test_a_killed_run_goes_on_bit_for_bit(whole, data_dir, tmp_path, ranks, step):
    kill_and_resume(whole, data_dir, tmp_path, ranks, step)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("step", range(1, 13))
def test_a_run_killed_after_any_step_goes_on_bit_for_bit(whole, data_dir, tmp_path, ranks, step):
    kill_and_resume(whole, data_dir, tmp_path, ranks, step)


def test_a_run_of_two_ranks_goes_on_with_one_and_another_micro_batch(whole, data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", save_every=3)
    assert train(line, tmp_path, 2, kill_after=7)[0] not in range(8)
    line = flags(data_dir=data_dir, out_dir="run", save_every=3, micro_batch_size=4)
    code, out, err = train([*line, "--resume"], tmp_path)
    assert code == 0, err
    assert (
        "resumed after step 6, not bit for bit because of --micro-batch-size 4 instead of 1" in out
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=1e-6)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_saves_and_exits_with_3(whole, data_dir, tmp_path, ranks):
    line = [*flags(data_dir=data_dir, out_dir="run", steps=2000, save_every=0), "--no-cosine"]
    processes = start_ranks(line, tmp_path, ranks)
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and '"loss"' in log.read_text()):
        assert processes[0].is_alive()
        time.sleep(0.02)
    os.kill(processes[-1].pid, signal.SIGTERM)  # one rank hears it, all stop after the same step
    code, out, _ = finish(processes, tmp_path)
    step = max(losses(tmp_path / "run"))
    assert code == 3 and f"stopped by a signal after step {step}" in out
    assert read_checkpoint(tmp_path / "run" / f"checkpoint_{step:06d}.pt")["step"] == step


def test_a_run_keeps_its_optimizer(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", save_every=3)
    whole = run(tmp_path, data_dir, "whole", muon=False)
    assert train([*line, "--no-muon"], tmp_path, kill_after=7)[0] not in range(8)
    code, _, err = train([*line, "--resume", "--muon"], tmp_path)
    assert code == 2 and "--muon: the run in run has False, this one True; give it as it was" in err
    code, out, _ = train([*line, "--resume", "--no-muon"], tmp_path)
    assert code == 0 and "resumed after step 6" in out and "instead of" not in out
    assert digest(tmp_path / "run") == digest(whole)
    code, _, err = train([*line, "--resume", "--muon", "--steps=14"], tmp_path)
    assert code == 2 and "--muon: " in err


def test_a_complete_run_is_left_alone(whole, data_dir):
    out_dir = whole[1]
    before = {f.name: f.stat().st_mtime_ns for f in out_dir.iterdir()}
    code, _, err = train([*flags(data_dir=data_dir, out_dir=out_dir), "--resume"], out_dir.parent)
    assert code == 0 and "already complete: --steps 12 are done" in err
    assert {f.name: f.stat().st_mtime_ns for f in out_dir.iterdir()} == before


def flip_a_bit(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(whole, data_dir, tmp_path):
    shutil.copytree(whole[1], tmp_path / "run")
    (tmp_path / "run" / "checkpoint_000012.pt").rename(tmp_path / "run" / "checkpoint_000011.pt")
    flip_a_bit(tmp_path / "run" / "checkpoint_000011.pt")
    line = [*flags(data_dir=data_dir, out_dir="run"), "--resume"]
    code, out, err = train(line, tmp_path)
    assert code == 0 and "resumed after step 10" in out
    assert re.search(r"checkpoint_000011.pt is damaged: .*CRC.*trying the one before it", err)
    assert digest(tmp_path / "run") == digest(whole[1])
    for path in (tmp_path / "run").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:5000])
    code, out, err = train(line, tmp_path)
    assert code == 7 and "no good checkpoint in run" in err


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
    code, out, err = train(
        [*flags(data_dir=data_dir, out_dir="run", **changes), "--resume"], tmp_path
    )
    assert code == 0, err
    was = {"steps": 12, "learning_rate": 0.01, "weight_decay": 0.1, "eval_tokens": 512}
    for name, value in changes.items():
        assert f", {train_gpt2.spell(name)} {value} instead of {was[name]}" in out
    assert records(tmp_path / "run", "learning_rate")[13] > 0.04


def test_a_run_that_is_extended_says_both_learning_rates(whole, data_dir, tmp_path):
    shutil.copytree(whole[1], tmp_path / "run")
    line = flags(data_dir=data_dir, out_dir="run", steps=120, warmup_steps=2, resume=True)
    code, out, _ = train(line, tmp_path, kill_after=13)
    new = TrainConfig(steps=120, warmup_steps=2, learning_rate=0.01)
    rates = learning_rate(12, new), learning_rate(12, replace(new, steps=12))
    assert rates == (pytest.approx(0.0098, rel=0.02), pytest.approx(0.001))
    assert f"the learning rate is {rates[0]:.2e}, it was {rates[1]:.2e}" in out
    assert records(tmp_path / "run", "learning_rate")[13] == rates[0]


def test_as_many_checkpoints_as_asked_for_are_kept(data_dir, tmp_path):
    out_dir = run(tmp_path, data_dir, save_every=1, keep=3)
    names = sorted(path.name for path in out_dir.glob("*.pt*"))
    assert names == [f"checkpoint_{step:06d}.pt" for step in (10, 11, 12)]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_by_another_process_is_bit_exact(whole, data_dir, tmp_path):
    rng = np.random.default_rng(5)
    line = [*flags(data_dir=data_dir, out_dir="run", save_every=1), "--resume"]
    for _ in range(8):
        processes = start_ranks(line, tmp_path, 2)
        time.sleep(rng.uniform(0.5, 3))
        for process in processes:
            process.kill()
            process.join()
    assert train(line, tmp_path, 2)[0] == 0
    assert losses(tmp_path / "run") == losses(whole[2])
    assert digest(tmp_path / "run") == digest(whole[2])


def test_a_loss_that_is_not_finite_enters_no_weight(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=1e30, save_every=1, warmup_steps=0)
    code, _, err = train(line, tmp_path, 2)
    assert code == 4
    assert re.fullmatch(r"train_gpt2.py: error: step \d+ gave loss .* not applied.*\n", err)
    last = max(losses(tmp_path / "run"))
    assert f"those of step {last}" in err
    assert all(t.isfinite().all() for t in weights(tmp_path / "run").values())


# --------------------------------------------------------------------------------------------------
# The command line


def test_no_program_asks_a_shell():
    for path in [
        p for folder in ("", "benchmarks/", "support/") for p in ROOT.glob(f"{folder}*.py")
    ]:
        assert not re.search(
            r"shell=True|getstatusoutput|getoutput|os\.system|popen\(", path.read_text()
        )


def test_runs_are_numbered_and_resume_takes_the_newest(data_dir, tmp_path):
    line = flags(data_dir=data_dir, steps=3)
    for _ in range(2):
        assert train(line, tmp_path)[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["001", "002"]
    code, out, _ = train([*flags(data_dir=data_dir, steps=4), "--resume"], tmp_path)
    assert code == 0 and "resumed after step 3" in out
    assert max(losses(tmp_path / "out" / "002")) == 4


def test_sample_only_and_eval_only_are_what_the_run_said(data_dir, tmp_path, capsys, monkeypatch):
    asked = {"hellaswag": questions(tmp_path), "prompt": "abc", "num_samples": 2}
    asked |= {"sample_tokens": 200}
    out_dir = run(tmp_path, data_dir, **asked)
    monkeypatch.chdir(tmp_path)
    line = ["--resume", "--out-dir", str(out_dir), *flags_of(asked)]
    before = sorted(path.stat().st_mtime_ns for path in out_dir.iterdir())
    capsys.readouterr()
    assert train_gpt2.main([*line, "--sample-only"]) == 0
    assert capsys.readouterr().out == printable(records(out_dir, "sample")[12]) + "\n"
    assert train_gpt2.main([*line, "--eval-only", "--eval-tokens=512"]) == 0
    out = capsys.readouterr().out
    loss = records(out_dir, "val_loss")[12]
    assert f"checkpoint_000012.pt, 512 validation tokens: loss {loss:.4f}, perplexity" in out
    assert f"questions: acc {records(out_dir, 'hellaswag_acc')[12]:.4f}, acc norm" in out
    assert sorted(path.stat().st_mtime_ns for path in out_dir.iterdir()) == before


@pytest.mark.slow
def test_a_small_model_of_hugging_faces_is_finetuned_and_goes_back(tmp_path, monkeypatch):
    """On the corpus that needs no download: the loss falls, and transformers samples from it."""
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' GPT-2")
    monkeypatch.chdir(tmp_path)
    config = transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained("small")
    line = ["--init-from", "small", "--batch-tokens", "1024", "--steps", "60", "--seq-len", "64",
            "--learning-rate", "3e-3", "--dropout", "0.1", "--no-cosine"]  # fmt: skip
    data = ["--data-dir", str(train_gpt2.corpus.own_source("bytes"))]
    code, _, err = train([*line, *data, "--out-dir", "run"], tmp_path)
    assert code == 0, err
    first, last = records(tmp_path / "run", "val_loss").values()
    assert last < first - 1
    assert train_gpt2.main(["--resume", "--out-dir", "run", "--export", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("hf")
    prompt = torch.tensor([list(b"def ")])
    ids = model.generate(prompt, max_new_tokens=40, do_sample=True, pad_token_id=256)
    assert bytes(i for i in ids[0].tolist() if i < 256).startswith(b"def ") and len(ids[0]) > 5


@pytest.mark.parametrize(("ranks", "flash"), [(1, True), (2, False)])
def test_dropout_is_the_same_after_a_resume(data_dir, tmp_path, ranks, flash):
    line = flags(data_dir=data_dir, out_dir="run", dropout=0.2, flash=flash, eval_every=3)
    assert train(line, tmp_path / "whole", ranks)[0] == 0
    assert train(line, tmp_path / "killed", ranks, kill_after=7)[0] not in range(8)
    assert train([*line, "--resume"], tmp_path / "killed", ranks)[0] == 0
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")
    assert digest(tmp_path / "killed" / "run") == digest(tmp_path / "whole" / "run")


def test_dropout_differs_by_step_rank_and_seed_and_spares_validation(whole, data_dir, tmp_path):
    out_dirs = [run(tmp_path, data_dir, name, dropout=0.2, steps=3, warmup_steps=1, seed=seed)
                for name, seed in (("a", 1337), ("b", 1337), ("c", 1))]  # fmt: skip
    a, b, c = map(losses, out_dirs)
    assert a == b != c and a[1] != losses(whole[1])[1]
    assert records(out_dirs[0], "val_loss")[0] == records(whole[1], "val_loss")[0]


def test_a_run_goes_on_from_the_weights_of_another(whole, data_dir, tmp_path):
    """From its folder, or from one checkpoint: the first validation is the other's last."""
    for source in (whole[1], checkpoints(whole[1])[0]):
        line = flags(data_dir=data_dir, out_dir="run", init_from=source, model=None, steps=2,
                     warmup_steps=1, n_layer=None, n_head=None, n_embd=None)  # fmt: skip
        code, _, err = train([*line, "--no-bf16"], tmp_path / source.name)
        assert code == 0, err
        first = records(tmp_path / source.name / "run", "val_loss")[0]
        assert first == records(whole[1], "val_loss")[12]


def test_a_finetuned_run_goes_on_without_its_source(data_dir, tmp_path):
    shape = GPTConfig(257, seq_len=16, n_layer=2, n_head=2, n_embd=32)
    folder = hugging_face_folder(GPT(shape), tmp_path / "hf")
    line = flags(data_dir=data_dir, out_dir="run", init_from=folder, model=None, resume=True)
    assert train(line, tmp_path / "whole")[0] == 0
    assert train(line, tmp_path / "killed", kill_after=7)[0] not in range(8)
    shutil.rmtree(folder)
    code, _, err = train(line, tmp_path / "killed")
    assert code == 0, err
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")


def test_eval_only_refuses_other_tokens(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hugging_face_folder(GPT(GPTConfig(seq_len=16, n_layer=1, n_head=1, n_embd=8)), Path("hf"))
    line = ["--init-from", "hf", "--eval-only", "--data-dir", str(data_dir)]
    assert train_gpt2.main(line) == 2
    assert "holds bytes tokens, the weights know gpt2: prepare" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Data that others wrote, and data that is damaged


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
    """A folder of random tokens in another project's layout; returns its train shard."""
    folder.mkdir()
    name, write = LAYOUTS[layout]
    for seed, split in enumerate(("val", "train")):
        tokens = np.random.default_rng(seed).integers(0, 50257, 5000).astype("<u2")
        (folder / name.format(split)).write_bytes(write(tokens))
    return folder / name.format("train")


def test_the_layouts_of_other_projects_train_alike(tmp_path):
    found = []
    for layout in LAYOUTS:
        data = lay_out(tmp_path / layout, layout).parent
        found.append(losses(run(tmp_path, data, f"run {layout}", steps=3, warmup_steps=1)))
    assert found[0] == found[1] == found[2] == found[3] and len(found[0]) == 3


DAMAGES = {  # what is left of a shard; a layout without header does not tell that half is missing
    "cut by a byte": lambda content: content[:-1],
    "a byte too long": lambda content: content + b"a",
    "cut in half": lambda content: content[: len(content) // 4 * 2],
    "a few tokens": lambda content: content[:-10_000] + content[-10:],
    "empty": lambda content: b"",
    "a page of text": lambda content: b"<html>404 Not Found</html>" * 50,
    "id 50257": lambda content: content[:-2] + np.array([50257], "<u2").tobytes(),
    "id 65535": lambda content: content[:-2] + b"\xff\xff",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_shard_is_refused_before_training(layout, damage, tmp_path):
    if (layout, damage) == ("nanoGPT", "cut in half"):
        pytest.skip("nanoGPT's layout has no length to compare with")
    shard = lay_out(tmp_path / "data", layout)
    shard.write_bytes(DAMAGES[damage](shard.read_bytes()))
    config = TrainConfig(model="gpt2", data_dir=str(tmp_path / "data"), seq_len=64, warmup_steps=1)
    with pytest.raises((ValueError, OSError)) as refused:
        train_gpt2.open_data(config, None)
    assert str(shard) in str(refused.value) or "--seq-len" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def own_data(data_dir, tmp_path) -> Path:
    return shutil.copytree(data_dir, tmp_path / "own")


def test_a_flipped_bit_ends_the_run_with_the_shards_name(own_data, tmp_path):
    flip_a_bit(own_data / "train_000000.bin")
    code, _, err = train(flags(data_dir=own_data, out_dir="run"), tmp_path)
    assert code in (2, 6) and "train_000000.bin is damaged" in err


@pytest.mark.parametrize("change", ["removed", "added", "reordered", "longer", "renamed"])
def test_a_run_does_not_go_on_with_other_data(change, data_dir, own_data, tmp_path):
    manifest = json.loads((own_data / "manifest.json").read_bytes())
    (own_data / "manifest.json").unlink()
    run(tmp_path, own_data, steps=3, warmup_steps=1)
    first, second = (own_data / f"train_{i:06d}.bin" for i in range(2))
    if change == "removed":
        second.unlink()
    if change == "added":
        shutil.copy(first, own_data / "train_1.bin")
    if change == "reordered":
        first.rename(own_data / "train_1.bin")
    if change == "longer":
        tokens = np.append(dataloader.open_shard(first).read(0, 1009), 7).astype("<u2")
        first.write_bytes(bin_of(tokens))
    if change == "renamed":
        for i in range(len(manifest["train"]["shards"])):
            (own_data / f"train_{i:06d}.bin").rename(own_data / f"more_train_{i:06d}.bin")
    line = flags(data_dir=own_data, out_dir="run", resume=True, steps=6, warmup_steps=1)
    code, _, err = train(line, tmp_path)
    if change == "renamed":
        assert code == 0, err
    else:
        assert code == 2 and "had when the run in run began; give it as it was, or another" in err


# --------------------------------------------------------------------------------------------------
# User mistakes: one line with the flag, both numbers and the cure, exit code 2, nothing written


def with_shard(name: str, content: bytes):
    """A mistake in the data: a shard of a folder is replaced."""

    def prepare(folder: Path) -> dict:
        header = np.array([dataloader.MAGIC, 1, 500, *[0] * 253], "<i4").tobytes()
        for split in ("train", "val"):
            (folder / f"{split}_000000.bin").write_bytes(header + bytes(1000))
        (folder / name).write_bytes(content(header) if callable(content) else content)
        return {"data_dir": folder}

    return prepare


def with_run(**changes):
    """A mistake in going on: run holds another run."""

    def prepare(folder: Path) -> dict:
        return {"out_dir": folder / "run", "resume": True} | changes

    return prepare


def with_weights(vocab_size: int = 257, **changes):
    """A mistake with the weights of another network."""

    def prepare(folder: Path) -> dict:
        shape = GPTConfig(vocab_size, seq_len=16, n_layer=2, n_head=2, n_embd=32)
        hugging_face_folder(GPT(shape), folder / "weights")
        return {"init_from": "weights", "model": None} | changes

    return prepare


def flipped(out_dir: Path) -> Path:
    path = checkpoints(out_dir)[0]
    flip_a_bit(path)
    return path


def hugging_face_folder(model: GPT, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model.config, None)))
    torch.save(hf_weights(model), folder / "pytorch_model.bin")
    return folder


def id_60000(header: bytes) -> bytes:
    return header + np.full(500, 60_000, "<u2").tobytes()


MISTAKES = {
    "no such folder": ({"data_dir": "nowhere"}, "--data-dir nowhere is not a folder: .*--input"),
    "no download": ({"data_dir": "data/fineweb-edu"}, "--download fineweb-edu --data-dir data"),
    "a file as folder": ({"data_dir": __file__}, "--data-dir .*is a file: name its f"),
    "no shards": ({"data_dir": "."}, "--data-dir . has no train shards"),
    "empty shard": (with_shard("train_000000.bin", b""), "train_000000.bin is not a whole token"),
    "no tokens": (
        with_shard("train_000000.bin", lambda h: h[:8] + bytes(1016)),
        "train_000000.bin .*holds 0 tokens",
    ),
    "cut shard": (
        with_shard("val_000000.bin", lambda h: h + bytes(998)),
        "val_000000.bin .*holds 499 tokens, its header says 500; copy it again",
    ),
    "half a token": (with_shard("val_000000.bin", lambda h: h + bytes(999)), "holds 499.5 tokens"),
    "foreign shard": (with_shard("train_000001.bin", b"text" * 300), "starts with 1954047348"),
    "llama shard": (
        with_shard("train_000001.bin", np.array([20240801, 7, 9], "<i4").tobytes()),
        "starts with 20240801, 7 instead of 20240520, 1",
    ),
    "id 60000": (
        with_shard("train_000001.bin", id_60000),
        "train_000001.bin holds token 60000, the network knows 0 to 50256: prepare the data again",
    ),
    "bad manifest": (with_shard("manifest.json", b'{"train": 1'), "manifest.json is damaged"),
    "batch of parts": (
        {"batch_tokens": 100, "micro_batch_size": 3},
        "--batch-tokens 100 is not a multiple of 48 = --micro-batch-size 3 .* 96 or 144",
    ),
    "small batch": ({"batch_tokens": 8}, "--batch-tokens 8 .* 16 = .*: try --batch-tokens 16"),
    "long warm-up": ({"warmup_steps": 99}, "--warmup-steps 99 must be less than --steps 12: try"),
    "long sequence": (
        {"model": "gpt2", "seq_len": 2048},
        "--seq-len 2048 is more than the 1024 positions of gpt2: try --seq-len 1024",
    ),
    "short shards": ({"seq_len": 4096, "batch_tokens": 4096}, "--seq-len 4096 needs .* has 1009"),
    "heads": ({"n_head": 5}, "--n-embd 32 must be a multiple of --n-head 5: try --n-embd 35"),
    "unknown flag": ({"lerning_rate": 3}, "--lerning-rate 3; did you mean --learning-rate?"),
    "no such flag": ({"zzz": 3}, "unrecognized arguments: --zzz 3; see --help"),
    "unknown model": ({"model": "gpt3"}, "--model: invalid choice: 'gpt3' .choose from '?gpt2"),
    "negative rate": ({"learning_rate": -1.0}, "--learning-rate -1.0 must be .* at least 0"),
    "rate of nan": ({"learning_rate": "nan"}, "--learning-rate nan must be a number"),
    "rate of inf": ({"learning_rate": "inf"}, "--learning-rate inf must be a number"),
    "a word": ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    "a fraction": ({"steps": 1.5}, "--steps: invalid int value: '1.5'"),
    "no steps": ({"steps": 0, "warmup_steps": 0}, "--steps 0 must be a number of at least 1"),
    "negative clip": ({"grad_clip": -0.5}, "--grad-clip -0.5 must be a number of at least 0"),
    "keep none": ({"keep": 0}, "--keep 0 must be a number of at least 2"),
    "no layers": ({"n_layer": 0}, "--n-layer 0 must be a number of at least 1"),
    "no value": ({"prompt": None, "seed": ""}, "--seed: invalid int value: ''"),
    "tf32": ({"tf32": True}, "--tf32 needs an NVIDIA GPU of 2020 or later, this is cpu: add --no-"),
    "a used out-dir": ({"out_dir": "run"}, "--out-dir run holds a run: add --resume, or name"),
    "a file as out-dir": ({"out_dir": __file__}, "--out-dir .* is a file: name a folder"),
    "an out-dir in a file": ({"out_dir": f"{__file__}/run"}, "(Not a directory|cannot find)"),
    "an unwritable out-dir": (
        {"out_dir": "/proc/run"}, "--out-dir /proc/run: 4 more checkpoints need .* 0.0 GB are free"
    ),
    "another shape": (with_run(n_layer=3), "--n-layer: the run in .*run has 2, this one 3; give"),
    "other padding": (with_run(pad_vocab=False), "--pad-vocab: the run in .* has True, this one F"),
    "another seed": (with_run(seed=7), "--seed: the run in .*run has 1337, this one 7; give it"),
    "another order": (with_run(shuffle=False), "--shuffle: the run in .* has True, this one False"),
    "two types": ({"bf16": True, "fp16": True}, "--bf16 and --fp16 are two types for the same: l"),
    "half a residual": ({"bf16_residual": True, "bf16": False}, "--bf16-residual needs --bf16: ad"),
    "an end of nothing": (
        {"cosine": False, "decay_to": 0.5}, "--decay-to 0.5 needs --cosine: add it, or --decay-to"
    ),
    "half a residual of float16": (
        {"bf16_residual": True, "fp16": True}, "--bf16-residual needs --bf16: add it, or --no-bf16-"
    ),
    "dropout": ({"dropout": 1.0}, "--dropout 1.0 must be a number of at least 0 and at most 0.99"),
    "no questions": ({"hellaswag": "none.bin"}, "none.bin is not a whole file of multiple-choice"),
    "other questions": (
        lambda folder: {"hellaswag": questions(folder, token=300)},
        "--hellaswag .*: its largest token is 300, the data's are of bytes; write it again",
    ),
    "another model": (
        lambda folder: with_weights()(folder) | {"model": "gpt2"},
        "--model gpt2: weights has a shape of its own; leave it out"),
    "bytes for gpt2": (
        with_weights(vocab_size=50257), "--data-dir .* holds bytes tokens, the weights know gpt2"),
    "nanoGPT's resume": ({"init_from": "resume", "model": None}, "--init-from resume: write --res"),
    "no weights": ({"init_from": "nobody/none", "model": None}, "--init-from nobody/none: no such"),
    "other heads": (with_weights(n_head=4), "--n-head 4: weights has 2; leave it out"),
    "more positions": (with_weights(n_head=2, seq_len=64), "--seq-len 64 is more than the 16 pos"),
    "ids beyond": (with_weights(vocab_size=100, n_head=2), "token 256, the network knows 0 to 99"),
    "a flipped bit": (
        lambda f: with_run()(f) | {"resume": False, "out_dir": None, "model": None,
                                   "init_from": flipped(f / "run")},
        "--init-from .*checkpoint_0000.*: the CRC-32 of its ",
    ),
    "nothing to sample": ({"sample_only": True}, "whose weights. Add --resume, .* or --init-from"),
    "nothing to export": ({"export": "x", "resume": True}, "--resume: no good checkpoint in new: "),
    "an empty name": ({"export": ""}, "--export is empty: name one, or leave it out"),
    "an export that exists": (
        lambda folder: with_weights(n_head=2)(folder) | {"export": folder / "weights"},
        "--export .*weights exists: name a new folder",
    ),
    "RANK alone": ({"RANK": "0"}, "LOCAL_RANK, WORLD_SIZE not set, others of torchrun's are: set"),
    "rank too high": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"},
        "RANK 0 must be less than WORLD_SIZE 0",
    ),
}  # fmt: skip


if find_spec("tensorboard") is None:
    MISTAKES["no tensorboard"] = (
        {"tensorboard": True}, "--tensorboard needs a library: pip install tensorboard"
    )  # fmt: skip
if not sys.platform.startswith("linux"):
    del MISTAKES["an unwritable out-dir"]  # root may write everywhere else


@pytest.fixture(scope="session")
def used(data_dir, once) -> Path:
    """A folder with a run in it, to be copied."""
    return once("used", lambda folder: run(folder, data_dir, steps=3)) / "run"


def snapshot(folder: Path) -> dict:
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def make_mistake(name, data_dir, used, folder) -> tuple[list[str], dict[str, str], str]:
    """The command line, the environment and the message of a mistake; prepared in folder."""
    changes, message = MISTAKES[name]
    shutil.copytree(used, folder / "run")
    if callable(changes):
        changes = changes(folder)
    env = {key: value for key, value in changes.items() if key.isupper()}
    changes = {key: value for key, value in changes.items() if not key.isupper()}
    return flags(**{"data_dir": data_dir, "out_dir": "new"} | changes), env, message


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name, data_dir, used, tmp_path, monkeypatch, capsys):
    line, env, message = make_mistake(name, data_dir, used, tmp_path)
    monkeypatch.chdir(tmp_path)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    before = snapshot(tmp_path)
    assert train_gpt2.main(line) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"train_gpt2.py: error: .*{message}.*\n", err), err
    assert out == "" and snapshot(tmp_path) == before


def test_the_largest_numbers_train(data_dir, tmp_path):
    names = [
        "steps",
        "eval_tokens",
        "save_every",
        "eval_every",
        "timeout_s",
        "top_k",
        "loss_chunk_tokens",
    ]
    most = {name: 2**31 - 1 for name in names} | {"seed": 2**64 - 1, "temperature": 1e308}
    asked = {"hellaswag": questions(tmp_path), "grad_clip": 1e308, "warmup_steps": 2**31 - 2}
    line = flags(data_dir=data_dir, out_dir="run", **most, **asked)
    code, _, err = train(line, tmp_path, kill_after=2)
    assert code not in range(8) and err == "" and list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize(("name", "make"), [
    *itertools.product(["hellaswag", "data_dir", "init_from"], ["mkfifo", "mkdir"]),
    ("out_dir", "mkfifo"),
])  # fmt: skip
def test_a_pipe_or_an_empty_folder_is_refused(name, make, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    getattr(os, make)("odd")
    changes = {"data_dir": data_dir, "out_dir": "new", name: "odd"}
    model = {} if name != "init_from" else dict.fromkeys(("model", "n_layer", "n_head", "n_embd"))
    assert train_gpt2.main(flags(**changes | model)) == 2
    assert re.fullmatch("train_gpt2.py: error: .*odd.*\n", capsys.readouterr().err)
    assert os.listdir() == ["odd"]


@pytest.mark.slow
def test_without_docstrings_and_asserts_it_trains_and_refuses(data_dir, tmp_path):
    program = [sys.executable, "-OO", ROOT / "train_gpt2.py"]
    subprocess.run([*program[:2], ROOT / "prepare_data.py", "--help"], check=True)
    for line, code in ((flags(data_dir=data_dir, out_dir="run", steps=3), 0), (["--help"], 0),
                       ([b"--prompt=\xff"], 2), (["--steps=--"], 2)):  # fmt: skip
        done = subprocess.run([*program, *line], cwd=tmp_path, capture_output=True)
        assert done.returncode == code, done.stderr
        assert len(done.stderr.splitlines()) == bool(code)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_of_the_program(name, data_dir, used, tmp_path):
    folder, out = tmp_path / "here", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    line, env, message = make_mistake(name, data_dir, used, folder)
    before = snapshot(folder)
    code, text, err = program(line, folder, env, out)
    assert (code, text) == (2, ""), err
    assert re.fullmatch(rf"train_gpt2.py: error: .*{message}.*\n", err), err
    assert snapshot(folder) == before


# --------------------------------------------------------------------------------------------------
# As a user starts it


@pytest.mark.slow
def test_torchrun_starts_it(data_dir, tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = flags(data_dir=data_dir, out_dir="run")
    subprocess.run(
        [sys.executable, *command, ROOT / "train_gpt2.py", *line], cwd=tmp_path, check=True
    )
    assert (
        json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[0])["environment"]["ranks"]
        == 2
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="hides the compiler by PATH")
def test_compile_without_a_compiler_is_refused_with_the_cure(data_dir, tmp_path):
    env = {"PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, ROOT / "train_gpt2.py", *flags(data_dir=data_dir, compile=True)],
        cwd=tmp_path, env=os.environ | env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--compile fails here" in done.stderr and "install a C++ compiler" in done.stderr


@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_has_ended_holds_nothing(data_dir, tmp_path, monkeypatch):
    """No cycle: else its log would stay open, and on a GPU its memory be taken. Python warns of
    files that are closed by being forgotten."""
    monkeypatch.chdir(tmp_path)
    train, runs = train_gpt2.train, []

    def note_and_train(run, signals):
        runs.append(weakref.ref(run))
        return train(run, signals)

    monkeypatch.setattr(train_gpt2, "train", note_and_train)
    monkeypatch.setattr(train_gpt2.log, "draw_loss", lambda path: False)  # matplotlib has cycles
    gc.collect()
    gc.disable()
    try:
        assert train_gpt2.main(flags(data_dir=data_dir, out_dir="run", steps=4)) == 0
        assert runs[0]() is None
    finally:
        gc.enable()
