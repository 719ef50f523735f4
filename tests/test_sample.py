"""Tests ../sample.py, as a function and as a program in a pipe."""

import io
import os
import sys

import pytest

import sample
from support.checkpoint import checkpoints


def sampled(capsys, *line: str) -> str:
    assert sample.main([*line]) == 0
    return capsys.readouterr().out


CHANGES = ["--num-samples=2", "--sample-tokens=7", "--temperature=0", "--top-k=1", "--seed=3"]


@pytest.mark.parametrize("flag", CHANGES)
def test_flags(whole, capsys, flag):
    line = [str(whole[1]), "--prompt=ab", "--temperature=0.9"]
    texts = [sampled(capsys, *line) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("ab")
    assert sampled(capsys, *line, flag) != texts[0]


def test_newest_checkpoint(whole, capsys):
    of_run = sampled(capsys, str(whole[1]), "--prompt=")
    newest, older = checkpoints(whole[1])[:2]
    assert of_run == sampled(capsys, str(newest), "--prompt=")
    assert of_run != sampled(capsys, str(older), "--prompt=")


def test_prompts_from_a_pipe(whole, capsys, monkeypatch):
    line = [str(whole[1]), "--num-samples=2"]
    expected = [sampled(capsys, *line, f"--prompt={text}") for text in ("ab c", "", "é")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab c\n\né"))
    assert sampled(capsys, *line) == "---\n".join(expected)
    assert expected[0].count("ab c") == 2  # each sample begins with its prompt


MISTAKES = {
    "nowhere/run --prompt=a": "nowhere/run",
    "x --learning-rate=3": "--learning-rate=3",
    "x --top-k=-1": "--top-k -1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(line, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.symlink(whole[1], "x")
    assert sample.main(line.split() + ["--prompt=a"] * ("x" in line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and MISTAKES[line] in err
