"""Draw the losses of runs against steps, tokens and time, beside figures that others published.

    python benchmarks/plot.py out/001                         # draws out/001/curves.png
    python benchmarks/plot.py out                             # every run below: out/curves.png
    python benchmarks/plot.py out/001 out/002 --out both.png
    python benchmarks/plot.py out/002 --against out/001       # another run of yours, in words
    python benchmarks/plot.py out/124M --against reference    # is my loss normal? said in words
    python benchmarks/plot.py out/124M --against llm.c        # only references of that name

Of several runs a table shows what differs: flags, first, last and best validation, time.

A run is read from its log.jsonl, also while it is running. Of steps that were made twice, because
the run was resumed from before them, the second time counts. Losses are in nats per token, so only
runs with the same tokenizer can be drawn together.

reference.json holds what public sources state of GPT-2 124M. A run is compared with references on
its own data set only, at equal tokens where they have a curve. The names of its shards tell which
data set that is, or where the folder is not here, the folder's name.
"""

import json
import re
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import machine
import numpy as np

REFERENCES = Path(__file__).with_name("reference.json")
QUANTITIES = {
    "val_loss": "validation loss",
    "hellaswag_acc": "HellaSwag accuracy",
    "hellaswag_acc_norm_tokens": "HellaSwag accuracy, normalized by tokens",
}
SHARDS = {  # how shards or folders of a data set are called, if not as the references call it
    "FineWeb-Edu": r"(fineweb[-_]?edu|edu[-_]?fineweb)[-\w]*",
    "FineWeb": r"fineweb(\d+B)?",
}
CAVEAT = "Losses compare only on the same data set and tokenizer, and midway only at equal --steps."

# ---- Runs


@dataclass
class Run:
    """What a log holds: the flags, the tokenizer, and each quantity by step."""

    name: str
    flags: dict
    tokenizer: str
    values: dict[str, dict[int, float]]

    @property
    def data(self) -> str:
        return self.flags["data_dir"] or "Python's own source"

    @property
    def title(self) -> str:
        return f"{self.flags['model']}, {self.flags['batch_tokens']:,} tokens a step, {self.data}"

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values, without those that are not finite."""
        pairs = np.array(list(self.values[name].items()), float).reshape(-1, 2)
        steps, values = pairs[np.isfinite(pairs[:, 1])].T
        return steps, values

    def seconds(self, steps):
        """Return the time of the optimizer steps up to these."""
        made, ms = self.series("ms")
        return np.interp(steps, [0, *made], [0, *np.cumsum(ms)]) / 1000

    def x(self, axis: str, steps):
        """Return steps in the unit of an axis: steps, tokens or minutes."""
        if axis == "minutes of steps":
            return self.seconds(steps) / 60
        return steps * self.flags["batch_tokens"] if axis == "tokens" else steps


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs of these folders, and all runs below a folder that is no run itself."""
    names = []
    for folder in folders:
        below = sorted(str(path.parent) for path in Path(folder).rglob("log.jsonl"))
        names += below if below and not Path(folder, "log.jsonl").exists() else [folder]
    runs = [read_run(name) for name in dict.fromkeys(names)]
    waiting = [run.name for run in runs if not run.values["ms"]]
    if len(waiting) == len(runs):
        raise ValueError(f"{waiting[0]} has no step yet: wait for the run's first one")
    if waiting:
        print(f"plot.py: left out, without a step yet: {', '.join(waiting)}", file=sys.stderr)
    return [run for run in runs if run.values["ms"]]


def read_run(folder: str) -> Run:
    path = Path(folder, "log.jsonl")
    if not path.exists():
        why = "has no log.jsonl, nor has a folder below it: name a run's folder, such as out/001"
        raise FileNotFoundError(f"{folder} {why}")
    run = Run(folder, {}, "", defaultdict(dict))
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn when the run was killed
        run.flags = record.get("flags", run.flags)
        run.tokenizer = record.get("tokenizer", run.tokenizer)
        step = record.get("step")
        if "ms" in record and step <= max(run.values["ms"], default=0):
            for name, values in run.values.items():  # resumed: forget what comes after
                run.values[name] = {n: value for n, value in values.items() if n < step}
        for name in (*QUANTITIES, "loss", "ms", "bits_per_byte"):
            if name in record:
                run.values[name][step] = record[name]
    return run


# ---- References: dicts with name, what, value, step, tokens, data, source, note, and points


def load_references(name: str = "") -> list[dict]:
    """Return the references whose names begin like that; ValueError if none does."""
    references = json.loads(REFERENCES.read_text(encoding="utf-8"))
    chosen = [r for r in references if r["name"].lower().startswith(name.lower())]
    if not chosen:
        names = dict.fromkeys(r["name"] for r in references)
        raise ValueError(f"--against {name}: there are reference, {', '.join(names)}")
    return chosen


def why_none(run: Run, references: list[dict]) -> str:
    """Say why a run can't be compared with any of these; return an empty string if it can."""
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
    """Say whether a run's data set is this one, by the names of its shards, or of its folder."""
    folder = Path(run.flags["data_dir"] or "nowhere")
    names = [path.name.partition("_val_")[0] for path in folder.glob("*_val_*")] or [folder.name]
    pattern = SHARDS.get(data, re.escape(data))
    return any(re.fullmatch(pattern, name, re.I) for name in names)


def alike(run: Run, references: list[dict]) -> list[dict]:
    """Return the losses on a run's own data set, and what answers the same questions."""
    if why_none(run, references):
        return []
    return [r for r in references if r["what"] != "val_loss" or has_read(run, r["data"])]


def curve(reference: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, tokens and values; empty where only a last figure is known."""
    steps, values = np.array(reference.get("points", [])).reshape(-1, 2).T
    return steps, steps * (reference["tokens"] or 0) / (reference["step"] or 1), values


def compare(value: float, tokens: float, reference: dict) -> str:
    """Say how far a value is from the reference's at as many tokens, or else from its last."""
    name = f"{reference['name']} on {reference['data']}"
    _, at_tokens, values = curve(reference)
    if not len(at_tokens) or tokens > at_tokens[-1]:
        last = reference["value"]
        side = "below" if value < last else "above"
        return f"{abs(value - last):.3f} {side} {name}, {last:.4f}, whose training is complete"
    expected = np.interp(tokens, at_tokens, values)
    is_loss = reference["what"] == "val_loss"
    side = "ahead of" if (value < expected) == is_loss else "behind"
    return f"{abs(value - expected):.3f} {side} {name}, {expected:.4f} at as many tokens"


def comparison(run: Run, references: list[dict]) -> list[str]:
    """Return a line for each quantity of a run that references have, or why there is none."""
    if why := why_none(run, references):
        return [f"{run.name}: its losses can't be compared: {why}"]
    lines = []
    for what, name in QUANTITIES.items():
        steps, values = run.series(what)
        known = [r for r in alike(run, references) if r["what"] == what]
        if known and max(steps, default=0):  # before the first step all runs are alike
            step, value, tokens = steps[-1], values[-1], run.x("tokens", steps[-1])
            text = "; ".join(compare(value, tokens, reference) for reference in known)
            place = f"{name} {value:.4f} after step {step:,.0f} ({brief(tokens)} tokens)"
            lines.append(f"{run.name} on {run.data}: {place}: {text}")
    return lines or [f"{run.name}: not validated after a step yet"]


def against_run(run: Run, other: Run) -> str:
    """Return how two runs compare where both were validated last, after as many tokens."""
    losses = losses_by_tokens(run)
    other_losses = losses_by_tokens(other)
    if run.tokenizer != other.tokenizer or Path(run.data).resolve() != Path(other.data).resolve():
        return f"{run.name} and {other.name} have other data: their losses can't be compared"
    # Not interpolated: early in a run, losses between two validations lie far below a line.
    tokens = max(losses.keys() & other_losses.keys() - {0}, default=0)
    if not tokens:
        return f"{run.name} and {other.name} were never validated after as many tokens"
    value, expected = losses[tokens], other_losses[tokens]
    side = "lower" if value < expected else "higher"
    return (
        f"{run.name}: validation loss {value:.4f} after {brief(tokens)} tokens,"
        f" {abs(value - expected):.4f} {side} than {other.name}'s {expected:.4f}"
    )


def losses_by_tokens(run: Run) -> dict[float, float]:
    steps, losses = run.series("val_loss")
    return dict(zip(run.x("tokens", steps), losses, strict=True))


def runs_table(runs: list[Run]) -> str:
    """Return a table of runs: the flags that differ, validations, and the time of the steps."""
    # Of all runs, since an older one may lack a flag that was added to the program meanwhile.
    flags = {name: None for run in runs for name in run.flags}
    names = [
        name
        for name in flags
        if name not in ("out_dir", "resume") and len({str(run.flags.get(name)) for run in runs}) > 1
    ]
    titles = ["steps made", "first validation", "last", "best", "minutes", "tokens/s"]
    rows = [["run", *names, *titles]]
    for run in runs:
        steps = run.series("loss")[0]
        _, losses = run.series("val_loss")
        figures = (losses[0], losses[-1], losses.min()) if len(losses) else ()
        cells = [f"{loss:.4f}" for loss in figures] or [""] * 3
        last = steps[-1] if len(steps) else 0
        flags = [str(run.flags.get(name, "")) for name in names]
        rates = run.series("tokens_per_s")[1]  # their median: the first steps are slow
        cells += [f"{run.seconds(last) / 60:.1f}", f"{np.median(rates):,.0f}" if len(rates) else ""]
        rows.append([run.name, *flags, f"{last:,.0f}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ---- The picture


def draw(runs: list[Run], references: list[dict], path: Path):
    """Draw three panels with one scale of losses."""
    if path.exists():
        raise FileExistsError(f"{path} exists: move it away, or name another file with --out")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    tokenizers = dict.fromkeys(run.tokenizer for run in runs)
    if len(tokenizers) > 1:
        raise ValueError(f"losses of {' and '.join(tokenizers)} tokens differ: draw them apart")
    losses = [r for r in references if r["what"] == "val_loss"]
    shown = [r for r in losses if any(r in alike(run, losses) for run in runs)]
    titles = list(dict.fromkeys(run.title for run in runs))
    height = 5.2 + 0.22 * (len(runs) + len(shown))  # of the panels, and of a label each
    figure = Figure(figsize=(15, height), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, axis in zip(panels, ("steps", "tokens", "minutes of steps"), strict=True):
        for number, run in enumerate(runs):
            color = f"C{number}" if len(runs) <= 10 else colormaps["turbo"](number / len(runs))
            name = run.name if len(titles) == 1 else f"{run.name}, {run.title}"
            draw_run(axes, axis, run, name, color)
        for number, reference in enumerate(shown):
            draw_reference(axes, axis, reference, number)
        axes.set(xlabel=axis, xlim=(0, axes.get_xlim()[1]))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda x, _: brief(x))
        axes.grid(alpha=0.3)
    panels[0].set(yscale="log", ylabel="loss (nats per token), dots: validation")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))  # far enough apart
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter("{x:g}")
    title = titles[0] if len(titles) == 1 else f"{len(runs)} runs"
    figure.suptitle(textwrap.fill(title, 120), fontsize=15)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center")
    figure.savefig(path, dpi=200)
    print(path)


def free_name(path: Path) -> Path:
    """Return path, or where that exists already, the same with the first free number."""
    number = 2
    free = path
    while free.exists():
        free = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return free


def brief(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.4g}"


def draw_run(axes, axis: str, run: Run, label: str, color):
    """Draw training losses, their mean over a fiftieth of the run, and validations as dots."""
    (steps, losses), (val_steps, val_losses) = run.series("loss"), run.series("val_loss")
    x = run.x(axis, steps)
    axes.plot(x, losses, color=color, linewidth=0.6, alpha=0.25, zorder=1)
    if len(steps):
        num = max(1, len(steps) // 50)
        smooth = np.convolve(losses, np.ones(num) / num, "valid")
        x = x[num // 2 :][: len(smooth)]
        axes.plot(x, smooth, color=color, linewidth=1.3, zorder=2)
        label += f": training {smooth[-1]:.3f} over the last {num:,} of {steps[-1]:,.0f} steps"
    if len(val_steps):
        label += f", validation {val_losses[-1]:.3f} after step {val_steps[-1]:,.0f}"
    x = run.x(axis, val_steps)
    [dots] = axes.plot(x, val_losses, "o", color=color, markersize=5, zorder=3)
    dots.set_label(textwrap.fill(label, 170))


def draw_reference(axes, axis: str, reference: dict, number: int):
    """Draw a line at its last figure, and its points where it has some on that axis."""
    look = {"color": str(min(0.2 * number, 0.6)), "linewidth": 1}
    label = f"{reference['name']} on {reference['data']}: {reference['value']:.4g}"
    axes.axhline(reference["value"], linestyle=(0, (3 + 5 * number, 3)), label=label, **look)
    steps, tokens, values = curve(reference)
    if axis in ("steps", "tokens"):
        axes.plot(steps if axis == "steps" else tokens, values, "x:", zorder=3, **look)


def main() -> int:
    parser = machine.OneLineParser(prog="plot.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder, or one above runs: out/001, out")
    add("--out", type=Path, help="picture to write (default: RUN/curves.png; with --against, none)")
    add("--against", metavar="NAME", help="say how runs compare with a RUN, or with reference")
    args = parser.parse_args()
    try:
        runs = read_runs(args.runs)
        other = None
        if args.against and Path(args.against, "log.jsonl").is_file():
            other = read_run(args.against)
        is_name = args.against not in (None, "reference") and not other
        references = load_references(args.against if is_name else "")
        if len(runs) > 1 and not args.against:
            print(runs_table(runs))
        if other:
            print("\n".join(against_run(run, other) for run in runs))
        elif args.against:
            for run in runs:
                print("\n".join(comparison(run, references)))
            if any(alike(run, references) for run in runs):
                print(CAVEAT)
        if args.out or not args.against:
            # Beside the run: the run itself draws loss.png, so this has another name.
            draw(runs, references, args.out or free_name(Path(args.runs[0], "curves.png")))
    except (OSError, ValueError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
