"""Show the results of runs, as tables and as a picture, beside published figures.

    python benchmarks/plot.py out/001                         # draws out/001/curves.png
    python benchmarks/plot.py out                             # every run below: out/curves.png
    python benchmarks/plot.py out --x tokens --out x.svg      # one panel, into this file

Losses are drawn in bits per byte if all runs have validations in that unit, else in nats per token.
In bits per byte, training losses are converted with the bytes per token of the validation text.

Runs that differ only in --seed share a colour, and a table has their means and standard deviations.
Means cover complete runs only; a run that is still training is drawn, but not averaged.

reference.json holds published figures for GPT-2 124M. A run of that network, from random weights
and with GPT-2's tokens, is shown beside the losses on the same data set, which is recognized by the
names of its shards or of their folder. Midway, they are comparable only at equal --steps.
"""

import json
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import machine
import numpy as np

from support.cli import spell

REFERENCES = Path(__file__).with_name("reference.json")
UNITS = {"val_loss": "nats per token", "bits_per_byte": "bits per byte"}
FORMATS = {  # of the columns of a table
    "nats per token": "{:.4f}",
    "bits per byte": "{:.4f}",
    "ms": "{:,.1f}",
    "tokens/s": "{:,.0f}",
    "MFU": "{:.1%}",
    "MiB": "{:,.0f}",
}
AXES = ("steps", "tokens", "minutes")

# ---- Runs ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a log holds: the record of the start, each quantity by step, and how it ended."""

    name: str
    start: dict
    values: dict[str, dict[int, float]]
    is_complete: bool

    @property
    def flags(self) -> dict:
        return {name: value for name, value in self.start["flags"].items() if name != "machine"}

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values."""
        pairs = np.array([*self.values[name].items()], float).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def last(self, name: str) -> float | None:
        """Return the last value, or None if there is none."""
        return next(reversed(self.values[name].values()), None)

    def figures(self) -> dict[str, float | None]:
        """Return the figures of FORMATS, where the log has them."""
        values = [self.last(name) for name in UNITS]
        for name in ("ms", "tokens_per_s", "mfu"):  # medians: the first steps are slow
            values.append(np.median(self.series(name)[1]) if self.values[name] else None)
        values.append(max(self.values["peak_mib"].values(), default=None))
        return dict(zip(FORMATS, values, strict=True))

    def x(self, axis: str, steps):
        """Return steps in the unit of an axis. Minutes are those of steps, without evaluations."""
        if axis == "tokens":
            return steps * self.flags["batch_tokens"]
        if axis == "minutes":
            made, ms = self.series("ms")
            return np.interp(steps, [0, *made], [0, *np.cumsum(ms)]) / 60_000
        return steps


def read_run(folder: str) -> Run:
    """Read a run's log. Steps that a resumed run has repeated count once."""
    records = machine.read_log(Path(folder))
    start: dict = {}
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        start = record if "flags" in record else start
        step = record.get("step")
        if "ms" in record and step <= max(values["ms"], default=0):
            # The run was resumed from an earlier step: forget what it did after that.
            for name, by_step in values.items():
                values[name] = {n: value for n, value in by_step.items() if n < step}
        for name, value in record.items():
            if step is not None and isinstance(value, int | float):
                values[name][step] = value
    return Run(folder, start, values, bool(records) and "done" in records[-1])


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs that have made a step. A folder that is not a run stands for those below it."""
    names = []
    for folder in folders:
        below = sorted(str(path.parent) for path in Path(folder).rglob("log.jsonl"))
        names += below if below and not Path(folder, "log.jsonl").exists() else [folder]
    runs = [run for run in map(read_run, dict.fromkeys(names)) if run.start and run.values["ms"]]
    if not runs:
        raise ValueError(f"{names[0]} holds no run that has made a step: name a folder like out/1")
    return runs


# ---- Settings: runs that differ only in their seeds ----------------------------------------------


def differing_flags(runs: list[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.flags)  # an older log has fewer
    return [name for name in names if len({str(run.flags.get(name)) for run in runs}) > 1]


def by_setting(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seeds. A group is named after the flags in which it
    differs from others, or after its run if it has only one."""
    names = [name for name in differing_flags(runs) if name != "seed"]
    groups = defaultdict(list)
    for run in runs:
        groups[" ".join(spell(name, run.flags.get(name)) for name in names)].append(run)
    titles = {}
    for key, group in groups.items():
        titles[group[0].name if len(group) == 1 else key or "all runs"] = group
    return titles


def mean(group: list[Run], column: str) -> str:
    """Return the mean and standard deviation of a column of FORMATS over the complete runs. An
    incomplete run's value would be that of another step."""
    values = [run.figures()[column] for run in group if run.is_complete]
    values = [value for value in values if value is not None]
    if not values:
        return ""
    text = FORMATS[column].format(np.mean(values))
    if len(values) > 1:
        text += " ± " + FORMATS[column].format(np.std(values, ddof=1))
    return text


def count(group: list[Run]) -> str:
    """Return how many runs a mean is of."""
    num_missing = sum(not run.is_complete for run in group)
    if num_missing:
        return f"{len(group) - num_missing} of {len(group)} runs, {num_missing} not complete"
    return f"{len(group)} runs"


def print_tables(runs: list[Run]):
    """Print a row for each run and, if some differ only in their seeds, one for each setting."""
    table = []
    for run in runs:
        row = {"run": run.name} | {name: str(run.flags.get(name)) for name in differing_flags(runs)}
        row["steps"] = f"{max(run.values['ms'])}" + ("" if run.is_complete else ", not complete")
        for column, value in run.figures().items():
            row[column] = "" if value is None else FORMATS[column].format(value)
        table.append(row)
    print(machine.markdown(table))
    groups = {name: group for name, group in by_setting(runs).items() if len(group) > 1}
    if groups:
        table = []
        for name, group in groups.items():
            row = {"setting": name, "mean of": count(group)}
            table.append(row | {column: mean(group, column) for column in FORMATS})
        print("\n" + machine.markdown(table))


# ---- References: dicts with name, what, value, step, tokens, data, source, note, and points ------


def data_set(run: Run) -> str:
    """Return which of the references' data sets a run read, by the names of its shards or of their
    folder, or an empty string for any other."""
    folder = Path(run.flags["data_dir"])
    name = next((path.name for path in folder.glob("*_val_*")), folder.name).lower()
    if "fineweb" in name:
        return "FineWeb-Edu" if "edu" in name else "FineWeb"
    return "OpenWebText" if "openwebtext" in name else ""


def alike(run: Run, references: list[dict]) -> list[dict]:
    """Return the references whose losses can be compared with a run's."""
    flags = run.flags
    is_gpt2 = (flags["n_layer"], flags["n_embd"], run.start["tokenizer"]) == (12, 768, "gpt2")
    if not is_gpt2 or flags["init_from"]:
        return []
    return [r for r in references if r["what"] == "val_loss" and r["data"] == data_set(run)]


def curve(reference: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and losses; empty if only a last figure is known."""
    steps, losses = np.array(reference.get("points", [])).reshape(-1, 2).T
    return steps * (reference["tokens"] or 0) / (reference["step"] or 1), losses


def comparison(run: Run, references: list[dict]) -> list[dict[str, str]]:
    """Return a row for each reference: a run's last loss, the reference's at as many tokens, and
    its last one."""
    table = []
    for reference in alike(run, references) if run.values["val_loss"] else []:
        tokens, (at_tokens, losses) = run.x("tokens", max(run.values["val_loss"])), curve(reference)
        row = {"run": run.name, "after": f"{tokens / 1e6:,.1f}M tokens"}
        row["validation loss"] = f"{run.last('val_loss'):.4f}"
        row["reference"] = f"{reference['name']} on {reference['data']}"
        if len(at_tokens) and tokens <= at_tokens[-1]:
            row["at as many tokens"] = f"{np.interp(tokens, at_tokens, losses):.4f}"
        row["at its end"] = f"{reference['value']:.4f}"
        table.append(row)
    return table


# ---- The picture ---------------------------------------------------------------------------------


def find_unit(runs: list[Run], references: list[dict]) -> str:
    """Return the quantity to draw: "bits_per_byte" if all runs have it and there are no references,
    which are in nats; else "val_loss"."""
    if all(run.values["bits_per_byte"] for run in runs) and not references:
        return "bits_per_byte"
    if len({run.start["tokenizer"] for run in runs}) > 1:
        raise ValueError("tokenizers differ, and some runs have no bits per byte: leave those out")
    return "val_loss"


def draw(runs: list[Run], references: list[dict], path: Path, axis_names: list[str]):
    """Draw losses in a panel for each axis. The panels share the scale of losses."""
    if path.exists():
        raise FileExistsError(f"{path} exists: move it away, or name another file with --out")
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    references = [r for r in references if "points" in r and any(alike(run, [r]) for run in runs)]
    quantity = find_unit(runs, references)
    groups = by_setting(runs)
    size = (3 + 4 * len(axis_names), 5.2 + 0.22 * (len(groups) + len(references)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(axis_names), sharey=True, squeeze=False)[0]
    for axes, axis in zip(panels, axis_names, strict=True):
        for number, (name, group) in enumerate(groups.items()):
            label = describe(name, group, quantity)
            for run in group:
                draw_run(axes, axis, run, quantity, color=f"C{number % 10}", label=label)
                label = None  # one entry in the legend for all runs of the group
        for reference in references if axis == "tokens" else []:
            label = f"{reference['name']} on {reference['data']}: {reference['value']:.4g}"
            axes.plot(*curve(reference), "x:", color="#606060", label=label)
        axes.set(xlabel=axis)
        axes.locator_params(axis="x", nbins=5)
        if axis != "minutes":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 10k, 1M
        axes.grid(alpha=0.3)
    panels[0].set(yscale="log", ylabel=f"loss ({UNITS[quantity]}, log scale), dots: validation")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter("{x:g}")
    titles = dict.fromkeys(f"{run.flags['model']} on {run.flags['data_dir']}" for run in runs)
    # A name may hold $, which would begin a formula.
    figure.suptitle(textwrap.fill("; ".join(titles), 40 * len(axis_names)), parse_math=False)
    entries = {}  # of the legend: a reference is in the panel of tokens alone
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    legend = figure.legend(entries.values(), entries.keys(), loc="outside lower center")
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=200)
    print(path)


def describe(name: str, group: list[Run], quantity: str) -> str:
    """Return a label for runs that differ only in their seeds."""
    if len(group) > 1:
        return f"{name}: validation {mean(group, UNITS[quantity])}, mean of {count(group)}"
    values = group[0].values[quantity]
    last = f": validation {values[max(values)]:.4f} after step {max(values)}" if values else ""
    return name + last


def draw_run(axes, axis: str, run: Run, quantity: str, **style):
    """Draw training losses, their means over a fiftieth of the run, and validations as dots."""
    (steps, losses), (val_steps, val_losses) = run.series("loss"), run.series(quantity)
    if quantity == "bits_per_byte":
        losses = losses * run.last("bits_per_byte") / run.last("val_loss")
    color, x = style["color"], run.x(axis, steps)
    axes.plot(x, losses, color=color, linewidth=0.6, alpha=0.25, zorder=1)
    width = len(steps) // 50 + 1
    means = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(x[width // 2 :][: len(means)], means, color=color, linewidth=1.3, zorder=2)
    axes.plot(run.x(axis, val_steps), val_losses, "o", markersize=5, zorder=3, **style)


def main():
    parser = machine.make_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder, or one above runs: out/001, out")
    add("--out", type=Path, help="picture: x.png, x.svg, ... (default: curves.png in first RUN)")
    add("--x", choices=AXES, help="draw one panel, over this (default: three panels)")
    args = parser.parse_args()
    runs, references = read_runs(args.runs), json.loads(REFERENCES.read_text(encoding="utf-8"))
    print_tables(runs)
    if table := [row for run in runs for row in comparison(run, references)]:
        print("\n" + machine.markdown(table))
    path = args.out or machine.unused(Path(args.runs[0], "curves.png"))
    draw(runs, references, path, [args.x] if args.x else [*AXES])


if __name__ == "__main__":
    sys.exit(machine.exit_code(main))
