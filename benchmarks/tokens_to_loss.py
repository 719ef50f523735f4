"""Measure how many tokens Muon takes to the loss that AdamW ends with.

    python benchmarks/tokens_to_loss.py                        # three networks: hours on two cores
    python benchmarks/tokens_to_loss.py --only nano
    python benchmarks/tokens_to_loss.py --data-dir data/mine   # on another corpus
    python benchmarks/tokens_to_loss.py --quick                # a minute, to see that it works
    python benchmarks/tokens_to_loss.py --resume               # continue an interrupted measurement

Each optimizer is at its best, after searches of equal size: with AdamW's beta1 at 0.9 and 0.8, four
peak learning rates are tried, and more while the best one is at the edge. The two settings with the
lowest last validation loss are run with two more seeds, since what is best with one may diverge
with another, and the one with the lower mean is taken. With each seed Muon also runs for 0.45 of
the steps, planned so from the start. Where one of Muon's two curves first falls below AdamW's last
loss with the same seed is interpolated between two validations. Last, nano runs with both for 20
tokens per parameter, at the best rate and at half of it, and with Muon for 0.7 of that.

Results go to benchmarks/results/tokens-*.json after each run; a table is printed at the end.
"""

import argparse
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import machine
import plot

NETWORKS = {  # the last is nanoGPT's smallest
    "nano": {"steps": 1200, "eval-tokens": 131_072},
    "3M": {"n-layer": 6, "n-head": 6, "n-embd": 192, "steps": 300, "eval-tokens": 16_384},
    "10M": {"n-layer": 6, "n-head": 6, "n-embd": 384, "steps": 200, "eval-tokens": 16_384},
}  # the larger, the fewer steps, for the time it takes
for name in ("3M", "10M"):
    NETWORKS[name]["bf16"] = True  # on a CPU that has it 1.4 and 1.7 times as fast
PARAMETERS = {"nano": 0.84e6, "3M": 2.75e6, "10M": 10.8e6}
RATES = {"AdamW": (2e-3, 4e-3, 8e-3, 16e-3), "Muon": (4e-3, 8e-3, 16e-3, 32e-3)}
BETAS = (0.9, 0.8)  # AdamW's beta1, which Muon has for what is no matrix of a block
END = 0.1  # of the cosine, as a share of the peak; an end at zero was worse in every search
SEEDS = (1337, 1338, 1339)
SHORT = 0.45  # of the steps, in Muon's second run of a seed
LONG = {"nano": 7}  # times the steps: 20 tokens per parameter
LONG_SHARE = 0.7  # of them, in Muon's second run
KINDS = {  # of runs at the best rate: optimizer and length
    "AdamW": ("AdamW", 1),
    "Muon": ("Muon", 1),
    f"Muon, {SHORT} of the tokens": ("Muon", SHORT),
}
COLORS = ("#d9622b", "#1f6feb", "#85b4f7")
DIVERGED = 4  # train_gpt2.py's exit code for a loss that is not finite

# ---- Runs


def settings(name: str, args: Namespace, runs: list[dict]) -> Iterator[dict]:
    """Yield what to run for a network; the later ones depend on runs, the results so far."""
    finalists = {}
    for optimizer, rates in RATES.items():
        first = {"network": name, "optimizer": optimizer, "seed": SEEDS[0], "length": 1}
        for beta1 in BETAS[:1] if args.quick else BETAS:
            for rate in rates[:1] if args.quick else rates:
                yield setting(args, first | {"rate": rate, "beta1": beta1})
            same = first | {"beta1": beta1}
            while not args.quick and (rate := next_rate(runs_of(runs, same))):
                yield setting(args, same | {"rate": rate})
        finalists[optimizer] = sorted(runs_of(runs, first), key=last_loss)[:2]
    for seed in SEEDS:
        for run in chain(*finalists.values()):
            yield setting(args, chosen(run) | {"seed": seed, "length": 1})
    for seed in SEEDS:
        yield setting(args, winner(runs, name, "Muon") | {"seed": seed, "length": SHORT})
    if name in LONG and not (args.quick or args.steps):
        for optimizer in RATES:
            best = winner(runs, name, optimizer) | {"seed": SEEDS[0], "length": LONG[name]}
            for rate in (best["rate"], best["rate"] / 2):
                yield setting(args, best | {"rate": rate})
        long = {"network": name, "optimizer": "Muon", "length": LONG[name]}
        run = min(runs_of(runs, long), key=last_loss)
        yield setting(args, chosen(run) | {"seed": run["seed"], "length": second_length(name)})


def second_length(name: str) -> float:
    """Return the length of Muon's second run with 20 tokens per parameter."""
    return round(LONG[name] * LONG_SHARE, 2)


def chosen(run: dict) -> dict:
    """Return what the search chooses of a run, and for which network and optimizer."""
    return {key: run[key] for key in ("network", "optimizer", "rate", "end", "beta1")}


def winner(runs: list[dict], network: str, optimizer: str) -> dict:
    """Return the settings with the lowest mean of last losses, among those run with all seeds."""
    means = []
    for run in runs_of(runs, {"network": network, "optimizer": optimizer, "length": 1}):
        settings = chosen(run)
        losses = [last_loss(other) for other in runs_of(runs, settings | {"length": 1})]
        if len(losses) == len(SEEDS):
            means.append((mean(losses), settings))
    return min(means, key=itemgetter(0))[1]


def setting(args: Namespace, run: dict) -> dict:
    """Return a run of a network with an optimizer, seed, rate, beta1 and length, with its flags."""
    network = NETWORKS[run["network"]]
    steps = round(run["length"] * (args.steps or network["steps"]))
    flags = network | {"steps": steps, "warmup-steps": steps // 24, "seed": run["seed"]}
    flags |= {"learning-rate": run["rate"], "beta1": run["beta1"], "decay-to": END}
    flags |= {"muon": run["optimizer"] == "Muon", "eval-every": max(1, steps // 20)}
    flags |= {"eval-tokens": args.eval_tokens} if args.eval_tokens else {}
    flags |= {"data-dir": args.data_dir} if args.data_dir else {}
    return run | {"end": END, "flags": flags}


def runs_of(runs: list[dict], wanted: dict) -> list[dict]:
    """Return the runs that have these values."""
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def next_rate(tried: list[dict]) -> float | None:
    """Return the rate to try if the best one so far is the lowest or the highest of up to seven."""
    rates = [run["rate"] for run in tried]
    best = min(tried, key=last_loss)["rate"]
    if len(rates) > 7 or min(rates) < best < max(rates):
        return None
    return best / 2 if best == min(rates) else 2 * best


def last_loss(run: dict) -> float:
    """Return the last validation loss, infinite if the run diverged."""
    return run["loss"][-1] if run["loss"] else math.inf


def train(setting: dict) -> dict:
    """Return a run with its losses at each validation; without any if it diverged."""
    words = [f"--{name}={value}" for name, value in setting["flags"].items()]
    with TemporaryDirectory() as folder:
        words += ["--save-every=0", "--num-samples=0", f"--out-dir={folder}/run"]
        program = [sys.executable, str(machine.TRAIN), "--model=nano", *words]
        code, errors = machine.run_quietly(program)
        if code not in (0, DIVERGED):
            raise ValueError(f"{' '.join(program)} ended with {code}: {errors}")
        with open(f"{folder}/run/log.jsonl", encoding="utf-8") as log:
            environment = json.loads(next(log))["environment"]
        run = plot.read_run(f"{folder}/run")
    steps, losses = run.series("val_loss")
    if code == DIVERGED:
        steps, losses = steps[:0], losses[:0]
    result = setting | {"step": steps.astype(int).tolist(), "loss": losses.tolist()}
    result["bits_per_byte"] = run.series("bits_per_byte")[1].tolist()
    result["tokens_per_step"] = run.flags["batch_tokens"]
    return result | {"environment": machine.environment(environment)}


# ---- What they show


def best_by_seed(runs: list[dict], name: str) -> dict[str, list[dict]]:
    """Return for each of KINDS the runs of the best settings, one for each seed."""
    best = {}
    for kind, (optimizer, length) in KINDS.items():
        wanted = winner(runs, name, optimizer) | {"length": length}
        best[kind] = [runs_of(runs, wanted | {"seed": seed})[0] for seed in SEEDS]
    return best


def reached(run: dict, loss: float) -> float:
    """Return the step at which a run falls to a loss; infinite if it never does."""
    below = [i for i, value in enumerate(run["loss"]) if value <= loss]
    if not below:
        return math.inf
    b = below[0]
    a = max(0, b - 1)
    fall = run["loss"][a] - run["loss"][b]
    share = (run["loss"][a] - loss) / fall if fall else 0.0
    return run["step"][a] + share * (run["step"][b] - run["step"][a])


def shares(runs: list[dict], name: str) -> list[float]:
    """Return Muon's tokens to AdamW's last loss, as shares of AdamW's, by seed."""
    found = []
    for adamw, muon, short in zip(*best_by_seed(runs, name).values(), strict=True):
        step = min(reached(muon, last_loss(adamw)), reached(short, last_loss(adamw)))
        found.append(step / adamw["step"][-1])
    return found


def spread(values: list[float]) -> str:
    """Return the mean, with the lowest and the highest."""
    return f"{mean(values):.2f} ({min(values):.2f}, {max(values):.2f})"


def rows(content: dict) -> list[dict]:
    """Return a table with a row for each network that is done."""
    table = []
    for name in content["done"]:
        best = best_by_seed(content["runs"], name)
        row = what_was_trained(best["AdamW"][0]) | last_losses(best)
        row["its tokens"] = spread(shares(content["runs"], name))
        table.append(row | settings_of(best))
        if name in LONG and runs_of(content["runs"], {"network": name, "length": LONG[name]}):
            table.append(long_row(content["runs"], name))
    return table


def long_row(runs: list[dict], name: str) -> dict[str, str]:
    """Return the row on the runs with 20 tokens per parameter, of one seed."""
    best = {}
    for optimizer in RATES:
        wanted = {"network": name, "optimizer": optimizer, "length": LONG[name]}
        best[optimizer] = [min(runs_of(runs, wanted), key=last_loss)]
    adamw = best["AdamW"][0]
    wanted = chosen(best["Muon"][0]) | {"length": second_length(name)}
    step = min(reached(run, last_loss(adamw)) for run in best["Muon"] + runs_of(runs, wanted))
    row = what_was_trained(adamw) | last_losses(best)
    return row | {"its tokens": f"{step / adamw['step'][-1]:.2f}"} | settings_of(best)


def what_was_trained(run: dict) -> dict[str, str]:
    """Return the columns on the network and its tokens."""
    tokens = run["step"][-1] * run["tokens_per_step"]
    ratio = f"{tokens / PARAMETERS[run['network']]:.2g}"
    unit = unit_of(run).replace("_", " ")
    return {
        "network": f"{run['network']}, {tokens / 1e6:.1f}M tokens, {unit}",
        "per parameter": ratio,
    }


def unit_of(run: dict) -> str:
    return "bits_per_byte" if run.get("bits_per_byte") else "loss"


def last_losses(best: dict[str, list[dict]]) -> dict[str, str]:
    return {
        kind: f"{mean(run[unit_of(run)][-1] for run in runs):.3f}" for kind, runs in best.items()
    }


def settings_of(best: dict[str, list[dict]]) -> dict[str, str]:
    """Return the columns on the best settings of each optimizer."""
    columns = {}
    for optimizer in RATES:
        run = best[optimizer][0]
        text = f"{run['rate']:g} to {run['rate'] * run['end']:g}"
        columns[f"{optimizer}'s rate"] = f"{text}, beta1 {run['beta1']:g}"
    return columns


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results."""
    parts = []
    for content in contents.values():
        env = content["environment"]
        where = f"{machine.short_name(env['device_name'])}, {env['cores']} cores"
        parts.append(f"**{content['corpus']}**, on {where}, torch {env['torch']}:")
        parts.append(machine.markdown(rows(content)))
    return "\n\n".join(parts)


def draw(content: dict, path: Path):
    """Draw the losses of nano by tokens: three seeds, and the runs with 20 tokens per parameter."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    runs = content["runs"]
    panels = {SEEDS: KINDS}
    if runs_of(runs, {"network": "nano", "length": LONG["nano"]}):
        kinds = [("AdamW", LONG["nano"]), ("Muon", LONG["nano"]), ("Muon", second_length("nano"))]
        names = ("AdamW", "Muon", f"Muon, {LONG_SHARE} of the tokens")
        panels[SEEDS[:1]] = dict(zip(names, kinds, strict=True))
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (seeds, kinds) in zip(all_axes, panels.items(), strict=True):
        for (kind, (optimizer, length)), color in zip(kinds.items(), COLORS, strict=True):
            settings = winner(runs, "nano", optimizer) | {"length": length}
            for seed in seeds:
                [run] = runs_of(runs, settings | {"seed": seed})
                tokens = [step * run["tokens_per_step"] / 1e6 for step in run["step"]]
                label = kind if seed == seeds[0] else None
                axes.plot(tokens, run[unit_of(run)], color=color, linewidth=1.5, label=label)
                if optimizer == "AdamW" and seed == seeds[0]:
                    end = run[unit_of(run)][-1]
                    axes.axhline(end, color="#9aa3b2", linestyle="--", linewidth=1, zorder=0)
                    per_parameter = tokens[-1] * 1e6 / PARAMETERS["nano"]
                    axes.set(ylim=(0.65 * end, 2 * end), xlim=(0, tokens[-1]))
        axes.set_title(f"nano, {per_parameter:.2g} tokens per parameter")
        axes.set(xlabel="million tokens", ylabel=unit_of(run).replace("_", " ") + " of validation")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
    figure.savefig(path, dpi=200)


# ---- The program


def start(args: Namespace, corpus: str) -> tuple[dict, Path | None]:
    """Return new results, or with --resume the newest of the same corpus and sizes."""
    sizes = {"corpus": corpus, "steps": args.steps, "eval_tokens": args.eval_tokens}
    sizes["beta1"] = list(BETAS)
    paths = machine.RESULTS.glob("tokens-*.json") if args.resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        if content["sizes"] == sizes:
            return content, path
    return {"corpus": corpus, "sizes": sizes, "done": [], "runs": []}, None


def measure(args: Namespace, corpus: str):
    content, path = start(args, corpus)
    for name in args.only:
        for wanted in settings(name, args, content["runs"]):
            if any(run["flags"] == wanted["flags"] for run in content["runs"]):
                continue
            run = train(wanted)
            now = run.pop("environment")
            known = content.setdefault("environment", now)
            machine.check_same(known, now, "device_name", "torch")
            content["runs"].append(run)
            if not path:
                path = machine.results_path("tokens", now["device_name"], corpus)
                path = machine.unused_path(path)
            machine.save(path, content)
            print(f"{name}, {run['optimizer']}, {run['flags']}: {last_loss(run):.4f}", flush=True)
        content["done"] = [*dict.fromkeys([*content["done"], name])]
        machine.save(path, content)
    if "nano" in content["done"]:
        draw(content, path.with_suffix(".png"))
    print(block({path.name: content}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--data-dir", default="", help="folder of token shards (default: Python's own source)")
    add("--steps", type=int, help="of each network (default: its own)")
    add("--eval-tokens", type=int, help="of each validation (default: each network's own)")
    add("--quick", action="store_true", help="24 steps of nano at one rate each")
    add("--resume", action="store_true", help="continue the newest results of the corpus")
    args = parser.parse_args()
    corpus = Path(args.data_dir).resolve().name if args.data_dir else "stdlib-bytes"
    if args.quick:
        args.only, args.steps, args.eval_tokens = ["nano"], 24, 4096
        corpus += "-quick"
    try:
        measure(args, corpus)
    except (OSError, ValueError) as error:
        print(f"tokens_to_loss.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tokens_to_loss.py: stopped; finished runs are kept: --resume continues")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
