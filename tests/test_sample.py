"""Tests ../sample.py, as a function and as a program in a pipe."""

import io
import os
import sys

import pytest
import torch
from test_model import hugging_face

import sample
from model import GPTConfig
from support.checkpoint import checkpoints
from support.tokenizer import bytes_tokenizer


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


def test_likeliest_tokens(tmp_path, capsys):
    oracle = hugging_face(GPTConfig(257, 8, 2, 2, 32), spread=0.1)
    oracle.save_pretrained(tmp_path)
    for name, content in bytes_tokenizer().files().items():
        (tmp_path / name).write_bytes(content)
    for prompt in ("ab", "longer than eight", ""):
        ids = torch.tensor([[*prompt.encode()][-8:] or [256]])
        with torch.no_grad():
            probs = oracle(ids).logits[0, -1].softmax(-1)
        lines = sampled(capsys, str(tmp_path), f"--prompt={prompt}", "--top=1000").splitlines()
        assert lines.pop(0) == prompt
        names = [bytes([i]).decode(errors="backslashreplace") for i in range(256)]
        names.append("<|endoftext|>")
        expected = {repr(name): prob for name, prob in zip(names, probs.tolist(), strict=True)}
        shown = {line[10:]: float(line[:7]) / 100 for line in lines}
        assert shown == {name: pytest.approx(prob, abs=6e-6) for name, prob in expected.items()}
        assert [*shown.values()] == sorted(shown.values(), reverse=True)
        fewer = sampled(capsys, str(tmp_path), f"--prompt={prompt}", "--top=3")
        assert fewer.splitlines() == [prompt, *lines[:3]]


MISTAKES = {
    "nowhere/run --prompt=a": "nowhere/run",
    "x --learning-rate=3": "--learning-rate=3",
    "x --top-k=-1": "--top-k -1",
    "x --top=-1": "--top -1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(line, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.symlink(whole[1], "x")
    assert sample.main(line.split() + ["--prompt=a"] * ("x" in line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and MISTAKES[line] in err
