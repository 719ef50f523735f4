"""Tests ../support/ending.py: the one line of an error, signals, and the watchdog."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import NEEDS_POSIX

import train_gpt2
from support import ending, log
from support.ending import Phase


def test_a_terminal_obeys_no_text(capsys, monkeypatch):
    monkeypatch.setattr(ending, "program", "train_gpt2.py")  # other tests run other programs
    log.show("\x1b[31mred\x9b2J\r\n\tünï\x07\x7f\0")
    assert capsys.readouterr().out == "\\x1b[31mred\\x9b2J\\r\n\tünï\\x07\\x7f\\x00\n"
    ending.print_error("a\nb \x1b[2J\u202e\ud800; cure")
    assert capsys.readouterr().err == "train_gpt2.py: a b \\x1b[2J\\u202e\\ud800; cure\n"


@NEEDS_POSIX
def test_an_exit_code_needs_no_reader(tmp_path):
    """Whoever reads the errors and the output may have gone away."""
    for name, line, code in (("stderr", "--steps=0", 2), ("stdout", "--help", 0)):
        with open("/dev/full", "w") as full:
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: full}
            command = [sys.executable, train_gpt2.__file__, line]
            assert subprocess.run(command, cwd=tmp_path, **streams).returncode == code


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("closed", [[2], [0, 1, 2], [1]], ids=str)
@pytest.mark.parametrize("script", ["train_gpt2.py", "sample.py", "prepare_data.py"])
def test_closed_streams_are_no_files_of_the_program(script, closed, tmp_path):
    """Once, the words about a signal were written into a checkpoint, which had the number 2."""
    code = f"""
import os, runpy, sys
report = os.fdopen(os.dup(1), "w")
for number in {closed}:
    os.close(number)
sys.argv = ["{script}", "--no-such-flag"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
print(code, [os.readlink(f"/proc/self/fd/{{number}}") for number in {closed}], file=report)
"""
    command = [sys.executable, "-c", code]
    repo = os.path.dirname(train_gpt2.__file__)
    out = subprocess.run(command, cwd=repo, capture_output=True, text=True).stdout
    assert out == f"2 {['/dev/null'] * len(closed)}\n"


@NEEDS_POSIX
def test_ctrl_c_while_torch_is_imported_is_no_traceback():
    command = [sys.executable, "-v", train_gpt2.__file__, "--help"]  # tells each import
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, errors="replace", **streams) as process:
        assert any("/torch/__init__" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT and "Traceback" not in rest


@NEEDS_POSIX
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_waits_for_unsaved_steps_and_a_second_one_for_nothing(name, capfd, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # without torchrun SIGHUP stops nothing
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with ending.signals as signals:
        signals.phase = Phase.UNSAVED
        signal.raise_signal(number)
        assert signals.received and "saving this step" in capfd.readouterr().err
        signal.raise_signal(number)  # torchrun passes on what the terminal has sent already
        signals.received_at -= ending.SECOND_SIGNAL_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signals.phase = Phase.LEAVING
        signal.raise_signal(number)
    assert signal.getsignal(number) == before and capfd.readouterr().err == ""


@NEEDS_POSIX
def test_a_signal_ends_at_once_where_nothing_is_unsaved():
    with ending.signals as signals:
        signal.raise_signal(signal.SIGHUP)  # a closed terminal stops nothing
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert signals.received


HANG = """
import bdb, time
from support import ending
ending.TIMEOUT_S = 0.5
def wait_for_another_rank():
    time.sleep(60)
for _ in range(4):
    ending.watchdog.reset()
    time.sleep(0.2)
ending.watchdog.stop()
time.sleep(0.7)
debugger = bdb.Bdb()
debugger.user_line = lambda frame: time.sleep(0.4)  # as a prompt in which nobody types
debugger.run("ending.watchdog.reset()\\n0\\n0", globals())
ending.watchdog.stop()
print("progress is no hang", flush=True)
ending.watchdog.reset()
wait_for_another_rank()
"""


def test_a_hang_ends_with_1_and_shows_where():
    repo = os.path.dirname(train_gpt2.__file__)
    command = [sys.executable, "-c", HANG]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and done.stdout == "progress is no hang\n"
    assert "in wait_for_another_rank" in done.stderr
