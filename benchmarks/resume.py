"""Check on this machine that a killed and resumed run equals an uninterrupted one bit for bit.

    python benchmarks/resume.py                        # GPT-2 124M on a GPU: two minutes
    python benchmarks/resume.py -- --deterministic     # flags of train_gpt2.py come after --
    python benchmarks/resume.py -- --model nano --batch-tokens 2048

One run is not interrupted; a second one is killed by SIGKILL after some steps, and resumed. Losses
and weights must be the same to the bit on a CPU, and on a GPU with --deterministic. Without it,
PyTorch promises nothing for GPUs, and the table shows the largest difference.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import machine

STEPS, SAVE_EVERY, KILL_AT = 12, 4, 6


def command(folder: Path, flags: list[str]) -> list:
    line = [sys.executable, machine.TRAIN, "--model=gpt2", "--auto-resume", f"--out-dir={folder}"]
    line += [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--eval-every=0", "--num-samples=0"]
    return [*line, "--batch-tokens=131072", "--eval-tokens=131072", *flags]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; if a step was made twice, the second one."""
    return {r["step"]: r["loss"] for r in machine.read_log(folder) if "loss" in r}


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
    """Return how a resumed run with these flags differs from an uninterrupted one."""
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
            "environment": machine.environment(machine.read_log(whole)[0]),
        }


def main() -> int:
    parser = machine.make_parser(__doc__)
    parser.add_argument("--out", type=Path, default="out/resume", help="folder of the results")
    parser.add_argument("flags", nargs="*", help="flags of train_gpt2.py, after --")
    args = parser.parse_args()
    run = compare(args.flags)
    env = run["environment"]
    machine.save(machine.new_path(args.out, "resume", env["device"]), run)
    row = {"machine": machine.describe(env), "torch": env["torch"], "commit": env["commit"]}
    row["flags"] = " ".join(args.flags) or "the defaults"
    row |= {"same losses": str(run["same_losses"]), "same weights": str(run["same_weights"])}
    row["largest difference"] = f"{run['difference']:.0e}"
    print(machine.markdown([row]))
    must_be_same = "--deterministic" in args.flags or not env["driver"]
    return int(must_be_same and not (run["same_weights"] and run["same_losses"]))


if __name__ == "__main__":
    sys.exit(machine.exit_code(main))
