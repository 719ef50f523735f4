"""Tests ../sample.py. Prompts that are typed and piped are tested in test_train_gpt2.py."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_POSIX
from test_pretrained import SMALLEST, nanogpt_checkpoint

import sample
from support.run_folder import checkpoints


def sampled(capsys, *line: str) -> str:
    assert sample.main([*line]) == 0
    return capsys.readouterr().out


CHANGES = ["--num-samples=2", "--sample-tokens=7", "--temperature=0", "--top-k=1", "--seed=3"]


@pytest.mark.parametrize("flag", CHANGES)
def test_each_flag_changes_what_is_written(whole, capsys, flag):
    line = [str(whole[1]), "--prompt=ab", "--temperature=0.9"]
    texts = [sampled(capsys, *line) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("ab")
    assert sampled(capsys, *line, flag) != texts[0]


def test_a_run_a_checkpoint_and_nanogpts_file_are_sampled(whole, tmp_path, capsys):
    newest = checkpoints(whole[1])[0]
    of_run = sampled(capsys, str(whole[1]), "--prompt=")
    assert of_run == sampled(capsys, str(newest), "--prompt=")
    torch.save(nanogpt_checkpoint(SMALLEST)[1], tmp_path / "ckpt.pt")
    assert sample.main([str(tmp_path / "ckpt.pt"), "--prompt="]) == 2  # of three tokens
    assert "tokenizer" in capsys.readouterr().err


def test_without_a_name_it_is_the_newest_run(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sample.main(["--prompt=a"]) == 2
    assert capsys.readouterr().err.startswith("sample.py: error: there is no run in out/: name")
    for name, saved_at in (("001", 1), ("book", 3), ("002", 2)):
        shutil.copytree(whole[1], f"out/{name}")
        for path in checkpoints(Path("out", name)):
            os.utime(path, (saved_at, saved_at))
    assert sample.main(["--prompt=a"]) == 0
    assert capsys.readouterr().err == f"sample.py: sampling from {Path('out/book/step_000012')}\n"


def test_nanogpts_start_is_understood_and_reads_files(whole, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("ab c", "utf8")
    expected = sampled(capsys, str(whole[1]), "--prompt=ab c")
    for line in (["--start", "ab c"], ["--start=ab c"], [f"--start=FILE:{tmp_path}/prompt.txt"]):
        assert sampled(capsys, str(whole[1]), *line) == expected
    assert sampled(capsys, str(whole[1]), f"--prompt=FILE:{tmp_path}/prompt.txt") == expected


def test_a_byte_order_mark_is_no_part_of_a_prompt(whole, tmp_path, capsys):
    """Windows puts one in front of UTF-8, in a file as well as in a pipe."""
    expected = sampled(capsys, str(whole[1]), "--prompt=ab c")
    (tmp_path / "prompt.txt").write_bytes("ab c".encode("utf-8-sig"))
    assert sampled(capsys, str(whole[1]), f"--prompt=FILE:{tmp_path}/prompt.txt") == expected
    prompts = "ab c\nab c\n".encode("utf-8-sig")
    command = [sys.executable, sample.__file__, str(whole[1])]
    out = subprocess.run(command, input=prompts, capture_output=True).stdout.decode()
    assert out.splitlines() == [*expected.splitlines(), "---", *expected.splitlines()]


MISTAKES = {
    "nowhere/run --prompt=a": "nowhere/run: no such file, folder or model",
    "--prompt=FILE:nowhere.txt": "--prompt FILE:nowhere.txt can't be read",
    "--learning-rate=3": "unrecognized arguments: --learning-rate=3",
    "--top-k=-1": "--top-k -1 must be at least 0",
    "--out_dir=nowhere": "nowhere is not there: train_gpt2.py makes it",
    "--num-samples=0": "--num-samples 0 must be at least 1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sample.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("sample.py: error: ") and err.count("\n") == 1
    assert MISTAKES[line] in err


def test_a_loss_of_numbers_is_one_line(whole, capsys, monkeypatch):
    def overflow(*_):
        raise FloatingPointError("the logits overflow")

    monkeypatch.setattr("model.sample_token", overflow)
    assert sample.main([str(whole[1]), "--prompt=a"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "sample.py: error: the logits overflow"


@pytest.mark.slow
def test_it_starts_as_a_program(whole):
    command = [sys.executable, sample.__file__, str(whole[1]), "--prompt=a", "--sample-tokens=2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("a")


@NEEDS_POSIX
def test_ctrl_c_at_the_prompt_ends_with_130(whole):
    command = [sys.executable, sample.__file__, str(whole[1])]
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        assert "sampling from" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
