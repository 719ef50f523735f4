"""Tests ../support/guard.py: the one line of an error, and the grace after a signal."""

import contextlib
import signal
import subprocess
import sys

import pytest

import train_gpt2
from support.guard import Watchdog


def test_a_terminal_obeys_no_text(capsys, monkeypatch):
    train_gpt2.log.show("\x1b[31mred\x9b2J\r\n\tünï\x07\x7f\0")
    assert capsys.readouterr().out == "\\x1b[31mred\\x9b2J\\r\n\tünï\\x07\\x7f\\x00\n"
    assert (
        train_gpt2.guard.fail(2, "a\nb \x1b[2J\u202e\U00018cd6" + "x" * 500 + "; cure", True) == 2
    )
    err = capsys.readouterr().err
    assert err.startswith("train_gpt2.py: a b \\x1b[2J\\u202e\\U00018cd6x") and err.endswith(
        "; cure\n"
    )
    assert len(err) == 301 and " ... " in err


@pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
def test_ctrl_c_while_torch_is_imported_is_no_traceback():
    program = [sys.executable, "-v", train_gpt2.__file__, "--help"]  # tells each import
    with subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                          errors="replace") as process:  # fmt: skip
        assert any("/torch/__init__" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT and "Traceback" not in rest


@pytest.mark.skipif(sys.platform == "win32", reason="signals, fork and limits of POSIX")
def test_an_exit_code_needs_no_reader(tmp_path):
    """Whoever reads the errors may have gone away."""
    with open("/dev/full", "w", buffering=1) as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        assert train_gpt2.guard.fail(4, "error: many words", True) == 4
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_the_grace_after_a_signal_is_longer_than_a_step():
    """A rank may wait for its GPU in it; what comes before the first step may take longer."""
    watchdog = Watchdog(timeout_s=900, rank=0, num_ranks=2, torchrun=None)
    for phase, idle_s, grace_s in (("compiling", 300, 20), ("micro-step 4 of step 1", 8, 20),
                                   ("micro-step 4 of step 2", 25, 50), ("a save", 99, 50),
                                   ("micro-step 4 of step 3", 700, 900)):  # fmt: skip
        watchdog.note(phase)
        watchdog.idle_s = idle_s
        watchdog.note("validation")
        assert watchdog.grace_s == grace_s
    watchdog.signals.close()
    watchdog.wakeup.close()
