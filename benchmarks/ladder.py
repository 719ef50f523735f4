"""Measure the speed-ups of "Let's reproduce GPT-2 (124M)" on this machine, one after the other.

    python benchmarks/ladder.py                       # GPT-2 124M on a GPU, nano without one
    python benchmarks/ladder.py --only bf16 flash '2 ranks'
    python benchmarks/ladder.py --quick               # half the time: one round, nothing alone
    python benchmarks/ladder.py --resume              # add what the newest results lack

Each rung is a run of train_gpt2.py that adds one speed-up to the rungs before it; flags beyond the
lecture are added to the lecture's rungs alone. A machine's speed drifts, so all rungs run from
first to last and then from last to first.

A speed-up must not change the mathematics. All runs start with the same weights and read the same
tokens, so their losses and gradient norms must agree. TF32 and bfloat16 round too coarsely for a
close comparison, so whatever should not change the numbers is also added alone to the float32 base.
A rung that differs by more than rounding is refused: its speed is not shown, and the rungs above do
without it.

Results are written to out/ladder after each run. --out benchmarks/results keeps them, for the
tables of benchmarks/README.md.
"""

import os
import shlex
import sys
from argparse import Namespace
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import ladder_report as report
import machine
import plot
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
RUNGS = ("base", *CHANGES, "accumulation", "2 ranks", "4 ranks", "8 ranks")  # in this order
SAME_NUMBERS = ("compile", "flash", "pad-vocab", "fused", "loss-chunk-tokens", "recompute")
# Largest relative difference allowed. In float32 only the order of additions differs: we saw 4e-7.
# bfloat16 moved 124M by 2e-3 and 3e-2.
FLOAT32 = {"loss": 1e-5, "grad_norm": 1e-4}
LOW_PRECISION = {"loss": 1e-2, "grad_norm": 0.1}
# With another batch: the first loss over 1 sequence of 256 tokens was 2e-2 away from that over 8.
OTHER_BATCH = {"loss": 5e-2}

# ---- One run of train_gpt2.py. Its flags are a dict by name; "ranks" is for torchrun.


def base_flags(args: Namespace) -> dict:
    T = args.seq_len or (64 if args.model == "nano" else 1024)
    flags = {"ranks": 1, "model": args.model, "seq-len": T}
    flags |= {"micro-batch-size": args.micro_batch_size, "batch-tokens": args.micro_batch_size * T}
    # A small learning rate that grows. With the lecture's 3e-4 from the start, the first losses of
    # 124M jump so much that rounding alone moves them by 1e-4.
    steps = WARM_UP + args.steps
    flags |= {"steps": steps, "warmup-steps": steps - 1, "learning-rate": 1e-4}
    flags |= {"schedule": "constant", "muon": False}
    flags |= {"eval-every": 0, "eval-tokens": 0, "save-every": 0, "num-samples": 0}
    if args.data_dir:
        flags["data-dir"] = args.data_dir
    return flags | dict.fromkeys((*SPEED_UPS, "bf16-residual"), False)


def command(flags: dict) -> str:
    """Return the command line as one types it."""
    words = ["python", "train_gpt2.py"]
    if flags["ranks"] > 1:
        words = ["torchrun", "--standalone", f"--nproc_per_node={flags['ranks']}", "train_gpt2.py"]
        if not machine.num_gpus():  # torchrun would give each rank a single core
            share = max(1, machine.num_cores() // flags["ranks"])
            words = ["env", f"OMP_NUM_THREADS={share}", *words]
    if flags.get("fp16") and flags["compile"]:
        # Up to torch 2.11 this cache takes code compiled for bfloat16 for float16's.
        words = ["env", "TORCHINDUCTOR_AUTOGRAD_CACHE=0", *words]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif name != "ranks":
            words.append(f"--{name}={value}")
    return shlex.join(words)


def train(flags: dict) -> dict:
    """Return a run: its flags, and what it measured, or its exit code and why it failed."""
    real = {"python": [sys.executable], "train_gpt2.py": [str(machine.TRAIN)]}
    real["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    program = [part for word in shlex.split(command(flags)) for part in real.get(word, [word])]
    with TemporaryDirectory() as folder:
        code, errors = machine.run_quietly([*program, f"--out-dir={folder}/run"])
        if code == 0:
            return {"flags": flags} | read_log(plot.read_run(f"{folder}/run"))
    if "exitcode  : 2" in errors:
        code = 2  # a rank's: torchrun itself ends with 1
    return {"flags": flags, "code": code, "why": machine.error_line(code, errors)}


def read_log(run: plot.Run) -> dict:
    """Return what a rung needs of a run's log: times in ms, losses in nats per token."""
    found = {name: list(run.values[name].values()) for name in ("ms", "loss", "grad_norm")}
    found["environment"] = machine.environment(run.start)
    found["peak_mib"] = max(run.values["peak_mib"].values(), default=0)
    return found


# ---- Rungs


def change(name: str, flags: dict) -> dict:
    """Return the flags that a rung changes in those of the rungs before it."""
    B, T = flags["micro-batch-size"], flags["seq-len"]
    if name == "accumulation":
        return {"batch-tokens": 524_288 if machine.num_gpus() else 8 * B * T}
    if name.endswith("ranks"):
        ranks = int(name.split()[0])
        share = max(1, flags["batch-tokens"] // T // ranks)
        return {"ranks": ranks, "micro-batch-size": min(B, share)}
    return CHANGES[name]


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

    def train(self, name: str, flags: dict) -> dict:
        """Return a run. Raise ValueError if the machine or the program has changed."""
        print(f"{name}: {command(flags)}", file=sys.stderr, flush=True)
        run = train(flags)
        if "environment" in run:
            now = run.pop("environment")
            keys = ("device", "device_name", "driver", "torch", "commit", "changed")
            machine.check_same(self.content.setdefault("environment", now), now, *keys)
        return run

    def save(self, rung: dict):
        if not self.path:
            device, folder = self.content["environment"]["device_name"], Path(self.args.out)
            self.path = machine.new_path("ladder", device, self.args.model, folder=folder)
        machine.save(self.path, self.content)
        print(report.last_run(rung), flush=True)

    def add(self, name: str, run: dict) -> dict:
        """Add a rung with its first run, and write it to the disk at once."""
        rung = {"name": name, "flags": run["flags"], "command": command(run["flags"])}
        rung |= {"state": "measured", "why": "", "runs": [run]}
        if "why" in run:
            is_missing = run["code"] == 2 and not machine.is_out_of_memory(2, run["why"])
            rung |= {"state": "not on this device" if is_missing else "failed"}
            rung |= {"why": run["why"], "runs": []}
        self.content["rungs"].append(rung)
        self.content["rungs"].sort(key=lambda rung: RUNGS.index(rung["name"]))
        if rung["runs"]:
            self.compare(rung)
        self.save(rung)
        return rung

    def base(self) -> dict:
        """Return the first rung. While its micro-batch does not fit into memory, halve it."""
        if self.content["rungs"]:
            return self.content["rungs"][0]
        flags = base_flags(self.args)
        run = self.train("base", flags)
        while "why" in run:
            B = flags["micro-batch-size"] // 2
            if not B or not machine.is_out_of_memory(run["code"], run["why"]):
                raise ValueError(run["why"])
            flags |= {"micro-batch-size": B, "batch-tokens": B * flags["seq-len"]}
            run = self.train("base", flags)
        return self.add("base", run)

    def rung(self, name: str, flags: dict) -> dict:
        """Return the rung of that name, measured unless the results have it already."""
        for rung in self.content["rungs"]:
            if rung["name"] == name:
                return rung
        return self.add(name, self.train(name, flags))

    def compare(self, rung: dict):
        """Compare a rung's last run with the first rung that has its batch, or if it is that one,
        with the base. If they differ, refuse the rung."""
        batch = rung["flags"]["batch-tokens"]
        rungs = report.measured(self.content)
        other = next(other for other in rungs if other["flags"]["batch-tokens"] == batch)
        if other is rung:
            other = rungs[0]
        rung["difference"] = difference(rung["runs"][-1], other["runs"][0])
        why = too_large(rung["difference"])
        if why and rung is not rungs[0]:
            rung |= {"state": "refused", "why": why}

    def compare_alone(self, rung: dict):
        """Add a rung alone to the float32 base, and refuse it if it changes any number."""
        base = self.content["rungs"][0]["runs"][0]
        name = rung["name"]
        run = self.train(f"{name}, alone", base["flags"] | CHANGES[name])
        if "why" in run:
            raise ValueError(f"{name}, alone: {run['why']}")
        rung["alone"] = difference(run, base)
        why = too_large(rung["alone"])
        if why:
            rung |= {"state": "refused", "why": f"alone, in float32: {why}"}
        self.save(rung)

    def climb(self):
        """Make the first round: each rung on top of those that this device has."""
        flags = self.base()["flags"]
        for name in self.args.only:
            rung = self.rung(name, flags | change(name, flags))
            is_exact = name in SAME_NUMBERS and rung["state"] == "measured"
            if is_exact and "alone" not in rung and not self.args.quick:
                self.compare_alone(rung)
            if rung["state"] == "measured" and not report.is_beyond(name):
                flags = rung["flags"]

    def second_round(self):
        """Run the rungs once more in reverse order, so that a drift of the machine meets all."""
        for rung in reversed(report.measured(self.content)):
            if len(rung["runs"]) == 1:
                run = self.train(f"{rung['name']}, second time", rung["flags"])
                if "why" in run:
                    raise ValueError(f"{rung['name']}, second time: {run['why']}")
                rung["runs"].append(run)
                self.compare(rung)
                self.save(rung)


# ---- The program


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = machine.OneLineParser(prog="ladder.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="as train_gpt2.py's (default: gpt2 on a GPU, nano without one)")
    add("--micro-batch-size", type=int, default=16, help="sequences per pass (default: 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: 1024, nano 64)")
    add("--steps", type=int, help="timed steps of a run (default: 20, nano 40)")
    add("--data-dir", help="folder of token shards (default: Python's own source)")
    add("--only", nargs="+", metavar="RUNG", help=f"of {', '.join(RUNGS[1:])}")
    add("--quick", action="store_true", help="one round, and no comparison alone in float32")
    add("--out", default="out/ladder", help="folder of the results (default: out/ladder)")
    add("--resume", action="store_true", help="add to the newest results of the same sizes")
    args = parser.parse_args(argv)
    num_gpus = machine.num_gpus()
    args.model = args.model or ("gpt2" if num_gpus else "nano")
    if args.steps is None:
        args.steps = 40 if args.model == "nano" else 20
    if min(args.steps, args.micro_batch_size) < 1:
        parser.error("--steps and --micro-batch-size must be at least 1")
    most = num_gpus or machine.num_cores()
    known = [n for n in RUNGS[1:] if not n.endswith("ranks") or int(n.split()[0]) <= most]
    for name in args.only or []:
        if name not in known:
            parser.error(f"--only takes {', '.join(known)} here, not {name}")
    args.only = [name for name in known if name in (args.only or known)]
    return args


def start(args: Namespace) -> Ladder:
    """Return a new ladder, or with --resume the newest one to which the rungs can be added."""
    names = ("model", "micro_batch_size", "seq_len", "steps", "data_dir")
    settings = {name: vars(args)[name] for name in names}
    paths = Path(args.out).glob("ladder-*.json") if args.resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        # Try again what failed: it may have been stopped.
        content["rungs"] = [rung for rung in content["rungs"] if rung["state"] != "failed"]
        below = [r["name"] for r in content["rungs"][1:] if not report.is_beyond(r["name"])]
        wanted = [name for name in args.only if not report.is_beyond(name)]
        if content["settings"] == settings and below == wanted[: len(below)]:
            return Ladder(args, content, path)
    return Ladder(args, {"date": str(date.today()), "settings": settings, "rungs": []})


def main() -> int:
    """Measure and show a ladder; return exit code 1 if a rung failed, and 3 if one was refused."""
    ladder = start(parse_args())
    with TemporaryDirectory() as cache:
        # Shared by the runs, and empty at the start, unless the caller has one.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        ladder.climb()
        if not ladder.args.quick:
            ladder.second_round()
    report.draw(ladder.content, ladder.path.with_suffix(".png"))
    table = report.block({ladder.path.name: ladder.content})
    ladder.path.with_suffix(".md").write_text(f"{table}\n", encoding="utf-8")
    print(f"\n{table}\n\nThe table, with links: {ladder.path.with_suffix('.md')}")
    states = [rung["state"] for rung in ladder.content["rungs"]]
    if "failed" in states:
        return 1
    return 3 if "refused" in states else 0


if __name__ == "__main__":
    sys.exit(machine.exit_code("ladder.py", main))
