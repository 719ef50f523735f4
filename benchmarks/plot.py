"""Losses of runs against steps, tokens and time, beside figures that others published.

    python benchmarks/plot.py out/001 out/002                 # draws loss.png
    python benchmarks/plot.py out/001 --out 001.png
    python benchmarks/plot.py out/124M --against reference    # is my loss normal? said in words
    python benchmarks/plot.py out/124M --against llm.c        # by references of that name only

A run is read from its log.jsonl, also while it goes on. Of steps that were made twice, because the
run was resumed from before them, the second time counts. Time is that of the optimizer steps alone.

reference.json holds what public sources state of GPT-2 124M, each figure with its source. Points
([step, value]) make it a curve: a run is ahead of it or behind it at as many tokens. Everything
else is a last figure. Only references on the run's own data set are taken, if data/NAME is called
as one of theirs is (as prepare_data.py --download calls it), else all of them.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REFERENCES = Path(__file__).with_name("reference.json")
QUANTITIES = {
    "val_loss": "validation loss",
    "hellaswag_acc": "HellaSwag accuracy",
    "hellaswag_acc_norm": "normalized HellaSwag accuracy",
}
LEAST_BYTES_PER_TOKEN = 1.5  # GPT-2's tokens of English are 4 to 5 bytes, a byte is 1
CAVEAT = "Losses compare only on the same data set and tokenizer, and midway only at equal --steps."

# --------------------------------------------------------------------------------------------------
# Runs


@dataclass
class Run:
    """What a log holds: the flags, and each quantity by step."""

    name: str
    flags: dict
    values: dict[str, dict[int, float]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values, without those that are not finite."""
        pairs = np.array(list(self.values[name].items()), float).reshape(-1, 2)
        return tuple(pairs[np.isfinite(pairs[:, 1])].T)

    def tokens(self, steps):
        return steps * self.flags["batch_tokens"]

    def hours(self, steps):
        made, ms = self.series("ms")
        return np.interp(steps, [0, *made], [0, *np.cumsum(ms)]) / 3.6e6


CURVES = ("loss", "training", "-", 0.5), ("val_loss", "validation", "o", 1)  # opacities
AXES = {"steps": lambda run, steps: steps, "tokens": Run.tokens, "hours of steps": Run.hours}


def read_run(folder: str) -> Run:
    """The run of a folder; FileNotFoundError without a log, ValueError without a step in it."""
    path, flags, values = Path(folder, "log.jsonl"), {}, defaultdict(dict)
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no log.jsonl: name a run's folder, such as out/001")
    for line in path.read_bytes().splitlines():
        record = {}
        with suppress(ValueError):  # a kill has torn it
            record = json.loads(line)
        flags, step = record.get("flags", flags), record.get("step")
        if "ms" in record and step <= next(reversed(values["ms"]), 0):  # made again
            for name in values:
                values[name] = {n: v for n, v in values[name].items() if n < step}
        for name in (*QUANTITIES, "loss", "ms", "bits_per_byte"):
            if name in record:
                values[name][step] = record[name]
    if not flags or not values["ms"]:
        raise ValueError(f"{path} has no step yet: wait for the run's first one")
    return Run(folder, flags, values)


# --------------------------------------------------------------------------------------------------
# References: dicts with name, what, value, step, tokens, data, source, note, and points for a curve


def load_references(name: str = "") -> list[dict]:
    """Those whose names begin like that; ValueError if none does."""
    references = json.loads(REFERENCES.read_text(encoding="utf-8"))
    chosen = [r for r in references if r["name"].lower().startswith(name.lower())]
    if not chosen:
        names = ", ".join(dict.fromkeys(r["name"] for r in references))
        raise ValueError(f"--against {name}: there are reference, {names}")
    return chosen


def why_none(run: Run) -> str:
    """Why no reference is like a run; nothing if some are."""
    if run.flags.get("init_from"):
        return "it began with the weights of another"
    model, layers, width = (run.flags[name] for name in ("model", "n_layer", "n_embd"))
    if (model, layers, width) != ("gpt2", 12, 768):
        return f"the references are GPT-2 124M, this is {model}: {layers} layers, {width} channels"
    bits, losses = run.values["bits_per_byte"], run.values["val_loss"]
    if any(losses[n] / math.log(2) / bits[n] < LEAST_BYTES_PER_TOKEN for n in bits):
        return "the references' tokens are GPT-2's, and this run's are bytes"
    return "" if run.flags["data_dir"] else "it read Python's own source, and no reference did"


def like(run: Run, references: list[dict]) -> list[dict]:
    """The references that a run can be compared with: of its data set, if its folder tells."""
    folder = Path(run.flags["data_dir"]).name.lower()
    same = [r for r in references if r["data"].lower() == folder]
    references = [r for r in references if r in same or not same or r["what"] != "val_loss"]
    return [] if why_none(run) else references


def curve(reference: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, tokens and values; nothing in them where only a last figure is known."""
    steps, values = np.array(reference.get("points", [])).reshape(-1, 2).T
    return steps, steps * (reference["tokens"] or 0) / (reference["step"] or 1), values


def short(tokens: float) -> str:
    return f"{tokens / 1e9:.2f}B" if tokens >= 1e9 else f"{tokens / 1e6:.1f}M"


def compare(value: float, tokens: float, reference: dict) -> str:
    """How far a run is ahead or behind at its tokens, or from the reference's last figure."""
    is_loss = reference["what"] == "val_loss"
    name, last = f"{reference['name']} on {reference['data']}", reference["value"]
    _, places, values = curve(reference)
    if not len(places) or tokens > places[-1]:
        side = "below" if value < last else "above"
        return f"{abs(value - last):.3f} {side} {name}, {last:.4f}, whose training is complete"
    there = np.interp(tokens, places, values)
    is_ahead = value < there if is_loss else value > there
    side = "ahead of" if is_ahead else "behind"
    text = f"{abs(value - there):.3f} {side} {name}, {there:.4f} at as many tokens"
    if not is_loss:
        return text  # an accuracy goes up and down
    if value < values[-1]:
        return f"{text}, which never got there"
    gap = np.interp(-value, -values, places) - tokens
    return f"{text}, which got there {short(abs(gap))} tokens {'later' if gap > 0 else 'earlier'}"


def words(run: Run, references: list[dict]) -> list[str]:
    """A line for each quantity of a run that references have, or why there is none."""
    if why := why_none(run):
        return [f"{run.name}: {why}"]
    lines = []
    for what, title in QUANTITIES.items():
        of_it = [r for r in like(run, references) if r["what"] == what]
        steps, values = run.series(what)
        if of_it and max(steps, default=0):  # before the first step all runs are alike
            step, value, tokens = steps[-1], values[-1], run.tokens(steps[-1])
            place = f"{title} {value:.4f} after step {step:,.0f} ({short(tokens)} tokens)"
            texts = [compare(value, tokens, r) for r in of_it]
            lines.append(f"{run.name} on {run.flags['data_dir']}: {place}: {'; '.join(texts)}")
    return lines or [f"{run.name}: not validated after a step yet"]


# --------------------------------------------------------------------------------------------------


def draw(runs: list[Run], references: list[dict], path: Path):
    """Three panels with one scale of losses; ValueError if matplotlib is missing."""
    if path.exists():
        raise FileExistsError(f"{path} exists: move it away, or name another file with --out")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    losses = [r for r in references if r["what"] == "val_loss"]
    shown = [r for r in losses if any(r in like(run, losses) for run in runs)]
    figure = Figure(figsize=(15, 6), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, (title, place) in zip(panels, AXES.items(), strict=True):
        for color, run in enumerate(runs):
            draw_run(axes, run, place, f"C{color}")
        axes.set(xlabel=title, yscale="log", xlim=(0, axes.get_xlim()[1]))
        axes.locator_params(axis="x", nbins=5)
        for number, reference in enumerate(shown):
            draw_reference(axes, reference, title, f"C{len(runs) + number}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("loss (nats per token)")
    figure.suptitle("; ".join(dict.fromkeys(map(what_ran, runs))), fontsize=15)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)
    print(path)


def what_ran(run: Run) -> str:
    data = run.flags["data_dir"] or "Python's own source"
    return f"{run.flags['model']}, {run.flags['batch_tokens']:,} tokens a step, {data}"


def draw_run(axes, run: Run, place, color: str):
    for name, label, style, alpha in CURVES:
        steps, losses = run.series(name)
        last = f" {losses[-1]:.3f} after step {steps[-1]:,.0f}" if len(steps) else ""
        look = {"color": color, "linewidth": 0.8, "markersize": 6, "alpha": alpha}
        look["label"] = f"{run.name}: {label}{last}"
        axes.plot(place(run, steps), losses, style, **look)


def draw_reference(axes, reference: dict, title: str, color: str):
    """A line at its last figure, and its points where it has some on that axis."""
    label = f"{reference['name']} on {reference['data']}: {reference['value']:.4g}"
    axes.axhline(reference["value"], color=color, linestyle="--", linewidth=1, label=label)
    steps, tokens, values = curve(reference)
    if title in ("steps", "tokens"):
        axes.plot(steps if title == "steps" else tokens, values, "x:", color=color, zorder=3)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, such as out/001")
    add("--out", type=Path, help="picture to write (default: loss.png, none with --against)")
    add("--against", metavar="NAME", help="say how the runs compare: reference, or its first name")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    try:
        runs = [read_run(folder) for folder in args.runs]
        if args.against:
            chosen = load_references("" if args.against == "reference" else args.against)
            lines = [line for run in runs for line in words(run, chosen)]
            print(*lines, *[] if all(map(why_none, runs)) else [CAVEAT], sep="\n")
        if args.out or not args.against:
            draw(runs, load_references(), args.out or Path("loss.png"))
    except (OSError, ValueError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
