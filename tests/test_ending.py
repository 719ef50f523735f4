"""Tests ../support/ending.py: the one line of an error, signals, and the watchdog."""

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib

import pytest
from conftest import NEEDS_POSIX

import train_gpt2
from support import ending, files, log
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


@pytest.mark.slow
def test_a_hang_ends_with_1_and_shows_where():
    repo = os.path.dirname(train_gpt2.__file__)
    command = [sys.executable, "-c", HANG]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and done.stdout == "progress is no hang\n"
    assert "in wait_for_another_rank" in done.stderr


# ---- Before anything works


def test_an_old_python_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """What runs before the check must be Python that an old version can read."""
    for name in ("train_gpt2.py", "sample.py", "prepare_data.py", "support/__init__.py"):
        ast.parse((files.REPO / name).read_text(), feature_version=(3, 8))
    first = [
        line for line in (files.REPO / "train_gpt2.py").read_text().splitlines() if "import" in line
    ]
    assert first[2] == "from support import cores, ending"  # behind os and sys
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(files.REPO / "support" / "__init__.py"))
    err = capsys.readouterr().err
    assert end.value.code == 2 and "use 3.11 or later" in err and err.count("\n") == 1


@pytest.mark.parametrize("script", ["train_gpt2.py", "sample.py", "prepare_data.py"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise ModuleNotFoundError('No module', name='numpy')", "numpy is not installed for this"),
        (
            "raise ImportError('cannot import x', name='torch.nn.attention')",
            "torch 2.3.1 is too old",
        ),
        ("raise AttributeError('a bug')", "Traceback"),
        ("raise KeyError('a bug')", "Traceback"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_one_line(script, what, message, tmp_path):
    """As in a .venv that was moved."""
    (tmp_path / "numpy.py").write_text(what)
    (tmp_path / "torch.py").write_text("import numpy")
    (tmp_path / "torch-2.3.1.dist-info").mkdir()
    (tmp_path / "torch-2.3.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.3.1\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(files.REPO / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    is_bug = message == "Traceback"
    assert message in done.stderr and done.returncode == (1 if is_bug else 2), done.stderr
    assert is_bug or (done.stderr.startswith(f"{script}: ") and done.stderr.count("\n") == 1)


def test_uv_gets_the_versions_of_requirements_txt():
    wanted = (files.REPO / "requirements.txt").read_text().split()
    for name in ("train_gpt2.py", "sample.py", "prepare_data.py"):
        text = (files.REPO / name).read_text()
        block = re.search(
            r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", text
        )  # PEP 723
        lines = [line[2:] for line in block["content"].splitlines()]
        content = tomllib.loads("\n".join(lines))
        assert content["requires-python"] == ">=3.11"
        if name != "prepare_data.py":
            assert content["dependencies"] == wanted
        assert set(content["dependencies"]) <= {*wanted, "filelock"}
