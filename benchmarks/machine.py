"""What the benchmarks share: this machine, runs of train_gpt2.py, result files, and tables."""

import argparse
import json
import logging
import os
import platform
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
RESULTS = REPO / "benchmarks" / "results"
logging.getLogger("matplotlib").setLevel("ERROR")  # it warns if there is no home folder
ONE_ROUND = "Measured in one round: other programs may have slowed some runs down"
WARM_UP = 3  # don't time the first steps of a process: memory and caches are still filling up


class OneLineParser(argparse.ArgumentParser):
    """Report a mistake in one line, without the usage text."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def exit_code(program: str, function: Callable, *args) -> int:
    """Return what function(*args) returns, or the exit code of an error that is the user's."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run that is measured, too
    if hasattr(sys.stdout, "reconfigure"):  # some terminals and pipes can't show every name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return function(*args) or 0
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped; finished runs are kept: repeat the command", file=sys.stderr)
        return 130


# ---- The machine


def output(*command: str) -> str:
    """Return what a program prints, or an empty string if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        return match[1]
    mac = output("sysctl", "-n", "machdep.cpu.brand_string")
    return mac or platform.processor() or platform.machine()


def short_name(device_name: str) -> str:
    return re.sub(r"\((R|TM)\)| Processor", "", device_name)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@lru_cache
def num_gpus() -> int:
    """Return how many GPUs PyTorch sees. Ask in another process, so this one holds no GPU."""
    return int(output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())") or 0)


def driver() -> str:
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return output("nvidia-smi", *query).partition("\n")[0]


def environment(start: dict) -> dict:
    """Return the machine in the first record of a run's log, plus what else a result depends on."""
    logged, cpu = dict(start["flags"]["machine"]), cpu_name()
    device = logged.pop("device")
    logged |= {"device": "cuda" if num_gpus() else "cpu", "device_name": device}
    changed = output("git", "-C", str(REPO), "diff", "--name-only", "HEAD", "--", "*.py").split()
    return logged | {
        # "changed" lists the programs that differ; "-dirty" would also mean an edited README.md
        "commit": logged.get("commit", "").removesuffix("-dirty"),
        "device_name": cpu if logged["device"] == "cpu" else logged["device_name"],
        "cpu": cpu,
        "cores": num_cores(),
        "driver": driver(),
        "changed": changed,
    }


def version(env: dict) -> str:
    """Return the commit that was measured, and the programs that differed from it."""
    text = f"commit {env['commit'][:7]}"
    return f"{text} and changes to {', '.join(env['changed'])}" if env.get("changed") else text


def check_same(before: dict, now: dict, *keys: str):
    """Raise ValueError if the machine or the program has changed since these results began."""
    for key in keys:
        if before[key] != now[key]:
            raise ValueError(f"{key} was {before[key]} so far and is {now[key]} now: start afresh")


# ---- Runs of train_gpt2.py


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
    lines = re.findall(r"^error(?: on rank \d+)?: (.+)|^([\w.]*Error: .+)", errors, re.M)
    return "".join(lines[-1]) if lines else f"exit code {code}, without a message"


def is_out_of_memory(code: int, why: str) -> bool:
    """Return whether a run that ended like this needed more memory than there is."""
    pattern = "not fit|out of memory|allocate memory|not enough memory"
    return code == -9 or bool(re.search(pattern, why))  # -9: the system killed the process


# ---- Result files


def new_path(program: str, device: str, *more: str, folder: Path = RESULTS) -> Path:
    """Return a path that is still free: folder/program-device-date-more.json, in small letters."""
    names = [program, device, str(date.today()), *more]
    words = [re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    return unused(folder / ("-".join(words) + ".json"))


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


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(table: list[dict]) -> str:
    """Return a table of dicts from column to text as Markdown, aligned for a terminal too."""
    columns = list(max(table, key=len))
    lines = [columns, *([row.get(column, "") for column in columns] for row in table)]
    widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    text = []
    for first, *cells in [columns, rule, *lines[1:]]:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    return "\n".join(text)
