"""Tests ../support/cli.py and what train_gpt2.py makes of a command line: defaults, the layers that
override each other, and mistakes."""

import os
import re
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import train

import train_gpt2
from model import SHAPES
from support.cli import KEEP, ONCE, default_text, spell
from support.errors import UserError
from support.synonyms import SYNONYMS
from train_gpt2 import FINETUNE, RECIPES, TrainConfig, given_flags, read_flags, resolve

ROOT = Path(train_gpt2.__file__).parent
CPU = torch.device("cpu")


def resolved(line: str, state: dict | None = None, on: torch.device = CPU) -> TrainConfig:
    return resolve(given_flags(read_flags(line.split()), state), state, None, on)[0]


def saved(line: str) -> dict:
    """Return what a checkpoint of a run with this command line says about its flags."""
    typed = given_flags(read_flags(line.split()), None)
    return {"typed": typed, "config": asdict(resolved(line))}


def test_nano_is_the_default_without_a_gpu_and_gpt2_with_one(monkeypatch):
    assert resolved("").model == "nano"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = resolved("--steps 7 --no-compile", on=torch.device("cuda"))
    assert (config.model, config.steps, config.warmup_steps, config.bf16) == ("gpt2", 7, 1, True)


def test_the_sizes_have_gpt3s_learning_rates():
    rates = [resolved(f"--model {name}").learning_rate for name in SHAPES if name != "nano"]
    assert rates == [6e-4, 3e-4, 2.5e-4, 2e-4]


def test_muon_has_a_rate_by_width_and_what_is_typed_wins():
    def rate(line: str) -> float:
        return resolved(line).learning_rate

    assert rate("--model gpt2 --muon") == train_gpt2.muon_learning_rate(768) > 6e-4
    assert rate("--model gpt2 --muon") == 0.0019  # which is told at the start: no 16 digits
    assert rate("--model gpt2 --muon --n-embd 384") == train_gpt2.muon_learning_rate(384)
    assert rate("--model gpt2-xl --muon") < rate("--model gpt2-medium --muon") < rate("")
    assert rate("--muon --learning-rate 0.5") == 0.5 and rate("--model gpt2") == 6e-4
    betas = [resolved(line).beta1 for line in ("--muon", "--no-muon", "--muon --beta1 0.7")]
    assert betas == [0.8, 0.9, 0.7]


SPEED_UPS = {  # which are on, of tf32, bf16, compile, flash, pad_vocab, fused, on a GPU of 2020
    "--speed-ups none": [0, 0, 0, 0, 0, 0],
    "--speed-ups bf16": [1, 1, 0, 0, 0, 0],
    "--speed-ups pad-vocab --no-compile": [1, 1, 0, 1, 1, 0],
    "--speed-ups none --flash": [0, 0, 0, 1, 0, 0],
    "--speed-ups all --no-compile": [1, 1, 0, 1, 1, 1],
}


@pytest.mark.parametrize("line", SPEED_UPS)
def test_speed_ups_are_on_up_to_the_one_that_is_named(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = resolved(f"--model gpt2 {line}", on=torch.device("cuda"))
    names = [name.replace("-", "_") for name in train_gpt2.SPEED_UPS]
    assert [getattr(config, name) for name in names] == SPEED_UPS[line]


RESIDUAL = {  # whether a GPU of 2020 has a residual stream in bfloat16
    "--model gpt2": True,
    "": True,
    "--speed-ups all": True,
    "--no-bf16-residual": False,
    "--speed-ups fused": False,
    "--speed-ups none --bf16 --bf16-residual": True,
    "--model nano": False,
    "--no-bf16": False,
    "--fp16": False,
    "--init-from gpt2": False,
    "--init-from gpt2 --bf16-residual": True,
}


@pytest.mark.parametrize("line", RESIDUAL)
def test_a_gpu_has_a_bf16_residual_unless_there_is_a_reason(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = resolved(f"--no-compile {line}", on=torch.device("cuda"))
    assert config.bf16_residual == RESIDUAL[line]


def test_a_cpu_has_a_float32_residual():
    assert not resolved("--model gpt2 --bf16").bf16_residual


def test_an_old_gpu_has_a_float32_residual(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    config = resolved("--model gpt2 --no-compile", on=torch.device("cuda"))
    assert (config.fp16, config.bf16_residual) == (True, False)


RESUMED = [  # the run, what is typed at its resume, a flag, its value
    ("--steps 7 --seed 3", "", "steps", 7),
    ("--steps 7 --seed 3", "--steps 9", "steps", 9),
    ("--no-pad-vocab", "--steps 9", "pad_vocab", False),
    ("--model gpt2 --n-layer 2", "", "n_layer", 2),
    ("--speed-ups none", "", "flash", False),
    ("--speed-ups none", "--flash", "flash", True),
    ("--speed-ups bf16", "--speed-ups fused", "fused", True),
    ("--no-bf16", "--speed-ups bf16", "bf16", True),
    ("--flash", "--speed-ups none", "flash", False),
    ("--bf16 --bf16-residual", "--speed-ups none", "bf16_residual", False),
    ("--speed-ups none", "--speed-ups all", "fused", True),  # flash depends on the processor
    ("--no-fused", "--speed-ups fused", "fused", True),
    ("", "--speed-ups none", "pad_vocab", True),
]


@pytest.mark.parametrize(("run", "line", "name", "value"), RESUMED)
def test_a_resume_has_the_runs_own_flags_and_what_is_typed_wins(run, line, name, value):
    assert getattr(resolved(line, saved(run)), name) == value


def test_each_field_of_the_network_must_stay_as_it_was():
    kept = {f.name for f in fields(TrainConfig) if f.metadata["on_resume"] == KEEP}
    assert {f.name for f in fields(SHAPES["gpt2"])} - {"vocab_size"} <= kept
    once = {f.name for f in fields(TrainConfig) if f.metadata["on_resume"] == ONCE}
    assert once == {"out_dir", "resume", "device", "eval_only", "sample_only"}


ELSEWHERE = {  # what nanoGPT, build-nanogpt and llm.c call it
    "--lr=3e-4": "--learning-rate",
    "--max_iters=100": "--steps",
    "--gradient_accumulation_steps=8": "--batch-tokens",
    "--block_size 64": "--seq-len",
    "--batch_size=12": "--micro-batch-size",
    "--zzz --max_iters=10 --lr 1e-3": "--steps",
}


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_it_is_called_elsewhere_is_understood(line):
    with pytest.raises(UserError, match=f"^--[a-z-]+ here is {ELSEWHERE[line]}"):
        read_flags(line.split())


def test_a_synonym_is_no_flag_of_ours_and_names_one():
    ours = {spell(f.name) for f in fields(TrainConfig)}
    ours |= {f"--no-{spell(f.name)[2:]}" for f in fields(TrainConfig) if f.type is bool}
    assert not ours & SYNONYMS.keys()
    for text in SYNONYMS.values():
        named = set(re.findall("--[a-z][a-z0-9-]+", text))
        assert named and named <= ours | {"--nproc"} or "prepare_data.py" in text


def test_nanogpts_spelling_is_understood():
    typed = read_flags(["--batch_tokens=4096", "--compile=False", "--bf16=True"])
    assert typed == {"batch_tokens": 4096, "compile": False, "bf16": True}


def test_help_begins_with_what_it_is_and_ends_with_commands(tmp_path):
    code, out, _ = train(["--help"], tmp_path)
    assert code == 0 and train_gpt2.__doc__.splitlines()[0] in out
    assert out.rstrip().endswith(train_gpt2.__doc__.splitlines()[-1])


def test_readme_shows_the_flags_as_they_are():
    rows = []
    for f in fields(TrainConfig):
        rows += [f"| **{f.metadata['group']}** | | |"] if f.metadata["group"] else []
        default = default_text(f.name, f.default, RECIPES | {"--init-from": FINETUNE})
        rows.append(f"| `{spell(f.name)}` | {default} | {f.metadata['help']} |")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [row for row in rows if row not in text]
    assert not missing, "the README's table of flags needs these rows:\n" + "\n".join(missing)
    assert "\n".join(rows) in text


# ---- Mistakes: one line, nothing written ---------------------------------------------------------

MISTAKES = {
    "--steps many": "--steps: invalid int value: 'many'",
    "--steps 1e3": "try 1000",
    "--speed-ups tf32": "--speed-ups tf32 needs an NVIDIA GPU.*: .*name another",
    "--seed=": "--seed: invalid int value: ''",
    "--steps 0 --warmup-steps 0": "--steps 0 must be at least 1",
    "--n-layer 0": "--n-layer 0 must be at least 1",
    "--learning-rate -1": "--learning-rate -1.0 must be at least 0",
    "--learning-rate nan": "--learning-rate nan must be at least 0",
    "--learning-rate inf": "--learning-rate inf must be at most 2147483647",
    "--decay-to 1.5": "--decay-to 1.5 must be at most 1",
    "--model gpt3": "--model: invalid choice: 'gpt3'",
    "--lerning-rate 3": "--lerning-rate 3; did you mean --learning-rate?",
    "--compile=0": "--compile is a switch: type it, or --no-compile",
    "--compile true": "arguments: true; flags begin with --, a switch takes no value",
    "config/train.py": "arguments: config/train.py; .* there are no config files",
    "--prompt a --prompt=b": "--prompt is typed 2 times",
    "--out-dir=": "--out-dir is empty: name one, or leave it out",
    "--steps=--": "-- ends the flags, and is not a value",
    "--steps 12 --warmup-steps 99": "--steps 12: try --warmup-steps 2",
    "--model gpt2 --n-embd 32 --n-head 5": "--n-head 5 must divide --n-embd 32: try --n-head 4",
    "--bf16 --fp16": "--bf16 and --fp16 exclude each other: add --no-bf16 or --no-fp16",
    "--bf16-residual --no-bf16": "--bf16-residual needs --bf16: add it, or --no-bf16-residual",
    "--tf32": "--tf32 needs an NVIDIA GPU of 2020 or later, this is cpu",
    "--batch-tokens 100 --seq-len 16 --micro-batch-size 3": "not a multiple of 48 = .*: try .* 96",
    "--batch-tokens 8 --seq-len 16": "--batch-tokens 8 .* 16 = .*: try --batch-tokens 16",
}


def refused(line: list[str], capsys) -> str:
    """Return the one line with which a command line is refused; nothing may be left behind."""
    assert train_gpt2.main(line) == 2, line
    out, err = capsys.readouterr()
    assert out == "" and not os.listdir(), line
    assert re.fullmatch(r"train_gpt2.py: error: [^\x00-\x1f\x7f-\x9f]+\n", err), (line, err)
    return err


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_names_the_flag_and_the_cure(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert re.search(MISTAKES[line], refused(line.split(), capsys))


HOSTILE = ["", " ", "-", "--", "---", "-1", "-0", "-0.0", "0", "1e400", "-1e400", "nan", "-nan"]
HOSTILE += ["inf", "1" * 40, "-" + "9" * 40, "9" * 5000, "1e-46", "1e30", "0x10", "1_0", "٣", "½"]
HOSTILE += ["None", "=", "True", "\x1b[31m\x9b", "\udcff", "\n", "a\nb", "../.."]
HOSTILE += ["a" * 5000, "🙂", "$(touch x)", "%s%n", "/dev/null", "--seed", str(2**31), str(2**64)]
NAMES = [f.name for f in fields(TrainConfig)]


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_a_flag_is_a_traceback(name, tmp_path, monkeypatch, capsys):
    """Each one is refused, or taken: of some of these the folder that is not there is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rng = np.random.default_rng(NAMES.index(name))
    taken = []
    for i, text in enumerate(HOSTILE):
        line = [f"{spell(name)}={text}"] if i % 4 else [spell(name), text]
        if i % 3 == 0:  # with another one
            line.append(f"{spell(str(rng.choice(NAMES)))}={rng.choice(HOSTILE)}")
        try:
            typed = read_flags(line)
            assert name in typed and isinstance(resolve(typed, None, None, CPU)[0], TrainConfig)
            taken.append([*line, "--data-dir", "nowhere"])
        except UserError:
            refused(line, capsys)
    for line in taken[::8]:
        refused(line, capsys)
