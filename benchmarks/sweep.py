"""Run train_gpt2.py once for each combination of flags, and show what each setting brings.

    python benchmarks/sweep.py --name rates -- --model nano --learning-rate 4e-3,8e-3 \\
        --muon,--no-muon --seed 1337,1338
    python benchmarks/sweep.py --name rates --until-loss-of no-muon -- ...   # the same flags
    python benchmarks/sweep.py --name sizes --discard -- --steps 7 --model gpt2,gpt2-xl \\
        ',--recompute --loss-chunk-tokens=1024'

The flags of train_gpt2.py come after "--". A comma separates alternatives: values of a flag, or
whole flags. In quotes, an alternative may be several flags, or none. Runs that differ only in
--seed share a row of the table. On a CPU, later runs of the same network and length reuse the
speed-ups that earlier ones chose, so that their times are comparable. With --until-loss-of it also
shows what share of a baseline's tokens each setting needs to reach the baseline's last loss. The
baseline is the best setting that has the flags named, without their dashes.

Runs are in out/sweep/NAME. Repeat the command to continue an interrupted sweep, or to add
alternatives: no run is made twice, and nothing is overwritten. A run that diverges or does not fit
in memory gets a row that says so; any other error ends the sweep.
"""

import itertools
import math
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from statistics import mean, median

import machine
import plot

RUNS = Path("out/sweep")
FEWEST_VALIDATIONS = 5  # of a run, or its tokens to a loss would be a guess between two of them
MEASURED = ("bf16", "flash", "compile")  # flags that a run on a CPU chooses by measuring
MEASURED_FOR = {"--model", "--n-layer", "--n-head", "--n-embd", "--seq-len", "--batch-tokens"}
MEASURED_FOR |= {"--init-from", "--steps"}
DIVERGED = 4  # train_gpt2.py's exit code when the loss is not finite
COLUMNS = {  # of the table: the figure of a run, and how it is written
    "validation loss": ("val_loss", "{:.3f}"),
    "bits per byte": ("bits_per_byte", "{:.3f}"),
    "sequences in a pass": ("micro_batch_size", "{:,.0f}"),
    "ms": ("ms", "{:,.1f}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "MFU": ("mfu", "{:.0%}"),
    "MiB": ("peak_mib", "{:,.0f}"),
}

# ---- The grid


def combinations(words: list[str]) -> list[list[str]]:
    """Return the flags of each run."""
    joined = []  # words, with each value joined to its flag: --seed=1, not --seed 1
    for word in words:
        is_name = joined and joined[-1].startswith("--") and not set("=,") & set(joined[-1])
        if is_name and not word.startswith(("--", ",")):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    grid = [alternatives(word) for word in joined]
    return [shlex.split(" ".join(chosen)) for chosen in itertools.product(*grid)]


def alternatives(word: str) -> list[str]:
    """Return what a word of the grid stands for: several flags, or one with several values."""
    first, *others = word.split(",")
    if "=" in first and not any(other.startswith("--") for other in others):
        others = [f"{first.partition('=')[0]}={value}" for value in others]
    return [first, *others]


def name_of(flag: str) -> str:
    return re.split("[= ]", flag)[0].replace("_", "-")


def setting(run: dict) -> tuple[str, ...]:
    """Return a run's flags except for its seed."""
    return tuple(flag for flag in run["flags"] if not flag.startswith("--seed="))


def differing(flags, of_all: list) -> list[str]:
    """Return those of the flags that not all have."""
    return [flag for flag in flags if not all(flag in other for other in of_all)]


# ---- Runs


def new_run(name: str, flags: list[str], wanted: list[list[str]]) -> dict:
    """Return a run that is not started yet. Its folder is named after the flags that differ."""
    text = ",".join(flag.strip("-") for flag in differing(flags, wanted)) or "run"
    text = "".join(c if c.isalnum() or c in "=.,-" else "-" for c in text)
    folder = machine.unused(RUNS / name / text)
    folder.mkdir(parents=True)
    return {"flags": flags, "folder": folder.as_posix(), "state": "not finished"}


def train(run: dict, choices: dict[str, bool]) -> dict:
    """Start or continue a run, with these choices unless its own flags say otherwise. Return what
    it measured, or how it failed."""
    if {name_of(flag) for flag in run["flags"]} & {"--fp16", "--bf16-residual"}:
        choices = {name: is_on for name, is_on in choices.items() if name != "bf16"}
    switches = [f"--{name}" if is_on else f"--no-{name}" for name, is_on in choices.items()]
    command = [sys.executable, machine.TRAIN, *switches, *run["flags"]]
    code, errors = machine.run_quietly([*command, "--auto-resume", f"--out-dir={run['folder']}"])
    if code == 0:
        return figures(plot.read_run(run["folder"]), {name_of(flag) for flag in run["flags"]})
    why = machine.error_line(code, errors)
    if "gradient norm" in why:
        return {"state": "diverged", "why": why}
    if machine.is_out_of_memory(code, why):
        return {"state": "does not fit", "why": why}
    if "belongs to a live run" in why:
        cure = "wait for the other sweep of this name, or use another --name"
        raise ValueError(f"{run['folder']} is a live run: {cure}")
    raise ValueError(f"{shlex.join(run['flags'])}: {why}")


def figures(run: plot.Run, typed: set[str]) -> dict:
    """Return what a run measured. `typed` are the flags that it was given."""
    steps, losses = run.series("val_loss")
    curve = {"tokens": run.x("tokens", steps).tolist(), "val_loss": losses.tolist()}
    found = {"state": "done", "environment": machine.environment(run.start)}
    found |= {"micro_batch_size": run.flags["micro_batch_size"], "curve": curve}
    for name in ("val_loss", "bits_per_byte"):
        found[name] = next(reversed(run.series(name)[1].tolist()), None)
    for name in ("ms", "tokens_per_s", "mfu"):
        values = run.series(name)[1].tolist()[machine.WARM_UP :]
        found[name] = median(values) if values else None
    found["peak_mib"] = max(run.series("peak_mib")[1].tolist(), default=None)
    is_measured = found["environment"]["device"] == "cpu" and not typed & {
        "--fp16",
        "--bf16-residual",
    }
    names = [name for name in MEASURED if is_measured and f"--{name}" not in typed]
    return found | {"choices": {name: run.flags[name] for name in names}}


def measured_for(flags: list[str]) -> str:
    """Return those of a run's flags on which the choices of a CPU depend."""
    pairs = [f"--{pair}" for pair in " ".join(flags).removeprefix("--").split(" --")]
    return " ".join(sorted(pair for pair in pairs if name_of(pair) in MEASURED_FOR))


def measure(args: Namespace) -> dict:
    """Make the runs that are missing. Return the contents of the results file."""
    path = Path(args.out, f"sweep-{args.name}.json")
    content = machine.load(path) if path.exists() else {"name": args.name, "runs": []}
    content["until_loss_of"] = args.until_loss_of
    wanted = combinations(args.flags)
    for number, flags in enumerate(wanted, 1):
        run = next((run for run in content["runs"] if run["flags"] == flags), None)
        if run is None:
            run = new_run(args.name, flags, wanted)
            content["runs"].append(run)
        machine.save(path, content)  # before the run, so that its folder is found again
        if run["state"] != "not finished":
            continue
        print(f"{number}/{len(wanted)}: {run['folder']}", file=sys.stderr, flush=True)
        choices = content.setdefault("choices", {}).setdefault(measured_for(flags), {})
        found = train(run, choices)
        if "environment" in found:
            choices |= found.pop("choices") | choices
            now = found.pop("environment")
            machine.check_same(content.setdefault("environment", now), now, "device_name", "torch")
        run |= found
        machine.save(path, content)
        if args.discard:
            for checkpoint in Path(run["folder"]).glob("step_*"):
                shutil.rmtree(checkpoint)
    return content


# ---- The table


def tokens_to(loss: float, curve: dict) -> float:
    """Return the tokens at which a run reaches a loss, interpolated between two validations."""
    tokens, losses = curve["tokens"], curve["val_loss"]
    for i in range(1, len(losses)):
        if losses[i] <= loss < losses[i - 1]:
            share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
            return tokens[i - 1] + share * (tokens[i] - tokens[i - 1])
    return math.inf


def baseline(words: str, done: dict[tuple, list[dict]]) -> list[dict]:
    """Return the finished runs of the best setting that has these flags."""
    flags = {f"--{word.strip('-')}" for word in words.split()}
    known = [runs for key, runs in done.items() if flags <= set(key) and runs]
    if not known or known[0][0]["val_loss"] is None:
        raise ValueError(f"--until-loss-of {words}: no finished run has these flags and a loss")
    return min(known, key=lambda runs: mean(run["val_loss"] for run in runs))


def share_of_tokens(runs: list[dict], others: list[dict]) -> str:
    """Return the tokens that runs need to the last loss of the others, by seed, as a share."""
    if others and any(len(run["curve"]["tokens"]) < FEWEST_VALIDATIONS for run in runs):
        return "validate more often (--eval-every)"
    shares = []
    for run, other in itertools.product(runs, others):
        if set(run["flags"]) - set(setting(run)) == set(other["flags"]) - set(setting(other)):
            tokens = tokens_to(other["val_loss"], run["curve"])
            shares.append(tokens / other["curve"]["tokens"][-1])
    text = "never" if math.inf in shares else spread(shares, "{:.2f}")
    if 0 < len(shares) < len(runs):
        text += f" (of {len(shares)} of {len(runs)} seeds)"
    return text


def spread(values: list[float], form: str) -> str:
    """Return the mean of the values, with the lowest and the highest if there are several."""
    if not values:
        return ""
    text = form.format(mean(values))
    if len(set(values)) > 1:
        text += f" ({form.format(min(values))}, {form.format(max(values))})"
    return text


def rows(content: dict) -> list[dict]:
    """Return the table: for each setting a dict from column to text."""
    states, done = {}, {}
    for run in content["runs"]:
        states.setdefault(setting(run), Counter())[run["state"]] += 1
        done.setdefault(setting(run), []).extend([run] if run["state"] == "done" else [])
    others = baseline(content["until_loss_of"], done) if content["until_loss_of"] else []
    table = []
    for flags, runs in done.items():
        row = {"setting": f"`{' '.join(differing(flags, [*done])) or 'the defaults'}`"}
        row["runs"] = ", ".join(f"{count} {state}" for state, count in states[flags].items())
        for column, (name, form) in COLUMNS.items():
            values = [run[name] for run in runs if run[name] is not None]
            if values and name not in ("val_loss", "bits_per_byte"):
                values = [mean(values)]
            row[column] = spread(values, form)
        row["share of tokens"] = share_of_tokens(runs, others)
        table.append(row)
    columns = [column for column in table[0] if any(row[column] for row in table)]
    return [{column: row[column] for column in columns} for row in table]


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results, by file name."""
    parts = []
    for file, content in contents.items():
        settings = [setting(run) for run in content["runs"]]
        common = [flag for flag in settings[0] if not differing([flag], settings)]
        where = "no run is done"
        if env := content.get("environment"):
            name = machine.short_name(env["device_name"])
            where = f"{name}, torch {env['torch']}, {machine.version(env)}"
        start = f"**{content['name']}**: {where} ([figures]({file}))"
        parts.append(f"{start}. All runs have `{' '.join(common)}`.")
        parts.append(machine.markdown(rows(content)))
    return "\n\n".join(parts)


# ---- The program


def main():
    parser = machine.OneLineParser(prog="sweep.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--name", required=True, help="of the sweep")
    add("--until-loss-of", default="", metavar="FLAGS", help="compare tokens with this baseline's")
    add("--discard", action="store_true", help="delete a run's checkpoints once it is measured")
    add("--out", default=RUNS, help="folder of the results (default: out/sweep)")
    add("flags", nargs="+", help="flags of train_gpt2.py, after --")
    if not {"--", "-h", "--help"} & {*sys.argv}:
        raise ValueError("put the flags of train_gpt2.py after --, as --help shows")
    args = parser.parse_args()
    if any(flag.startswith(("--out-dir", "--out_dir")) for flag in args.flags):
        raise ValueError(f"leave --out-dir out: the runs are in {RUNS / args.name}")
    print(block({f"sweep-{args.name}.json": measure(args)}))
    print(f"\nThe curves: python benchmarks/plot.py {RUNS / args.name}")


if __name__ == "__main__":
    sys.exit(machine.exit_code("sweep.py", main))
