"""What a run promises: its numbers, its speed-ups, and its one line about a mistake."""

import json
import math
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    before,
    digest,
    equal,
    finish,
    flags,
    flip,
    large_scale,
    losses,
    moments,
    questions,
    records,
    refused,
    run,
    saved_state,
    shard_header,
    start_ranks,
    train,
    weights,
)
from safetensors.torch import save_file

import model as network
import train_gpt2
from config import SCHEDULES, TrainConfig
from model import GPT, MLP, GPTConfig
from support import checkpoint
from support.checkpoint import checkpoints
from train_gpt2 import learning_rate

slow = pytest.mark.slow
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
        model = GPT(GPTConfig(pad_vocab=pad_vocab))
    groups = model.decay_groups()
    assert [len(group) for group in groups] == [50, 98]
    assert [model.num_elements(group) for group in groups] == [124_318_464, 121_344]
    assert {p for group in groups for p in group} == set(model.parameters())


ONE_AT_A_TIME = [pytest.param(ranks, 1, marks=slow) for ranks in (1, 3, 4)]


@pytest.mark.parametrize(("ranks", "B"), [(1, 8), (2, 2), (2, 8), *ONE_AT_A_TIME])
def test_micro_batches_and_ranks_change_no_loss(data_dir, once, tmp_path, ranks, B):
    batch = {"batch_tokens": 768}  # 48 sequences
    make = partial(run, data_dir=data_dir, micro_batch_size=4, **batch)
    one = losses(once("48-sequences", make) / "run")
    several = run(tmp_path, data_dir, ranks=ranks, micro_batch_size=B, **batch)
    assert losses(several) == pytest.approx(one, rel=1e-6)


SPEED_UPS = ["--no-flash", "--no-pad-vocab", "--no-fused", "--bf16", "--bf16 --bf16-residual"]
SPEED_UPS += ["--fp16", "--recompute", "--loss-chunk-tokens=5", "--tf32"]


@pytest.mark.parametrize("line", SPEED_UPS)
def test_a_speed_up_changes_no_loss_beyond_its_precision(whole, data_dir, tmp_path, line):
    code, _, err = train([*flags(data_dir=data_dir, out_dir="run"), *line.split()], tmp_path)
    assert code == 0, err
    tolerance = 2e-2 if "16" in line else 1e-5
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1]), rel=tolerance)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_what_is_measured_is_the_same_on_all_ranks_and_kept_by_a_resume(data_dir, tmp_path, ranks):
    """Of --bf16 and --flash, which nobody has typed."""
    line = flags(data_dir=data_dir, out_dir="run", bf16=None, flash=None, batch_tokens=768)
    code, out, err = train(line, tmp_path, ranks, kill_after=7)
    assert code == -signal.SIGKILL and " ms a block" in out, err
    code, out, err = train([*line, "--resume"], tmp_path, ranks)
    assert code == 0 and "changed" not in out and " ms a block" not in out, err
    chosen = {name: saved_state(tmp_path / "run")["flags"][name] for name in ("bf16", "flash")}
    assert train(flags(data_dir=data_dir, batch_tokens=768, **chosen), tmp_path, ranks)[0] == 0
    equal(tmp_path / "run", tmp_path / "out/001")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_micro_batch_is_the_largest_that_every_rank_has_memory_for(data_dir, tmp_path, ranks):
    """A resume keeps it, since another one would change the last bits."""
    line = flags(data_dir=data_dir, out_dir="run", micro_batch_size=None, batch_tokens=384)
    code, _, err = train(line, tmp_path / "none", ranks, inject=partial(little_memory, 0))
    assert code == 2 and "--seq-len" in err and not (tmp_path / "none/run").exists()
    code, _, err = train(line, tmp_path, ranks, kill_after=7, inject=partial(little_memory, 5))
    assert code == -signal.SIGKILL, err
    code, out, err = train([*line, "--resume"], tmp_path, ranks)
    assert code == 0 and "not bit for bit" not in out, err
    assert saved_state(tmp_path / "run")["flags"]["micro_batch_size"] == 3  # 12 or 24, 6, 3
    line[line.index("run")] = "typed"
    assert train([*line, "--micro-batch-size=3"], tmp_path, ranks)[0] == 0
    equal(tmp_path / "run", tmp_path / "typed")


def little_memory(most: int, rank: int):
    """Injection: the last rank has memory for so many sequences."""
    forward = GPT.forward

    def forward_or_fail(self, idx, targets):
        if len(idx) > most and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, idx, targets)

    GPT.forward = forward_or_fail


# ---- torch.compile -------------------------------------------------------------------------------


@slow
def test_compiled_runs_train_evaluate_sample_and_resume(data_dir, tmp_path):
    """To the bit, on two threads, which would add up an embedding's gradient in any order."""
    line = flags(data_dir=data_dir, out_dir="run", batch_tokens=3072, micro_batch_size=192)
    assert train(line, tmp_path / "eager")[0] == 0
    line += ["--compile", "--eval-every=4"]
    for name, kill_after in (("whole", None), ("killed", 7)):
        train(line, tmp_path / name, kill_after=kill_after, inject=two_threads)
    code, out, err = train([*line, "--resume"], tmp_path / "killed", inject=two_threads)
    assert code == 0 and "not bit for bit" not in out, err
    compiled = tmp_path / "killed/run"
    equal(compiled, tmp_path / "whole/run")
    assert losses(compiled) == pytest.approx(losses(tmp_path / "eager/run"), rel=1e-5)
    assert [*records(compiled, "sample")] == [*records(compiled, "val_loss")][1:] == [4, 8, 12]
    assert not any("_orig_mod" in name for name in weights(compiled))


def two_threads(rank: int):
    torch.set_num_threads(2)


@slow
def test_compile_asks_and_samples_without_compiling_again(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", compile=True, dropout=0.1)
    asked = ["--hellaswag", str(questions(tmp_path)), "--eval-every", "5"]
    graphs = []
    for name, more in (("plain", []), ("asked", asked)):
        code, _, err = train([*line, *more], tmp_path / name, inject=count_graphs)
        assert code == 0, err
        graphs.append(json.loads((tmp_path / name / "graphs").read_text()))
    equal(tmp_path / "asked/run", tmp_path / "plain/run")
    assert graphs[0] == graphs[1] and len(graphs[0]) == 12 and graphs[0][0] == graphs[0][-1] > 0


def count_graphs(rank: int):
    """Injection: write how many graphs have been compiled by the end of each step."""
    log_step, counts = train_gpt2.log_step, []

    def log_and_count(*args):
        log_step(*args)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        Path("graphs").write_text(json.dumps(counts))

    train_gpt2.log_step = log_and_count


# ---- The run -------------------------------------------------------------------------------------


def test_a_run_learns_and_its_log_says_how(whole):
    first, *_, last = losses(whole[1]).values()
    assert first == pytest.approx(math.log(257), rel=0.03) and last < 0.8 * first
    log = [json.loads(line) for line in (whole[1] / "log.jsonl").read_text().splitlines()]
    assert log[0]["process"] > 0 and log[0]["flags"]["learning_rate"] == 0.01
    assert log[0]["flags"] == json.loads((whole[1] / "config.json").read_bytes())
    steps = [record for record in log if "loss" in record]
    assert [record["step"] for record in steps] == [*range(1, 13)]
    names = {"loss", "grad_norm", "learning_rate", "ms", "tokens_per_s", "time"}
    assert all(names <= record.keys() for record in steps) and log[-1]["done"] == 12
    assert [record["saved"] for record in log if "saved" in record] == [5, 10, 12]


def test_watching_never_changes_the_run(whole, data_dir, tmp_path):
    often = {"eval_every": 5, "save_every": 2, "keep": 3, "eval_tokens": 100, "num_samples": 2}
    line = {"hellaswag": questions(tmp_path), "log_every": 1}
    watched = run(tmp_path, data_dir, **line, **often)
    assert losses(watched) == losses(whole[1]) and digest(watched) == digest(whole[1])
    assert [*records(watched, "val_loss")] == [0, 5, 10, 12]
    assert [*records(watched, "hellaswag_acc")] == [*records(watched, "sample")] == [5, 10, 12]
    pytest.importorskip("matplotlib")
    assert (watched / "loss.png").read_bytes().startswith(b"\x89PNG")


def note_modes(rank: int):
    """Injection: in which mode a run computes, with and without gradients, in a file."""
    forward, modes = MLP.forward, set()
    before("train", 1, lambda *_: modes.clear(), 0, rank)  # what the start has tried

    def noted(self, x):
        modes.add(f"{'training' if torch.is_grad_enabled() else 'watching'} {self.training}")
        Path("modes").write_text(" ".join(sorted(modes)))
        return forward(self, x)

    MLP.forward = noted


def test_evaluations_run_in_evaluation_mode_and_training_in_its_own(data_dir, tmp_path):
    asked = {"hellaswag": questions(tmp_path), "steps": 4, "eval_every": 2}
    line = flags(data_dir=data_dir, out_dir="run", **asked)
    assert train(line, tmp_path, inject=note_modes)[0] == 0
    assert (tmp_path / "modes").read_text() == "training True watching False"


def test_a_loss_that_is_not_finite_enters_no_weight(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run", learning_rate=1e6, save_every=1)
    code, _, err = train(line, tmp_path, 2)
    last = max(losses(tmp_path / "run"))
    assert code == 1 and len(err.splitlines()) == 1 and f"step {last} is saved" in err, err
    assert (tmp_path / "rank1.err").read_text() == ""
    assert saved_state(tmp_path / "run")["step"] == last
    assert all(t.isfinite().all() for t in weights(tmp_path / "run").values())
    for name, moment in moments(tmp_path / "run").items():
        assert moment.isfinite().all(), name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("line", ["--muon", "--no-muon", "--no-muon --no-fused", "--no-fused"])
def test_an_overflow_of_float16_skips_the_update_and_halves_the_scale(
    data_dir, tmp_path, line, ranks
):
    command = [*flags(data_dir=data_dir, out_dir="run", fp16=True, save_every=1), *line.split()]
    code, _, err = train(command, tmp_path, ranks, inject=large_scale)
    assert code == 0, err
    norms = records(tmp_path / "run", "grad_norm")
    skipped = [step for step, norm in norms.items() if norm is None]
    assert len(skipped) > 2 and skipped == [*range(1, len(skipped) + 1)]
    assert losses(tmp_path / "run")[len(skipped)] == pytest.approx(math.log(257), rel=0.03)
    assert losses(tmp_path / "run")[12] < 4.5
    scaler = saved_state(tmp_path / "run")["scaler"]
    assert scaler["scale"] == 2.0 ** (23 - len(skipped))
    assert scaler["_growth_tracker"] == 12 - len(skipped)


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


# ---- Weights of other runs and programs ----------------------------------------------------------


def hugging_face_folder(model: GPT, folder: Path) -> Path:
    """Write a model as Hugging Face's tools do: its config.json knows nothing of ours."""
    folder.mkdir(parents=True)
    settings = checkpoint.hf_config(model.config, "unknown", None)
    del settings[checkpoint.OURS]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(checkpoint.hf_weights(model), folder / "model.safetensors")
    return folder


def test_a_run_begins_with_the_weights_of_another(whole, data_dir, tmp_path):
    """From its folder, or from one checkpoint: the first validation is the other's last."""
    for source in (whole[1], checkpoints(whole[1])[0]):
        line = flags(data_dir=data_dir, out_dir="run", init_from=source, steps=2, **OF_WEIGHTS)
        code, _, err = train([*line, "--warmup-steps=1"], tmp_path / source.name)
        assert code == 0, err
        first = records(tmp_path / source.name / "run", "val_loss")[0]
        assert first == records(whole[1], "val_loss")[12]


def test_trained_weights_are_sampled_and_asked_before_the_first_step(whole, data_dir, tmp_path):
    """The baseline of a finetuning. Random weights would only write noise."""
    asked = {"hellaswag": questions(tmp_path), "steps": 2, "warmup_steps": 1}
    for init_from, first in ((whole[1], 0), (None, 2)):
        changes = asked | {"init_from": init_from} | (OF_WEIGHTS if init_from else {})
        out_dir = run(tmp_path, data_dir, f"run{first}", **changes)
        assert min(records(out_dir, "sample")) == min(records(out_dir, "hellaswag_acc")) == first


@slow
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


# ---- The user's mistakes: one line with the flag, exit code 2, nothing written -------------------


@pytest.fixture(scope="session")
def wrong_things(once, data_dir) -> Path:
    """A folder with a run, weights of other networks, and data that is damaged."""

    def make(folder: Path):
        run(folder, data_dir, steps=3)
        shutil.copytree(folder / "run", folder / "flipped")
        flip(folder / "flipped/step_000003/model.safetensors", 99_999)
        for size in (100, 257, 50257):
            shape = GPTConfig(size, seq_len=16, n_layer=2, n_head=2, n_embd=32)
            hugging_face_folder(GPT(shape), folder / f"weights{size}")
        header = shard_header(500)
        shards = {"llama": np.array([20240801, 7, 9] + [0] * 253, "<i4").tobytes(), "none": header}
        shards["beyond"] = header + np.full(500, 60_000, "<u2").tobytes()
        for name, content in shards.items():
            (folder / name).mkdir()
            for split in ("train", "val"):
                (folder / name / f"{split}_0.bin").write_bytes(header + bytes(1000))
            (folder / name / "train_1.bin").write_bytes(content)
        (folder / "questions.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": 2}\n')
        (folder / "weights.pt").write_bytes(b"PK")
        for name, text in {
            "list": "[]",
            "typo": '{"stesp": 3}',
            "type": '{"model": "nano", "seed": "a"}',
        }.items():
            (folder / f"{name}.json").write_text(text)

    return once("wrong-things", make)


WEIGHTS = "--model gpt2 --init-from"
MISTAKES = {  # words in the line
    "--data-dir nowhere": "--data-dir nowhere",
    "--data-dir run/log.jsonl": "--data-dir run/log.jsonl",
    "--data-dir .": "--data-dir .",
    "--data-dir none": "none/train_1.bin",
    "--data-dir llama": "20240801",
    "--data-dir beyond --model gpt2": "60000",
    "--seq-len 4096 --batch-tokens 8192": "1009",
    "--batch-tokens 100": "--batch-tokens 100",
    "--hellaswag nowhere.jsonl": "nowhere.jsonl",
    "--hellaswag questions.jsonl": "line 1",
    "--init-from nobody/none": "nobody/none",
    "--init-from weights.pt": "weights.pt",
    "--init-from flipped": "flipped",
    f"{WEIGHTS} weights50257": "gpt2",
    f"{WEIGHTS} weights257 --n-head 4": "--n-head 4",
    f"{WEIGHTS} weights257 --n-layer 3": "weights257",
    f"{WEIGHTS} weights257 --seq-len 64": "64",
    f"{WEIGHTS} weights100": "256",
    "--out-dir run": "--out-dir run",
    "--out-dir run/log.jsonl": "--out-dir run/log.jsonl",
    "--out-dir run/log.jsonl/run": "--out-dir run/log.jsonl/run",
    "--out-dir run/step_000003 --resume": "run/step_000003",
    "--out-dir flipped --resume --steps 9": "flipped",
    "--config nowhere.json": "nowhere.json",
    "--config list.json": "list.json",
    "--config typo.json": "stesp",
    "--config type.json": "seed",
    "--max-hours -1": "--max-hours",
    "--steps 0": "--steps 0",
    "--warmup-steps 12": "--warmup-steps 12",
    "--learning-rate nan": "--learning-rate nan",
    "--n-head 3": "--n-head 3",
    "--bf16 --fp16": "--fp16",
    "--bf16-residual": "--bf16",
    "--device cuda": "--device cuda",
    "--device nothing": "--device nothing",
    "--schedule linear": "linear",
    "--stesp 3": "--stesp",
    "--eval-only": "--eval-only",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    line, data_dir, wrong_things, monkeypatch, capfd
):
    monkeypatch.chdir(wrong_things)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    is_damaged = "flipped" in line  # whose name comes in a line before
    command = [*flags(data_dir=data_dir, out_dir="new"), *line.split()]
    try:
        err = refused(command, capfd, code=1 if "flipped" in line else 2, lines=1 + is_damaged)
        assert MISTAKES[line] in err and not Path("new").exists()
    finally:
        shutil.rmtree("new", ignore_errors=True)


def test_a_missing_library_is_one_line_and_leaves_no_run_behind(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main(flags(data_dir=data_dir, out_dir="run", wandb=True)) == 2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("mistake", ["--data-dir=nowhere", "--init-from=.", "--device=cuda"])
def test_a_mistake_is_one_line_of_one_rank(data_dir, tmp_path, mistake):
    processes = start_ranks([*flags(data_dir=data_dir, out_dir="run"), mistake], tmp_path, 2)
    code, out, err = finish(processes, tmp_path)
    assert code == 2 and processes[1].exitcode == 2 and out == ""
    both = (err + (tmp_path / "rank1.err").read_text()).splitlines()
    assert len(both) == (2 if "device" in mistake else 1), both  # each has its own GPUs
    assert not (tmp_path / "run").exists()


def see_all(rank: int):
    """Injection: an edit has lost the mask."""
    scaled = torch.nn.functional.scaled_dot_product_attention
    network.flash_attention = lambda q, k, v, dropout=0.0: scaled(q, k, v)


def test_a_network_that_sees_later_tokens_is_refused(data_dir, tmp_path):
    line = flags(data_dir=data_dir, out_dir="run")
    code, _, err = train(line, tmp_path, inject=see_all)
    assert code == 2 and "position 0 sees token 7" in err, err
    assert len(err.splitlines()) == 1 and not (tmp_path / "run").exists()
