"""How many tokens and seconds Muon takes to the loss that AdamW ends with.

    python benchmarks/tokens_to_loss.py                        # three networks: hours on two cores
    python benchmarks/tokens_to_loss.py --only nano
    python benchmarks/tokens_to_loss.py --data-dir data/mine   # on another corpus
    python benchmarks/tokens_to_loss.py --quick                # a minute, which shows that it works
    python benchmarks/tokens_to_loss.py --resume               # go on with what was interrupted
    python benchmarks/tokens_to_loss.py --readme benchmarks/results/tokens-*.json

Each optimizer is at its best: four peak learning rates are tried with a cosine that ends at a tenth
of them, and more while the best one is at the edge; then the best two with one that ends at zero.
What has the lowest last validation loss of these is run with two more seeds, and with each seed
once more by Muon for 0.45 of the steps, with warm-up and cosine as long: who needs fewer steps
plans for fewer. Each run is train_gpt2.py in a process of its own, whose log is read. Where one of
Muon's two curves first falls below the last loss of AdamW with the same seed is found between two
validations on a straight line. Seconds are those of the steps alone, and compared only between runs
that came one after the other: those of the later seeds.

Writes results/tokens-<device>-<date>-<corpus>.json after each run, and at the end a picture.
--readme puts the table of such files into benchmarks/README.md, and draws their pictures anew.
"""

import argparse
import json
import math
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import ladder
import machine
import plot

NETWORKS = {  # parameters of the blocks: 0.8M, 2.7M and 10.6M, the last as nanoGPT's smallest
    "nano": {"steps": 1200, "eval-tokens": 131_072},
    "3M": {"n-layer": 6, "n-head": 6, "n-embd": 192, "steps": 300, "eval-tokens": 16_384},
    "10M": {"n-layer": 6, "n-head": 6, "n-embd": 384, "steps": 200, "eval-tokens": 16_384},
}  # the larger, the fewer, for the time it takes
for name in ("3M", "10M"):
    NETWORKS[name]["bf16"] = True  # on a CPU that has it 1.4 and 1.7 times as fast
RATES = {"AdamW": (2e-3, 4e-3, 8e-3, 16e-3), "Muon": (4e-3, 8e-3, 16e-3, 32e-3)}
ENDS = (0.1, 0)  # of the cosine, as a share of the peak: for all rates, and for the best two
SEEDS = (1337, 1338, 1339)
SHORT = 0.45  # of the steps, in Muon's second run of a seed
COLORS = {"AdamW": "#8fb4e8", "Muon": "#d1480f", f"Muon, {SHORT} of the tokens": "#eba47f"}


def settings(name: str, args: Namespace, runs: list[dict]) -> Iterator[dict]:
    """What to run for a network, one after the other: which ones come last depends on runs, those
    so far."""
    for optimizer, rates in RATES.items():
        for rate in rates[: 1 if args.quick else None]:
            yield setting(name, args, optimizer, SEEDS[0], rate, ENDS[0])
        while not args.quick and (rate := beyond(search(runs, name, optimizer))):
            yield setting(name, args, optimizer, SEEDS[0], rate, ENDS[0])
        for run in sorted(search(runs, name, optimizer), key=last_loss)[:2]:
            yield setting(name, args, optimizer, SEEDS[0], run["rate"], ENDS[1])
    for seed in SEEDS:
        for optimizer, length in (("AdamW", 1), ("Muon", 1), ("Muon", SHORT)):
            best = min(runs_of(runs, name, optimizer, SEEDS[0]), key=last_loss)
            yield setting(name, args, optimizer, seed, best["rate"], best["end"], length)


def setting(
    name: str, args: Namespace, optimizer: str, seed: int, rate: float, end: float, length=1.0
) -> dict:
    own = {"network": name, "optimizer": optimizer, "seed": seed, "rate": rate, "end": end}
    steps = round(length * (args.steps or NETWORKS[name]["steps"]))
    flags = NETWORKS[name] | {"steps": steps, "warmup-steps": steps // 24, "seed": seed}
    flags |= {"learning-rate": rate, "decay-to": end, "muon": optimizer == "Muon"}
    flags |= {"eval-every": max(1, steps // 20)}
    flags |= {"eval-tokens": args.eval_tokens} if args.eval_tokens else {}
    flags |= {"data-dir": args.data_dir} if args.data_dir else {}
    return own | {"length": length, "flags": flags}


def runs_of(
    runs: list[dict], name: str, optimizer: str, seed: int, length: float = 1
) -> list[dict]:
    """The finished runs of a network with an optimizer, a seed and a length."""
    wanted = (name, optimizer, seed, length)
    keys = ("network", "optimizer", "seed", "length")
    return [run for run in runs if tuple(run[key] for key in keys) == wanted]


def search(runs: list[dict], name: str, optimizer: str) -> list[dict]:
    """Those that have tried a rate."""
    return [run for run in runs_of(runs, name, optimizer, SEEDS[0]) if run["end"] == ENDS[0]]


def beyond(tried: list[dict]) -> float | None:
    """The rate to try next if the best so far is the lowest or the highest of up to seven."""
    rates, best = [run["rate"] for run in tried], min(tried, key=last_loss)["rate"]
    if len(rates) > 7 or min(rates) < best < max(rates):
        return None
    return best / 2 if best == min(rates) else 2 * best


def last_loss(run: dict) -> float:
    return run["loss"][-1] if run.get("is_finite", True) else math.inf


def train(setting: dict) -> dict:
    """A run: its seconds and losses at each validation, in bits per byte too where known."""
    words = [f"--{name}={value}" for name, value in setting["flags"].items()]
    with TemporaryDirectory() as folder:
        program = [sys.executable, str(ladder.TRAIN), "--model=nano", *words]
        program += ["--save-every=0", "--sample-tokens=1", f"--out-dir={folder}/run"]
        code, errors = ladder.finish(program, dict(os.environ))
        if code not in (0, 4):  # 4: not finite, since a rate may be too high
            raise ValueError(f"{shlex.join(program)} ended with {code}: {errors}")
        log = Path(folder, "run", "log.jsonl").read_text(encoding="utf-8")
        environment = json.loads(log.splitlines()[0])["environment"]
        run = plot.read_run(f"{folder}/run")
    steps, losses = run.series("val_loss")
    found = {"step": [int(step) for step in steps], "loss": [float(loss) for loss in losses]}
    found["bits_per_byte"] = [float(value) for value in run.series("bits_per_byte")[1]]
    found["seconds"] = [round(float(3600 * hours), 3) for hours in run.hours(steps)]
    found |= {"tokens_per_step": run.flags["batch_tokens"], "is_finite": code == 0}
    return setting | found | {"environment": machine.environment(environment)}


# --------------------------------------------------------------------------------------------------
# What was found


def best_runs(runs: list[dict], name: str, optimizer: str) -> list[dict]:
    """Those at the best setting, one for each seed."""
    best = min(runs_of(runs, name, optimizer, SEEDS[0]), key=last_loss)
    others = [run for seed in SEEDS[1:] for run in runs_of(runs, name, optimizer, seed)]
    return [best, *others]


def shown(runs: list[dict], name: str) -> dict[str, list[dict]]:
    """What table and picture show, each with a run for each seed."""
    short = [run for seed in SEEDS for run in runs_of(runs, name, "Muon", seed, SHORT)]
    full = (best_runs(runs, name, optimizer) for optimizer in RATES)
    return dict(zip(COLORS, (*full, short), strict=True))


def reached(run: dict, loss: float) -> tuple[float, float]:
    """The step and the seconds at which a run falls to a loss; infinite if it never does."""
    losses = run["loss"]
    if not (below := [i for i, value in enumerate(losses) if value <= loss]):
        return math.inf, math.inf
    b = below[0]
    a = max(0, b - 1)
    share = (losses[a] - loss) / (losses[a] - losses[b]) if b else 0.0
    between = lambda name: run[name][a] + share * (run[name][b] - run[name][a])  # noqa: E731
    return between("step"), between("seconds")


def shares(runs: list[dict], name: str) -> dict[str, list[float]]:
    """Of each seed: Muon's tokens to AdamW's last loss, as a share of AdamW's; and the seconds, of
    the later seeds alone, whose runs came in turns."""
    found = {"tokens": [], "seconds": []}
    for adamw, *muon in zip(*shown(runs, name).values(), strict=True):
        step, seconds = min(reached(run, last_loss(adamw)) for run in muon)
        found["tokens"].append(step / adamw["step"][-1])
        if adamw["seed"] != SEEDS[0]:
            found["seconds"].append(seconds / adamw["seconds"][-1])
    return found


def spread(values: list[float], form: str = ".2f") -> str:
    """The mean, with the lowest and the highest."""
    return f"{mean(values):{form}} ({min(values):{form}}, {max(values):{form}})"


def rows(content: dict) -> list[dict]:
    """A table for people: a row for each network that is done."""
    table = []
    for name in dict.fromkeys(run["network"] for run in content["runs"]):
        if name not in content["done"]:
            continue
        found = shares(content["runs"], name)
        runs = shown(content["runs"], name)
        tokens = runs["AdamW"][0]["step"][-1] * runs["AdamW"][0]["tokens_per_step"]
        unit = "bits_per_byte" if runs["AdamW"][0].get("bits_per_byte") else "loss"
        row = {"network": f"{name}, {tokens / 1e6:.1f}M tokens, {unit.replace('_', ' ')}"}
        row |= {kind: f"{mean(run[unit][-1] for run in own):.3f}" for kind, own in runs.items()}
        row |= {"its tokens": spread(found["tokens"]), "its time": spread(found["seconds"])}
        for optimizer in RATES:
            best = runs[optimizer][0]
            row[f"{optimizer}'s rate"] = f"{best['rate']:g} to {best['rate'] * best['end']:g}"
        table.append(row)
    return table


def block(contents: dict[str, dict]) -> str:
    """The tables of some results, in Markdown."""
    parts = []
    for content in contents.values():
        env = content["environment"]
        where = f"{machine.plain(env['device_name'])}, {env['cores']} cores, torch {env['torch']}"
        parts += [f"**{content['corpus']}**, on {where}:", machine.markdown(rows(content))]
    return "\n\n".join(parts)


def draw(content: dict, path: Path):
    """Validation losses of the best settings against tokens and, of the seeds that ran in turns,
    against seconds; a column for each network."""
    from matplotlib.figure import Figure

    names = content["done"]
    figure = Figure(figsize=(max(6, 1 + 3.2 * len(names)), 5.6), layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False, sharey="col")
    for name, upper, lower in zip(names, *grid, strict=True):
        curves = shown(content["runs"], name).items()
        for color, run in ((COLORS[kind], run) for kind, runs in curves for run in runs):
            tokens = [step * run["tokens_per_step"] / 1e6 for step in run["step"]]
            upper.plot(tokens, run["loss"], color=color, linewidth=1.4)
            if run["seed"] != SEEDS[0]:
                lower.plot(run["seconds"], run["loss"], color=color, linewidth=1.4)
        upper.set(xlabel="million tokens")
        upper.set_title(f"{name}, {content['corpus']}", fontsize=13, loc="left")
        lower.set(xlabel="seconds of steps")
        ends = [last_loss(run) for run in content["runs"] if run["network"] == name]
        upper.set_ylim(0.95 * min(ends), 2.2 * min(ends))
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("validation loss")
    lines = [figure.axes[0].plot([], color=color, label=kind)[0] for kind, color in COLORS.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=110)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--data-dir", default="", help="folder of token shards (default: Python's own source)")
    add("--steps", type=int, help="of each network (default: its own)")
    add("--eval-tokens", type=int, help="of each validation (default: each network's own)")
    add("--quick", action="store_true", help="24 steps of nano at one rate each")
    add("--resume", action="store_true", help="go on with the newest results of the corpus")
    add("--readme", nargs="+", type=Path, metavar="JSON", help="put their tables into the README")
    return parser


def start(args: Namespace, corpus: str) -> tuple[dict, Path | None]:
    """New results, or the newest ones of the same corpus and sizes, and where they are."""
    sizes = {"corpus": corpus, "steps": args.steps, "eval_tokens": args.eval_tokens}
    paths = machine.RESULTS.glob("tokens-*.json") if args.resume else ()
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        content = machine.load(path)
        if content["sizes"] == sizes:
            runs, last = content["runs"], content["runs"][-1]
            turn = [r for r in runs if all(r[key] == last[key] for key in ("network", "seed"))]
            if last["seed"] != SEEDS[0] and len(turn) < 3:  # all three come again, in turns
                content["runs"] = runs[: -len(turn)]
            return content, path
    return {"corpus": corpus, "sizes": sizes, "environment": {}, "done": [], "runs": []}, None


def check_same(known: dict, found: dict):
    """ValueError if a run was on another device, or with another torch, than those before it."""
    for key in ("device_name", "torch"):
        if known[key] != found[key]:
            why = f"{known[key]} for the runs so far, {found[key]} for this one"
            raise ValueError(f"{key} is {why}: begin anew, without --resume")


def measure(args: Namespace, corpus: str):
    content, path = start(args, corpus)
    for name in args.only:
        for wanted in settings(name, args, content["runs"]):
            if any(run["flags"] == wanted["flags"] for run in content["runs"]):
                continue
            run = train(wanted)
            environment = run.pop("environment")
            known = content["environment"] = content["environment"] or environment
            check_same(known, environment)
            content["runs"].append(run)
            path = path or machine.free(
                machine.results_path("tokens", known["device_name"], corpus)
            )
            machine.save(path, content)
            ends = f"{run['rate']:g} to {run['rate'] * run['end']:g}"
            told = (
                f"{name}, {run['optimizer']}, seed {run['seed']}, {ends}, {run['step'][-1]} steps"
            )
            print(f"{told}: {last_loss(run):.4f}, {run['seconds'][-1]:.0f} s", flush=True)
        content["done"] = [*dict.fromkeys([*content["done"], name])]
        machine.save(path, content)
        print(machine.markdown(rows(content)), flush=True)
    show(content, path)


def show(content: dict, path: Path):
    try:
        draw(content, path.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib")


def main() -> int:
    args = make_parser().parse_args()
    if args.quick:
        args.only, args.steps, args.eval_tokens = ["nano"], 24, 4096
    corpus = Path(args.data_dir).resolve().name if args.data_dir else "stdlib-bytes"
    try:
        if not args.readme:
            measure(args, f"{corpus}-quick" if args.quick else corpus)
        contents = {path.name: machine.load(path) for path in args.readme or ()}
        if contents:
            machine.put_into_readme("tokens", block(contents))
        for path in args.readme or ():
            show(contents[path.name], path)
    except (OSError, ValueError) as error:
        print(f"tokens_to_loss.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tokens_to_loss.py: stopped; the finished runs are kept: --resume goes on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
