"""Run train_gpt2.py once for each combination of flags, and show what each setting brings.

    python benchmarks/sweep.py --name rates -- --seed 1337,1338 --model nano \\
        --learning-rate 4e-3,8e-3 --muon,--no-muon
    python benchmarks/sweep.py --name sizes --discard -- --steps 7 --model gpt2,gpt2-xl \\
        ',--recompute --loss-chunk-tokens=1024'

The flags of train_gpt2.py come after "--". A comma separates alternatives: values of a flag, or
whole flags. In quotes, an alternative may be several flags, or none. Put --seed first, so that the
settings take turns: a machine's speed drifts. On a CPU each run measures whether --bf16 and --flash
are faster; runs that choose differently are different settings, unless you type these flags.

Runs are in out/sweep/NAME. Repeat the command to continue an interrupted sweep, or with more
alternatives to add runs: no run is made twice. If one fails, as when it diverges or does not fit in
memory, the sweep says so and goes on. The tables are those of plot.py.
"""

import itertools
import json
import shlex
import shutil
import sys
from pathlib import Path

import machine
import plot

RUNS = Path("out/sweep")


def combinations(words: list[str]) -> dict[str, list[str]]:
    """Return each run's flags, by the name of its folder, which lists the chosen alternatives."""
    joined = []  # words, with each value joined to its flag: --seed=1, not --seed 1
    for word in words:
        is_name = joined and joined[-1].startswith("--") and not set("=,") & set(joined[-1])
        if is_name and not word.startswith(("--", ",")):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    grid = [alternatives(word) for word in joined]
    runs = {}
    for chosen in itertools.product(*grid):
        pairs = zip(chosen, grid, strict=True)
        text = " ".join(choice for choice, others in pairs if len(others) > 1).replace("--", "")
        name = "".join(c if c.isalnum() or c in "=.-" else "," for c in text) or "run"
        runs[name] = shlex.split(" ".join(chosen))
    return runs


def alternatives(word: str) -> list[str]:
    """Return what a word of the grid stands for: several flags, or one with several values."""
    first, *others = word.split(",")
    if "=" in first and not any(other.startswith("--") for other in others):
        others = [f"{first.partition('=')[0]}={value}" for value in others]
    return [first, *others]


def train(folder: Path, flags: list[str]) -> str:
    """Make or continue a run, unless it is complete. Return why it failed, or an empty string."""
    known = folder / "sweep.json"
    if known.exists() and json.loads(known.read_text()) != flags:
        raise ValueError(f"{folder} is a run with other flags: use another --name")
    machine.save(known, flags)
    command = [sys.executable, machine.TRAIN, *flags, "--auto-resume", f"--out-dir={folder}"]
    code, errors = machine.run_quietly(command)
    return machine.error_line(code, errors) if code else ""


def main() -> int:
    """Make all runs and show their tables; return exit code 1 if a run failed."""
    parser = machine.make_parser(__doc__)
    add = parser.add_argument
    add("--name", required=True, help="of the sweep")
    add("--discard", action="store_true", help="delete each run's checkpoints when it has ended")
    add("flags", nargs="+", help="flags of train_gpt2.py, after --")
    args = parser.parse_args()
    runs, has_failed = combinations(args.flags), False
    for number, (name, flags) in enumerate(runs.items(), 1):
        folder = RUNS / args.name / name
        if "done" in [*machine.read_log(folder), {}][-1]:
            continue
        print(f"{number}/{len(runs)}: {folder}", file=sys.stderr, flush=True)
        if why := train(folder, flags):
            print(f"{folder}: {why}", flush=True)
            has_failed = True
        if args.discard:
            for checkpoint in folder.glob("step_*"):
                shutil.rmtree(checkpoint)
    plot.print_tables(plot.read_runs([str(RUNS / args.name)]))
    print(f"\nThe curves: python benchmarks/plot.py {RUNS / args.name}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(machine.exit_code(main))
