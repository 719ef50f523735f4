"""Tests ../sample.py, as a function and as a program in a pipe."""

import io
import os
import signal
import subprocess
import sys

import pytest
from conftest import NEEDS_POSIX

import sample
from support.checkpoint import checkpoints


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


def test_a_run_is_sampled_from_its_newest_checkpoint(whole, capsys):
    of_run = sampled(capsys, str(whole[1]), "--prompt=")
    newest, older = checkpoints(whole[1])[:2]
    assert of_run == sampled(capsys, str(newest), "--prompt=")
    assert of_run != sampled(capsys, str(older), "--prompt=")


def test_prompts_are_the_lines_of_a_pipe(whole, capsys, monkeypatch):
    line = [str(whole[1]), "--num-samples=2"]
    expected = [sampled(capsys, *line, f"--prompt={text}") for text in ("ab c", "", "é")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab c\n\né"))
    assert sampled(capsys, *line) == "---\n".join(expected)
    assert expected[0].count("ab c") == 2  # each sample begins with its prompt


MISTAKES = {
    "nowhere/run --prompt=a": "nowhere/run",
    "--prompt=a": "model",
    "x --learning-rate=3": "--learning-rate=3",
    "x --top-k=-1": "--top-k -1",
    "x --num-samples=0": "--num-samples 0",
    "x --device=nothing": "nothing",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.symlink(whole[1], "x")
    assert sample.main(line.split() + ["--prompt=a"] * ("x" in line)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and MISTAKES[line] in err


def test_logits_that_overflow_are_one_line(whole, capsys, monkeypatch):
    def overflow(*_):
        raise FloatingPointError("the logits overflow")

    monkeypatch.setattr("model.sample_token", overflow)
    assert sample.main([str(whole[1]), "--prompt=a"]) == 1
    assert capsys.readouterr().err.splitlines() == ["error: the logits overflow"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is full")
def test_a_full_disk_is_an_error_and_a_reader_that_leaves_is_none(whole):
    command = [sys.executable, sample.__file__, str(whole[1]), "--sample-tokens=3"]
    prompts = b"ab\n" * 9
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, input=prompts, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"error" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, input=prompts, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@NEEDS_POSIX
@pytest.mark.slow
def test_it_starts_as_a_program_that_ctrl_c_ends_with_130(whole):
    command = [sys.executable, "-u", sample.__file__, str(whole[1]), "--sample-tokens=2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdin.write(b"a\n")
        process.stdin.flush()
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()
