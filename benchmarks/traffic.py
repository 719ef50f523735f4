"""Add up what a step of GPT-2 moves between an H100 and its memory, on a machine that has none.

    python benchmarks/traffic.py                        # GPT-2 124M with the default flags
    python benchmarks/traffic.py -- --no-bf16-residual  # flags of train_gpt2.py, behind --
    python benchmarks/traffic.py --ddp                  # as torchrun's ranks compute it

A step of one pass, compiled. Inductor generates its code for an H100, and says for each kernel how
many bytes it reads and writes; no kernel runs (tests/fake_compiler.py). What a kernel finds in the
cache counts as read. So the traffic is reckoned, not measured: it serves to compare. The gradient's
norm and the optimizer are not compiled: on a GPU they are fewer launches, of many tensors each.

Needs a C++ compiler and triton (pip install triton==3.7.1).
"""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import machine

sys.path.insert(0, str(machine.REPO / "tests"))
import stand_in

KINDS = {  # of launches: the first one whose pattern is found in the kernel's name
    "matrix products": r"^(add|b|badd)?b?mm$",
    "attention": r"^_scaled_dot_product",
    "loss": r"log_softmax|nll_loss",
    "residual stream and layer norms": r"layer_norm",
    "GELU, and bias gradients with it": r"gelu",
    "joining the gradients of q, k and v": r"_cat_",
    "other bias gradients": r"triton.*_sum_",
    "casts": r"triton.*_to_copy",
    "gradient norm and optimizer": r"^(?!triton)",
    "the rest": r"",
}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def table(launches: list[tuple[str, int]]) -> str:
    """Return a row for each kind of launches in Markdown."""
    rows = []
    for kind in [*KINDS, "all"]:
        sizes = [size for name, size in launches if kind in ("all", kind_of(name))]
        gigabytes = f"{sum(sizes) / 1e9:.1f}"
        rows.append({"kernels": kind, "launches": str(len(sizes)), "GB": gigabytes})
    return machine.markdown(rows)


def main():
    parser = machine.OneLineParser(prog="traffic.py", description=__doc__.splitlines()[0])
    parser.add_argument("flags", nargs="*", help="flags of train_gpt2.py, behind --")
    parser.add_argument("--ddp", action="store_true", help="as under torchrun: split for DDP")
    parser.add_argument("--sequences", type=int, default=64, help="of 1,024 tokens in the pass")
    args = parser.parse_args()
    if not find_spec("triton"):
        raise ValueError("needs triton: pip install triton==3.7.1")
    B = args.sequences
    with TemporaryDirectory() as folder:
        library = stand_in.build(Path(folder))
        data = stand_in.make_data(Path(folder))
        line = ["--model=gpt2", f"--data-dir={data}", "--steps=2", "--eval-tokens=0", "--compile"]
        line += [f"--micro-batch-size={B}", f"--batch-tokens={1024 * B}", "--num-samples=0"]
        found = stand_in.on_gpu(library, *line, *args.flags, ddp=args.ddp)
    if found["code"]:
        raise ValueError(found["stderr"])
    flags = shlex.join(args.flags) + " as split for DDP" * args.ddp
    print(f"GPT-2 124M, {B} x 1,024 tokens {flags}".rstrip() + ", reckoned:\n")
    print(table(found["launches"]))
    if not args.ddp:  # the stand-in also counts what Dynamo makes up to compile the parts
        print(f"\nPeak memory of the run: {found['peak_mib'] / 1024:.1f} GiB")


if __name__ == "__main__":
    sys.exit(machine.exit_code("traffic.py", main))
