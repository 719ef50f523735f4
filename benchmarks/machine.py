"""What the results of these benchmarks say about the machine, and how they are kept."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from functools import lru_cache
from itertools import count
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results"
README = REPO / "benchmarks" / "README.md"


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def output(*command) -> str:
    """What a program prints; nothing if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def plain(device_name: str) -> str:
    return re.sub(r"\((R|TM)\)| Processor", "", device_name)


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    mac = output("sysctl", "-n", "machdep.cpu.brand_string")
    return found[1] if found else mac or platform.processor() or platform.machine()


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@lru_cache
def num_gpus() -> int:
    """Those that PyTorch can use, asked in another process, since this one may not need PyTorch."""
    return int(output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())") or 0)


def driver() -> str:
    """NVIDIA's, where there is one."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return output("nvidia-smi", *query).partition("\n")[0]


def changed_files() -> list[str]:
    """Programs that are not as in the commit."""
    return output("git", "-C", str(REPO), "diff", "--name-only", "HEAD", "--", "*.py").split()


def environment(logged: dict) -> dict:
    """What train_gpt2.py logs of it, and what more a result depends on."""
    cpu = {"cpu": cpu_name(), "cores": num_cores(), "driver": driver()}
    cpu["changed"] = changed_files()
    name = cpu["cpu"] if logged["device"] == "cpu" else logged["device_name"]
    return logged | {"device_name": name} | cpu


def results_path(*parts: str, folder: Path = RESULTS) -> Path:
    """Where results are kept: program-device-date-more.json, in small letters."""
    program, device, *more = (re.sub("[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
    names = [program, device, str(date.today()), *more]
    return folder / ("-".join(filter(None, names)) + ".json")


def free(path: Path) -> Path:
    """path, or with -2, -3, ... if that is taken."""
    paths = (path.with_stem(f"{path.stem}-{n}") for n in count(2))
    return path if not path.exists() else next(p for p in paths if not p.exists())


def save(path: Path, content: dict):
    """Write content whole, a list of numbers on one line."""
    text = re.sub(r"\[[^][{}]*]", lambda m: " ".join(m[0].split()), json.dumps(content, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(table: list[dict]) -> str:
    """A table of dicts from column to text."""
    columns = list(max(table, key=len))
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)]]
    lines += [[row.get(column, "") for column in columns] for row in table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(table: list[dict], columns: list[str]) -> str:
    """These columns of a table, as a terminal shows them."""
    lines = [columns, *([row.get(column, "") for column in columns] for row in table)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for first, *cells in lines
    )


def with_block(text: str, name: str, block: str) -> str:
    """text with block between its marks of that name; ValueError if it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{README.name} has no {begin} and {end}")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def put_into_readme(name: str, block: str):
    text = README.read_text(encoding="utf-8")
    README.write_text(with_block(text, name, block), encoding="utf-8")
