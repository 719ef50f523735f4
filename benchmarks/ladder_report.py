"""Show what ladder.py measured: as a table, and as a picture."""

import sys
from pathlib import Path
from statistics import mean, median

import machine

SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad-vocab", "fused")  # in the lecture's order
NAMES = {
    "base": "float32, everything off",
    "tf32": "TF32",
    "bf16": "BF16 autocast",
    "compile": "torch.compile",
    "flash": "flash attention",
    "pad-vocab": "padded vocabulary",
    "fused": "fused AdamW",
    "bf16-residual": "BF16 residual stream",
    "loss-chunk-tokens": "loss in chunks",
    "recompute": "recompute blocks",
    "fp16": "FP16 instead of BF16",
    "muon": "Muon for the matrices",
}


def is_beyond(name: str) -> bool:
    """Return whether a rung is beyond the lecture, so that the next rung does not build on it."""
    return name not in ("base", *SPEED_UPS, "accumulation") and not name.endswith("ranks")


def measured(content: dict) -> list[dict]:
    return [rung for rung in content["rungs"] if rung["state"] == "measured"]


def round_ms(rung: dict) -> list[float]:
    """Return the median time of a step in each round."""
    return [median(run["ms"][machine.WARM_UP :]) for run in rung["runs"]]


def speed(rung: dict) -> float:
    """Return tokens per second, the mean over the rounds."""
    return mean(1000 * rung["flags"]["batch-tokens"] / ms for ms in round_ms(rung))


def title(name: str) -> str:
    """Return a rung's name, with a plus if it is added to the rungs above."""
    has_plus = name != "base" and not name.endswith("ranks")
    return f"{'+ ' if has_plus else ''}{NAMES.get(name, name)}"


def last_run(rung: dict) -> str:
    if rung["state"] != "measured":
        return f"{title(rung['name'])}: {rung['state']}: {rung['why']}"
    ms = round_ms(rung)[-1]
    tokens_per_s = 1000 * rung["flags"]["batch-tokens"] / ms
    return f"{title(rung['name'])}: {ms:,.1f} ms, {tokens_per_s:,.0f} tokens/s"


def rows(content: dict) -> list[dict]:
    """Return the table: for each rung a dict from column to text."""
    table = []
    base = before = content["rungs"][0]
    for rung in content["rungs"]:
        row = {"rung": title(rung["name"])}
        table.append(row)
        if rung["state"] != "measured":
            row["ms"] = rung["state"].replace("not on this device", "not here")
            continue
        row["ms"] = f"{1000 * rung['flags']['batch-tokens'] / speed(rung):,.1f}"
        row["tokens/s"] = f"{speed(rung):,.0f}"
        row["x before"] = f"{speed(rung) / speed(before):.2f}"
        row["x base"] = f"{speed(rung) / speed(base):.2f}"
        row["MiB"] = f"{max(run['peak_mib'] for run in rung['runs']):,.0f}"
        row["difference"] = small(rung["difference"]["loss"]) if "difference" in rung else ""
        if not is_beyond(rung["name"]):
            before = rung
    return table


def small(share: float) -> str:
    return f"{share:.0e}" if share else "0"


def notes(content: dict) -> list[str]:
    """Return why a rung has no figure, what disturbed one, and what was compared alone."""
    lines, alone = [], {}
    for rung in content["rungs"]:
        name = NAMES.get(rung["name"], rung["name"])
        if rung["state"] != "measured":
            lines.append(f"{name}: {rung['state']}: {rung['why']}")
            continue
        if rung["why"]:
            lines.append(f"{name}: {rung['why']}")
        drift = max(round_ms(rung)) / min(round_ms(rung)) - 1
        if drift > 0.1:
            lines.append(f"{name}: its two rounds differ by {drift:.0%}")
        if "alone" in rung:
            alone[name] = rung["alone"]["loss"]
    if max((len(rung["runs"]) for rung in content["rungs"]), default=0) == 1:
        lines.append(machine.ONE_ROUND)
    if alone:
        differ = f"losses differ by at most {small(max(alone.values()))}"
        lines.append(f"Alone on the float32 base, {', '.join(alone)}: {differ}")
    return lines


def heading(content: dict) -> str:
    """Return what was measured, and where."""
    env = content["environment"]
    model = content["rungs"][0]["flags"]["model"].replace("gpt2", "GPT-2 124M")
    cores = f", {env['cores']} cores" if env["device"] == "cpu" else ""
    return f"{model} on {machine.short_name(env['device_name'])}{cores}"


def conditions(content: dict) -> str:
    env, flags = content["environment"], content["rungs"][0]["flags"]
    size = f"{flags['micro-batch-size']} x {flags['seq-len']} tokens per pass"
    where = f"torch {env['torch']}, {content['date']}, {machine.version(env)}"
    rounds = max(len(rung["runs"]) for rung in content["rungs"])
    each = f" in each of {rounds} rounds" if rounds > 1 else ""
    return f"{size}, {where}. Median of {content['settings']['steps']} steps{each}"


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results, by file name."""
    parts = []
    for name, content in contents.items():
        files = f"[figures]({name}), [picture]({Path(name).with_suffix('.png')})"
        parts.append(f"**{heading(content)}**: {conditions(content)} ({files}).")
        parts.append(machine.markdown(rows(content)))
        if lines := notes(content):
            parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def draw(content: dict, path: Path):
    """Draw a bar for each rung: how many times as fast as the first one it is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    rungs = content["rungs"]
    titles = [title(rung["name"]) for rung in rungs]
    speeds = [speed(rung) if rung["state"] == "measured" else 0 for rung in rungs]
    ratios = [value / speeds[0] for value in speeds]
    texts = []
    for ratio, value in zip(ratios, speeds, strict=True):
        texts.append(f"{ratio:.2f}  {value:,.0f} tokens/s" if value else "not measured")
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(rungs)), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.barh(titles, ratios, color="#1f6feb"), texts, padding=4, color="#303030")
    axes.set(xlabel=f'times as fast as "{titles[0]}"', xlim=(0, 1.5 * max(ratios)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(heading(content), fontsize=12)
    axes.invert_yaxis()
    figure.savefig(path, dpi=200)
