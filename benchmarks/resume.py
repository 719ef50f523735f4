"""See whether a run that was killed and resumed ends with the same bits as one that was not.

    python benchmarks/resume.py                        # GPT-2 124M, on a GPU: five minutes
    python benchmarks/resume.py -- --model nano        # other flags of train_gpt2.py, behind --
    python benchmarks/resume.py --resume               # continue interrupted comparisons

A run is made whole; again, killed by SIGKILL after some steps and resumed; and both once more with
--deterministic. Losses and weights are compared. On a CPU the bits must be the same. On a GPU they
must be with --deterministic; without it, PyTorch promises nothing, and the largest difference is
told. Results go to benchmarks/results/resume-*.json.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import machine

STEPS, SAVE_EVERY, KILL_AT = 12, 4, 6
VARIANTS = ([], ["--deterministic"])


def command(folder: Path, flags: list[str]) -> list[str]:
    line = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--eval-every=0", "--num-samples=0"]
    line += ["--resume", f"--out-dir={folder}", "--batch-tokens=131072", "--eval-tokens=131072"]
    return [sys.executable, str(machine.TRAIN), "--model=gpt2", *line, *flags]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; of one that was made twice, the second."""
    path = folder / "log.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {}
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):  # the last one may be half written
            record = json.loads(line)
            if "loss" in record:
                found[record["step"]] = record["loss"]
    return found


def train(folder: Path, flags: list[str]):
    """Train to the end. Raise ValueError if the run fails."""
    code, errors = machine.run_quietly(command(folder, flags))
    if code:
        raise ValueError(f"{' '.join(command(folder, flags))} ended with {code}: {errors[-1000:]}")


def train_until_killed(folder: Path, flags: list[str]):
    """Start a run, and kill it when it has made KILL_AT steps."""
    process = subprocess.Popen(command(folder, flags), stdout=subprocess.DEVNULL)
    while process.poll() is None and max(losses(folder), default=0) < KILL_AT:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise ValueError(f"{' '.join(process.args)} ended before it was killed")


def weights(folder: Path) -> str:
    """Return the SHA-256 of the last checkpoint's weights."""
    path = folder / f"step_{STEPS:06d}" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compare(flags: list[str]) -> dict:
    with TemporaryDirectory() as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        train(whole, flags)
        train_until_killed(resumed, flags)
        train(resumed, flags)
        a, b = losses(whole), losses(resumed)
        environment = json.loads((whole / "log.jsonl").open(encoding="utf-8").readline())
        return {
            "flags": flags,
            "same_weights": weights(whole) == weights(resumed),
            "same_losses": a == b and len(a) == STEPS,
            "difference": max(abs(a[step] / b[step] - 1) for step in a),
            "environment": machine.environment(environment["environment"]),
        }


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results."""
    parts = []
    for name, content in contents.items():
        env = content["runs"][0]["environment"]
        where = machine.short_name(env["device_name"])
        parts.append(f"**{where}**, torch {env['torch']} ([figures](results/{name})):")
        rows = []
        for run in content["runs"]:
            row = {"flags": " ".join(run["flags"]) or "the defaults"}
            row["same losses"] = "yes" if run["same_losses"] else "no"
            row["same weights"] = "yes" if run["same_weights"] else "no"
            rows.append(row | {"largest difference": f"{run['difference']:.0e}"})
        parts.append(machine.markdown(rows))
    return "\n\n".join(parts)


def start(flags: list[str], go_on: bool) -> tuple[dict, Path | None]:
    """Return new results, or to go on, the newest of the same flags that lack a comparison."""
    paths = machine.RESULTS.glob("resume-*.json") if go_on else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        if content["flags"] == flags and len(content["runs"]) < len(VARIANTS):
            return content, path
    return {"flags": flags, "runs": []}, None


def measure(flags: list[str], go_on: bool) -> int:
    """Compare what is not compared yet, save and print; return 1 if bits differ that must be the
    same."""
    content, path = start(flags, go_on)
    for more in VARIANTS[len(content["runs"]) :]:
        run = compare([*flags, *more])
        content["runs"].append(run)
        first, now = content["runs"][0]["environment"], run["environment"]
        machine.check_same(first, now, "device_name", "torch")
        if not path:
            name = run["environment"]["device_name"]
            path = machine.unused_path(machine.results_path("resume", name))
        machine.save(path, content)
    print(block({path.name: content}))
    for run in content["runs"]:
        must_be_same = "--deterministic" in run["flags"] or run["environment"]["device"] == "cpu"
        if must_be_same and not (run["same_weights"] and run["same_losses"]):
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flags", nargs="*", help="flags of train_gpt2.py, behind --")
    parser.add_argument("--resume", action="store_true", help="continue interrupted comparisons")
    args = parser.parse_args()
    try:
        return measure(args.flags, args.resume)
    except (OSError, ValueError) as error:
        print(f"resume.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
