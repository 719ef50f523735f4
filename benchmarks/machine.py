"""What the benchmarks share: facts about this machine, result files, and tables."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile

REPO = Path(__file__).resolve().parent.parent
TRAIN = REPO / "train_gpt2.py"
RESULTS = REPO / "benchmarks" / "results"
WARM_UP = 3  # timings at the start of a process that do not count: memory and caches fill up


class OneLineParser(argparse.ArgumentParser):
    """Report a mistake in one line, without the usage text."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def output(*command: str) -> str:
    """Return what a program prints, or an empty string if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def run_quietly(command: list[str]) -> tuple[int, str]:
    """Return a program's exit code and what it wrote to stderr."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # not kill: torchrun has to end its ranks
            process.wait()
            raise
        errors.seek(0)
        return code, errors.read()


# ---- The machine


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
    """Return how many GPUs PyTorch sees. Another process asks: this one must not hold a GPU."""
    return int(output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())") or 0)


def driver() -> str:
    """Return the version of NVIDIA's driver, where there is one."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return output("nvidia-smi", *query).partition("\n")[0]


def environment(logged: dict) -> dict:
    """Add to what train_gpt2.py logs of its environment what else a result depends on."""
    cpu = cpu_name()
    changed = output("git", "-C", str(REPO), "diff", "--name-only", "HEAD", "--", "*.py").split()
    return logged | {
        # "changed" says which programs differ. "-dirty" would also mean a new table in README.md.
        "commit": logged["commit"].removesuffix("-dirty"),
        "device_name": cpu if logged["device"] == "cpu" else logged["device_name"],
        "cpu": cpu,
        "cores": num_cores(),
        "driver": driver(),
        "changed": changed,  # programs that differ from the commit
    }


def check_same(before: dict, now: dict, *keys: str):
    """Raise ValueError if results go on with another machine or program than they began with."""
    for key in keys:
        if before[key] != now[key]:
            why = f"{key} was {before[key]} so far and is {now[key]} now"
            raise ValueError(f"{why}: start again, without --resume")


# ---- Result files


def results_path(program: str, device: str, *more: str, folder: Path | None = None) -> Path:
    """Return folder/program-device-date-more.json, in small letters; by default in RESULTS."""
    names = [program, device, str(date.today()), *more]
    words = [re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    return (folder or RESULTS) / ("-".join(filter(None, words)) + ".json")


def unused_path(path: Path) -> Path:
    """Return path, or with -2, -3, ... at its end if that exists already."""
    paths = chain([path], (path.with_stem(f"{path.stem}-{n}") for n in count(2)))
    return next(path for path in paths if not path.exists())


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
