"""Measure which sizes of GPT-2 this machine can train, and how fast.

    python benchmarks/sizes.py                      # all four, on a GPU: ten minutes
    python benchmarks/sizes.py --only gpt2-xl
    python benchmarks/sizes.py --resume             # continue an interrupted measurement

Each size runs for a few steps with the default flags, and with those that save memory. The run
finds how many sequences fit in a pass. Results go to benchmarks/results/sizes-*.json after each of
them.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import machine
from memory import LESS

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def train(model: str, flags: tuple, args: Namespace) -> dict:
    """Return what a run of a few steps measured, or why there was none."""
    result = {"model": model, "flags": list(flags)}
    with TemporaryDirectory() as folder:
        line = [f"--model={model}", f"--steps={machine.WARM_UP + args.steps}", "--save-every=0"]
        line.append("--keep=1")  # a run wants room on the disk for all that it may keep
        line += ["--eval-tokens=0", "--num-samples=0", f"--out-dir={folder}/run"]
        if args.batch_tokens:
            line.append(f"--batch-tokens={args.batch_tokens}")
        program = [sys.executable, str(machine.TRAIN), *line, *flags]
        code, errors = machine.run_quietly(program)
        if code:
            return result | {"why": (errors.strip().splitlines() or [f"ended with {code}"])[-1]}
        with open(f"{folder}/run/log.jsonl", encoding="utf-8") as log:
            start, *records = map(json.loads, log)
    steps = [record for record in records if "ms" in record][machine.WARM_UP :]
    result["environment"] = start["environment"]
    result["micro_batch_size"] = start["flags"]["micro_batch_size"]
    result["tokens_per_s"] = median(step["tokens_per_s"] for step in steps)
    result["matmul_share"] = median(step["matmul_share"] for step in steps)
    result["mfu"] = median(step.get("mfu", 0) for step in steps)  # 0: no data sheet
    result["peak_mib"] = max(step["peak_mib"] or 0 for step in steps)
    return result


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results."""
    parts = []
    for name, content in contents.items():
        env = content["environment"]
        where = machine.short_name(env["device_name"])
        parts.append(f"**{where}**, torch {env['torch']} ([figures](results/{name})):")
        rows = []
        for run in content["runs"]:
            row = {"model": " ".join([run["model"], *run["flags"]])}
            if "why" in run:
                rows.append(row | {"sequences in a pass": "no", "tokens/s": run["why"]})
                continue
            row["sequences in a pass"] = str(run["micro_batch_size"])
            row["tokens/s"] = f"{run['tokens_per_s']:,.0f}"
            row["of matmul"] = f"{run['matmul_share']:.0%}"
            row["MFU"] = f"{run['mfu']:.0%}" if run["mfu"] else ""
            rows.append(row | {"GiB": f"{run['peak_mib'] / 1024:.1f}"})
        parts.append(machine.markdown(rows))
    return "\n\n".join(parts)


def start(args: Namespace) -> tuple[dict, Path | None]:
    """Return new results, or with --resume the newest of the same settings."""
    settings = {"steps": args.steps, "batch_tokens": args.batch_tokens}
    paths = machine.RESULTS.glob("sizes-*.json") if args.resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        if content["settings"] == settings:
            return content, path
    return {"settings": settings, "runs": []}, None


def measure(args: Namespace) -> int:
    """Train what is not measured yet; print the table."""
    content, path = start(args)
    for model in args.only:
        for flags in ((), LESS):
            if any((r["model"], tuple(r["flags"])) == (model, flags) for r in content["runs"]):
                continue
            run = train(model, flags, args)
            if "environment" in run:
                environment = machine.environment(run.pop("environment"))
                content.setdefault("environment", environment)
                machine.check_same(content["environment"], environment, "device_name", "torch")
            content["runs"].append(run)
            if "environment" not in content:
                continue  # nothing has fitted so far
            if not path:
                name = content["environment"]["device_name"]
                path = machine.unused_path(machine.results_path("sizes", name))
            machine.save(path, content)
    if not path:
        print(f"sizes.py: error: {content['runs'][0]['why']}", file=sys.stderr)
        return 2
    print(block({path.name: content}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=[*MODELS, "nano"], default=MODELS)
    add("--steps", type=int, default=4, help=f"timed ones, after {machine.WARM_UP} others")
    add("--batch-tokens", type=int, help="of a step (default: each model's own)")
    add("--resume", action="store_true", help="continue the newest results")
    args = parser.parse_args()
    try:
        return measure(args)
    except (OSError, ValueError) as error:
        print(f"sizes.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
