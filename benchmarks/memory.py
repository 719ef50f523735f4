"""How much memory a GPU needs for GPT-2, reckoned on a machine that has none.

    python benchmarks/memory.py            # five minutes; needs a C++ compiler
    python benchmarks/memory.py --readme   # puts the newest table into benchmarks/README.md

Each row is a step of train_gpt2.py itself on fake CUDA tensors (tests/fake_gpu.py), which have
shapes and no numbers: the sizes of all that is alive at once are added up. A real GPU needs more:
up to 1 GiB for the driver, the kernels and gaps between tensors. So a card is taken to have
HEADROOM less than it is sold with, and all of this is called reckoned until a GPU has measured it.

Writes results/memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import machine
import numpy as np

sys.path.insert(0, str(machine.REPO))
from dataloader import shard_header
from model import SHAPES

CXX = os.environ.get("CXX", "g++")
PROGRAM = machine.REPO / "tests" / "fake_gpu.py"
RESULTS = machine.RESULTS / "memory.json"
LESS = ("--recompute", "--loss-chunk-tokens=1024")
ROWS = [  # model, flags, sequences of 1,024 tokens in a pass
    *(("gpt2", (), B) for B in (64, 32, 16, 8, 4, 2, 1)),
    *(("gpt2", LESS, B) for B in (64, 32, 16, 8, 4, 2, 1)),
    *(("gpt2-xl", (), B) for B in (8, 4, 2, 1)),
    *(("gpt2-xl", LESS, B) for B in (16, 8, 4, 2, 1)),
]
HEADROOM = 1.5  # GiB of a card that are not PyTorch's to give
CARDS = (8, 12, 16, 24, 40, 80)  # GiB


def build(folder: Path) -> Path:
    """The stand-in for a GPU, compiled into folder."""
    torch = Path(subprocess.check_output([
        sys.executable, "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"
    ], text=True).strip()).parent  # fmt: skip
    command = [CXX, "-shared", "-fPIC", "-std=c++20"]
    command += [f"-I{torch / 'include'}", str(PROGRAM.with_suffix(".cpp"))]
    command += ["-o", str(folder / "fake_gpu.so"), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "fake_gpu.so"


def make_data(folder: Path) -> Path:
    """Shards of zeros, enough for a step."""
    for name, count in (("train", 70_000), ("val", 9000)):
        tokens = shard_header(count) + np.zeros(count, "<u2").tobytes()
        (folder / f"{name}_000000.bin").write_bytes(tokens)
    return folder


def on_gpu(stand_in: Path, *flags: str, gib: float = 1000, capability: str = "9.0",
           program: Path = PROGRAM) -> dict:  # fmt: skip
    """What train_gpt2.py does with these flags on a GPU of so many GiB: its exit code and output,
    and what fake_gpu.py has found. OSError if it could not be tried."""
    command = [sys.executable, str(program), str(gib), capability, *flags]
    env = os.environ | {"FAKE_GPU": str(stand_in), "OMP_NUM_THREADS": "1"}
    env |= {"FAKE_MAC": "1"} if capability == "mps" else {}
    with TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    *lines, last = done.stdout.splitlines() or [""]
    if not last.startswith("{"):
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(last) | {"stdout": "\n".join(lines), "stderr": done.stderr}


def step(stand_in: Path, data: Path, model: str, flags: tuple[str, ...], B: int = 0, **how) -> dict:
    """Two steps, since the first has no moments yet, of two passes of B sequences each, or of 64
    sequences in passes that fit."""
    size = (f"--micro-batch-size={B}",) if B else ()
    size += (f"--batch-tokens={1024 * (2 * B or 64)}", "--steps=2")
    line = (f"--model={model}", f"--data-dir={data}", "--eval-tokens=8192", "--sample-tokens=1")
    return on_gpu(stand_in, *line, *size, *flags, **how)


def fitting(rows: list[dict], gib: float) -> dict[str, int]:
    """For a card of so many GiB the most sequences in a pass, by model and flags. A run tries them
    with the gradients in memory twice, to leave room."""
    found = {}
    for row in rows:
        gradients_mib = 4 * SHAPES[row["model"]].num_params / 2**20
        if row["peak_mib"] + gradients_mib <= 1024 * (gib - HEADROOM):
            name = " ".join([row["model"], *row["flags"]])
            found[name] = max(found.get(name, 0), row["B"])
    return found


def block(content: dict) -> str:
    """The tables in Markdown."""
    sizes = list(dict.fromkeys(row["B"] for row in content["rows"]))
    table, cards = [], []
    for name in dict.fromkeys((row["model"], *row["flags"]) for row in content["rows"]):
        own = {r["B"]: r["peak_mib"] for r in content["rows"] if (r["model"], *r["flags"]) == name}
        cells = {str(B): f"{own[B] / 1024:.1f}" if B in own else "" for B in sizes}
        table.append({"sequences in a pass": " ".join(name)} | cells)
        fits = {f"{gib} GB": f"{fitting(content['rows'], gib).get(' '.join(name), 'no')}"
                for gib in CARDS}  # fmt: skip
        cards.append({"most sequences in a pass": " ".join(name)} | fits)
    return "\n\n".join([
        "GiB of a step, reckoned:", machine.markdown(table),
        f"What a card has room for, reckoned with {HEADROOM} GiB to spare:",
        machine.markdown(cards),
    ])  # fmt: skip


def measure():
    rows = []
    with TemporaryDirectory() as folder:
        stand_in, data = build(Path(folder)), make_data(Path(folder))
        for model, flags, B in ROWS:
            found = step(stand_in, data, model, flags, B)
            row = {"model": model, "flags": list(flags), "B": B, "peak_mib": found["peak_mib"]}
            rows.append(row | {"at": found["at_peak"]})
            print(f"{model} {' '.join(flags)} B {B}: {row['peak_mib']:,.0f} MiB", flush=True)
    machine.save(RESULTS, {"rows": rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="put the table into the README")
    try:
        if parser.parse_args().readme:
            machine.put_into_readme("memory", block(machine.load(RESULTS)))
        else:
            measure()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"memory.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
