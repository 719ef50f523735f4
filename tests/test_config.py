"""Tests ../config.py and ../support/cli.py: what a command line becomes, rule by rule."""

import inspect
import json
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

import config as flags
import train_gpt2
from config import DEFAULTS, NOT_SAVED, RECIPES, SPEED_UPS, TrainConfig, resolve
from model import ComputeConfig, GPTConfig
from support.checkpoint import Weights
from support.cli import UserError
from support.world import World

ROOT = Path(train_gpt2.__file__).parent
CPU, TWO = World(0, 1, torch.device("cpu")), World(1, 2, torch.device("cpu"))
GPU = World(0, 1, torch.device("cuda", 0))
MACHINE = {"device": "a card", "ranks": 1, "threads": 1, "torch": "2.9", "commit": "abc"}


def typed(*line: str) -> dict:
    return flags.read_flags([*line], train_gpt2.__doc__)[0]


def resolved(line: str = "", saved: dict | None = None, on: World = CPU, weights=None):
    return resolve(typed(*line.split()), saved or {}, weights, on)


@pytest.fixture
def gpu(monkeypatch) -> World:
    """What resolve sees where there is a GPU of 2020, and Triton."""
    return put_in_card(monkeypatch, (8, 0))


def put_in_card(monkeypatch, capability: tuple[int, int]) -> World:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flags, "find_spec", lambda name: name)
    return GPU


# ---- The command line ----------------------------------------------------------------------------


def test_spellings():
    line = ["--batch_tokens=4096", "--compile=False", "--bf16=True", "--no-flash", "--steps", "7"]
    line += ["--prompt=a_b", "--learning-rate=1e-3", "--out-dir=a=b_c", "--top_k", "3"]
    assert typed(*line) == {
        "batch_tokens": 4096, "compile": False, "bf16": True, "flash": False, "steps": 7,
        "prompt": "a_b", "learning_rate": 1e-3, "out_dir": "a=b_c", "top_k": 3,
    }  # fmt: skip


WRONG = {  # and a word that the line must have
    "--step 3": "--step",  # no abbreviations
    "--config typo.json": "stesp",
    "--config list.json": "list.json",
    "--model gpt3": "gpt3",
    "--prompt \udcff": "UTF-8",
    "--learning-rate nan": "--learning-rate nan",
    "--steps 12 --warmup-steps 12": "--warmup-steps 12",
    "--model gpt2 --n-embd 32 --n-head 5": "--n-head 5",
    "--bf16 --fp16": "--no-fp16",
    "--bf16-residual --no-bf16": "--no-bf16-residual",
    "--batch-tokens 100 --seq-len 16 --micro-batch-size 3": "48",
}


@pytest.mark.parametrize("line", WRONG)
def test_mistakes(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("typo.json").write_text('{"stesp": 3}')
    Path("list.json").write_text("[1]")
    # torch's @record, around it, needs a stderr with a number
    assert inspect.unwrap(train_gpt2.main)(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and WRONG[line] in err
    assert sorted(os.listdir()) == ["list.json", "typo.json"]


# ---- resolve, rule by rule -----------------------------------------------------------------------


def test_default_model(gpu):
    config = resolved()
    recipe = RECIPES["nano"] | {"learning_rate": 0.0067}
    assert config == replace(config, **recipe, model="nano")
    assert not (config.tf32 or config.bf16 or config.compile or config.bf16_residual)
    config = resolved(on=gpu)
    assert config.model == "gpt2" and (config.n_layer, config.n_embd) == (12, 768)
    assert config.tf32 and config.bf16 and config.compile and config.flash and config.fused


def test_learning_rates():
    rates = [resolved(f"--model {name}").learning_rate for name in RECIPES]
    assert rates == [0.0019, 0.0015, 0.0013, 0.0011, 0.0067]
    rates = [resolved(f"--model {name} --no-muon").learning_rate for name in RECIPES]
    assert rates == [6e-4, 3e-4, 2.5e-4, 2e-4, 4e-3]


RULES = [  # on a GPU of 2020 or on a CPU: a flag, and its value by what is typed
    (CPU, "muon", {
        "": True, "--no-muon": False, "--init-from gpt2": False, "--init-from gpt2 --muon": True,
        # below 6 * 768, Muon takes over a third of a step
        "--model gpt2 --seq-len 1 --batch-tokens 4607": False,
        "--model gpt2 --seq-len 1 --batch-tokens 4608": True,
        "--model gpt2 --seq-len 1 --batch-tokens 4607 --muon": True,
    }),
    (CPU, "beta1", {"--muon": 0.8, "--no-muon": 0.9, "--muon --beta1 0.7": 0.7}),
    (CPU, "steps", {
        "": 850, "--model gpt2": 240, "--model gpt2 --steps 9": 9, "--model gpt2 --data-dir d": 50,
    }),
    (CPU, "batch_tokens", {
        "": 2048, "--model gpt2": 65_536, "--model gpt2 --data-dir d": 524_288,
        "--model gpt2 --init-from gpt2": 32_768,
    }),
    (CPU, "warmup_steps", {"--steps 7": 1, "--steps 20": 4, "--steps 4": 0, "": 60,
                           "--steps 9 --warmup-steps 8": 8, "--model gpt2 --steps 9999": 715}),
    (CPU, "eval_tokens", {"": 262_144, "--model gpt2": 8192, "--model gpt2 --eval-tokens 9": 9}),
    (GPU, "eval_tokens", {"": 10_485_760}),
    (CPU, "compile", {"": False, "--compile": True, "--model gpt2": False}),
    (GPU, "compile", {"": True, "--no-compile": False, "--model nano": False}),
    (GPU, "bf16_residual", {"": True, "--model nano": False, "--fp16": False}),
    (GPU, "dtype", {"": "bfloat16", "--fp16": "float16", "--no-bf16": "float32"}),
    (CPU, "dtype", {"": "float32", "--bf16": "bfloat16", "--fp16": "float16"}),
    (GPU, "micro_batch_size", {"": 64, "--batch-tokens 24576": 24, "--batch-tokens 71680": 35}),
    (CPU, "micro_batch_size", {
        "": 32, "--model gpt2": 4, "--seq-len 8192 --batch-tokens 8192": 1,
        "--batch-tokens 24576 --micro-batch-size 3": 3,
    }),
    (TWO, "micro_batch_size", {"": 16}),
    (CPU, "data_dir", {
        "": "data/stdlib-bpe", "--model gpt2": "data/stdlib-bpe", "--data-dir mine": "mine",
    }),
    (CPU, "prompt", {"": "def ", "--prompt x": "x", "--data-dir d": "", "--init-from w": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("on", "name", "values"), RULES)
def test_rules(on, name, values, gpu):
    for line, value in values.items():
        assert getattr(resolved(line, on=on), name) == value, line


def test_older_card_and_no_triton(monkeypatch, gpu):
    monkeypatch.setattr(flags, "find_spec", lambda name: None)
    assert not resolved(on=gpu).compile and resolved("--compile", on=gpu).compile
    card = put_in_card(monkeypatch, (7, 5))
    lines = ("", "--fp16", "--no-fp16", "--bf16 --no-fp16")
    dtypes = [resolved(line, on=card).dtype for line in lines]
    assert dtypes == ["float16", "float16", "float32", "bfloat16"]
    config = resolved(on=card)
    assert config.flash and config.compile and not (config.tf32 or config.bf16_residual)


def test_init_from():
    for name, shape, model in (
        ("bytes", GPTConfig(257, n_layer=2, n_head=2, n_embd=64, seq_len=4096), "nano"),
        ("bpe-0123", GPTConfig(n_layer=6, n_head=6, n_embd=384, seq_len=256), "nano"),
        ("gpt2", GPTConfig(pad_vocab=False), "gpt2"),
    ):
        weights = Weights(Path("w"), shape, name)
        config = resolved("--init-from w", weights=weights)
        assert config.model == model and config.batch_tokens >= config.seq_len
        assert config.fields_of(GPTConfig) | {"vocab_size": shape.vocab_size} == asdict(shape)
        assert config.learning_rate == (1e-3 if model == "nano" else 3e-5) and not config.muon
        assert config.data_dir == f"data/stdlib-{name.partition('-')[0]}"
        assert resolved("--init-from w --seq-len 32", weights=weights).seq_len == 32


def test_whole_number_of_passes():
    for saved, B in ((5, 4), (4, 4), (99, 32)):  # of a run that is resumed, of 32 sequences
        assert resolved("", {"micro_batch_size": saved}).micro_batch_size == B
    assert resolved(on=TWO).num_micro_batches(2) == 1
    with pytest.raises(UserError, match=r"192.* 2 ranks"):
        resolved("--batch-tokens 96 --seq-len 16 --micro-batch-size 6", on=TWO)


# ---- A run's flags, saved and taken --------------------------------------------------------------


def test_flags_of_a_resume():
    for run, line, name, value in (
        ("--steps 7 --seed 3", "", "steps", 7),
        ("--steps 7 --seed 3", "--steps 9", "steps", 9),
        ("--steps 20", "--steps 100", "warmup_steps", 4),  # it is past, and stays as it was
        ("--model gpt2 --n-layer 2 --no-muon", "", "muon", False),
        ("--model gpt2 --n-layer 2", "", "n_layer", 2),
        ("--no-flash", "", "flash", False),
        ("--no-flash", "--flash", "flash", True),
        ("--prompt a", "--data-dir data/mine", "prompt", "a"),
    ):
        saved = json.loads(json.dumps(flags.to_save(resolved(run), MACHINE)))
        assert getattr(resolved(line, flags.to_take(saved, "a card")), name) == value


def test_same_and_other_device(gpu):
    config = resolved("--no-flash --fp16 --micro-batch-size 3 --batch-tokens 384 --recompute")
    config = replace(config, out_dir="run", resume=True, max_hours=2.0)
    saved = flags.to_save(config, MACHINE)
    assert saved.keys() == DEFAULTS.keys() - {*NOT_SAVED} | {"machine"}
    same = asdict(resolve({}, flags.to_take(saved, "a card"), None, CPU))
    assert same == asdict(config) | {name: DEFAULTS[name] for name in NOT_SAVED}
    moved = resolve({}, flags.to_take(saved, "another"), None, gpu)
    fresh = resolved("--model nano", on=gpu)
    assert all(getattr(moved, name) == getattr(fresh, name) for name in SPEED_UPS)
    assert moved.micro_batch_size == 3 and moved.recompute  # where the search begins


def test_kept_flags():
    saved = flags.to_save(resolved("--steps 7"), MACHINE)
    flags.check_fixed({name: saved[name] for name in saved.keys() - {"machine"}}, saved)
    kept = {f.name for f in fields(TrainConfig) if f.metadata["fixed"]}
    assert {"seed", "muon", "shuffle"} <= kept
    assert {f.name for f in fields(GPTConfig)} - {"vocab_size"} <= kept
    for name, default in DEFAULTS.items():
        other = {name: not saved[name] if isinstance(default, bool) and name in saved else 12345}
        if name not in kept:
            flags.check_fixed(other, saved)
        else:
            with pytest.raises(UserError, match=name.replace("_", "-")):
                flags.check_fixed(other, saved)


def test_changes():
    before = resolved("--steps 7")
    saved = flags.to_save(before, MACHINE)
    assert flags.changes(saved, saved) == []
    del saved["dropout"]  # it is newer than the checkpoint
    now = flags.to_save(
        replace(before, dropout=0.1, steps=9, flash=False, micro_batch_size=1),
        MACHINE | {"ranks": 2, "device": "another"},
    )
    lines = flags.changes(saved, now)
    told = {"steps": ("9", "7"), "flash": ("False", "True"), "ranks": ("2", "1")}
    told |= {"micro_batch": ("1", "32"), "dropout": ("0.1", "0.0"), "device": ("another", "card")}
    for name, values in told.items():
        (line,) = [line for line in lines if name in line.replace("-", "_")]
        assert all(value in line for value in values)
        assert ("not bit for bit" in line) == (name not in ("steps", "dropout"))
    assert len(lines) == len(told)
    assert {*SPEED_UPS, "micro_batch_size", "recompute", "loss_chunk_tokens"} <= {*flags.INEXACT}


def test_each_flag_is_read():
    """One that nothing reads would be taken, and do nothing. So would a field of the network."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]
    source = "".join(path.read_text("utf-8") for path in paths if path.name != "config.py")
    owners = (TrainConfig, "(config|compute)"), (GPTConfig, "config"), (ComputeConfig, "compute")
    for kind, owner in owners:
        for name in {f.name for f in fields(kind)} - {"bf16", "fp16", "compile"}:
            assert re.search(rf"\b{owner}s?(\[.\])?\.{name}\b|\W\"{name}\"\W", source), name
