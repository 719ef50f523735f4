"""Tests ../docs/rotary.patch, an example of a change of the network, from end to end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import digest, flags, losses

import sample

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patched(once) -> Path:
    """A folder with the program and the tests of the network, and with the patch."""

    def make(folder: Path):
        for name in ("support", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__*", ".*"))
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # not a checkout's part
        command = ["git", "apply", ROOT / "docs/rotary.patch"]
        subprocess.run(command, cwd=folder, env=env, check=True)

    return once("patched", make)


def python(folder: Path, *line: object, code: int = 0) -> str:
    """Run a Python program in folder, which must end with this code. Return its output."""
    command = [sys.executable, *map(str, line)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rotary(patched, data_dir, once) -> Path:
    """The folder of a run with --rope."""

    def make(folder: Path):
        line = flags(data_dir=data_dir, out_dir=folder / "run", rope=True)
        python(patched, "train_gpt2.py", *line)

    return once("rotary", make) / "run"


def test_it_learns(rotary, whole):
    found = losses(rotary)
    assert [*found] == [*range(1, 13)] and found[12] < found[1] - 0.1
    assert abs(found[1] / losses(whole[1])[1] - 1) > 1e-5


def test_exact_resume(patched, rotary, data_dir, tmp_path):
    shutil.copytree(rotary / "step_000010", tmp_path / "run" / "step_000010")
    line = flags(data_dir=data_dir, out_dir=tmp_path / "run")
    refused = python(patched, "train_gpt2.py", *line, "--resume", "--no-rope", code=2)
    assert "--rope" in refused
    python(patched, "train_gpt2.py", *line, "--resume")
    assert [*losses(tmp_path / "run")] == [11, 12]
    assert digest(tmp_path / "run") == digest(rotary)


def test_samples(patched, rotary, capsys):
    greedy = ["--prompt=ab", "--temperature=0", "--sample-tokens=30"]
    assert python(patched, "sample.py", rotary, *greedy).startswith("ab")
    assert sample.main([str(rotary), *greedy]) == 2 and "rope" in capsys.readouterr().err
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="rope=True"):
        transformers.AutoModelForCausalLM.from_pretrained(rotary / "step_000012")


def test_model_tests_hold(patched):
    """Those of cached sampling and of positions try each field of GPTConfig."""
    line = ["-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
    text = python(patched, "-m", "pytest", "-q", "tests/test_model.py", *line, "-rA")
    assert "test_cache[rope-1.0-True]" in text
