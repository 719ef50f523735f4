"""Find the best learning rate of --muon for several widths, and compare them with the program's
rule.

    python benchmarks/rates.py                  # four widths: about 50 minutes on two cores
    python benchmarks/rates.py --only 128 192
    python benchmarks/rates.py --resume         # continue an interrupted search
    python benchmarks/rates.py --quick          # a minute, to see that it works
    python benchmarks/rates.py --draw RESULTS   # draw the picture of results anew

At each width four peak rates are tried, and more while the best one is at the edge. The best rate
is that of a parabola through the logarithms of the best three rates and their last validation
losses. Results go to benchmarks/results/rates-*.json after each run, with a picture at the end.
"""

import argparse
import sys
from pathlib import Path

import machine
import numpy as np
import tokens_to_loss

sys.path.insert(0, str(machine.REPO))
from train_gpt2 import muon_learning_rate

NETWORKS = {  # by width. The two smaller ones see at least two tokens per parameter
    128: {"n-layer": 4, "n-head": 4, "steps": 1200, "eval-tokens": 131_072},
    192: {"n-layer": 6, "n-head": 6, "steps": 2700, "eval-tokens": 131_072},
    384: {"n-layer": 6, "n-head": 6, "steps": 200, "eval-tokens": 32_768},
    512: {"n-layer": 6, "n-head": 8, "steps": 200, "eval-tokens": 32_768},
}
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
# At 768 channels, in our units: RMS of the update / 0.2. Both networks differ from GPT-2 by the
# norm of q and k, among other things; that of 2024-10-10 differs the least.
PUBLISHED = {
    "modded-nanogpt, 2024-10-10": 1.8e-3,
    "nanochat, d12": 3.6e-3,
}


def run_at(width: int, rate: float, args: argparse.Namespace) -> dict:
    """Train at a rate, and return the run as tokens_to_loss.py records it."""
    flags = NETWORKS[width] | {"n-embd": width, "seed": 1337, "learning-rate": rate}
    flags |= {"muon": True, "decay-to": tokens_to_loss.END}
    if args.quick:
        flags |= {"steps": 12, "eval-tokens": 4096}
    flags |= {"warmup-steps": flags["steps"] // 24, "eval-every": max(1, flags["steps"] // 4)}
    run = tokens_to_loss.train({"width": width, "rate": rate, "flags": flags})
    tokens = run["step"][-1] * run["tokens_per_step"] if run["step"] else 0
    print(f"{width} channels, {rate:g}: {tokens_to_loss.last_loss(run):.4f}", flush=True)
    return run | {"tokens": tokens}


def best_rate(runs: list[dict]) -> tuple[float, np.ndarray]:
    """Return the rate with the lowest loss by a parabola through the best run and its neighbours,
    and the parabola's coefficients in log2 of the rate."""
    runs = sorted(runs, key=lambda run: run["rate"])
    losses = [tokens_to_loss.last_loss(run) for run in runs]
    i = min(max(1, int(np.argmin(losses))), len(runs) - 2)
    around = slice(i - 1, i + 2)
    x = np.log2([run["rate"] for run in runs[around]])
    a, b, c = np.polyfit(x, losses[around], 2)
    return float(2 ** (-b / (2 * a))), np.array([a, b, c])


def rows(runs: list[dict]) -> list[dict]:
    """Return a table with a row for each width."""
    table = []
    for width in sorted({run["width"] for run in runs}):
        same = sorted((run for run in runs if run["width"] == width), key=lambda r: r["rate"])
        best, rule = best_rate(same)[0], muon_learning_rate(width)
        tried = ", ".join(f"{r['rate']:g}: {tokens_to_loss.last_loss(r):.4f}" for r in same)
        row = {"channels": f"{width}", "tokens": f"{same[0]['tokens'] / 1e6:.2f}M"}
        row |= {"loss by rate": tried, "best": f"{best:.2g}", "rule": f"{rule:.2g}"}
        table.append(row | {"rule / best": f"{rule / best:.2f}"})
    return table


def draw(runs: list[dict], path: Path):
    """Draw the losses by rate for each width, and the best rates by width beside the rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    widths = sorted({run["width"] for run in runs})
    for number, width in enumerate(widths):
        color = f"C{number}"
        same = [run for run in runs if run["width"] == width and run["loss"]]
        best, parabola = best_rate(same)
        lowest = np.polyval(parabola, np.log2(best))
        label = f"{width} channels"
        rates = [run["rate"] for run in same]
        rises = [tokens_to_loss.last_loss(run) - lowest for run in same]
        left.plot(rates, rises, "o", color=color, label=label)
        around = np.linspace(np.log2(best) - 1.2, np.log2(best) + 1.2, 50)
        left.plot(2**around, np.polyval(parabola, around) - lowest, color=color, alpha=0.5)
        right.plot([width], [best], "o", color=color, markersize=9)
    left.set(xscale="log", xlabel="peak learning rate", ylim=(-0.01, 0.25))
    left.set(ylabel="validation loss above the lowest (nats)", title="Losses by rate")
    left.legend()
    line = np.array([100, 1700])
    rule = [muon_learning_rate(width) for width in line]
    right.plot(line, rule, color="#606060", label="the program's rule", zorder=0)
    for (name, rate), mark in zip(PUBLISHED.items(), ("s", "^"), strict=True):
        right.plot([768], [rate], mark, color="#b0b7c3", label=f"{name} (published)")
    right.set(xscale="log", yscale="log", xlabel="channels", ylabel="best peak learning rate")
    right.set_title("Best rates by width")
    right.set_xticks([*widths, 768, 1600], [*map(str, widths), "768", "1600"], minor=False)
    right.minorticks_off()
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def measure(args: argparse.Namespace) -> Path:
    content, path = {"runs": []}, None
    done = sorted(machine.RESULTS.glob("rates-*.json"))
    if args.resume and done:
        path = done[-1]
        content = machine.load(path)
    for width in args.only:
        runs = [run for run in content["runs"] if run["width"] == width]
        todo = [rate for rate in RATES if rate not in [run["rate"] for run in runs]]
        while todo:
            run = run_at(width, todo.pop(0), args)
            environment = run.pop("environment")
            content.setdefault("environment", environment)
            machine.check_same(content["environment"], environment, "device_name", "torch")
            runs.append(run)
            content["runs"].append(run)
            if not path:
                name = environment["device_name"]
                path = machine.unused_path(machine.results_path("rates", name))
            machine.save(path, content)
            if not todo and not args.quick and (rate := tokens_to_loss.next_rate(runs)):
                todo = [rate]
    if path is None:
        raise ValueError("all rates are there")
    return path


def main() -> int:
    parser = machine.OneLineParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", type=int, choices=NETWORKS, default=list(NETWORKS), metavar="WIDTH")
    add("--resume", action="store_true", help="continue the newest results")
    add("--quick", action="store_true", help="12 steps of each run")
    add("--draw", type=Path, metavar="RESULTS", help="only draw these results")
    args = parser.parse_args()
    try:
        path = args.draw or measure(args)
        runs = machine.load(path)["runs"]
        draw(runs, path.with_suffix(".png"))
        print(machine.markdown(rows(runs)))
    except (OSError, ValueError) as error:
        print(f"rates.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rates.py: stopped; finished runs are kept: --resume continues")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
