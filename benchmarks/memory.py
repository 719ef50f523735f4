"""Estimate how much memory a GPU needs for GPT-2, on a machine that has none.

    python benchmarks/memory.py            # five minutes; needs a C++ compiler

Each row is a step of train_gpt2.py on fake CUDA tensors (tests/fake_gpu.py), which have shapes but
no numbers: it adds up the sizes of all that is alive at once. A real GPU needs up to 1 GiB more,
for the driver, the kernels and gaps between tensors. Writes results/memory.json, and prints the
table that benchmarks/README.md shows.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import machine

sys.path.insert(0, str(machine.REPO / "tests"))
import stand_in

RESULTS = machine.RESULTS / "memory.json"
LESS = ("--recompute", "--loss-chunk-tokens=1024")
ROWS = {  # model and flags: sequences of 1,024 tokens in a pass
    ("gpt2",): (64, 32, 16, 8, 4, 2, 1),
    ("gpt2", *LESS): (64, 32, 16, 8, 4, 2, 1),
    ("gpt2-xl",): (8, 4, 2, 1),
    ("gpt2-xl", *LESS): (16, 8, 4, 2, 1),
}


def label(row: dict) -> str:
    return " ".join([row["model"], *row["flags"]])


def block(content: dict) -> str:
    """Return the table in Markdown."""
    table = {}
    for row in content["rows"]:
        columns = {str(other["B"]): "" for other in content["rows"]}
        table.setdefault(label(row), {"sequences in a pass": label(row)} | columns)
        table[label(row)][str(row["B"])] = f"{row['peak_mib'] / 1024:.1f}"
    return f"GiB of a step, estimated:\n\n{machine.markdown([*table.values()])}"


def main():
    machine.OneLineParser(description=__doc__.splitlines()[0]).parse_args()  # --help alone
    rows = []
    with TemporaryDirectory() as folder:
        library = stand_in.build(Path(folder))
        data = stand_in.make_data(Path(folder))
        for (model, *flags), sizes in ROWS.items():
            for B in sizes:
                found = stand_in.step(library, data, model, tuple(flags), B)
                row = {"model": model, "flags": flags, "B": B, "peak_mib": found["peak_mib"]}
                rows.append(row)
                print(f"{label(row)} B {B}: {row['peak_mib']:,.0f} MiB", flush=True)
    machine.save(RESULTS, {"rows": rows})
    print(block({"rows": rows}))


if __name__ == "__main__":
    main()
