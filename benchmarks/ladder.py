"""Measure the speed-ups of "Let's reproduce GPT-2 (124M)" on this machine, one after the other.

    python benchmarks/ladder.py                       # GPT-2 124M on a GPU, nano without one
    python benchmarks/ladder.py --model gpt2 --micro-batch-size 1 --seq-len 256 --steps 5
    python benchmarks/ladder.py --leave-one-out       # everything on, then one thing off at a time
    python benchmarks/ladder.py --resume              # continue an interrupted ladder

Each rung adds one speed-up to the rungs before it. It is a run of train_gpt2.py in a process of its
own: the command is printed, and the figures are read from its log.jsonl. Because a machine's speed
drifts, all rungs run from first to last and then from last to first. Each flag beyond the lecture
is added to the lecture's rungs alone.

A speed-up must not change the mathematics. All runs start with the same weights and read the same
tokens, so the losses and gradient norms of every step are compared with those of the base. TF32 and
bfloat16 round too coarsely for a close comparison. Therefore whatever should not change the numbers
is also added alone to the float32 base, where losses must agree to 1e-5. A rung that differs more
is refused: its speed is not shown, and the rungs above do without it.

After each run the results are written to out/ladder, at the end with a picture if matplotlib is
installed. --out benchmarks/results keeps them, for the tables of benchmarks/README.md.
"""

import json
import os
import re
import shlex
import signal
import sys
from argparse import Namespace
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import ladder_report as report
import machine
from ladder_report import SPEED_UPS
from machine import WARM_UP

CHANGES = {name: {name: True} for name in SPEED_UPS}  # rung: the flags that it changes
CHANGES |= {  # beyond the lecture
    "bf16-residual": {"bf16-residual": True},
    "loss-chunk-tokens": {"loss-chunk-tokens": 1024},
    "recompute": {"recompute": True},
    "fp16": {"bf16": False, "fp16": True},
    "muon": {"muon": True},
}
SAME_NUMBERS = ("compile", "flash", "pad-vocab", "fused", "loss-chunk-tokens", "recompute")
# Largest allowed relative differences from the base. In float32 only the order of additions
# differs: 4e-7 was seen. bfloat16 moved 124M by 2e-3 and 3e-2.
FLOAT32 = {"loss": 1e-5, "grad_norm": 1e-4}
LOW_PRECISION = {"loss": 1e-2, "grad_norm": 0.1}
# The first loss over one sequence of 256 tokens was 2e-2 away from the one over eight.
OTHER_BATCH = {"loss": 5e-2}

# ---- One run of train_gpt2.py. Its flags are a dict by name; "ranks" is for torchrun.


def base_flags(args: Namespace) -> dict:
    T = args.seq_len or (128 if args.model == "nano" else 1024)
    flags = {"ranks": 1, "model": args.model, "seq-len": T}
    flags |= {"micro-batch-size": args.micro_batch_size, "batch-tokens": args.micro_batch_size * T}
    # The learning rate is small and grows. With the lecture's 3e-4 from the start the first losses
    # of 124M jump so much that rounding alone moves them by 1e-4.
    steps = WARM_UP + args.steps
    flags |= {"steps": steps, "warmup-steps": steps - 1, "learning-rate": 1e-4, "cosine": False}
    flags |= {"muon": False, "eval-every": 0, "eval-tokens": 0, "save-every": 0, "num-samples": 0}
    if args.data_dir:
        flags["data-dir"] = args.data_dir
    return flags | dict.fromkeys((*SPEED_UPS, "bf16-residual"), False)


def command(flags: dict) -> str:
    """Return the command line as one types it."""
    words = ["python", "train_gpt2.py"]
    if flags["ranks"] > 1:
        words = ["torchrun", "--standalone", f"--nproc_per_node={flags['ranks']}", "train_gpt2.py"]
        if not machine.num_gpus():  # torchrun would give one core to each rank
            share = max(1, machine.num_cores() // flags["ranks"])
            words = ["env", f"OMP_NUM_THREADS={share}", *words]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif name != "ranks":
            words.append(f"--{name}={value}")
    return shlex.join(words)


def train(flags: dict) -> tuple[dict, int, str]:
    """Return what a run measured, its exit code, and its error message. If the micro-batch does not
    fit into memory, half of it is tried, and gradient accumulation makes up for that. The result
    holds the flags that were used."""
    real = {"python": [sys.executable], "train_gpt2.py": [str(machine.TRAIN)]}
    real["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    program = [part for word in shlex.split(command(flags)) for part in real.get(word, [word])]
    with TemporaryDirectory() as folder:
        code, errors = machine.run_quietly([*program, f"--out-dir={folder}/run"])
        if code == 0:
            return read_log(Path(folder, "run", "log.jsonl")) | {"flags": flags}, 0, ""
    lines = re.findall(r"train_gpt2\.py: (?:error: )?(.+)|^([\w.]*Error: .+)", errors, re.M)
    why = "".join(lines[-1]) if lines else f"ended with {code}, without a message"
    needs_memory = re.search("not fit|out of memory|allocate memory|not enough memory", why)
    smaller = next_micro_batch(flags)
    if smaller and (needs_memory or code == -signal.SIGKILL):
        return train(flags | {"micro-batch-size": smaller})
    if "exitcode  : 2" in errors:
        code = 2  # of a rank: torchrun itself ends with 1
    return {}, code, why


def next_micro_batch(flags: dict) -> int:
    """Return half of the micro-batch, or the next smaller one that divides the batch; else 0."""
    per_sequence = flags["seq-len"] * flags["ranks"]
    for size in range(flags["micro-batch-size"] // 2, 0, -1):
        if flags["batch-tokens"] % (size * per_sequence) == 0:
            return size
    return 0


def read_log(path: Path) -> dict:
    """Return what a rung needs of a run's log: times in ms, losses in nats per token."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "ms" in record]
    run = {name: [step[name] for step in steps] for name in ("ms", "loss", "grad_norm")}
    run["environment"] = records[0]["environment"]
    run["peak_mib"] = max(step["peak_mib"] or 0 for step in steps)
    run["matmul_share"] = median(step["matmul_share"] for step in steps[WARM_UP:])
    return run


# ---- Rungs


def change(name: str, flags: dict, args: Namespace) -> dict:
    """Return the flags that a rung changes in those of the rungs before it."""
    B, T = flags["micro-batch-size"], flags["seq-len"]
    if name == "accumulation":
        return {"batch-tokens": args.batch_tokens or (524_288 if machine.num_gpus() else 8 * B * T)}
    if name.endswith("ranks"):
        ranks = int(name.split()[0])
        share = max(1, flags["batch-tokens"] // T // ranks)
        return {"ranks": ranks, "micro-batch-size": min(B, share)}
    return CHANGES.get(name, {})


def alone(name: str, base: dict) -> tuple[dict, dict] | None:
    """Return the float32 base with this rung alone, and with what it must agree, if it must."""
    B = base["micro-batch-size"]
    if name in SAME_NUMBERS:
        return base | CHANGES[name], base
    if name == "accumulation" and B % 2 == 0:
        return base | {"micro-batch-size": B // 2}, base
    if name == "accumulation":
        twice = base | {"batch-tokens": 2 * base["batch-tokens"]}
        return twice, twice | {"micro-batch-size": 2 * B}
    if name.endswith("ranks"):
        ranks = int(name.split()[0])
        whole = base | {"batch-tokens": base["batch-tokens"] * ranks}
        return whole | {"ranks": ranks}, whole
    return None


def difference(run: dict, other: dict) -> dict:
    """Return the largest relative differences of losses and gradient norms, and the tolerances."""
    flags, other_flags = run["flags"], other["flags"]
    if flags["batch-tokens"] != other_flags["batch-tokens"]:
        return {"loss": abs(run["loss"][0] / other["loss"][0] - 1), "tolerances": OTHER_BATCH}
    losses = list(zip(run["loss"], other["loss"], strict=True))
    norms = list(zip(run["grad_norm"], other["grad_norm"], strict=True))
    if bool(flags.get("muon")) != bool(other_flags.get("muon")):
        losses, norms = losses[:1], norms[:1]  # the first update already makes other weights
    # A step that overflows float16 has no norm and makes no update: compare no losses after it.
    overflow = next((i for i, pair in enumerate(norms) if None in pair), len(norms))
    losses, norms = losses[: overflow + 1], norms[:overflow]
    is_low = any(some.get(n) for n in ("tf32", "bf16", "fp16") for some in (flags, other_flags))
    return {
        "tolerances": LOW_PRECISION if is_low else FLOAT32,
        "loss": max((abs(a / b - 1) for a, b in losses), default=0.0),
        "grad_norm": max((abs(a / b - 1) for a, b in norms), default=0.0),
    }


def too_large(found: dict) -> str:
    """Say why a difference is refused; return an empty string if it is not."""
    for key, limit in found["tolerances"].items():
        if not found[key] <= limit:  # also true of NaN
            return f"{key} differs from the base's by {found[key]:.1e}, more than {limit:.0e}"
    return ""


@dataclass
class Ladder:
    """Measure rungs and keep them in content, which is written to path after each run."""

    args: Namespace
    content: dict
    path: Path | None = None  # unknown until the first run has named the device

    def train(self, flags: dict) -> tuple[dict, int, str]:
        """As train(); ValueError if the machine or the program is another one than before."""
        run, code, why = train(flags)
        if run:
            now = machine.environment(run.pop("environment"))
            keys = ("device", "device_name", "driver", "torch", "commit", "changed")
            machine.check_same(self.content.setdefault("environment", now), now, *keys)
        return run, code, why

    def save(self):
        if not self.path:
            names = [self.args.model, "leave-one-out" if self.args.leave_one_out else ""]
            device = self.content["environment"]["device_name"]
            path = machine.results_path("ladder", device, *names, folder=Path(self.args.out))
            self.path = machine.unused_path(path)
        machine.save(self.path, self.content)

    def first_run(self, name: str, flags: dict) -> dict:
        """Return the rung of that name, measured unless a resumed ladder has it already."""
        for rung in self.content["rungs"]:
            if rung["name"] == name:
                return rung
        print(f"{name}: {command(flags)}", file=sys.stderr, flush=True)
        run, code, why = self.train(flags)
        if not run and not self.content["rungs"]:
            raise ValueError(why)  # there is no base to compare with
        state = {0: "measured", 2: "not on this device"}.get(code, "failed")
        rung = {"name": name, "flags": flags, "state": state, "why": why, "runs": []}
        if run:
            rung |= {"flags": run["flags"], "runs": [run]}
            self.check(rung)
        if rung["flags"] != flags:
            rung["why"] = f"{flags['micro-batch-size']} sequences do not fit in a pass"
        rung["command"] = command(rung["flags"])
        self.content["rungs"].append(rung)
        self.save()
        print(report.last_run(rung), flush=True)
        return rung

    def check(self, rung: dict):
        """Compare a rung's last run with the base's, once also alone; refuse it if it differs."""
        measured = report.measured(self.content)
        if not measured:
            return
        run, base = rung["runs"][-1], measured[0]["runs"][0]
        below = measured[: measured.index(rung)] if rung in measured else measured
        batch_tokens = run["flags"]["batch-tokens"]
        same_batch = [r["runs"][0] for r in below if r["flags"]["batch-tokens"] == batch_tokens]
        rung["difference"] = difference(run, [*same_batch, base][0])
        why = too_large(rung["difference"])
        pair = alone(rung["name"], base["flags"])
        if pair and not why and "alone" not in rung:
            runs = [base if flags == base["flags"] else self.alone_run(flags) for flags in pair]
            rung["alone"] = difference(*runs)
            if too_large(rung["alone"]):
                why = f"alone, in float32: {too_large(rung['alone'])}"
        if why and rung is not measured[0]:
            rung |= {"state": "refused", "why": why}

    def alone_run(self, flags: dict) -> dict:
        run, _, why = self.train(flags)
        if not run:
            raise ValueError(f"{command(flags)}: {why}")
        return run

    def climb(self):
        """Make the first round: each rung on top of those that this device has."""
        flags = base_flags(self.args)
        for name in ("base", *self.args.only):
            rung = self.first_run(name, flags | change(name, flags, self.args))
            if rung["state"] == "measured" and not report.is_beyond(name):
                flags = rung["flags"]

    def leave_one_out(self):
        """Make the first round: everything that this device has, then all of it but one."""
        base = base_flags(self.args)
        flags = dict(base)
        for name in self.args.only:
            flags |= change(name, flags, self.args)
        while not self.content["rungs"]:
            try:
                self.first_run("all", flags)
            except ValueError as error:
                refused = [n for n in SPEED_UPS if flags[n] and str(error).startswith(f"--{n} ")]
                if not refused:
                    raise
                flags[refused[0]] = False
                print(f"not on this device: {error}", file=sys.stderr)
        flags = self.content["rungs"][0]["flags"]
        offs = {name: {name: False} for name in SPEED_UPS if flags[name]}
        if flags["batch-tokens"] != base["batch-tokens"]:
            offs["accumulation"] = {"batch-tokens": flags["micro-batch-size"] * flags["seq-len"]}
        for name, off in offs.items():
            self.first_run(f"without {name}", flags | off)

    def second_round(self):
        """Run the rungs once more in reverse order, so that a drift of the machine meets all."""
        for rung in reversed(report.measured(self.content)):
            if len(rung["runs"]) > 1:
                continue
            print(f"{rung['name']}, second time", file=sys.stderr, flush=True)
            run, _, why = self.train(rung["flags"])
            if run:
                rung["runs"].append(run)
                self.check(rung)
            else:
                rung["why"] = f"one round, the second failed: {why}"
            self.save()
            print(report.last_run(rung), flush=True)
        self.content["complete"] = True
        self.save()


# ---- The program


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = machine.OneLineParser(prog="ladder.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="as train_gpt2.py's (default: gpt2 on a GPU, nano without one)")
    add("--micro-batch-size", type=int, default=16, help="sequences per pass (default: 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: 1024, nano 128)")
    add("--batch-tokens", type=int, help="of accumulation (default: 524288, on a CPU 8 passes)")
    add("--steps", type=int, help="timed steps of a run (default: 20, nano 40)")
    add("--data-dir", help="folder of token shards (default: Python's own source)")
    add("--only", nargs="+", metavar="RUNG", help="of tf32 bf16 ... accumulation '2 ranks' ...")
    add("--leave-one-out", action="store_true", help="everything on, then one thing off at a time")
    add("--out", default="out/ladder", help="folder of the results (default: out/ladder)")
    add("--resume", action="store_true", help="continue the newest ladder with the same flags")
    args = parser.parse_args(argv)
    num_gpus = machine.num_gpus()
    args.model = args.model or ("gpt2" if num_gpus else "nano")
    if args.steps is None:
        args.steps = 40 if args.model == "nano" else 20
    if min(args.steps, args.micro_batch_size) < 1:
        parser.error("--steps and --micro-batch-size must be at least 1")
    names = [*(SPEED_UPS if args.leave_one_out else CHANGES), "accumulation"]
    ranks = [f"{n} ranks" for n in range(2, 1 + (num_gpus or machine.num_cores()))]
    if args.leave_one_out:
        ranks = []
    wanted = args.only or [*names, *(name for name in ranks if name.split()[0] in ("2", "4", "8"))]
    if unknown := [name for name in wanted if name not in [*names, *ranks]]:
        parser.error(f"--only takes {', '.join([*names, *ranks])} here, not {unknown[0]}")
    args.only = [name for name in [*names, *ranks] if name in wanted]
    return args


def start(args: Namespace) -> Ladder:
    """Return a new ladder, or with --resume the newest unfinished one of the same flags."""
    settings = {n: v for n, v in vars(args).items() if n not in ("resume", "out")}
    paths = Path(args.out).glob("ladder-*.json") if args.resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        if content["settings"] == settings and not content.get("complete"):
            return Ladder(args, content, path)
    return Ladder(args, {"date": str(date.today()), "settings": settings, "rungs": []})


def measure(ladder: Ladder) -> int:
    """Measure and show a ladder; return exit code 3 if a rung was refused or failed."""
    with TemporaryDirectory() as cache:
        # Shared by the runs, and empty at the start, unless the caller has one.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        if ladder.args.leave_one_out:
            ladder.leave_one_out()
        else:
            ladder.climb()
        ladder.second_round()
    report.draw(ladder.content, ladder.path.with_suffix(".png"))
    print(f"\n{report.block({ladder.path.name: ladder.content})}\n\n{ladder.path}")
    states = [rung["state"] for rung in ladder.content["rungs"]]
    return 3 if "refused" in states or "failed" in states else 0


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return measure(start(args))
    except (OSError, ValueError) as error:
        print(f"ladder.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ladder.py: stopped; finished runs are kept: --resume continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
