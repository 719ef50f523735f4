"""Measure the speed-ups of "Let's reproduce GPT-2 (124M)" on this machine, one after the other.

    python benchmarks/ladder.py                       # GPT-2 124M on a GPU, nano without one
    python benchmarks/ladder.py --rounds 1            # half the time
    python benchmarks/ladder.py --only bf16 flash '2 ranks'

Each rung is a run of train_gpt2.py that adds one speed-up to the rungs before it; a flag beyond the
lecture is added to the lecture's rungs alone. A machine's speed drifts, so the rungs run from first
to last, then from last to first, and only runs of the same round are compared in speed.

A speed-up must not change the mathematics. All runs start with the same weights and read the same
tokens, so their losses must agree. A rung that differs by more than rounding is refused: its speed
is not shown, and the rungs above do without it.

Results are written to a file in --out after each run; a picture and the table lie beside it.
"""

import shlex
import sys
from argparse import Namespace
from datetime import date
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import machine
from machine import WARM_UP

BASE = "float32, everything off"
SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad-vocab", "fused")  # in the lecture's order
BEYOND = ("bf16-residual", "loss-chunk-tokens", "recompute", "fp16", "muon")
RANKS = {"2 ranks": 2, "4 ranks": 4, "8 ranks": 8}
RUNGS = (*SPEED_UPS, *BEYOND, "accumulation", *RANKS)  # above the base, in this order

# The largest relative difference of losses that rounding explains. In float32 only the order of
# additions differs: we saw 4e-7. bfloat16 moved the losses of 124M by 2e-3.
FLOAT32, LOW_PRECISION = 1e-5, 1e-2
# With another batch: the first loss over 1 sequence of 256 tokens was 2e-2 away from that over 8.
OTHER_BATCH = 5e-2

# ---- One run of train_gpt2.py: its flags are a dict by name, and "ranks" is for torchrun ---------


def base_flags(args: Namespace) -> dict:
    """Return the flags of the first rung."""
    B, T = args.micro_batch_size, args.seq_len
    flags = {"ranks": 1, "model": args.model, "seq-len": T}
    flags |= {"micro-batch-size": B, "batch-tokens": B * T}
    # A small learning rate that grows. With the lecture's from the start, the first losses of 124M
    # jump so much that rounding alone moves them by 1e-4.
    steps = WARM_UP + args.steps
    flags |= {"steps": steps, "warmup-steps": steps - 1, "learning-rate": 1e-4}
    flags |= {"schedule": "constant", "muon": False}
    flags |= {"eval-every": 0, "eval-tokens": 0, "save-every": 0, "num-samples": 0}
    return flags | dict.fromkeys((*SPEED_UPS, "bf16-residual"), False)


def changes(name: str, flags: dict) -> dict:
    """Return the flags that a rung changes, relative to the rungs before it."""
    B, T = flags["micro-batch-size"], flags["seq-len"]
    if name in RANKS:
        sequences_of_rank = max(1, flags["batch-tokens"] // T // RANKS[name])
        return {"ranks": RANKS[name], "micro-batch-size": min(B, sequences_of_rank)}
    if name == "accumulation":
        return {"batch-tokens": 524_288 if machine.num_gpus() else 8 * B * T}
    if name == "loss-chunk-tokens":
        return {name: 1024}
    return {"bf16": False, "fp16": True} if name == "fp16" else {name: True}


def command(flags: dict) -> list[str]:
    """Return the command line without --out-dir."""
    words = [sys.executable, str(machine.TRAIN)]
    if flags["ranks"] > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        words[1:1] = [*launcher, f"--nproc_per_node={flags['ranks']}"]
        if not machine.num_gpus():  # torchrun would give each rank a single core
            share = max(1, machine.num_cores() // flags["ranks"])
            words = ["env", f"OMP_NUM_THREADS={share}", *words]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif name != "ranks":
            words.append(f"--{name}={value}")
    return words


def train(flags: dict) -> dict:
    """Return what a run measured (times in ms, losses in nats per token), or why it failed."""
    print(shlex.join(command(flags)), file=sys.stderr, flush=True)
    with TemporaryDirectory() as folder:
        code, errors = machine.run_quietly([*command(flags), f"--out-dir={folder}/run"])
        if code:
            return {"why": machine.error_line(code, errors)}
        records = machine.read_log(Path(folder, "run"))
    steps = [record for record in records if "ms" in record]
    run = {name: [step[name] for step in steps] for name in ("ms", "loss")}
    run["peak_mib"] = max(step.get("peak_mib", 0) for step in steps)  # 0 on a CPU
    return run | {"start": records[0]}


def compare(rung: dict, rungs: list[dict]):
    """Compare the losses of a rung's last run with those of the first rung with its batch size or,
    if it is that rung, of the base. Refuse the rung if they differ by more than rounding."""
    flags = rung["flags"]
    others = [r for r in rungs if r["flags"]["batch-tokens"] == flags["batch-tokens"]]
    other = rungs[0] if others[0] is rung else others[0]
    is_low = any(r["flags"].get(name) for r in (rung, other) for name in ("tf32", "bf16", "fp16"))
    limit = LOW_PRECISION if is_low else FLOAT32
    num_steps = len(rung["runs"][-1]["loss"])
    if other["flags"]["batch-tokens"] != flags["batch-tokens"]:
        limit, num_steps = OTHER_BATCH, 1
    if flags.get("muon") or flags.get("fp16"):
        num_steps = 1  # other updates, or none where a gradient overflows float16
    losses, other_losses = rung["runs"][-1]["loss"][:num_steps], other["runs"][0]["loss"]
    pairs = zip(losses, other_losses, strict=False)
    found = rung["difference"] = max(abs(a / b - 1) for a, b in pairs)
    if not found <= limit:  # also true of NaN
        rung |= {"state": "refused", "why": f"losses differ by {found:.1e}, more than {limit:.0e}"}


# ---- The rounds ----------------------------------------------------------------------------------


def measured(rungs: list[dict]) -> list[dict]:
    return [rung for rung in rungs if rung["state"] == "measured"]


def add_run(rung: dict, content: dict):
    """Run a rung once more, and note whether it failed or computes something else."""
    run = train(rung["flags"])
    if "why" in run and rung["name"] == BASE:
        raise ValueError(run["why"])
    if "why" in run:
        rung |= {"state": "failed", "why": run["why"]}
        print(f"{rung['name']}: failed: {run['why']}", flush=True)
        return
    start = run.pop("start")
    content.setdefault("environment", machine.environment(start))
    # A run halves a micro-batch that does not fit into memory. The rungs above keep that size.
    rung["flags"]["micro-batch-size"] = start["flags"]["micro_batch_size"]
    rung["runs"].append(run)
    compare(rung, measured(content["rungs"]))
    speed = speeds(rung)[-1]
    print(f"{rung['name']}: {speed:,.0f} tokens/s {rung['why']}", flush=True)


def first_round(names: list[str], args: Namespace, content: dict) -> Path:
    """Run each rung on top of those that work on this device. Return the path of the results."""
    flags, path = base_flags(args), None
    for name in [BASE, *names]:
        if name != BASE:
            flags = flags | changes(name, flags)
        rung = {"name": name, "flags": dict(flags), "state": "measured", "why": "", "runs": []}
        content["rungs"].append(rung)
        add_run(rung, content)
        path = path or machine.new_path(
            Path(args.out), "ladder", content["environment"]["device"], args.model
        )
        machine.save(path, content)
        below = [rung for rung in measured(content["rungs"]) if rung["name"] not in BEYOND]
        flags = below[-1]["flags"]
    return path


# ---- The report ----------------------------------------------------------------------------------


def speeds(rung: dict) -> list[float]:
    """Return the tokens per second of each round, from the median time of a step."""
    times = [median(run["ms"][WARM_UP:]) for run in rung["runs"]]
    return [1000 * rung["flags"]["batch-tokens"] / ms for ms in times]


def ratio(rung: dict, other: dict) -> float:
    """Return how many times as fast a rung is as another, the mean over the rounds."""
    pairs = zip(speeds(rung), speeds(other), strict=True)
    return mean(speed / other_speed for speed, other_speed in pairs)


def rows(rungs: list[dict]) -> list[dict[str, str]]:
    """Return the table: for each rung a dict from column to text."""
    table = []
    base = before = rungs[0]
    for rung in rungs:
        row = {"rung": rung["name"]}
        table.append(row)
        if rung["state"] != "measured":
            row["ms"] = rung["state"]
            continue
        speed = mean(speeds(rung))
        row["ms"] = f"{1000 * rung['flags']['batch-tokens'] / speed:,.1f}"
        row["tokens/s"] = f"{speed:,.0f}"
        row["x before"] = f"{ratio(rung, before):.2f}"
        row["x base"] = f"{ratio(rung, base):.2f}"
        peak = max(run["peak_mib"] for run in rung["runs"])
        row["MiB"] = f"{peak:,.0f}" if peak else ""
        row["difference"] = f"{rung['difference']:.0e}"
        if rung["name"] not in BEYOND:
            before = rung
    return table


def report(content: dict) -> str:
    """Return what was measured and where, the table, and why rungs are not in it."""
    rungs, env, num_rounds = content["rungs"], content["environment"], content["rounds"]
    flags = rungs[0]["flags"]
    lines = [
        f"{flags['model']} on {machine.describe(env)}: {flags['micro-batch-size']} x"
        f" {flags['seq-len']} tokens per pass, torch {env['torch']}, {content['date']}, commit"
        f" {env['commit']}. Median of {flags['steps'] - WARM_UP} steps, rounds: {num_rounds}.",
        "",
        machine.markdown(rows(rungs)),
        "",
    ]
    for rung in rungs:
        if rung["state"] != "measured":
            lines.append(f"- {rung['name']}: {rung['state']}: {rung['why']}")
            continue
        drift = max(speeds(rung)) / min(speeds(rung)) - 1
        if drift > 0.1:
            lines.append(f"- {rung['name']}: the rounds differ by {drift:.0%}")
    return "\n".join(lines)


def draw(content: dict, path: Path):
    """Draw a bar for each rung: how many times as fast as the first one it is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    rungs = measured(content["rungs"])
    titles = [rung["name"] for rung in rungs]
    ratios = [ratio(rung, rungs[0]) for rung in rungs]
    pairs = zip(ratios, rungs, strict=True)
    labels = [f"{each:.2f}  {mean(speeds(rung)):,.0f} tokens/s" for each, rung in pairs]
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(rungs)), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.barh(titles, ratios, color="#1f6feb"), labels, padding=4)
    axes.set(xlabel=f'times as fast as "{titles[0]}"', xlim=(0, 1.5 * max(ratios)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{rungs[0]['flags']['model']} on {machine.describe(content['environment'])}")
    axes.invert_yaxis()
    figure.savefig(path, dpi=200)


def parse_args() -> tuple[Namespace, list[str]]:
    """Return the flags, and the names of the rungs above the base."""
    parser = machine.make_parser(__doc__)
    add = parser.add_argument
    add("--model", help="as train_gpt2.py's (default: gpt2 on a GPU, nano without one)")
    add("--micro-batch-size", type=int, default=16, help="sequences per pass (default: 16)")
    add("--seq-len", type=int, help="tokens per sequence (default: 1024, nano 64)")
    add("--steps", type=int, help="timed steps of a run (default: 20, nano 40)")
    add("--rounds", type=int, default=2, help="runs of each rung (default: 2)")
    add("--only", nargs="+", choices=RUNGS, help="rungs above the first (default: all)")
    add("--out", default="out/ladder", help="folder of the results (default: out/ladder)")
    args = parser.parse_args()
    num_gpus = machine.num_gpus()
    args.model = args.model or ("gpt2" if num_gpus else "nano")
    args.seq_len = args.seq_len or (64 if args.model == "nano" else 1024)
    args.steps = args.steps or (40 if args.model == "nano" else 20)
    num_ranks = num_gpus or machine.num_cores()
    names = [name for name in RUNGS if RANKS.get(name, 1) <= num_ranks]
    if not num_gpus:
        names.remove("tf32")
    return args, [name for name in names if name in (args.only or names)]


def main() -> int:
    """Measure and show a ladder; return exit code 1 if a rung failed."""
    args, names = parse_args()
    content = {"date": str(date.today()), "rounds": args.rounds, "rungs": []}
    path = first_round(names, args, content)
    for number in range(1, args.rounds):
        rungs = measured(content["rungs"])
        for rung in reversed(rungs) if number % 2 else rungs:
            add_run(rung, content)
            machine.save(path, content)
    table = report(content)
    path.with_suffix(".md").write_text(f"{table}\n", encoding="utf-8")
    draw(content, path.with_suffix(".png"))
    print(f"\n{table}\n\n{path}, and .md and .png beside it")
    return int(any(rung["state"] == "failed" for rung in content["rungs"]))


if __name__ == "__main__":
    sys.exit(machine.exit_code(main))
