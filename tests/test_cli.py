"""Tests ../support/cli.py and what train_gpt2.py makes of a command line: defaults, the layers that
override each other, and mistakes."""

import os
import re
import shlex
import subprocess
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import train

import config as config_module
import train_gpt2
from config import SYNONYMS, TrainConfig, resolve
from model import SHAPES, ComputeConfig, GPTConfig
from support import cli, device
from support.cli import spell
from support.ending import UserError
from support.pretrained import Pretrained

ROOT = Path(train_gpt2.__file__).parent
PROGRAM = [*ROOT.glob("*.py"), *(ROOT / "support").glob("*.py")]
CPU = torch.device("cpu")


def read_flags(line: list[str]) -> dict:
    return config_module.read_flags(line, "")


def resolved(line: str, state: dict | None = None, on: torch.device = CPU) -> TrainConfig:
    return resolve(read_flags(line.split()), state, None, on)[0]


def saved(line: str, device_name: str = device.device_name(CPU)) -> dict:
    """Return what a checkpoint of a run with this command line says about its flags."""
    return {"config": asdict(resolved(line)), "environment": {"device_name": device_name}}


def test_nano_is_the_default_without_a_gpu_and_gpt2_with_one(monkeypatch):
    assert resolved("").model == "nano"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = resolved("--steps 7 --no-compile", on=torch.device("cuda"))
    assert (config.model, config.steps, config.warmup_steps, config.bf16) == ("gpt2", 7, 1, True)


def test_the_sizes_have_gpt3s_learning_rates():
    rates = [
        resolved(f"--model {name} --no-muon").learning_rate for name in SHAPES if name != "nano"
    ]
    assert rates == [6e-4, 3e-4, 2.5e-4, 2e-4]


def test_muon_has_a_rate_by_width_and_what_is_typed_wins():
    def rate(line: str) -> float:
        return resolved(line).learning_rate

    assert rate("--model gpt2") == config_module.muon_learning_rate(768) > 6e-4
    assert rate("--model gpt2") == 0.0019  # which is told at the start: no 16 digits
    assert rate("--model gpt2 --n-embd 384") == config_module.muon_learning_rate(384)
    assert rate("--model gpt2-xl") < rate("--model gpt2-medium") < rate("")
    assert rate("--learning-rate 0.5") == 0.5 and rate("--model gpt2 --no-muon") == 6e-4
    betas = [resolved(line).beta1 for line in ("--muon", "--no-muon", "--muon --beta1 0.7")]
    assert betas == [0.8, 0.9, 0.7]


def test_weights_have_the_recipe_of_the_model_of_the_nearest_size():
    for n_layer, n_embd, model in (
        (1, 8, "nano"),
        (2, 64, "nano"),
        (4, 256, "nano"),
        (6, 384, "gpt2"),  # nanoGPT's baby GPT
        (12, 768, "gpt2"),
        (24, 1040, "gpt2-medium"),
        (96, 12288, "gpt2-xl"),
    ):
        shape = GPTConfig(n_layer=n_layer, n_head=2, n_embd=n_embd)
        weights = Pretrained(Path("weights"), shape, {}, "gpt2")
        config, _ = resolve({"init_from": "weights"}, None, weights, CPU)
        assert (config.model, config.n_layer, config.n_embd) == (model, n_layer, n_embd)


def test_a_cpu_validates_on_as_many_tokens_as_take_half_a_minute():
    for line, num_tokens in (
        ("--model gpt2", 8192),
        ("--model gpt2-xl", 8192),
        ("--model gpt2 --n-layer 6 --n-embd 384", 4 * 8192),
        ("--model gpt2 --eval-tokens 9", 9),
        ("", 262_144),
    ):
        config, reasons = resolve(read_flags(line.split()), None, None, CPU)
        assert config.eval_tokens == num_tokens
        is_chosen = line.startswith("--model") and num_tokens > 9
        assert (f"--eval-tokens {num_tokens}" in reasons) == is_chosen


OPTIMIZERS = {  # whether the matrices are Muon's
    "": True,
    "--model gpt2-xl": True,
    "--no-muon": False,
    "--init-from gpt2": False,
    "--init-from gpt2 --muon": True,
    "--batch-tokens 64 --n-embd 384": True,  # nano is quick with either
    "--model gpt2 --batch-tokens 4607": False,  # below 6 * 768, Muon takes over a third of a step
    "--model gpt2 --batch-tokens 4608": True,
    "--model gpt2 --batch-tokens 4607 --muon": True,
    "--model gpt2 --batch-tokens 4608 --n-embd 960": False,
}


@pytest.mark.parametrize("line", OPTIMIZERS)
def test_new_weights_are_trained_by_muon_unless_there_is_a_reason(line):
    config, reasons = resolve(read_flags(line.split()), None, None, CPU)
    assert config.muon == OPTIMIZERS[line]
    assert ("--no-muon" in reasons) == ("--batch-tokens" in line and not config.muon)
    for had in (True, False):  # a run from before the default changed goes on as it was
        state = saved("--steps 9")
        state["config"]["muon"] = had
        assert resolved("--batch-tokens 9", state).muon == had


def test_the_first_command_on_a_gpu_takes_half_a_minute():
    for line, steps, batch_tokens in (
        ("--model gpt2", 240, 65_536),
        ("--model gpt2-medium --steps 9", 9, 65_536),
        ("--model gpt2 --data-dir mine", 50, 524_288),
        ("--model gpt2 --init-from gpt2", 50, 32_768),
        ("", 700, 2048),
        ("--init-from nano", 700, 2048),
    ):
        config = resolved(line)
        assert (config.steps, config.batch_tokens) == (steps, batch_tokens), line


RESIDUAL = {  # whether a GPU of 2020 has a residual stream in bfloat16
    "--model gpt2": True,
    "": True,
    "--no-bf16-residual": False,
    "--bf16 --bf16-residual": True,
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


def test_a_cpu_has_a_float32_residual_and_says_so():
    config, reasons = resolve(read_flags(["--model", "gpt2", "--bf16"]), None, None, CPU)
    assert not config.bf16_residual and "--no-bf16-residual" in reasons
    for line in ("--bf16 --bf16-residual", "--no-bf16-residual"):
        assert "--no-bf16-residual" not in resolve(read_flags(line.split()), None, None, CPU)[1]


def test_an_old_gpu_has_a_float32_residual(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    config = resolved("--model gpt2 --no-compile", on=torch.device("cuda"))
    assert (config.fp16, config.bf16_residual) == (True, False)


RESUMED = [  # the run, what is typed at its resume, a flag, its value
    ("--steps 7 --seed 3", "", "steps", 7),
    ("--steps 7 --seed 3", "--steps 9", "steps", 9),
    ("--steps 20", "--steps 100", "warmup_steps", 4),  # the warm-up is past, and stays as it was
    ("--no-pad-vocab", "--steps 900", "pad_vocab", False),
    ("--model gpt2 --n-layer 2", "", "n_layer", 2),
    ("--no-flash", "", "flash", False),
    ("--no-flash", "--flash", "flash", True),
    ("--prompt a", "--data-dir data/mine", "prompt", "a"),
    ("--learning-rate 0.5", "--steps 900", "learning_rate", 0.5),
]


@pytest.mark.parametrize(("run", "line", "name", "value"), RESUMED)
def test_a_resume_has_the_runs_own_flags_and_what_is_typed_wins(run, line, name, value):
    assert getattr(resolved(line, saved(run)), name) == value


def test_a_run_that_moves_to_another_device_chooses_its_speed_ups_anew():
    """Those it had were typed for the other device. A typed flag wins, as always; what is no matter
    of the device stays."""
    line = "--no-flash --fp16 --micro-batch-size 3 --batch-tokens 384 --recompute --steps 7"
    here, moved = (resolved("", saved(line, *name)) for name in ([], ["another"]))
    assert (here.flash, here.fp16, here.micro_batch_size) == (False, True, 3)
    assert (moved.fp16, moved.micro_batch_size) == (False, 0)
    assert moved.flash == resolved("").flash and moved.recompute and moved.steps == 7
    assert not resolved("--no-flash", saved(line, "another")).flash


def test_each_flag_is_read_somewhere():
    """A flag that nothing reads would be taken, and do nothing. So would a field of the network."""
    text = "".join(path.read_text("utf-8") for path in PROGRAM)
    read = set(re.findall(r"\.([a-z]\w*)\b", re.sub(r"self\.\w+ = ", "", text)))
    read |= set(re.findall(r"typed\.get\(\"(\w+)\"", text))
    for kind in (TrainConfig, GPTConfig, ComputeConfig):
        unread = {f.name for f in fields(kind)} - read
        assert not unread, f"nothing reads {unread} of {kind.__name__}"


def test_a_field_of_the_network_without_a_flag_fails_at_the_start(monkeypatch):
    more = [*fields(ComputeConfig), SimpleNamespace(name="window")]
    monkeypatch.setattr(
        config_module, "fields", lambda kind: more if kind is ComputeConfig else fields(kind)
    )
    with pytest.raises(TypeError, match="window is no field of TrainConfig"):
        TrainConfig(warmup_steps=0)


def test_a_flag_of_the_network_that_the_network_lacks_fails_at_the_start(monkeypatch):
    """Taken, it would do nothing. Here a field of ComputeConfig has gone."""
    fewer = [f for f in fields(ComputeConfig) if f.name != "dropout"]
    monkeypatch.setattr(
        config_module, "fields", lambda kind: fewer if kind is ComputeConfig else fields(kind)
    )
    with pytest.raises(TypeError, match="dropout is a field of neither GPTConfig"):
        resolved("")


def test_each_field_of_the_network_must_stay_as_it_was():
    kept = {f.name for f in fields(TrainConfig) if f.metadata["on_resume"] == "refuse"}
    assert {f.name for f in fields(SHAPES["gpt2"])} - {"vocab_size"} <= kept
    once = {f.name for f in fields(TrainConfig) if f.metadata["on_resume"] == "per command"}
    assert once == {"out_dir", "resume", "device", "eval_only", "max_hours"}


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


# ---- Mistakes: one line, nothing written ---------------------------------------------------------

MISTAKES = {
    "--steps many": "--steps: invalid int value: 'many'",
    "--steps 1e3": "try 1000",
    "--sample-only": "--sample-only here is a program, sample.py",
    "--no-cosine": "--no-cosine here is --schedule constant",
    "--schedule zigzag": "--schedule: invalid choice: 'zigzag' .*cosine.*constant.*wsd",
    "--eval-only --learning-rate 3": "--eval-only does not use --learning-rate: leave it out",
    "--eval-only --compile": "--eval-only does not use --compile: leave it out",
    "--seed=": "--seed: invalid int value: ''",
    "--steps 0 --warmup-steps 0": "--steps 0 must be at least 1",
    "--n-layer 0": "--n-layer 0 must be at least 1",
    "--learning-rate -1": "--learning-rate -1.0 must be at least 0",
    "--learning-rate nan": "--learning-rate nan must be at least 0",
    "--learning-rate inf": "--learning-rate inf must be at most 2147483647",
    "--decay-to 1.5": "--decay-to 1.5 must be at most 1",
    "--model gpt3": "--model: invalid choice: 'gpt3'",
    "--lerning-rate 3": "--lerning-rate 3; did you mean --learning-rate?",
    "--compile=0": "--compile takes no value, nor does --no-compile",
    "--compile true": "arguments: true; flags begin with --, a switch takes no value",
    "config/train.py": "config/train.py is not here: type its path in your folder of nanoGPT",
    "config/train.yaml": "arguments: config/train.yaml; .* there are no config files",
    "--prompt a --prompt=b": "--prompt was given 2 times",
    "--out-dir=": "--out-dir is empty: give it a value, or leave it out",
    "--steps=--": "-- ends the flags, and is not a value",
    "--steps 12 --warmup-steps 99": "--steps 12: try --warmup-steps 2",
    "--model gpt2 --n-embd 32 --n-head 5": "--n-head 5 must divide --n-embd 32: try --n-head 4",
    "--bf16 --fp16": "--bf16 and --fp16 conflict: add --no-bf16 or --no-fp16",
    "--bf16-residual --no-bf16": "--bf16-residual needs --bf16: add it, or --no-bf16-residual",
    "--tf32": "--tf32 needs an NVIDIA GPU from 2020 or later; this is cpu",
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


@pytest.mark.parametrize("words", [["out/my run"], ["it's", "$HOME"], ["plain"]], ids=str)
def test_what_is_printed_can_be_pasted_into_the_shell_of_the_system(words, monkeypatch):
    """cmd.exe passes on single quotes, so that a pasted --resume began a new run."""
    monkeypatch.setattr(cli.os, "name", "posix")
    assert shlex.split(cli.quoted(*words)) == words
    monkeypatch.setattr(cli.os, "name", "nt")
    windows = cli.quoted(*words)
    monkeypatch.undo()
    assert windows == subprocess.list2cmdline(words) and not windows.startswith("'")
