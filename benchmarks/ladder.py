"""The ladder of speed-ups of "Let's reproduce GPT-2 (124M)", measured on this machine.

    python benchmarks/ladder.py                       # GPT-2 124M on a GPU, nano without one
    python benchmarks/ladder.py --model gpt2 --micro-batch-size 1 --seq-len 256 --steps 5
    python benchmarks/ladder.py --leave-one-out       # what does each bring on top of all others?
    python benchmarks/ladder.py --resume              # go on with what was interrupted
    python benchmarks/ladder.py --compare A.json B.json
    python benchmarks/ladder.py --readme benchmarks/results/ladder-*.json

Each rung adds one speed-up to those before it. It is a run of train_gpt2.py in a process of its
own, and its row is read from that run's log; the command is printed, so that anyone can type it.
All rungs are climbed once up and once down, since a machine's speed drifts. What goes beyond the
lecture is off by default: each such rung is added to the lecture's alone, and not carried on.

That the mathematics stayed the same is shown by the losses and the gradient norms of all steps,
which must be those of the base, from the same weights and the same tokens. In bfloat16 and TF32
that can't be shown closely. So what should not change the numbers at all is also added alone to the
float32 base, where it must agree to 1e-5. A rung that does not is refused: no speed is shown for it
and the rungs above do without it.

Writes out/ladder/ladder-<device>-<date>-<model>.json after each run, and a picture of it where
matplotlib is installed; with --keep both go to benchmarks/results. --readme puts the tables of such
files into benchmarks/README.md, and draws their pictures anew.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory, TemporaryFile

import machine

TRAIN = machine.REPO / "train_gpt2.py"
OUT = Path("out", "ladder")
WIDTH = 80  # of a terminal
LECTURE = "A100, lecture"
NOT_MEASURED = {"not on this device": "not here", "refused": "refused", "failed": "failed"}
LEFT_OUT = 3  # steps at the start of a process, in which memory and caches fill
BUSY = 0.1  # share of the machine that may be used by others before a run
IDLE_WITHIN_S = 5
SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad-vocab", "fused")
BEYOND = {  # the lecture: what each changes
    "bf16-residual": {"bf16-residual": True},
    "loss-chunk-tokens": {"loss-chunk-tokens": 1024},
    "recompute": {"recompute": True},
    "fp16": {"bf16": False, "fp16": True},
    "muon": {"muon": True},
    "ranks-muon": {"muon": True},
}
AMONG_RANKS = ("ranks-muon",)
PRECISIONS = ("tf32", "bf16", "fp16")  # these change the numbers; Muon does after the first update
NAMES = {
    "base": "float32, everything off", "tf32": "TF32", "bf16": "BF16 autocast",
    "compile": "torch.compile", "flash": "flash attention", "pad-vocab": "padded vocabulary",
    "fused": "fused AdamW", "accumulation": "accumulation", "all": "everything on",
    "bf16-residual": "BF16 residual stream", "fp16": "FP16 instead of BF16",
    "loss-chunk-tokens": "loss in chunks", "recompute": "recompute blocks",
    "muon": "Muon for the matrices",
    "ranks-muon": "Muon among them",
}  # fmt: skip
# Largest relative differences from the base's losses and gradient norms. In float32 only the order
# of additions differs: 4e-7 was seen. bfloat16 moved 124M by 2e-3 and 3e-2, and one sequence of 256
# tokens has another first loss than eight, by 2e-2.
FLOAT32 = {"loss": 1e-5, "grad_norm": 1e-4}
LOWER = {"loss": 1e-2, "grad_norm": 0.1}  # TF32 and bfloat16
ANOTHER_BATCH = {"loss": 5e-2}
# Tokens per second of GPT-2 124M, or of a model of 11M, as the lecture and four people who followed
# it published them; of the fourth only the factor over the step before is known.
PUBLISHED = {
    LECTURE: {"base": 16e3, "tf32": 49e3, "bf16": 54.5e3, "compile": 126e3, "flash": 170e3,
              "pad-vocab": 175e3, "fused": 182e3},  # 16,384 tokens in 90 ms
    "RTX 4060 Ti": {"base": 1600, "tf32": 2000, "bf16": 3250, "flash": 15000, "pad-vocab": 15300},
    "Colab GPU": {"tf32": 8780, "bf16": 10930, "compile": 24100, "flash": 34200,
                  "pad-vocab": 35900, "fused": 36000, "accumulation": 38200},
    "A800, 11M": {"base": 144547, "tf32": 542632, "bf16": 353410, "compile": 706729,
                  "flash": 731946},
    "RTX 3090": {"tf32": "x1.5", "bf16": "x1.5", "compile": "x1.3", "flash": "x1.1",
                 "pad-vocab": "x1.06", "fused": "slower"},
}  # fmt: skip

# What train_gpt2.py says against flags on this device, asked of it in another process, as this one
# may not hold a GPU
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
from dataclasses import asdict
import torch, train_gpt2
device = train_gpt2.ranks.find_world({}, torch.cuda.device_count()).device
try:
    config, given, _ = train_gpt2.parse_args(sys.argv[2:], device.type)
    train_gpt2.device.why_off(asdict(config), given, device)
except ValueError as error:
    print(error)
"""

# --------------------------------------------------------------------------------------------------
# One run of train_gpt2.py. Flags are held by name: True, False or a value; ranks is torchrun's


def base_flags(args: Namespace) -> dict:
    T = args.seq_len or (128 if args.model == "nano" else 1024)
    return {
        "ranks": 1, "model": args.model, "seq-len": T, "micro-batch-size": args.micro_batch_size,
        "batch-tokens": args.micro_batch_size * T, "steps": LEFT_OUT + args.steps,
        # small and growing: with the lecture's 3e-4 from the start the first losses of 124M jump
        # so much that rounding alone moves them by 1e-4
        "learning-rate": 1e-4, "warmup-steps": LEFT_OUT + args.steps - 1, "cosine": False,
        "muon": False, "eval-every": 0, "eval-tokens": 1, "save-every": 0, "sample-tokens": 1,
        **({"data-dir": args.data_dir} if args.data_dir else {}), **dict.fromkeys(SPEED_UPS, False),
    }  # fmt: skip


def command(flags: dict) -> list[str]:
    """As one types it."""
    ranks, words = flags["ranks"], ["python", "train_gpt2.py"]
    if ranks > 1:
        words = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "train_gpt2.py"]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif name != "ranks":
            words.append(f"--{name}={value}")
    return words


def threads(flags: dict) -> dict[str, str]:
    """The environment that shares a CPU's cores among its ranks: torchrun would give each one."""
    share = machine.num_cores() // flags["ranks"]
    is_shared = flags["ranks"] > 1 and share > 1 and not machine.num_gpus()
    return {"OMP_NUM_THREADS": str(share)} if is_shared else {}


def typed(flags: dict) -> str:
    settings = [f"{name}={value}" for name, value in threads(flags).items()]
    return " ".join([*settings, shlex.join(command(flags))])


def executable(words: list[str]) -> list[str]:
    """The same with this Python and this train_gpt2.py."""
    real = {"python": [sys.executable], "train_gpt2.py": [str(TRAIN)]}
    real["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]
    return [part for word in words for part in real.get(word, [word])]


def attempt(flags: dict) -> tuple[dict, int, str]:
    """A run's values, its exit code, and if that is not 0 why. What does not fit is tried again
    with a smaller micro-batch, which accumulation makes up for; the values hold its flags."""
    with TemporaryDirectory() as folder:
        busy = wait_until_idle()
        program = [*executable(command(flags)), f"--out-dir={folder}/run"]
        code, errors = finish(program, os.environ | threads(flags))
        if code == 0:
            values = read_log(Path(folder, "run", "log.jsonl"))
            return values | {"flags": flags, "busy": busy}, 0, ""
    said = re.findall(r"train_gpt2\.py: (?:error: )?(.+)|^(\w+Error: .+)", errors, re.M)
    why = "".join(said[-1]) if said else f"ended with {code} and no word"
    smaller = [b for b in range(1, flags["micro-batch-size"]) if divides(b, flags)]
    if smaller and (code == -signal.SIGKILL or re.search("does not fit|allocate memory", why)):
        return attempt(flags | {"micro-batch-size": smaller[-1]})
    return {}, 2 if "exitcode  : 2" in errors else code, why  # torchrun's own is 1


def divides(micro_batch_size: int, flags: dict) -> bool:
    return flags["batch-tokens"] % (micro_batch_size * flags["seq-len"] * flags["ranks"]) == 0


def finish(program: list[str], env: dict) -> tuple[int, str]:
    """A program's exit code and what it said of errors. Interrupted, it is asked to end, as
    torchrun needs to be to end its ranks."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=errors, env=env)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        errors.seek(0)
        return code, errors.read()


def read_log(path: Path) -> dict:
    """What a row needs of a run's log; times in milliseconds, losses in nats per token."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    first, steps = records[0], [record for record in records if "ms" in record]
    ready = next(record for record in records if "val_loss" in record)
    return {
        "environment": first["environment"],
        "start_s": ready["time"] - first["time"],  # compiling, two passes and a small validation
        "peak_mib": max(step["peak_mib"] or 0 for step in steps),
        "matmul_share": median(step["matmul_share"] for step in steps[LEFT_OUT:]),
        **{name: [step[name] for step in steps] for name in ("ms", "loss", "grad_norm")},
    }


def wait_until_idle() -> float:
    """The share of the machine that others use, once it is small or some seconds have passed."""
    begin = time.monotonic()
    while (busy := busy_share()) > BUSY and time.monotonic() - begin < IDLE_WITHIN_S:
        pass
    return busy


def busy_share() -> float:
    """Of the processors, for half a second, or of the GPUs if that is more."""
    before = processor_ticks()
    time.sleep(0.5)
    total, idle = (b - a for a, b in zip(before, processor_ticks(), strict=True))
    query = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    shares = machine.output("nvidia-smi", *query).split()
    gpus = [int(share) / 100 for share in shares if share.isdigit()]
    return max([1 - idle / max(total, 1), *gpus]) if total else max([0.0, *gpus])


def processor_ticks() -> tuple[int, int]:
    """All so far, and the idle ones; zeros where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    ticks = [int(word) for word in stat.read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


# --------------------------------------------------------------------------------------------------
# Rungs


def rung_names(args: Namespace) -> list[str]:
    ranks = [f"{n} ranks" for n in args.ranks]
    names = [*SPEED_UPS, *(n for n in BEYOND if n not in AMONG_RANKS), "accumulation", *ranks]
    names += AMONG_RANKS if ranks else ()
    names = [n for n in names if n not in args.skip]
    return ["base", *(n for n in names if not args.only or n in args.only)]


def change(name: str, flags: dict, args: Namespace) -> dict:
    """What a rung changes in the flags of those before it."""
    B, T = flags["micro-batch-size"], flags["seq-len"]
    if name in SPEED_UPS:
        return {name: True}
    if name in BEYOND:
        return BEYOND[name]
    if name == "accumulation":
        return {"batch-tokens": args.batch_tokens or (524_288 if machine.num_gpus() else 8 * B * T)}
    if name.endswith("ranks"):
        ranks = int(name.split()[0])
        most = max(1, flags["batch-tokens"] // T // ranks)
        return {"ranks": ranks, "micro-batch-size": min(B, most)}
    return {}


def why_not(name: str, args: Namespace) -> str:
    """Why a rung can't be measured here, as far as is known without a run; nothing if it can."""
    flags = base_flags(args)
    flags |= change(name, flags, args)
    devices = machine.num_gpus() or machine.num_cores()
    if flags["ranks"] > devices:
        return f"{flags['ranks']} ranks, {devices} GPUs or cores"
    words = command(flags | {"ranks": 1})[2:]
    said = machine.output(sys.executable, "-c", ASK, str(machine.REPO), *words)
    return " ".join(said.split())  # a compiler's has many lines


def check_any(args: Namespace):
    """ValueError if none of the rungs that were asked for can be measured here."""
    whys = []
    for name in rung_names(args)[1:] if args.only else ():
        if not (why := why_not(name, args)):
            return
        whys.append(f"{name}: {why}")
    if whys:
        raise ValueError(f"none of the rungs of --only can be measured here: {'; '.join(whys)}")


def alone(name: str, base: dict) -> tuple[dict, dict] | None:
    """The float32 base with what should not change its numbers, and the base to compare it with;
    None where there is no such thing."""
    B, T = base["micro-batch-size"], base["seq-len"]
    if name in SPEED_UPS:
        return None if name in PRECISIONS else (base | {name: True}, base)
    if name in ("loss-chunk-tokens", "recompute"):
        return base | BEYOND[name], base
    if name == "accumulation":
        twice = base | {"micro-batch-size": 2 * B, "batch-tokens": 2 * B * T}
        return (base | {"micro-batch-size": B // 2}, base) if B % 2 == 0 else (
            twice | {"micro-batch-size": B}, twice)  # fmt: skip
    if name.endswith("ranks"):
        whole = base | {"batch-tokens": base["batch-tokens"] * int(name.split()[0])}
        return whole | {"ranks": int(name.split()[0])}, whole
    return None


def difference(run: dict, other: dict) -> dict:
    """The largest relative differences of losses and gradient norms, and what they may be. With
    another number of tokens per step only the first losses are alike, and not closely; with another
    optimizer only the first losses and norms; after a step whose gradient overflows float16, which
    makes no update, nothing is."""
    flags, other_flags = run["flags"], other["flags"]
    if flags["batch-tokens"] != other_flags["batch-tokens"]:
        return {"loss": abs(run["loss"][0] / other["loss"][0] - 1), "tolerances": ANOTHER_BATCH}
    lower = any(some.get(name) for name in PRECISIONS for some in (flags, other_flags))
    norms = list(zip(run["grad_norm"], other["grad_norm"], strict=True))
    num_alike = next((i for i, pair in enumerate(norms) if None in pair), len(norms))
    losses = list(zip(run["loss"], other["loss"], strict=True))[: num_alike + 1]
    if bool(flags.get("muon")) != bool(other_flags.get("muon")):
        losses, num_alike = losses[:1], min(num_alike, 1)
    found = {"tolerances": LOWER if lower else FLOAT32}
    for key, pairs in (("loss", losses), ("grad_norm", norms[:num_alike])):
        found[key] = max((abs(mine / theirs - 1) for mine, theirs in pairs), default=0.0)
    return found


def too_large(found: dict) -> str:
    """Why a difference is refused; nothing if it is not."""
    for key, most in found["tolerances"].items():
        if not found[key] <= most:
            return f"{key} differs from the base's by {found[key]:.1e}, more than {most:.0e}"
    return ""


@dataclass
class Ladder:
    """The rows so far and where they are kept. A row is a dict: name, flags, command, state, why,
    runs (of each round), difference (from the base) and alone (the same, added to it alone)."""

    args: Namespace
    content: dict
    path: Path | None = None  # none before the first run, which says what device this is

    @property
    def measured(self) -> list[dict]:
        return measured_rungs(self.content)

    def run(self, flags: dict) -> tuple[dict, int, str]:
        """As attempt; ValueError if it is of another machine or program than the rows so far."""
        run, code, why = attempt(flags)
        if run:
            found = machine.environment(run.pop("environment"))
            known = self.content.setdefault("environment", found)
            for key in ("device", "device_name", "driver", "torch", "commit", "changed"):
                if known[key] != found[key]:
                    why = f"{self.path} was measured with {key} {known[key]}, not {found[key]}"
                    raise ValueError(f"{why}: measure all of it again, without --resume")
        return run, code, why

    def keep(self, **more):
        self.content |= more
        if not self.path:
            names = self.args.model, "leave-one-out" if self.args.leave_one_out else ""
            device = self.content["environment"]["device_name"]
            path = machine.results_path("ladder", device, *names, folder=results_folder(self.args))
            self.path = machine.free(path)
        machine.save(self.path, self.content)

    def rung(self, name: str, flags: dict) -> dict:
        """The row of that name with its first run, unless it is there already: measured, not on
        this device, or refused. ValueError if there is nothing to compare it with."""
        known = {rung["name"]: rung for rung in self.content["rungs"]}
        rung = known.get(name) or {"name": name, "flags": flags, "state": "measured", "runs": []}
        rung |= {"command": typed(flags), "why": rung.get("why", "")}
        if rung["state"] != "measured" or "checked" in rung:
            return rung
        if not rung["runs"]:
            print(f"{name}: {rung['command']}", file=sys.stderr, flush=True)
            self.first_run(rung)
        if rung["runs"] and self.measured[0] is not rung:
            self.check(rung)
        rung["checked"] = True
        self.keep()
        return rung

    def first_run(self, rung: dict):
        flags, devices = rung["flags"], machine.num_gpus() or machine.num_cores()
        run, code, why = {}, 2, f"{flags['ranks']} ranks, {devices} GPUs or cores"
        if flags["ranks"] <= devices:
            run, code, why = self.run(flags)
        if not run and not self.measured:
            raise ValueError(why)
        states = {0: "measured", 2: "not on this device"}
        rung |= {"state": states.get(code, "failed"), "why": why}
        if run:
            rung |= {"runs": [run], "flags": run["flags"], "command": typed(run["flags"])}
            if run["flags"] != flags:
                rung["why"] = f"{flags['micro-batch-size']} sequences do not fit in a pass"
        self.content["rungs"].append(rung)
        self.keep()

    def check(self, rung: dict):
        """Compare a row's last run with the base's, and at first what it adds alone to the base
        with that; refuse a row that differs."""
        base, run = self.measured[0], rung["runs"][-1]
        alike = [r for r in self.measured
                 if r["flags"]["batch-tokens"] == run["flags"]["batch-tokens"]]  # fmt: skip
        other = alike[0] if alike and alike[0] is not rung else base
        rung["difference"] = difference(run, other["runs"][0])
        why, pair = too_large(rung["difference"]), alone(rung["name"], base["flags"])
        if pair and not why and "alone" not in rung:
            rung["alone"] = self.compare_alone(*pair)
            why = too_large(rung["alone"])
            why = f"alone, in float32: {why}" if why else ""
        if why and rung is not base:
            rung |= {"state": "refused", "why": why}

    def compare_alone(self, flags: dict, reference: dict) -> dict:
        """The difference of these two runs; the base is not run again. ValueError if one fails."""
        runs = [self.measured[0]["runs"][0]]
        for some in [reference, flags] if reference != self.measured[0]["flags"] else [flags]:
            run, _, why = self.run(some)
            if not run:
                raise ValueError(f"{typed(some)}: {why}")
            runs.append(run)
        return difference(runs[-1], runs[-2])

    def climb(self):
        """The first round: each rung on top of those that can be had here."""
        flags, names = base_flags(self.args), rung_names(self.args)
        for left, name in zip(reversed(range(len(names))), names, strict=True):
            rung = self.rung(name, flags | change(name, flags, self.args))
            tell(rung, round_words(rung), "first", left)
            if rung["state"] == "measured" and name not in BEYOND:
                flags = rung["flags"]

    def leave_one_out(self):
        """The first round: everything that can be had here, then all of it but one."""
        flags = base_flags(self.args) | dict.fromkeys(SPEED_UPS, True)
        flags |= change("accumulation", flags, self.args)
        for name in self.args.skip:
            flags |= undo(name, flags)
        while not self.content["rungs"]:
            try:
                self.rung("all", flags)
            except ValueError as error:
                missing = [name for name in SPEED_UPS if str(error).startswith(f"--{name} ")]
                if not missing or not flags[missing[0]]:
                    raise
                print(f"not on this device: {error}", file=sys.stderr)
                flags |= {missing[0]: False}
        flags = self.measured[0]["flags"]
        offs = {name: flags | undo(name, flags) for name in (*SPEED_UPS, "accumulation")}
        names = [name for name, off in offs.items() if off != flags]
        tell(self.measured[0], round_words(self.measured[0]), "first", len(names))
        for left, name in zip(reversed(range(len(names))), names, strict=True):
            rung = self.rung(f"without {name}", offs[name])
            tell(rung, round_words(rung), "first", left)

    def second_round(self):
        """The other way round, so that a machine that grows slower or faster does so for all. A run
        that fails now leaves its row with one."""
        todo = [rung for rung in reversed(self.measured) if len(rung["runs"]) == 1]
        for left, rung in zip(reversed(range(len(todo))), todo, strict=True):
            print(f"{rung['name']}, second time", file=sys.stderr, flush=True)
            run, _, why = self.run(rung["flags"])
            if run:
                rung["runs"].append(run)
                self.check(rung)
            else:
                rung["why"] = f"one round, the second failed: {why}"
            self.keep()
            tell(rung, round_words(rung) if run else "failed", "second", left)
        self.keep(complete=True)


def tell(rung: dict, words: str, turn: str, left: int):
    print(f"{title(rung['name'])}: {words} ({turn} round, {left} left)", flush=True)


def undo(name: str, flags: dict) -> dict:
    if name == "accumulation":
        return {"batch-tokens": flags["micro-batch-size"] * flags["seq-len"]}
    return {name: False}


# --------------------------------------------------------------------------------------------------
# What is shown


def round_speeds(rung: dict) -> list[float]:
    """Tokens per second in each round: the median of the steps that count."""
    batch_tokens = rung["flags"]["batch-tokens"]
    return [1000 * batch_tokens / median(run["ms"][LEFT_OUT:]) for run in rung["runs"]]


def speed(rung: dict) -> float:
    return mean(round_speeds(rung))


def round_words(rung: dict) -> str:
    """What the last round found."""
    if rung["state"] != "measured":
        return NOT_MEASURED[rung["state"]]
    speed = round_speeds(rung)[-1]
    return f"{1000 * rung['flags']['batch-tokens'] / speed:,.1f} ms, {speed:,.0f} tokens/s"


def rows(content: dict) -> list[dict]:
    """For each rung a dict from column to text."""
    table, measured = [], measured_rungs(content)
    for rung in content["rungs"]:
        row = {"rung": title(rung["name"]), "ms": NOT_MEASURED.get(rung["state"])}
        if rung["state"] == "measured":
            below = [r for r in measured[: measured.index(rung)] if r["name"] not in BEYOND]
            before = below[-1] if below else rung
            factors = {
                "x before": speed(rung) / speed(before),
                "x base": speed(rung) / speed(measured[0]),
            }
            if content["settings"]["leave_one_out"]:
                factors = {"brings": speed(measured[0]) / speed(rung)}
            row |= measured_cells(rung, factors)
        table.append(row)
    return table


def measured_rungs(content: dict) -> list[dict]:
    return [rung for rung in content["rungs"] if rung["state"] == "measured"]


def title(name: str) -> str:
    plus = "+ " if name in (*SPEED_UPS, *BEYOND, "accumulation") else ""
    return plus + NAMES.get(name, name)


def measured_cells(rung: dict, factors: dict[str, float]) -> dict:
    runs = rung["runs"]
    return {
        "ms": f"{1000 * rung['flags']['batch-tokens'] / speed(rung):,.1f}",
        "tokens/s": f"{speed(rung):,.0f}",
        **{column: f"{value:.2f}" for column, value in factors.items()},
        "of matmul": f"{mean(run['matmul_share'] for run in runs):.0%}",
        "MiB": f"{max(run['peak_mib'] for run in runs):,.0f}",
        "difference": small(rung["difference"]["loss"]) if "difference" in rung else "",
    }


def small(share: float) -> str:
    return f"{share:.0e}" if share else "0"


def notes(content: dict) -> list[str]:
    """What the cells have no room for: why there is no figure, what disturbed one, and what else
    was compared."""
    found = []
    for rung in content["rungs"]:
        name, busy = NAMES.get(rung["name"], rung["name"]), [run["busy"] for run in rung["runs"]]
        if rung["state"] != "measured":
            found.append(f"{name}: {rung['state']}: {rung['why']}")
        elif rung["why"]:
            found.append(f"{name}: {rung['why']}")
        if max(busy, default=0) > BUSY:
            found.append(f"{name}: others used {max(busy):.0%} of the machine")
    alone = {r["name"]: r["alone"]["loss"] for r in measured_rungs(content) if "alone" in r}
    if alone:
        names = ", ".join(NAMES.get(name, name) for name in alone)
        found.append(f"Alone on the float32 base, {names}: losses differ by at most"
                     f" {small(max(alone.values()))}")  # fmt: skip
    return found


def published() -> str:
    """Markdown: what others measured; beside their tokens per second the factor over the step
    before, which is all that is known of some."""
    table = []
    for name in NAMES:
        row = {"rung": title(name)}
        for column, values in PUBLISHED.items():
            before = dict(zip(values, [None, *values.values()], strict=False))
            value = values.get(name, "")
            is_figure = not isinstance(value, str)
            factor = f" (x{value / before[name]:.2f})" if is_figure and before[name] else ""
            row[column] = f"{value:,.0f}{factor}" if is_figure else value
        if any(row[column] for column in PUBLISHED):
            table.append(row)
    return machine.markdown(table)


def report(content: dict, file: str) -> str:
    """Markdown: what was measured, where, and in which file of the results it is."""
    files = f" ([figures](results/{file}), [picture](results/{Path(file).with_suffix('.png')}))."
    head = f"**{subject(content)}**: {conditions(content)}{files}{unfinished(content)}"
    lines = "\n".join(f"- {note}" for note in notes(content))
    return "\n\n".join(filter(None, [head, machine.markdown(rows(content)), lines]))


def summary(content: dict) -> str:
    """The same for a terminal, with the columns that matter most."""
    head = f"{subject(content)}: {conditions(content)}.{unfinished(content)}"
    columns = ["rung", "ms", "tokens/s", "x before", "x base"]
    if content["settings"]["leave_one_out"]:
        columns[3:] = ["brings"]
    lines = "\n".join(
        textwrap.fill(f"- {note}", WIDTH, subsequent_indent="  ") for note in notes(content)
    )
    table = machine.aligned(rows(content), columns)
    return "\n\n".join(filter(None, [textwrap.fill(head, WIDTH), table, lines]))


def subject(content: dict) -> str:
    return f"{model_name(content)} on {machine_name(content)}"


def conditions(content: dict) -> str:
    env, flags = content["environment"], content["rungs"][0]["flags"]
    changed = f" and changes to {', '.join(env['changed'])}" if env["changed"] else ""
    return (
        f"{flags['micro-batch-size']} x {flags['seq-len']} tokens per pass, torch {env['torch']},"
        f" {content['date']}, commit {env['commit'][:7]}{changed}. Median of"
        f" {content['settings']['steps']} steps in each of"
        f" {max(len(r['runs']) for r in content['rungs'])} rounds"
    )


def unfinished(content: dict) -> str:
    return "" if content.get("complete") else " Not finished: go on with --resume."


def model_name(content: dict) -> str:
    model = content["rungs"][0]["flags"]["model"]
    return {"gpt2": "GPT-2 124M"}.get(model, model)


def machine_name(content: dict) -> str:
    env = content["environment"]
    cores = f", {env['cores']} cores" if env["device"] == "cpu" else ""
    return machine.plain(env["device_name"]) + cores


def compare(a: dict, b: dict) -> str:
    """Two machines side by side."""
    table, others = [], {r["name"]: r for r in b["rungs"] if r["state"] == "measured"}
    names = [c["environment"]["device_name"] for c in (a, b)]
    bases = a["rungs"][0], b["rungs"][0]
    for rung in a["rungs"]:
        other = others.get(rung["name"])
        if rung["state"] != "measured" or not other:
            continue
        row = {"rung": NAMES.get(rung["name"], rung["name"])}
        for side, name, mine, base in zip("AB", names, (rung, other), bases, strict=True):
            row[f"{side}: {name}, tokens/s"] = f"{speed(mine):,.0f}"
            row[f"{side}: x base"] = f"{speed(mine) / speed(base):.2f}"
        table.append(row | {"B / A": f"{speed(other) / speed(rung):.2f}"})
    if not table:
        raise ValueError("the two have no rung in common")
    return machine.markdown(table)


def draw(content: dict, path: Path):
    """The factors over the first row as bars, those of the lecture beside them where this ladder
    has its rungs, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    bars = [(machine_name(content), "#1f6feb", *own_bars(content))]
    names = [rung["name"] for rung in content["rungs"]]
    if {*SPEED_UPS} <= {*names}:
        model = "" if content["settings"]["model"] == "gpt2" else ", GPT-2 124M"
        bars.append((f"{LECTURE}{model} (published)", "#b0b8c4", *lecture_bars(names)))
    figure = Figure(figsize=(8, 1.4 + 0.42 * len(names)), layout="constrained")
    axes = figure.add_subplot(xlabel=f'times as fast as "{title(names[0])}"')
    height = 0.8 / len(bars)
    for number, (label, color, factors, words) in enumerate(bars):
        places = [row + (number - (len(bars) - 1) / 2) * height for row in range(len(names))]
        drawn = axes.barh(places, factors, height, color=color, label=label)
        texts = [f"{f:.2f}  " * bool(f) + text for f, text in zip(factors, words, strict=True)]
        axes.bar_label(drawn, texts, padding=4, fontsize=9, color="#303030")
    axes.set_yticks(range(len(names)), [title(name) for name in names], fontsize=11)
    axes.set_xlim(0, 1.3 * max(max(factors) for _, _, factors, _ in bars))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    is_one_off = content["settings"]["leave_one_out"]
    what = "everything on, one off" if is_one_off else "each speed-up on top of those above it"
    axes.set_title(f"{model_name(content)}: {what}", fontsize=14)
    figure.legend(loc="outside lower center", ncols=2, fontsize=11)
    figure.savefig(path, dpi=120)


def own_bars(content: dict) -> tuple[list[float], list[str]]:
    """For each rung the factor over the first one, and a word; 0 where it was not measured."""
    base = measured_rungs(content)[0]
    factors = [speed(r) / speed(base) if r["state"] == "measured" else 0 for r in content["rungs"]]
    return factors, [
        f"{speed(r):,.0f} tokens/s" if r["state"] == "measured" else r["state"]
        for r in content["rungs"]
    ]


def lecture_bars(names: list[str]) -> tuple[list[float], list[str]]:
    """The same of the lecture; 0 and no word where it has no such rung."""
    values = PUBLISHED[LECTURE]
    factors = [values.get(name, 0) / values["base"] for name in names]
    return factors, [f"{values[name]:,.0f} tokens/s" if name in values else "" for name in names]


def block(contents: dict[str, dict]) -> str:
    """What benchmarks/README.md shows of these results, by file name."""
    parts = [report(content, name) for name, content in contents.items()]
    if all(content["environment"]["device"] != "cuda" for content in contents.values()):
        parts.insert(0, "**GPT-2 124M on a GPU**: not measured yet.")
    return "\n\n".join([*parts, "**What others published**, in tokens per second:", published()])


# --------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = machine.OneLineParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, " ".join([*SPEED_UPS, *BEYOND, "accumulation"])
    add("--model", help="as train_gpt2.py's (default: gpt2 on a GPU, nano without one)")
    add("--micro-batch-size", type=int, default=16, help="sequences per pass (default: 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: 1024, nano 128)")
    add(
        "--batch-tokens", type=int, help="of accumulation (default: 524288; without a GPU 8 passes)"
    )
    add("--steps", type=int, help="timed steps of a run (default: 20, nano 40)")
    add("--data-dir", help="token shards (default: Python's own source)")
    add("--ranks", type=number_list, help="of DDP (default: 2,4,8, those that the machine has)")
    add("--only", nargs="+", default=[], metavar="RUNG", help=f"of {names} 'N ranks'")
    add("--skip", nargs="+", default=[], metavar="RUNG", help="leave these out")
    add("--leave-one-out", action="store_true", help="everything on, one off")
    add("--keep", action="store_true", help="write to benchmarks/results (default: out/ladder)")
    add("--resume", action="store_true", help="go on with the newest unfinished one of these flags")
    add("--compare", nargs=2, type=Path, metavar="JSON", help="print two results side by side")
    add(
        "--readme",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="put their tables into benchmarks/README.md, and draw their pictures",
    )
    return parser


def number_list(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def settle(args: Namespace):
    """Fill in what was not given; ValueError if something does not fit."""
    devices = machine.num_gpus() or machine.num_cores()
    args.model = args.model or ("gpt2" if machine.num_gpus() else "nano")
    if args.steps is None:
        args.steps = 40 if args.model == "nano" else 20
    asked = args.ranks or [n for n in (2, 4, 8) if n <= devices]
    args.ranks = [n for n in asked if n > 1]  # one rank is what all other rungs are
    beyond = () if args.leave_one_out else BEYOND
    known = [*SPEED_UPS, *beyond, "accumulation", *(f"{n} ranks" for n in args.ranks)]
    for name in args.only + args.skip:
        if name not in known or (args.leave_one_out and name.endswith("ranks")):
            raise ValueError(f"--only and --skip take {', '.join(known)}, not {name}")
    if args.leave_one_out and args.only:
        raise ValueError("--leave-one-out takes --skip, not --only")
    sizes = args.micro_batch_size, args.steps, args.seq_len, args.batch_tokens
    least = min(size for size in sizes if size is not None)
    if least < 1:
        raise ValueError(f"{least}: sizes and steps must be at least 1")


def results_folder(args: Namespace) -> Path:
    return machine.RESULTS if args.keep else OUT


def start(args: Namespace) -> Ladder:
    """A new ladder, or the newest one of the same flags that is not complete."""
    left_out = ("resume", "compare", "readme", "keep")
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    if args.resume:
        paths = results_folder(args).glob("ladder-*.json")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            content = machine.load(path)
            if content["settings"] == settings and not content.get("complete"):
                return Ladder(args, content, path)
    return Ladder(args, {"date": str(date.today()), "settings": settings, "rungs": []})


def measure(args: Namespace) -> int:
    """Measure what is not there yet, keep it, print it. Exit code 1 if a rung was refused."""
    ladder = start(args)
    with TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # the first compilation of a rung is cold
        (ladder.leave_one_out if args.leave_one_out else ladder.climb)()
        ladder.second_round()
    draw(ladder.content, ladder.path.with_suffix(".png"))
    print(f"\n{summary(ladder.content)}\n\n{ladder.path}")
    return int(any(rung["state"] in ("refused", "failed") for rung in ladder.content["rungs"]))


def main() -> int:
    args = make_parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.compare:
            print(compare(*map(machine.load, args.compare)))
        elif args.readme:
            contents = {path.name: machine.load(path) for path in args.readme}
            machine.put_into_readme("ladder", block(contents))
            for path in args.readme:
                draw(machine.load(path), path.with_suffix(".png"))
        else:
            settle(args)
            check_any(args)
            return measure(args)
    except (OSError, ValueError) as error:
        print(f"ladder.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ladder.py: stopped; the finished runs are kept: --resume goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
