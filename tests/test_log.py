"""Tests ../support/log.py: log.jsonl and the terminal."""

import os
import sys

import pytest
from conftest import NEEDS_POSIX, flags, in_process, losses, train

from config import TrainConfig
from support.cli import show
from support.log import LOG, Log, read_log


def test_cut_line(tmp_path):
    assert read_log(tmp_path) == []
    config = TrainConfig(warmup_steps=0, steps=3)
    torn = b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo'
    for end in (b"", b"\xff\x00", b"\n", b"\0" * 4096):
        (tmp_path / LOG).write_bytes(torn + end)
        log = Log(tmp_path, vars(config), 1, is_main=True)
        log.record(step=2, loss=2.25)
        log.record(done=2)
        log.file.close()
        records = read_log(tmp_path)
        assert [record.get("loss") for record in records] == [2.5, 2.25, None]
        assert records[-1]["done"] == 2


def test_log_every(data_dir, tmp_path):
    code, out, err = train(flags(data_dir=data_dir, out_dir="run", log_every=5), tmp_path)
    assert code == 0 and err == ""
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert shown == ["1/12", "5/12", "10/12", "12/12"]
    assert len(losses(tmp_path / "run")) == 12


def show_to(target: str):
    """Show two lines to a reader that has gone, a terminal that is closed, or a disk that is full,
    and end as Python does."""
    if target == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif target == "terminal":
        master, writer = os.openpty()
        os.close(master)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writer, 1)
    for _ in range(2):
        try:
            show("a line")
        except OSError as error:
            print(type(error).__name__, error.errno, file=sys.stderr)
    sys.stdout.flush()


@NEEDS_POSIX
@pytest.mark.parametrize("target", ["pipe", "terminal", "/dev/full"])
def test_lost_outputs(target, tmp_path):
    if target[0] == "/" and not os.path.exists(target):
        pytest.skip("this system has none")
    code, _, err = in_process(tmp_path, show_to, target)
    assert code == 0 and err.splitlines() == (["OSError 28"] if target == "/dev/full" else [])
