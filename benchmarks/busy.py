"""What a step costs when another program keeps one core busy, by how long threads wait actively.

    python benchmarks/busy.py                  # a quarter of an hour on two cores
    python benchmarks/busy.py --only nano
    python benchmarks/busy.py --readme benchmarks/results/busy-*.json

Threads that wait for each other spin for GOMP_SPINCOUNT turns of a loop, and then sleep; what comes
of it is told in support/cores.py, which looks after it where the variable is not set. Each setting
runs train_gpt2.py quiet and beside a loop that never ends, in turns, in two rounds; the medians of
all steps are compared.

Writes results/busy-<device>-<date>.json.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import ladder
import machine

LARGE = {"model": "gpt2", "seq-len": 256, "batch-tokens": 256, "eval-tokens": 256, "steps": 8}
SMALL = {"model": "nano", "eval-tokens": 2048, "steps": 60}
MODELS = {"nano": SMALL, "nano, compiled": SMALL | {"compile": True}, "124M": LARGE}
SPINS = {"as it is": None, "300,000 (PyTorch's)": "300000", "1,000": "1000"}
USUAL = "300,000 (PyTorch's)"
LEFT_OUT = 2  # of the steps, whose memory is new


def step_times(flags: dict, spins: str | None) -> tuple[list[float], dict]:
    """The milliseconds of the steps of a run, and its environment."""
    words = [f"--{name}={value}" for name, value in flags.items()]
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {"GOMP_SPINCOUNT": spins} if spins else {}
    with TemporaryDirectory() as folder:
        program = [sys.executable, str(ladder.TRAIN), *words, "--save-every=0"]
        program += ["--sample-tokens=0", f"--out-dir={folder}/run"]
        code, errors = ladder.finish(program, env)
        if code:
            raise ValueError(f"{' '.join(program)} ended with {code}: {errors}")
        log = Path(folder, "run", "log.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in log.splitlines()]
    return [r["ms"] for r in records if "ms" in r][LEFT_OUT:], records[0]["environment"]


def measure(names: list[str]) -> dict:
    times, environment = {}, {}
    for number, model, setting, load in product((1, 2), names, SPINS, ("quiet", "busy")):
        beside = [sys.executable, "-c", "while True: pass"]
        other = subprocess.Popen(beside) if load == "busy" else None
        try:
            found, environment = step_times(MODELS[model], SPINS[setting])
        finally:
            if other:
                other.kill()
                other.wait()
        times.setdefault((model, setting, load), []).extend(found)
        print(f"round {number}: {model}, {setting}, {load}: {median(found):,.1f} ms", flush=True)
    rows = [{"model": m, "spins": s, "load": load, "ms": median(found), "steps": len(found)}
            for (m, s, load), found in times.items()]  # fmt: skip
    return {"environment": machine.environment(environment), "rows": rows}


def block(contents: dict[str, dict]) -> str:
    """The tables in Markdown: the milliseconds of a step, and the factor that a busy core makes."""
    parts = []
    for content in contents.values():
        env, table = content["environment"], []
        ms = {(row["model"], row["spins"], row["load"]): row["ms"] for row in content["rows"]}
        for model, setting in dict.fromkeys((m, s) for m, s, _ in ms):
            quiet, busy = (ms[model, setting, load] for load in ("quiet", "busy"))
            usual = ms[model, USUAL, "quiet"]
            row = {"model": model, "turns": setting, "quiet, ms": f"{quiet:,.0f}"}
            row |= {"one core busy, ms": f"{busy:,.0f}", "factor": f"{busy / quiet:.1f}"}
            table.append(row | {"quiet, x PyTorch's": f"{quiet / usual:.2f}"})
        parts += [f"**{machine.plain(env['device_name'])}, {env['cores']} cores**:"]
        parts += [machine.markdown(table)]
    return "\n\n".join(parts)


def main() -> int:
    parser = machine.OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--readme", nargs="+", type=Path, help="put their tables into the README")
    args = parser.parse_args()
    try:
        if args.readme:
            machine.put_into_readme("busy", block({p.name: machine.load(p) for p in args.readme}))
            return 0
        content = measure(args.only)
        name = content["environment"]["device_name"]
        machine.save(machine.free(machine.results_path("busy", name)), content)
        print(block({"": content}))
    except (OSError, ValueError) as error:
        print(f"busy.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
