"""Tests ../support/flags.py: command lines, their defaults, and their mistakes."""

import os
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from conftest import train

import prepare_data
import train_gpt2
from model import SHAPES
from support.flags import default_text, spell
from support.synonyms import SAID_HERE, SYNONYMS
from train_gpt2 import TrainConfig, parse_args

ROOT = Path(train_gpt2.__file__).parent


def test_nano_is_the_default_without_a_gpu_and_gpt2_with_one():
    assert parse_args([], "cpu")[0].model == "nano"
    config, given, _ = parse_args(["--steps", "7"], "cuda")
    assert (config.model, config.steps, config.warmup_steps, given) == ("gpt2", 7, 1, {"steps"})


def test_the_sizes_have_gpt3s_learning_rates():
    rates = [parse_args(["--model", name], "cuda")[0].learning_rate for name in SHAPES][:4]
    assert rates == [6e-4, 3e-4, 2.5e-4, 2e-4]


@pytest.mark.parametrize(
    ("typed", "here"),
    [
        ("--lr=3e-4", "--learning-rate"), ("--max_iters=100", "--steps"), ("--gpus 2", "torchrun"),
        ("--gradient_accumulation_steps=8", "--batch-tokens"), ("--block_size 64", "--seq-len"),
        ("--batch_size=12", "--micro-batch-size"), ("--epochs 3", "--steps"),
    ],
)  # fmt: skip
def test_what_it_is_called_elsewhere_is_understood(typed, here):
    with pytest.raises(ValueError, match=f"{typed[:4]}.* here is {here}"):
        parse_args(typed.split(), "cpu")


def test_every_synonym_of_a_line_is_told_at_once():
    said = "--max-iters here is --steps; --lr here is --learning-rate"
    with pytest.raises(ValueError, match=said):
        parse_args(["--max_iters=10", "--zzz", "--lr", "1e-3"], "cpu")


def test_a_synonym_is_no_flag_of_ours_and_names_one():
    ours = {spell(f.name) for f in fields(TrainConfig)}
    assert not ours & SYNONYMS.keys()
    for text in SAID_HERE:
        assert ours | {"torchrun"} >= set(re.findall(r"--[a-z][a-z0-9-]+|^torchrun", text)) - {
            "--nproc", "--no-bf16", "--no-cosine"}  # fmt: skip
    assert len(SYNONYMS) == sum(len(names.split()) for names in SAID_HERE.values())


@pytest.mark.parametrize(
    "typed, cure",
    [
        ("--compile=0", "--compile is a switch: type it, or --no-compile; see --help"),
        ("--no-tf32=yes", "--tf32 is a switch: type it, or --no-tf32; see --help"),
        ("--bias=False", "--no-bias here is always on, as in GPT-2"),
    ],
)
def test_a_switch_with_a_value_is_told_how_it_is_typed(typed, cure):
    with pytest.raises(ValueError, match=f"^{cure}$"):
        parse_args([typed], "cpu")


def test_a_flag_that_is_like_no_other_gets_no_guess():
    with pytest.raises(ValueError, match="unrecognized arguments: --zero-grad 1; see --help"):
        parse_args(["--zero-grad", "1"], "cpu")


def test_help_begins_with_what_it_is_and_ends_with_commands(tmp_path):
    code, out, _ = train(["--help"], tmp_path)
    assert code == 0 and train_gpt2.__doc__.splitlines()[0] in out
    assert out.rstrip().endswith(train_gpt2.__doc__.splitlines()[-1])


def test_nanogpts_spelling_is_understood():
    config, *_ = parse_args(["--batch_tokens=4096", "--compile=False", "--bf16=True"], "cuda")
    assert (config.batch_tokens, config.compile, config.bf16) == (4096, False, True)


def test_readme_shows_the_flags_as_they_are():
    rows = []
    for f in fields(TrainConfig):
        rows += [f"| **{f.metadata['group']}** | | |"] if f.metadata["group"] else []
        default = default_text(f.name, f.default, train_gpt2.RECIPES)
        rows.append(f"| `{train_gpt2.spell(f.name)}` | {default} | {f.metadata['help']} |")
    table = "\n".join(rows)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table in text, f"the README needs this table:\n{table}"


HOSTILE = [
    *("", " ", "-", "--", "---", "-1", "-0", "-0.0", "0", "1e400", "-1e400", "nan", "-nan", "inf"),
    *("1" * 40, "-" + "9" * 40, "9" * 5000, "1e-46", "1e30", "0x10", "1_0", "٣", "½", "None", "="),
    *("True", "\0", "a\0b", "\x1b[31m\x9b", "\udcff", "\n", "a\nb", "../..", "a" * 5000, "🙂"),
    *("$(touch x)", "%s%n", "/dev/null", "--seed", str(2**31), str(2**63), str(2**64)),
]  # fmt: skip


def refused(line: list[str], capsys) -> str:
    """The one line with which a command line is refused, and nothing left behind."""
    assert train_gpt2.main(line) == 2, line
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"train_gpt2.py: error: [^\x00-\x1f\x7f-\x9f]+\n", err), (
        line,
        err,
    )
    assert len(err) <= 301 and not os.listdir(), line
    return err


NAMES = [f.name for f in fields(TrainConfig)]


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_a_flag_is_a_traceback(name, tmp_path, monkeypatch, capsys):
    """Each one is refused, or taken: of some of these the folder that is not there is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rng, taken = np.random.default_rng(NAMES.index(name)), []
    for i, text in enumerate(HOSTILE):
        line = [f"{train_gpt2.spell(name)}={text}"]
        line = line if i % 4 else [train_gpt2.spell(name), text]
        if i % 3 == 0:  # with another one
            line.append(f"{train_gpt2.spell(str(rng.choice(NAMES)))}={rng.choice(HOSTILE)}")
        try:
            config, given, _ = parse_args(line, "cpu")
            taken.append([*line, "--data-dir", "nowhere"])
            assert isinstance(config, TrainConfig) and name in given
        except (ValueError, OSError):
            refused(line, capsys)
    for line in taken[::8]:
        refused(line, capsys)
    assert "-- ends the flags, and is no value" in refused([f"{train_gpt2.spell(name)}=--"], capsys)


FLAGS = {
    "--download fineweb --shards 104": "at least 1 and at most 103: fineweb has",
    "--download fineweb --shards 0": "--shards 0 must be a number of at least 1 and at most",
    "--shard-tokens 1000": "--shard-tokens 1000 must be a number of at least 1024 and at most 2147",
    "--val-fraction 1": "--val-fraction 1.0 must be a number of at least 0 and at most 0.5",
    "--workers -1": "--workers -1 must be a number of at least 0 and at most 61",
    "--workers 62": "--workers 62 must be a number of at least 0 and at most 61",
    "--download fineweb --dry-run": "--dry-run is for --input, not for --download; see --help",
    "--multiple-choice arc.jsonl --dry-run --data-dir data": "--dry-run is for --input, not for --",
    "--verify --dry-run --data-dir data": "--dry-run is for --input, not for --verify; see --help",
    "--input book.txt": "--input needs --data-dir; see --help",
    "--multiple-choice arc.jsonl": "--multiple-choice needs --data-dir; see --help",
    "--verify": "--verify needs --data-dir; see --help",
    "--multiple-choice arc.jsonl --input book.txt": "not allowed together: --input --mul",
    "--input book.txt --download fineweb": "not allowed together: --input --download; see --help",
    "--verify --download fineweb": "not allowed together: --download --verify; see --help",
    "--tokeniser gpt2": "unrecognized arguments: --tokeniser gpt2; did you mean --tokenizer?",
}


@pytest.mark.parametrize("line", FLAGS)
def test_flags_out_of_range_are_refused(line, capsys):
    assert prepare_data.main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("prepare_data.py: error: ") and FLAGS[line] in error
    assert error.count("\n") == 1


NUMBERS = ("shard-tokens", "val-fraction", "seed", "workers", "shards")
NO_NUMBERS = ("--", "", "x", "nan", "inf", "1e400", "1e9", "9" * 40, "-" + "9" * 40, "9" * 10**4,
              "\0", "\ud800", "\x1b[2J", "0x10", "1,000", "\n")  # fmt: skip


def check_mistake(line: list[str], capsys):
    assert prepare_data.main(line) == 2, line
    out, error = capsys.readouterr()
    assert not out and error.startswith("prepare_data.py: error: ") and len(error) < 1200
    assert error.endswith("\n") and error[:-1].isprintable(), error


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_number_that_is_none_is_one_line(flag, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = os.listdir()
    for value in NO_NUMBERS:
        check_mistake(["--input", "texts", "--data-dir", "data", f"--{flag}={value}"], capsys)
        if not value.startswith("-"):
            line = ["--input", "texts", "--data-dir", "data", f"--{flag}", value]
            check_mistake(line, capsys)
    assert os.listdir() == before
