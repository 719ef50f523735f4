"""benchmarks/tokens_to_loss.py: what it reckons from curves, and as a program."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import tokens_to_loss
from test_ladder import benchmark, copy_of_project


def made(optimizer: str, losses: dict[int, float], seed=1337, rate=4e-3, length=1) -> dict:
    """A run of nano with these losses by step."""
    own = {"network": "nano", "optimizer": optimizer, "seed": seed, "rate": rate, "end": 0.1}
    own |= {"length": length, "beta1": 0.9}
    curve = {"step": [*losses], "loss": [*losses.values()]}
    return own | curve | {"tokens_per_step": 2048}


def test_a_loss_is_reached_between_two_validations():
    run = made("AdamW", {0: 6.0, 10: 4.0, 20: 2.0, 30: 3.0})
    steps = [tokens_to_loss.reached(run, loss) for loss in (3.5, 2.0, 7.0, 1.0)]
    assert steps == [12.5, 20, 0, math.inf]


def results() -> dict:
    """AdamW ends at 2.0 after 20 steps; Muon is there after 10, or, where it plans for fewer, after
    8."""
    runs = []
    for seed in tokens_to_loss.SEEDS:
        runs.append(made("AdamW", {0: 6.0, 20: 2.0}, seed))
        runs.append(made("Muon", {0: 6.0, 10: 2.0, 20: 1.0}, seed))
        runs.append(made("Muon", {0: 6.0, 8: 2.0, 9: 1.5}, seed, length=tokens_to_loss.SHORT))
        # Better with the first seed, and worse on average.
        runs.append(made("AdamW", {0: 6.0, 20: 1.9 if seed == 1337 else 2.5}, seed, rate=8e-3))
        runs.append(made("Muon", {0: 6.0, 20: 0.9 if seed == 1337 else 1.5}, seed, rate=8e-3))
    runs.append(made("Muon", {0: 6.0, 20: 0.5}, rate=16e-3))  # one seed alone is no proof
    env = {"device_name": "a CPU", "cores": 2, "torch": "2.13.0"}
    return {"corpus": "words", "environment": env, "done": ["nano"], "runs": runs}


def test_shares_are_of_the_best_settings_seed_by_seed():
    found = tokens_to_loss.shares(results()["runs"], "nano")
    assert found == [0.4] * 3
    for run in (runs := results()["runs"]):
        if run["length"] < 1:
            run["loss"] = [6.0, 3.0, 2.5]  # never there
    found = tokens_to_loss.shares(runs, "nano")
    assert found == [0.5] * 3


def test_the_table_has_a_row_for_each_network_that_is_done():
    [row] = tokens_to_loss.rows(results())
    assert len(row) <= 8 and row["network"] == "nano, 0.0M tokens, loss"
    assert row["its tokens"] == "0.40 (0.40, 0.40)"
    losses = [row["AdamW"], row["Muon"], row["Muon, 0.45 of the tokens"]]
    assert losses == ["2.000", "1.000", "1.500"]
    for run in (content := results())["runs"]:
        run["bits_per_byte"] = [2 * loss for loss in run["loss"]]
    [row] = tokens_to_loss.rows(content)
    assert row["AdamW"] == "4.000" and row["network"] == "nano, 0.0M tokens, bits per byte"
    assert tokens_to_loss.rows(results() | {"done": []}) == []


def test_the_last_settings_are_of_the_best_rate():
    """A rate at which the run diverges is not the best, and each beta1 has its own search."""
    args, runs = Namespace(steps=None, eval_tokens=1, data_dir="", quick=False), []
    best = {"AdamW": (1e-3, 0.9), "Muon": (16e-3, 0.8)}
    for setting in tokens_to_loss.settings("nano", args, runs):
        if setting["flags"] in [run["flags"] for run in runs]:
            continue
        rate, beta1 = best[setting["optimizer"]]
        distance = abs(math.log2(setting["rate"] / rate)) + abs(setting["beta1"] - beta1)
        runs.append(setting | {"loss": [2.0 + distance] if setting["rate"] < 32e-3 else []})
    search = [(run["optimizer"], run["beta1"], run["rate"]) for run in runs[:20]]
    rates = {"AdamW": [2e-3, 4e-3, 8e-3, 16e-3, 1e-3, 5e-4], "Muon": [4e-3, 8e-3, 16e-3, 32e-3]}
    assert search == [
        (name, beta1, rate) for name, some in rates.items() for beta1 in (0.9, 0.8) for rate in some
    ]
    # The second best has the other beta1.
    second = {"AdamW": (1e-3, 0.8), "Muon": (16e-3, 0.9)}
    finals = [(run["optimizer"], (run["rate"], run["beta1"]), run["seed"]) for run in runs[20:28]]
    assert finals == [
        (name, place[name], seed)
        for seed in tokens_to_loss.SEEDS[1:]
        for name in best
        for place in (best, second)
    ]
    flags = [run["flags"] for run in runs[28:]]
    sizes = [(540, 22, True)] * 3 + [(8400, 350, False)] * 2 + [(8400, 350, True)] * 2
    sizes += [(5880, 245, True)]
    assert [(f["steps"], f["warmup-steps"], f["muon"]) for f in flags] == sizes
    assert [run["rate"] for run in runs[28:]] == [16e-3] * 3 + [1e-3, 5e-4, 16e-3, 8e-3, 16e-3]


def test_long_runs_have_a_row_of_their_own():
    content = results()
    length = tokens_to_loss.LONG["nano"]
    content["runs"] += [
        made("AdamW", {0: 6.0, 140: 1.5}, length=length),
        made("AdamW", {0: 6.0, 140: 1.6}, length=length, rate=8e-3),
        made("Muon", {0: 6.0, 70: 1.5, 140: 1.2}, length=length),
        made("Muon", {0: 6.0, 56: 1.5, 98: 1.3}, length=tokens_to_loss.second_length("nano")),
        made(
            "Muon",
            {0: 6.0, 28: 1.5, 98: 1.3},
            length=tokens_to_loss.second_length("nano"),
            rate=8e-3,
        ),
    ]
    first, second = tokens_to_loss.rows(content)
    assert (second["AdamW"], second["Muon"], second["its tokens"]) == ("1.500", "1.200", "0.40")
    assert first["its tokens"] == "0.40 (0.40, 0.40)" and second["AdamW's rate"].startswith("0.004")


def test_the_search_for_a_rate_ends():
    """Even where each higher one is better."""
    tried = [made("Muon", {0: 6.0, 20: 1 / rate}, rate=rate) for rate in (4e-3, 8e-3, 16e-3)]
    while rate := tokens_to_loss.next_rate(tried):
        tried.append(made("Muon", {0: 6.0, 20: 1 / rate}, rate=rate))
    assert len(tried) == 8 and tried[-1]["rate"] == 512e-3


@pytest.mark.slow
def test_the_quick_run_goes_on_and_is_shown(tmp_path, data_dir):
    quicker = ("benchmarks/tokens_to_loss.py", "24, 4096", "4, 512")
    project = copy_of_project(tmp_path / "project", quicker)
    quick = ("tokens_to_loss.py", "--quick", "--data-dir", data_dir)
    done = benchmark(project, *quick)
    assert done.returncode == 0, done.stderr
    [path] = Path(project, "benchmarks", "results").glob("tokens-*.json")
    content = json.loads(path.read_text())
    assert len(content["runs"]) == 9 and content["done"] == ["nano"]
    content["runs"] = content["runs"][:4]
    path.write_text(json.dumps(content))
    done = benchmark(project, *quick, "--resume")
    again = json.loads(path.read_text())
    assert len(again["runs"]) == 9 and again["runs"][:4] == content["runs"]
    assert again["runs"][5]["loss"] != again["runs"][3]["loss"]  # another seed
    assert tokens_to_loss.block({path.name: again}) in done.stdout
