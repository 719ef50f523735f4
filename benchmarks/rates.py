"""Find the best learning rate of --muon for several widths, and compare them with the program's
rule.

    python benchmarks/rates.py                  # four widths: about 50 minutes on two cores
    python benchmarks/rates.py --only 128 192
    python benchmarks/rates.py --resume         # continue an interrupted search
    python benchmarks/rates.py --quick          # a minute, to see that it works
    python benchmarks/rates.py --draw RESULTS   # draw the picture of results anew

For each network four peak rates are tried, and more while the best one is at the edge. A parabola
through the best rate (its logarithm) and its two neighbours says where the lowest loss would be.
The small widths run twice: for as few steps as the large ones too, to tell width from length.

Results go to benchmarks/results/rates-*.json after each run, with a picture at the end.
"""

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path

import machine
import numpy as np
import tokens_to_loss
from tokens_to_loss import last_loss

sys.path.insert(0, str(machine.REPO))
from train_gpt2 import muon_learning_rate

NETWORKS = (  # the long runs see at least two tokens per parameter
    {"n-embd": 128, "n-layer": 4, "n-head": 4, "steps": 1200, "eval-tokens": 131_072},
    {"n-embd": 192, "n-layer": 6, "n-head": 6, "steps": 2700, "eval-tokens": 131_072},
    {"n-embd": 128, "n-layer": 4, "n-head": 4, "steps": 200, "eval-tokens": 32_768},
    {"n-embd": 192, "n-layer": 6, "n-head": 6, "steps": 200, "eval-tokens": 32_768},
    {"n-embd": 384, "n-layer": 6, "n-head": 6, "steps": 200, "eval-tokens": 32_768},
    {"n-embd": 512, "n-layer": 6, "n-head": 8, "steps": 200, "eval-tokens": 32_768},
)
WIDTHS = sorted({network["n-embd"] for network in NETWORKS})
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
# At 768 channels, in our units: RMS of the update / 0.2. Both networks differ from GPT-2 by the
# norm of q and k, among other things; that of 2024-10-10 differs the least.
PUBLISHED = {
    "modded-nanogpt, 2024-10-10": 1.8e-3,
    "nanochat, d12": 3.6e-3,
}


def train(network: dict, rate: float, quick: bool) -> dict:
    """Train a network at a rate, and return the run as tokens_to_loss.py records it."""
    flags = network | {"seed": 1337, "learning-rate": rate, "muon": True}
    if quick:
        flags |= {"steps": network["steps"] // 100, "eval-tokens": 4096}
    steps = flags["steps"]
    flags |= {"warmup-steps": steps // 24, "eval-every": max(1, steps // 4)}
    flags["decay-to"] = tokens_to_loss.END
    run = tokens_to_loss.train({"width": network["n-embd"], "rate": rate, "flags": flags})
    print(f"{run['width']} channels, {steps} steps, {rate:g}: {last_loss(run):.4f}", flush=True)
    return run


def by_network(runs: list[dict]) -> dict[tuple[int, int], list[dict]]:
    """Return the runs of each width and number of steps, by rate."""
    groups = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run["width"], run["flags"]["steps"], run["rate"])):
        groups[run["width"], run["flags"]["steps"]].append(run)
    return groups


def parabola(runs: list[dict]) -> np.ndarray | None:
    """Return the coefficients of a parabola, in log2 of the rate, through the best run and its
    neighbours; None if the best rate is at the edge of those tried."""
    runs = [run for run in runs if run["loss"]]  # the others diverged
    losses = [last_loss(run) for run in runs]
    i = int(np.argmin(losses)) if runs else 0
    if not 0 < i < len(runs) - 1:
        return None
    around = slice(i - 1, i + 2)
    return np.polyfit(np.log2([run["rate"] for run in runs[around]]), losses[around], 2)


def best_rate(runs: list[dict]) -> float:
    """Return the rate with the lowest loss: of the parabola, or of those tried."""
    if (coefficients := parabola(runs)) is None:
        return min(runs, key=last_loss)["rate"]
    a, b, _ = coefficients
    return float(2 ** (-b / (2 * a)))


def rows(runs: list[dict]) -> list[dict]:
    """Return a table with a row for each network."""
    table = []
    for (width, steps), same in by_network(runs).items():
        best, rule = best_rate(same), muon_learning_rate(width)
        tokens = steps * same[0]["tokens_per_step"]
        row = {"channels": f"{width}", "steps": f"{steps:,}", "tokens": f"{tokens / 1e6:.1f}M"}
        row |= {f"{run['rate']:g}": f"{last_loss(run):.4f}" for run in same}
        edge = "" if parabola(same) is not None else " (at the edge)"
        row |= {"best": f"{best:.2g}{edge}", "rule": f"{rule:.2g}"}
        table.append(row | {"rule / best": f"{rule / best:.2f}"})
    rates = sorted({run["rate"] for run in runs})
    columns = ["channels", "steps", "tokens", *(f"{rate:g}" for rate in rates)]
    columns += ["best", "rule", "rule / best"]
    return [{column: row.get(column, "") for column in columns} for row in table]


def draw(runs: list[dict], path: Path):
    """Draw the losses by rate for each network, and the best rates by width beside the rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (width, steps), same in by_network(runs).items():
        color = f"C{WIDTHS.index(width)}"
        is_short = steps < max(n["steps"] for n in NETWORKS if n["n-embd"] == width)
        fill = {"markerfacecolor": "white"} if is_short else {}
        best, coefficients = best_rate(same), parabola(same)
        good = [run for run in same if run["loss"]]
        lowest = min(map(last_loss, good))
        if coefficients is not None:
            lowest = np.polyval(coefficients, np.log2(best))
            around = np.linspace(np.log2(best) - 1.2, np.log2(best) + 1.2, 50)
            losses = np.polyval(coefficients, around) - lowest
            left.plot(2**around, losses, "--" if is_short else "-", color=color, alpha=0.5)
        label = f"{width} channels, {steps:,} steps"
        rises = [last_loss(run) - lowest for run in good]
        left.plot([run["rate"] for run in good], rises, "o", color=color, label=label, **fill)
        right.plot([width], [best], "o", color=color, markersize=9, **fill)
    left.set(xscale="log", xlabel="peak learning rate", ylim=(-0.01, 0.25))
    left.set(ylabel="validation loss above the lowest (nats)", title="Losses by rate")
    tried = sorted({run["rate"] for run in runs})
    left.set_xticks(tried, [f"{rate:g}" for rate in tried])
    left.minorticks_off()
    left.legend(loc="upper right", bbox_to_anchor=(1.05, 1), framealpha=0.95)
    widths = np.geomspace(100, 1700)
    rule = [muon_learning_rate(width) for width in widths]
    right.plot(widths, rule, color="#606060", label="the program's rule", zorder=0)
    for (name, rate), mark in zip(PUBLISHED.items(), ("s", "^"), strict=True):
        right.plot([768], [rate], mark, color="#9aa3b2", label=f"{name} (published)")
    right.set(xscale="log", yscale="log", xlabel="channels", ylabel="peak learning rate")
    right.set_title("Best rates by width")
    right.set_xticks([*WIDTHS, 768, 1600], [*map(str, WIDTHS), "768", "1600"])
    ticks = (1e-3, 2e-3, 4e-3, 8e-3)
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    right.minorticks_off()
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def start(args: argparse.Namespace) -> tuple[dict, Path | None]:
    """Return new results, or with --resume the newest of the same kind."""
    paths = machine.RESULTS.glob("rates-*.json") if args.resume else []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        content = machine.load(path)
        if content["quick"] == args.quick:
            return content, path
    return {"quick": args.quick, "runs": []}, None


def measure(args: argparse.Namespace) -> dict:
    content, path = start(args)
    for network in NETWORKS:
        if network["n-embd"] not in args.only:
            continue
        steps = network["steps"] // 100 if args.quick else network["steps"]
        runs = by_network(content["runs"])[network["n-embd"], steps]
        while rate := next_rate(runs, args.quick):
            run = train(network, rate, args.quick)
            environment = run.pop("environment")
            known = content.setdefault("environment", environment)
            machine.check_same(known, environment, "device_name", "torch")
            runs.append(run)
            content["runs"].append(run)
            if not path:
                more = ["quick"] if args.quick else []
                path = machine.results_path("rates", environment["device_name"], *more)
                path = machine.unused_path(path)
            machine.save(path, content)
    draw(content["runs"], path.with_suffix(".png"))
    return content


def next_rate(runs: list[dict], quick: bool) -> float | None:
    """Return the rate to try next on a network; None if the best one is found."""
    tried = [run["rate"] for run in runs]
    for rate in RATES:
        if rate not in tried:
            return rate
    return None if quick else tokens_to_loss.next_rate(runs)


def main() -> int:
    parser = machine.OneLineParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", type=int, choices=WIDTHS, default=WIDTHS, metavar="WIDTH")
    add("--resume", action="store_true", help="continue the newest results")
    add("--quick", action="store_true", help="a hundredth of the steps")
    add("--draw", type=Path, metavar="RESULTS", help="only draw these results")
    args = parser.parse_args()
    try:
        if args.draw:
            content = machine.load(args.draw)
            draw(content["runs"], args.draw.with_suffix(".png"))
        else:
            content = measure(args)
        print(machine.markdown(rows(content["runs"])))
    except (OSError, ValueError) as error:
        print(f"rates.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rates.py: stopped; finished runs are kept: --resume continues")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
