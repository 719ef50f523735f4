"""Draw and compare the losses of runs, beside figures that others published.

    python benchmarks/plot.py out/001                         # draws out/001/curves.png
    python benchmarks/plot.py out                             # every run below: out/curves.png
    python benchmarks/plot.py out/sweep --csv sweep.csv       # the table, for other programs
    python benchmarks/plot.py out/124M --against reference    # is my loss normal? In words

For several runs a table shows what differs: flags, validations and time. Runs that differ only in
--seed
share a colour, and another table has their means and standard deviations. A repetition with the
same seed has a colour of its own. A run may still be training. Losses are in nats per token, so
only runs with the same tokenizer are drawn together.

reference.json holds what public sources state of GPT-2 124M. A run is compared only with references
on its own data set, which the names of its shards tell (or of the folder, if that is gone), and at
equal tokens if the reference has a curve.
"""

import csv
import json
import re
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import machine
import numpy as np

REFERENCES = Path(__file__).with_name("reference.json")
QUANTITIES = {  # what references have
    "val_loss": "validation loss",
    "hellaswag_acc": "HellaSwag accuracy",
    "hellaswag_acc_norm_tokens": "HellaSwag accuracy, normalized by tokens",
}
# Flags in which runs of the same setting may differ: a machine chooses them, or Muon (beta1), or
# they do not affect the training.
NO_SETTING = {"seed", "beta1", "micro_batch_size", "bf16", "fp16", "tf32", "compile", "flash"}
NO_SETTING |= {"fused", "bf16_residual", "num_samples", "sample_tokens", "prompt", "temperature"}
NO_SETTING |= {"top_k", "hellaswag", "wandb", "log_every", "save_every", "keep"}
START = {"model": str, "data_dir": str, "tokenizer": str}  # what we use of a run's first record
START |= {"n_layer": int, "n_embd": int, "batch_tokens": int}
SHARDS = {  # how shards or folders are named, for data sets whose reference has another name
    "FineWeb-Edu": r"(fineweb[-_]?edu|edu[-_]?fineweb)[-\w]*",
    "FineWeb": r"fineweb(\d+B)?",
}
CAVEAT = "Losses compare only on the same data set and tokenizer, and midway only at equal --steps."

# ---- Runs


@dataclass
class Run:
    """What a log holds: the record of the start, and each quantity by step."""

    name: str
    start: dict
    values: dict[str, dict[int, float]]

    @property
    def flags(self) -> dict:
        return {name: value for name, value in self.start["flags"].items() if name != "machine"}

    @property
    def tokenizer(self) -> str:
        return self.start["tokenizer"]

    @property
    def data(self) -> str:
        return self.flags["data_dir"] or "Python's own source"

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values, leaving out values that are not finite."""
        pairs = np.array(list(self.values[name].items()), float).reshape(-1, 2)
        steps, values = pairs[np.isfinite(pairs[:, 1])].T
        return steps, values

    def x(self, axis: str, steps):
        """Return steps in the unit of an axis: steps, tokens or minutes."""
        if axis == "tokens":
            return steps * self.flags["batch_tokens"]
        if axis == "minutes of steps":
            made, ms = self.series("ms")
            return np.interp(steps, [0, *made], [0, *np.cumsum(ms)]) / 60_000
        return steps


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs of these folders. A folder that is no run stands for all runs below it."""
    names = []
    for folder in folders:
        below = sorted(str(path.parent) for path in Path(folder).rglob("log.jsonl"))
        names += below if below and not Path(folder, "log.jsonl").exists() else [folder]
    runs = [read_run(name) for name in dict.fromkeys(names)]
    begun = [run for run in runs if run.values["ms"]]
    if not begun:
        raise ValueError(f"{runs[0].name} has no step yet: wait for the run's first one")
    for run in begun:
        if not run.start:
            raise ValueError(f"{run.name}: no record of its start can be read: leave it out")
    return begun


def read_run(folder: str) -> Run:
    path = Path(folder, "log.jsonl")
    # logrotate calls older parts .1, .2, ..., or by their dates.
    parts = [p for p in Path(folder).glob("log.jsonl[.-]*") if p.name[10:].isdecimal()]
    parts.sort(key=lambda p: n if (n := int(p.name[10:])) > 9999 else -n)
    parts += [path] if path.exists() else []
    if not parts:
        why = "has no log.jsonl, nor has a folder below it: name a run's folder, such as out/001"
        raise FileNotFoundError(f"{folder} {why}")
    run = Run(folder, {}, defaultdict(dict))
    content = b"".join(part.read_bytes() for part in parts)
    records = [as_record(line) for line in content.split(b"\n")[:-1]]
    if None in records:
        print(f"{path}: damaged lines, skipped: {records.count(None)}", file=sys.stderr)
    for record in filter(None, records):
        if "flags" in record:
            run.start = record
        step = record.get("step")
        if "ms" in record and step <= max(run.values["ms"], default=0):
            # The run was resumed from an earlier step: forget what it did after that.
            for name, values in run.values.items():
                run.values[name] = {n: value for n, value in values.items() if n < step}
        for name, value in record.items():
            if step is not None and (value is None or isinstance(value, int | float)):
                run.values[name][step] = value
    return run


def as_record(line: bytes) -> dict | None:
    """Return the record in a line of a log, or None if the line is damaged."""
    try:
        record = json.loads(line)
        values, kinds = record, {}
        if "flags" in record:
            values, kinds = record["flags"] | {"tokenizer": record["tokenizer"]}, START
        elif "step" in record or "ms" in record:
            kinds = {"step": int}
        is_whole = all(type(values[name]) is kind for name, kind in kinds.items())
        return record if is_whole and type(record) is dict else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


# ---- References: dicts with name, what, value, step, tokens, data, source, note, and points


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
    """Return whether a run trained on this data set, by the names of its shards or its folder."""
    folder = Path(run.flags["data_dir"] or "nowhere")
    names = [path.name.partition("_val_")[0] for path in folder.glob("*_val_*")] or [folder.name]
    pattern = SHARDS.get(data, re.escape(data))
    return any(re.fullmatch(pattern, name, re.I) for name in names)


def alike(run: Run, references: list[dict]) -> list[dict]:
    """Return the references that a run compares with: losses on its own data set, and accuracies,
    since all answer the same questions."""
    if why_none(run, references):
        return []
    return [r for r in references if r["what"] != "val_loss" or has_read(run, r["data"])]


def curve(reference: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, tokens and values; empty if only a last figure is known."""
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
    """Return a line for each quantity that both a run and references have, or why none."""
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


def differing_flags(runs: list[Run]) -> list[str]:
    flags = dict.fromkeys(name for run in runs for name in run.flags)  # an older log has fewer
    hidden = ("out_dir", "resume", "device", "eval_only", "max_hours")  # of one command, up to 1.0
    return [
        name
        for name in flags
        if len({str(run.flags.get(name)) for run in runs}) > 1 and name not in hidden
    ]


def by_setting(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seeds. A group's name has the flags in which it differs
    from others, or is the run's if it has only one. A repetition is a group of its own, since it is
    no second sample: of runs with one seed, the longest counts."""
    names = [name for name in differing_flags(runs) if name not in NO_SETTING]
    several = len({run.tokenizer for run in runs}) > 1
    longest: dict[tuple, Run] = {}  # by setting and seed
    for run in runs:
        settings = [spelled(name, run.flags.get(name)) for name in names]
        key = ", ".join(settings + [run.tokenizer] * several), str(run.flags.get("seed"))
        if key not in longest or len(run.values["ms"]) > len(longest[key].values["ms"]):
            longest[key] = run
    groups = defaultdict(list)
    for (setting, _), run in longest.items():
        groups[setting].append(run)
    for run in runs:
        if not any(run is other for other in longest.values()):
            groups[run.name].append(run)
    named = {}
    for key, group in groups.items():
        if key == group[0].name:
            key = f"{key} (same seed)"
        elif len(group) == 1:
            key = group[0].name
        elif not key:
            key = "all runs" if len(groups) == 1 else f"{group[0].name} and {len(group) - 1} more"
        named[key] = group
    return named


def spelled(name: str, value) -> str:
    """Return "no-muon" or "learning_rate 0.001"."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name} {value}"


def runs_table(runs: list[Run]) -> list[dict[str, str]]:
    """Return a row for each run: the flags that differ, validations, and the time of the steps."""
    table = []
    for run in runs:
        flags = {name: str(run.flags.get(name, "")) for name in differing_flags(runs)}
        steps, _ = run.series("loss")
        last = max(steps, default=0)
        row = {"run": run.name} | flags | {"steps made": f"{last:.0f}"}
        losses, bits = run.series("val_loss")[1], run.series("bits_per_byte")[1]
        row["last validation"] = f"{losses[-1]:.4f}" if len(losses) else ""
        row["best"] = f"{losses.min():.4f}" if len(losses) else ""
        row["bits per byte"] = f"{bits[-1]:.4f}" if len(bits) else ""
        row["minutes"] = f"{run.x('minutes of steps', last):.1f}"
        rates = run.series("tokens_per_s")[1]  # take the median: the first steps are slow
        row["tokens/s"] = f"{np.median(rates):.0f}" if len(rates) else ""
        table.append(row)
    return table


def means_table(groups: dict[str, list[Run]]) -> list[dict[str, str]]:
    """Return a row for each setting: its figures, over the seeds."""
    table = []
    for name, group in groups.items():
        row = {"setting": name, "seeds": str(len(group))}
        row["validation"], row["standard deviation"] = mean(group, "val_loss")
        row["bits per byte"], row["standard deviation of bits per byte"] = mean(
            group, "bits_per_byte"
        )
        table.append(row)
    return table


def mean(runs: list[Run], quantity: str) -> tuple[str, str]:
    """Return the mean of a quantity, and its standard deviation over the runs, after the last step
    that all have reached."""
    common = set.intersection(*({*run.values[quantity]} for run in runs))
    if not common:
        return "", ""
    values = [run.values[quantity][max(common)] for run in runs]
    deviation = f"{np.std(values, ddof=1):.4f}" if len(runs) > 1 else ""
    return f"{np.mean(values):.4f}", deviation


def write_csv(path: Path, rows: list[dict[str, str]]):
    with open(path, "x", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(path)


# ---- The picture


def draw(runs: list[Run], references: list[dict], path: Path):
    """Draw losses by steps, tokens and minutes, in three panels that share the scale of losses."""
    if path.exists():
        raise FileExistsError(f"{path} exists: move it away, or name another file with --out")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    unit = "nats per token"
    if len({run.tokenizer for run in runs}) > 1:  # whose losses can't be compared
        runs, references, unit = [in_bits_per_byte(run) for run in runs], [], "bits per byte"
    # The panels, and a label for each run.
    groups = by_setting(runs)
    figure = Figure(figsize=(15, 5.2 + 0.22 * len(groups)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, axis in zip(panels, ("steps", "tokens", "minutes of steps"), strict=True):
        for number, (name, group) in enumerate(groups.items()):
            # Ten colours, and for more settings twenty of which two are alike.
            color = f"C{number}" if len(groups) <= 10 else colormaps["tab20"](number % 20)
            for run in group:
                label = describe(name, group) if run is group[0] else None
                draw_run(axes, axis, run, color, label)
        for reference in references:
            is_shown = reference["what"] == "val_loss" and any(alike(r, [reference]) for r in runs)
            if is_shown and axis != "minutes of steps":
                steps, tokens, values = curve(reference)
                label = f"{reference['name']} on {reference['data']}: {reference['value']:.4g}"
                x = steps if axis == "steps" else tokens
                axes.plot(x, values, "x:", color="#606060", label=label)
        axes.set(xlabel=axis, xlim=(-axes.get_xlim()[1] / 50, axes.get_xlim()[1]))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda x, _: brief(x))
        axes.grid(alpha=0.3)
    panels[0].set(yscale="log", ylabel=f"loss ({unit}, log scale), dots: validation")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].yaxis.set_major_formatter("{x:g}")
    titles = dict.fromkeys(f"{run.flags['model']} on {run.data}" for run in runs)
    texts = {str(run.start.get("preparation", {}).get("files")) for run in runs}
    title = "; ".join(titles) + (" (different texts: not comparable)" if len(texts) > 1 else "")
    title = textwrap.fill(title, 120)
    figure.suptitle(title, fontsize=15, parse_math=False)  # a name may hold $
    legend = figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center")
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.savefig(path, dpi=200)
    print(path)


def in_bits_per_byte(run: Run) -> Run:
    """Return a run whose validations are in bits per byte. It has no training losses, because the
    log does not say how many bytes its training tokens have."""
    bits = run.values["bits_per_byte"]
    if not any(bits.values()):
        why = "has no validation in bits per byte"
        raise ValueError(f"{run.name} {why}, and losses of other tokens differ: leave it out")
    return replace(run, values=run.values | {"loss": {}, "val_loss": bits})


def brief(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.4g}"


def describe(name: str, group: list[Run]) -> str:
    """Return a label for runs that differ only in their seeds."""
    if len(group) > 1:
        loss = " ± ".join(filter(None, mean(group, "val_loss")))
        return f"{name}: validation {loss}, {len(group)} seeds"
    (steps, _), (val_steps, val_losses) = group[0].series("loss"), group[0].series("val_loss")
    if len(steps):
        values, num = smoothed(group[0])
        name += f": training {values[-1]:.3f} over the last {num:,} of {steps[-1]:,.0f} steps"
    if len(val_steps):
        name += f", validation {val_losses[-1]:.3f} after step {val_steps[-1]:,.0f}"
    return name


def smoothed(run: Run) -> tuple[np.ndarray, int]:
    """Return means of the training loss over a fiftieth of the run, and the number of steps in
    each."""
    losses = run.series("loss")[1]
    num = max(1, len(losses) // 50)
    return np.convolve(losses, np.ones(num) / num, "valid"), num


def draw_run(axes, axis: str, run: Run, color, label: str | None):
    """Draw training losses, their means, and validations as dots."""
    (steps, losses), (val_steps, val_losses) = run.series("loss"), run.series("val_loss")
    x = run.x(axis, steps)
    axes.plot(x, losses, color=color, linewidth=0.6, alpha=0.25, zorder=1)
    if len(steps):
        values, num = smoothed(run)
        axes.plot(x[num // 2 :][: len(values)], values, color=color, linewidth=1.3, zorder=2)
    x = run.x(axis, val_steps)
    line = "o" if len(steps) else "o-"
    axes.plot(x, val_losses, line, color=color, markersize=5, zorder=3, label=label)


def main():
    parser = machine.OneLineParser(prog="plot.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder, or one above runs: out/001, out")
    add(
        "--out",
        type=Path,
        help="picture to write (default: RUN/curves.png; with --csv or --against none)",
    )
    add(
        "--csv",
        metavar="NAME",
        help="write the table of runs to NAME.csv, and means over seeds to NAME-means.csv",
    )
    add("--against", choices=["reference"], help="say how runs compare with published ones")
    args = parser.parse_args()
    runs = read_runs(args.runs)
    references = machine.load(REFERENCES)
    groups = by_setting(runs)
    has_seeds = any(len(group) > 1 for group in groups.values())
    if args.against:
        for run in runs:
            print("\n".join(comparison(run, references)))
        if any(alike(run, references) for run in runs):
            print(CAVEAT)
    elif len(runs) > 1:
        print(machine.markdown(runs_table(runs)))
        if has_seeds:
            print("\n" + machine.markdown(means_table(groups)))
    if args.csv:
        name = args.csv.removesuffix(".csv")
        tables = {Path(f"{name}.csv"): runs_table(runs)}
        if has_seeds:
            tables[Path(f"{name}-means.csv")] = means_table(groups)
        for path in filter(Path.exists, tables):
            raise FileExistsError(f"{path} exists: move it away, or give --csv another name")
        for path, rows in tables.items():
            write_csv(path, rows)
    if args.out or not (args.against or args.csv):
        # The run itself draws loss.png, so the picture beside it has another name.
        path = args.out or machine.unused(Path(args.runs[0], "curves.png"))
        draw(runs, references, path)


if __name__ == "__main__":
    sys.exit(machine.exit_code("plot.py", main))
