"""Losses of runs against steps, tokens and time, beside figures that others published.

    python benchmarks/plot.py out/001 out/002                 # draws loss.png
    python benchmarks/plot.py out                             # every run below that folder
    python benchmarks/plot.py out/001 --out 001.png
    python benchmarks/plot.py out/124M --against reference    # is my loss normal? said in words
    python benchmarks/plot.py out/124M --against llm.c        # by references of that name only

A run is read from its log.jsonl, also while it goes on. Of steps that were made twice, because the
run was resumed from before them, the second time counts. Time is that of the optimizer steps alone.
Losses are in nats per token. Those of runs with different tokenizers are in bits per byte, each
divided by the bytes per token of its run's validation data, and no reference is drawn beside them.

reference.json holds what public sources state of GPT-2 124M, each figure with its source. Points
([step, value]) make it a curve: a run is ahead of it or behind it at as many tokens. Everything
else is a last figure. A run is compared with references on its own data set alone. The names of its
shards tell which that is, where its folder is at hand (as of prepare_data.py --download), or else
the folder's name.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import machine
import numpy as np

REFERENCES = Path(__file__).with_name("reference.json")
QUANTITIES = {
    "val_loss": "validation loss",
    "hellaswag_acc": "HellaSwag accuracy",
    "hellaswag_acc_norm": "normalized HellaSwag accuracy",
}
SHARDS = {  # of a data set: how they or their folder are called, if not as the references call it
    "FineWeb-Edu": r"(fineweb[-_]?edu|edu[-_]?fineweb)[-\w]*",
    "FineWeb": r"fineweb(\d+B)?",
}
LEAST_BYTES_PER_TOKEN = 1.5  # GPT-2's tokens of English are 4 to 5 bytes, a byte is 1
CAVEAT = "Losses compare only on the same data set and tokenizer, and midway only at equal --steps."

# --------------------------------------------------------------------------------------------------
# Runs


@dataclass
class Run:
    """What a log holds: the flags, each quantity by step, and whose tokens these are."""

    name: str
    flags: dict
    values: dict[str, dict[int, float]]
    logged_tokenizer: str  # nothing in a log of before it was logged

    @property
    def bytes_per_token(self) -> float | None:
        """Of the validation data; None before a validation that knows it."""
        bits, losses = self.values["bits_per_byte"], self.values["val_loss"]
        return next((losses[n] / math.log(2) / bits[n] for n in bits), None)

    @property
    def tokenizer(self) -> str:
        is_bytes = (self.bytes_per_token or math.inf) < LEAST_BYTES_PER_TOKEN
        return self.logged_tokenizer or ("bytes" if is_bytes else "gpt2")

    @property
    def data(self) -> str:
        return self.flags["data_dir"] or "Python's own source"

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values, without those that are not finite."""
        pairs = np.array(list(self.values[name].items()), float).reshape(-1, 2)
        return tuple(pairs[np.isfinite(pairs[:, 1])].T)

    def tokens(self, steps):
        return steps * self.flags["batch_tokens"]

    def hours(self, steps):
        made, ms = self.series("ms")
        return np.interp(steps, [0, *made], [0, *np.cumsum(ms)]) / 3.6e6


AXES = {"steps": lambda run, steps: steps, "tokens": Run.tokens, "hours of steps": Run.hours}


def read_runs(folders: list[str]) -> list[Run]:
    """The runs of these folders, and of all folders below one that is no run's; of those, one that
    can't be read yet is left out. OSError or ValueError if there is nothing to draw."""
    runs, whys = {}, []
    for name in (name for folder in folders for name in run_folders(Path(folder))):
        try:
            runs[name] = read_run(name)
        except ValueError as error:
            if name in folders:
                raise
            whys.append(str(error))
    if not runs:
        raise ValueError("; ".join(whys))
    for why in whys:
        print(f"plot.py: left out: {why}", file=sys.stderr)
    return [*runs.values()]


def run_folders(folder: Path) -> list[str]:
    """The folder itself if it has a log, else all below it that have one, else itself again."""
    if (folder / "log.jsonl").exists():
        return [str(folder)]
    return sorted(str(path.parent) for path in folder.rglob("log.jsonl")) or [str(folder)]


def read_run(folder: str) -> Run:
    """The run of a folder; FileNotFoundError without a log, ValueError without a step in it."""
    path, flags, values, tokenizer = Path(folder, "log.jsonl"), {}, defaultdict(dict), ""
    if not path.exists():
        why = "has no log.jsonl, nor has a folder below it: name a run's folder, such as out/001"
        raise FileNotFoundError(f"{folder} {why}")
    for line in path.read_bytes().splitlines():
        record = {}
        with suppress(ValueError):  # a kill has torn it
            record = json.loads(line)
        if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
            continue
        flags, step = record.get("flags", flags), record.get("step")
        tokenizer = record.get("tokenizer", tokenizer)
        if (
            "ms" in record and step is not None and step <= next(reversed(values["ms"]), 0)
        ):  # made again
            for name in values:
                values[name] = {n: v for n, v in values[name].items() if n < step}
        for name in (*QUANTITIES, "loss", "ms", "bits_per_byte"):
            if name in record:
                values[name][step] = record[name]
    if not flags or not values["ms"]:
        raise ValueError(f"{path} has no step yet: wait for the run's first one")
    return Run(folder, flags, values, tokenizer)


def units(runs: list[Run]) -> tuple[str, list[float]]:
    """The one unit that the losses of these runs are comparable in, and what makes it of each run's
    nats per token; ValueError if there is none."""
    if len({run.tokenizer for run in runs}) == 1:
        return "nats per token", [1.0] * len(runs)
    if unknown := [run for run in runs if not run.bytes_per_token]:
        others = next(run for run in runs if run.tokenizer != unknown[0].tokenizer)
        raise ValueError(
            f"{others.name} has {others.tokenizer} tokens, {unknown[0].name} {unknown[0].tokenizer}"
            " tokens and no bits per byte in its log: draw them apart"
        )
    return "bits per byte", [1 / (math.log(2) * run.bytes_per_token) for run in runs]


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


def why_none(run: Run, references: list[dict]) -> str:
    """Why none of these references is like a run; nothing if some are."""
    if run.flags.get("init_from"):
        return "it began with the weights of another"
    model, layers, width = (run.flags[name] for name in ("model", "n_layer", "n_embd"))
    if (model, layers, width) != ("gpt2", 12, 768):
        return f"the references are GPT-2 124M, this is {model}: {layers} layers, {width} channels"
    if run.tokenizer != "gpt2":
        return f"the references' tokens are GPT-2's, and this run's are {run.tokenizer}"
    known = list(dict.fromkeys(r["data"] for r in references if r["what"] == "val_loss"))
    if known and not any(has_read(run, data) for data in known):
        return f"the references read {', '.join(known)}, and this run {run.data}"
    return ""


def has_read(run: Run, data: str) -> bool:
    """Whether a run's data set is this one, as its shards' names tell, or else its folder's."""
    folder = Path(run.flags["data_dir"] or "nowhere")
    shards = [path.name.partition("_val_")[0] for path in folder.glob("*_val_*")]
    pattern = SHARDS.get(data, re.escape(data))
    return any(re.fullmatch(pattern, name, re.I) for name in shards or [folder.name])


def like(run: Run, references: list[dict]) -> list[dict]:
    """The references that a run can be compared with: the losses on its own data set, and all that
    answer the same questions."""
    if why_none(run, references):
        return []
    return [r for r in references if r["what"] != "val_loss" or has_read(run, r["data"])]


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
    if why := why_none(run, references):
        return [f"{run.name}: its losses can't be compared: {why}"]
    lines = []
    for what, title in QUANTITIES.items():
        of_it = [r for r in like(run, references) if r["what"] == what]
        steps, values = run.series(what)
        if of_it and max(steps, default=0):  # before the first step all runs are alike
            step, value, tokens = steps[-1], values[-1], run.tokens(steps[-1])
            place = f"{title} {value:.4f} after step {step:,.0f} ({short(tokens)} tokens)"
            texts = [compare(value, tokens, r) for r in of_it]
            lines.append(f"{run.name} on {run.data}: {place}: {'; '.join(texts)}")
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
    unit, factors = units(runs)
    losses = [r for r in references if r["what"] == "val_loss" and unit == "nats per token"]
    shown = [r for r in losses if any(r in like(run, losses) for run in runs)]
    titles = list(dict.fromkeys(map(what_ran, runs)))
    height = 5.2 + 0.22 * (len(runs) + len(shown))  # of the panels, and of a label each
    figure = Figure(figsize=(15, height), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, (title, place) in zip(panels, axes_of(runs).items(), strict=True):
        for number, (run, factor) in enumerate(zip(runs, factors, strict=True)):
            name = run.name if len(titles) == 1 else f"{run.name}, {what_ran(run)}"
            draw_run(axes, run, name, place, factor, colors(len(runs))[number])
        axes.set(xlabel=title, xlim=(0, axes.get_xlim()[1]))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda x, _: brief(x))
        for number, reference in enumerate(shown):
            draw_reference(axes, reference, title, number)
        axes.grid(alpha=0.3)
    scale_losses(panels[0], unit)
    title = titles[0] if len(titles) == 1 else f"{len(runs)} runs"
    figure.suptitle(textwrap.fill(title, 120), fontsize=15)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center")
    figure.savefig(path)
    print(path)


def axes_of(runs: list[Run]) -> dict:
    """AXES, with time in the largest unit of which some run took two."""
    *others, _ = AXES.items()
    longest = max(run.hours(run.series("loss")[0]).max(initial=0) for run in runs)
    sizes = {"hours": 1, "minutes": 60, "seconds": 3600}
    unit = next((name for name, size in sizes.items() if longest * size >= 2), "seconds")
    return dict(others) | {f"{unit} of steps": lambda run, steps: sizes[unit] * run.hours(steps)}


def brief(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def colors(count: int) -> list:
    """As many as there are runs, as different as they can be."""
    from matplotlib import colormaps

    return [f"C{n}" if count <= 10 else colormaps["turbo"](n / (count - 1)) for n in range(count)]


def scale_losses(axes, unit: str):
    """A logarithmic axis; its labels are so far apart that they don't touch."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(yscale="log", ylabel=f"loss ({unit}), dots: validation")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def what_ran(run: Run) -> str:
    return f"{run.flags['model']}, {run.flags['batch_tokens']:,} tokens a step, {run.data}"


def draw_run(axes, run: Run, name: str, place, factor: float, color):
    """Training faint, and its mean over a fiftieth of the run as a line; validation as dots. One
    label for all, with the last of each."""
    (steps, losses), (val_steps, val_losses) = run.series("loss"), run.series("val_loss")
    x, num = place(run, steps), max(1, len(steps) // 50)
    axes.plot(x, factor * losses, color=color, linewidth=0.6, alpha=0.25, zorder=1)
    smooth = np.convolve(losses, np.ones(num) / num, "valid") if len(losses) else losses
    axes.plot(x[num // 2 :][: len(smooth)], factor * smooth, color=color, linewidth=1.3, zorder=2)
    [dots] = axes.plot(place(run, val_steps), factor * val_losses, "o", color=color, markersize=5,
                       zorder=3)  # fmt: skip
    last = ""
    if len(steps):
        last += (
            f", training {factor * smooth[-1]:.3f} over the last {num:,} of {steps[-1]:,.0f} steps"
        )
    if len(val_steps):
        last += f", validation {factor * val_losses[-1]:.3f} after step {val_steps[-1]:,.0f}"
    dots.set_label(textwrap.fill(name + last.replace(",", ":", 1), 170))


def draw_reference(axes, reference: dict, title: str, number: int):
    """A line at its last figure, and its points where it has some on that axis. The first one has
    the shortest dashes and is black."""
    look = {"color": str(min(0.2 * number, 0.6)), "linewidth": 1}
    label = f"{reference['name']} on {reference['data']}: {reference['value']:.4g}"
    axes.axhline(reference["value"], linestyle=(0, (3 + 5 * number, 3)), label=label, **look)
    steps, tokens, values = curve(reference)
    if title in ("steps", "tokens"):
        axes.plot(steps if title == "steps" else tokens, values, "x:", zorder=3, **look)


def make_parser() -> argparse.ArgumentParser:
    parser = machine.OneLineParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder, or one above runs: out/001, out")
    add("--out", type=Path, help="picture to write (default: loss.png, none with --against)")
    add("--against", metavar="NAME", help="say how the runs compare: reference, or its first name")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    try:
        runs = read_runs(args.runs)
        references = load_references("" if args.against in (None, "reference") else args.against)
        if args.against:
            lines = [line for run in runs for line in words(run, references)]
            print(*lines, *[CAVEAT] * any(like(run, references) for run in runs), sep="\n")
        if args.out or not args.against:
            draw(runs, references, args.out or Path("loss.png"))
    except (OSError, ValueError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
