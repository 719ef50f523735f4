"""What the benchmarks share: this machine, runs of train_gpt2.py, files of results, and tables."""

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile

REPO = Path(__file__).resolve().parent.parent
TRAIN = REPO / "train_gpt2.py"
sys.path.append(str(REPO))
from support.log import read_log  # noqa: E402, F401

logging.getLogger("matplotlib").setLevel("ERROR")  # it warns if there is no home folder
WARM_UP = 3  # don't time the first steps of a process: memory and caches are still filling up


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose --help shows a program's docstring as it is written."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=how)


def exit_code(function: Callable, *args) -> int:
    """Return what function(*args) returns, or the exit code of an error that is the user's."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run that is measured, too
    try:
        return function(*args) or 0
    except (OSError, ValueError, ImportError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the runs that had ended are kept", file=sys.stderr)
        return 130


# ---- The machine ---------------------------------------------------------------------------------


def output(*command: str) -> str:
    """Return what a program prints, or an empty string if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@lru_cache
def num_gpus() -> int:
    """Return how many GPUs PyTorch sees. Ask in another process, so this one holds no GPU."""
    return int(output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())") or 0)


def environment(start: dict) -> dict:
    """Return the machine in the first record of a run's log, with its cores and GPU driver."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = output(*query).partition("\n")[0]
    return start["flags"]["machine"] | {"cores": num_cores(), "driver": driver}


def describe(env: dict) -> str:
    """Return the machine's name, and on a CPU how many cores were used."""
    name = re.sub(r"\((R|TM)\)| Processor", "", env["device"])
    return name if env["driver"] else f"{name}, {env['cores']} cores"


# ---- Runs of train_gpt2.py -----------------------------------------------------------------------


def run_quietly(command: list) -> tuple[int, str]:
    """Return a program's exit code and what it wrote to stderr."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # not kill: a run saves, and torchrun has to end its ranks
            process.wait()
            raise
        errors.seek(0)
        return code, errors.read()


def error_line(code: int, errors: str) -> str:
    """Return the line that says why a run of train_gpt2.py failed."""
    lines = re.findall(r"^error: (.+)|^([\w.]*Error: .+)", errors, re.M)
    return "".join(lines[-1]) if lines else f"exit code {code}, without a message"


# ---- Files of results, and tables ----------------------------------------------------------------


def new_path(folder: Path, *names: str) -> Path:
    """Return a path in folder that is still free: the names and the date, in small letters."""
    words = [re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    return unused(folder / ("-".join([*words, str(date.today())]) + ".json"))


def unused(path: Path) -> Path:
    """Return path, or with -2, -3, ... at its end if that exists already."""
    free, number = path, 2
    while free.exists():
        free = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return free


def save(path: Path, content: dict):
    """Write content as JSON, whole or not at all, with each list of numbers on one line."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[^][{}]*]", lambda match: " ".join(match[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def markdown(table: list[dict[str, str]]) -> str:
    """Return a table of dicts from column to text as Markdown, aligned for a terminal too. Leave
    out columns without any text."""
    names = dict.fromkeys(name for row in table for name in row)
    columns = [name for name in names if any(row.get(name) for row in table)]
    cells = [columns, *([row.get(name, "") for name in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)
