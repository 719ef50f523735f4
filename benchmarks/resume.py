"""See whether a run that was killed and resumed ends with the same bits as one that was not.

    python benchmarks/resume.py                        # GPT-2 124M on a GPU: two minutes
    python benchmarks/resume.py -- --deterministic     # flags of train_gpt2.py come after --
    python benchmarks/resume.py -- --model nano --batch-tokens 2048

A run is made without interruption; again, killed by SIGKILL after some steps; and resumed. Losses
and weights must be the same to the bit on a CPU, and on a GPU with --deterministic. Without it,
PyTorch promises nothing for GPUs, and the table shows the largest difference. Results are written
to benchmarks/results/resume-*.json.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import machine
import plot

STEPS, SAVE_EVERY, KILL_AT = 12, 4, 6


def command(folder: Path, flags: list[str]) -> list:
    line = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--eval-every=0", "--num-samples=0"]
    line += [
        "--auto-resume",
        f"--out-dir={folder}",
        "--batch-tokens=131072",
        "--eval-tokens=131072",
    ]
    return [sys.executable, machine.TRAIN, "--model=gpt2", *line, *flags]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, and if it was made twice, the second one."""
    if not (folder / "log.jsonl").exists():
        return {}
    return plot.read_run(str(folder)).values["loss"]


def train(folder: Path, flags: list[str]):
    """Train to the end. Raise ValueError if the run fails."""
    code, errors = machine.run_quietly(command(folder, flags))
    if code:
        raise ValueError(machine.error_line(code, errors))


def train_until_killed(folder: Path, flags: list[str]):
    """Start a run, and kill it when it has made KILL_AT steps."""
    process = subprocess.Popen(command(folder, flags), stdout=subprocess.DEVNULL)
    while process.poll() is None and max(losses(folder), default=0) < KILL_AT:
        time.sleep(0.02)
    process.kill()
    if process.wait() >= 0:
        raise ValueError("the run ended before it was killed")


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
        return {
            "flags": flags,
            "same_weights": weights(whole) == weights(resumed),
            "same_losses": a == b and len(a) == STEPS,
            "difference": max(abs(a[step] / b[step] - 1) for step in a),
            "environment": machine.environment(plot.read_run(str(whole)).start),
        }


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results, by file name."""
    rows = []
    for name, run in contents.items():
        env = run["environment"]
        row = {"machine": f"[{machine.short_name(env['device_name'])}]({name})"}
        row |= {"torch": env["torch"], "flags": " ".join(run["flags"]) or "the defaults"}
        row["same losses"] = "yes" if run["same_losses"] else "no"
        row["same weights"] = "yes" if run["same_weights"] else "no"
        rows.append(row | {"largest difference": f"{run['difference']:.0e}".replace("0e+00", "0")})
    return machine.markdown(rows)


def main() -> int:
    parser = machine.OneLineParser(prog="resume.py", description=__doc__.splitlines()[0])
    parser.add_argument("flags", nargs="*", help="flags of train_gpt2.py, after --")
    flags = parser.parse_args().flags
    run = compare(flags)
    path = machine.new_path("resume", run["environment"]["device_name"])
    machine.save(path, run)
    print(block({path.name: run}))
    must_be_same = "--deterministic" in flags or run["environment"]["device"] == "cpu"
    return int(must_be_same and not (run["same_weights"] and run["same_losses"]))


if __name__ == "__main__":
    sys.exit(machine.exit_code("resume.py", main))
