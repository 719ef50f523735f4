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
    "all": "everything on",
}

# Tokens per second of 124M on one A100, as "Let's reproduce GPT-2 (124M)" shows them.
LECTURE = {
    "base": 16_000,
    "tf32": 49_000,
    "bf16": 54_500,
    "compile": 126_000,
    "flash": 170_000,
    "pad-vocab": 175_000,
    "fused": 182_000,
}


def is_beyond(name: str) -> bool:
    """Say whether a rung is beyond the lecture, so that the next rung does not build on it."""
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
    """Return a rung's name, with a plus where it is added to the rungs above."""
    has_no_plus = name in ("base", "all") or name.endswith("ranks") or name.startswith("without")
    return NAMES.get(name, name) if has_no_plus else f"+ {NAMES.get(name, name)}"


def last_run(rung: dict) -> str:
    if rung["state"] != "measured":
        return f"{title(rung['name'])}: {rung['state']}: {rung['why']}"
    ms = round_ms(rung)[-1]
    tokens_per_s = 1000 * rung["flags"]["batch-tokens"] / ms
    return f"{title(rung['name'])}: {ms:,.1f} ms, {tokens_per_s:,.0f} tokens/s"


def rows(content: dict) -> list[dict]:
    """Return the table: for each rung a dict from column to text."""
    table, lecture = [], []
    for rung in content["rungs"]:
        if rung["state"] != "measured":
            state = rung["state"].replace("not on this device", "not here")
            table.append({"rung": title(rung["name"]), "ms": state})
            continue
        base = measured(content)[0]
        before = lecture[-1] if lecture else rung
        if not is_beyond(rung["name"]):
            lecture.append(rung)
        row = {"rung": title(rung["name"])}
        row["ms"] = f"{1000 * rung['flags']['batch-tokens'] / speed(rung):,.1f}"
        row["tokens/s"] = f"{speed(rung):,.0f}"
        if content["settings"]["leave_one_out"]:
            row["brings"] = f"{speed(base) / speed(rung):.2f}"
        else:
            row["x before"] = f"{speed(rung) / speed(before):.2f}"
            row["x base"] = f"{speed(rung) / speed(base):.2f}"
        row["of matmul"] = f"{mean(run['matmul_share'] for run in rung['runs']):.0%}"
        row["MiB"] = f"{max(run['peak_mib'] for run in rung['runs']):,.0f}"
        row["difference"] = small(rung["difference"]["loss"]) if "difference" in rung else ""
        table.append(row)
    return table


def small(share: float) -> str:
    return f"{share:.0e}" if share else "0"


def notes(content: dict) -> list[str]:
    """Return why a rung has no figure, what disturbed one, and what was compared alone."""
    lines, alone = [], {}
    for rung in content["rungs"]:
        name = NAMES.get(rung["name"], rung["name"])
        drift = max(round_ms(rung), default=1) / min(round_ms(rung), default=1) - 1
        if rung["state"] != "measured":
            lines.append(f"{name}: {rung['state']}: {rung['why']}")
        elif rung["why"]:
            lines.append(f"{name}: {rung['why']}")
        if drift > 0.1:
            lines.append(f"{name}: its two rounds differ by {drift:.0%}")
        if rung["state"] == "measured" and "alone" in rung:
            alone[name] = rung["alone"]["loss"]
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
    changed = f" and changes to {', '.join(env['changed'])}" if env["changed"] else ""
    where = f"torch {env['torch']}, {content['date']}, commit {env['commit'][:7]}{changed}"
    rounds = max(len(rung["runs"]) for rung in content["rungs"])
    steps = f"Median of {content['settings']['steps']} steps in each of {rounds} rounds"
    return f"{size}, {where}. {steps}"


def block(contents: dict[str, dict]) -> str:
    """Return what benchmarks/README.md shows of these results, by file name."""
    parts = []
    for name, content in contents.items():
        files = f"[figures](results/{name}), [picture](results/{Path(name).with_suffix('.png')})"
        parts.append(f"**{heading(content)}**: {conditions(content)} ({files}).")
        parts.append(machine.markdown(rows(content)))
        if lines := notes(content):
            parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def draw(content: dict, path: Path):
    """Draw a bar for each rung: how many times as fast as the first one it is. Beside the rungs of
    124M stand the lecture's, in a panel and on a scale of their own: that was another device."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    rungs = content["rungs"]
    speeds = {r["name"]: speed(r) if r["state"] == "measured" else 0 for r in rungs}
    panels = {heading(content): ("#1f6feb", speeds)}
    # Not of a ladder that begins with everything on: the lecture has no such row.
    if rungs[0]["flags"]["model"] == "gpt2" and rungs[0]["name"] in LECTURE:
        panels["GPT-2 124M on an A100 in the lecture"] = ("#b0b7c3", LECTURE)
    height = 1.4 + 0.42 * len(rungs)
    figure = Figure(figsize=(5 + 4 * len(panels), height), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    titles = [title(rung["name"]) for rung in rungs]
    for axes, (label, (color, shown)) in zip(all_axes, panels.items(), strict=True):
        values = [shown.get(rung["name"], 0) for rung in rungs]
        ratios = [value / values[0] for value in values]
        bars = axes.barh(titles, ratios, color=color)
        texts = [
            f"{ratio:.2f}  {value:,.0f} tokens/s" if value else "not measured"
            for ratio, value in zip(ratios, values, strict=True)
        ]
        axes.bar_label(bars, texts, padding=4, fontsize=9, color="#303030")
        axes.set(xlabel=f'times as fast as "{titles[0]}"', xlim=(0, 1.5 * max(ratios)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(label, fontsize=12)
    all_axes[0].invert_yaxis()
    figure.savefig(path, dpi=200)
