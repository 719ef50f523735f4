"""Estimate how much memory a GPU needs for GPT-2, on a machine that has none.

    python benchmarks/memory.py            # five minutes; needs a C++ compiler

Each row is a step of train_gpt2.py on fake CUDA tensors (tests/fake_gpu.py), which have shapes but
no numbers: the sizes of all that is alive at once are added up. A real GPU needs up to 1 GiB more,
for the driver, the kernels and gaps between tensors; therefore HEADROOM is taken off each card.
Writes results/memory.json, and prints the tables that benchmarks/README.md shows.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import machine
import numpy as np
import torch

sys.path.insert(0, str(machine.REPO))
from model import GPT, SHAPES

CXX = os.environ.get("CXX", "g++")
PROGRAM = machine.REPO / "tests" / "fake_gpu.py"
RESULTS = machine.RESULTS / "memory.json"
LESS = ("--recompute", "--loss-chunk-tokens=1024")
ROWS = {  # model and flags: sequences of 1,024 tokens in a pass
    ("gpt2",): (64, 32, 16, 8, 4, 2, 1),
    ("gpt2", *LESS): (64, 32, 16, 8, 4, 2, 1),
    ("gpt2-xl",): (8, 4, 2, 1),
    ("gpt2-xl", *LESS): (16, 8, 4, 2, 1),
}
HEADROOM = 1.5  # GiB of a card that PyTorch can't use
CARDS = (8, 12, 16, 24, 40, 80)  # GiB


def build(folder: Path) -> Path:
    """Compile the stand-in for a GPU into folder."""
    folder_of_torch = Path(find_spec("torch").origin).parent
    library = folder / "fake_gpu.so"
    command = [CXX, "-shared", "-fPIC", "-std=c++20", str(PROGRAM.with_suffix(".cpp"))]
    command += [
        f"-I{folder_of_torch / 'include'}",
        f"-L{folder_of_torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    subprocess.run([*command, "-o", library], check=True, capture_output=True, text=True)
    return library


def make_data(folder: Path) -> Path:
    """Write shards of zeros, enough for a step."""
    for name, count in (("train", 70_000), ("val", 9000)):
        header = np.zeros(256, "<i4")
        header[:3] = (20240520, 1, count)  # llm.c's magic number and version
        tokens = np.zeros(count, "<u2")
        (folder / f"{name}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return folder


def on_gpu(
    stand_in: Path,
    *flags: str,
    gib: float = 1000,
    capability: str = "9.0",
    program: Path = PROGRAM,
) -> dict:
    """Return what train_gpt2.py and fake_gpu.py found on a stand-in for a GPU of so many GiB."""
    command = [sys.executable, str(program), str(gib), capability, *flags]
    env = os.environ | {"FAKE_GPU": str(stand_in), "OMP_NUM_THREADS": "1"}
    if capability == "mps":
        env["FAKE_MAC"] = "1"
    with TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    *lines, last = done.stdout.splitlines() or [""]
    if not last.startswith("{"):
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(last) | {"stdout": "\n".join(lines), "stderr": done.stderr}


def step(stand_in: Path, data: Path, model: str, flags: tuple, B: int = 0, **options) -> dict:
    """Make two steps of two passes of B sequences each, or of 64 sequences in passes that fit."""
    # two, because the first step has no moments yet
    line = [f"--model={model}", f"--data-dir={data}", "--steps=2", "--eval-tokens=8192"]
    line += ["--sample-tokens=1", f"--batch-tokens={1024 * (2 * B or 64)}"]
    if B:
        line.append(f"--micro-batch-size={B}")
    return on_gpu(stand_in, *line, *flags, **options)


def label(row: dict) -> str:
    return " ".join([row["model"], *row["flags"]])


def fitting(rows: list[dict], gib: float) -> dict[str, int]:
    """Return the most sequences in a pass on a card of so many GiB, by model and flags."""
    most = {}
    for row in rows:
        # when a run tries what fits, it holds the gradients twice, to leave room
        with torch.device("meta"):  # sizes alone: takes no memory
            params = GPT(SHAPES[row["model"]]).parameters()
        gradients_mib = sum(p.nbytes for p in params) / 2**20
        if row["peak_mib"] + gradients_mib <= 1024 * (gib - HEADROOM):
            most[label(row)] = max(most.get(label(row), 0), row["B"])
    return most


def block(content: dict) -> str:
    """Return the tables in Markdown."""
    rows = content["rows"]
    needs, cards = {}, {}
    for row in rows:
        name = label(row)
        needs.setdefault(name, {"sequences in a pass": name} | {str(r["B"]): "" for r in rows})
        needs[name][str(row["B"])] = f"{row['peak_mib'] / 1024:.1f}"
        cards[name] = {"most sequences in a pass": name}
        for gib in CARDS:
            cards[name][f"{gib} GB"] = str(fitting(rows, gib).get(name, "no"))
    parts = ["GiB of a step, estimated:", machine.markdown([*needs.values()])]
    parts += [f"What a card has room for, estimated with {HEADROOM} GiB to spare:"]
    return "\n\n".join([*parts, machine.markdown([*cards.values()])])


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # --help alone
    rows = []
    with TemporaryDirectory() as folder:
        stand_in, data = build(Path(folder)), make_data(Path(folder))
        for (model, *flags), sizes in ROWS.items():
            for B in sizes:
                found = step(stand_in, data, model, tuple(flags), B)
                row = {"model": model, "flags": flags, "B": B, "peak_mib": found["peak_mib"]}
                rows.append(row | {"at": found["at_peak"]})
                print(f"{label(row)} B {B}: {row['peak_mib']:,.0f} MiB", flush=True)
    machine.save(RESULTS, {"rows": rows})
    print(block({"rows": rows}))


if __name__ == "__main__":
    main()
