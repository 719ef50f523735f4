"""Tests ../benchmarks/rates.py and ../benchmarks/muon_ranks.py."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rates

import config

BENCHMARKS = Path(rates.__file__).parent


def made(width: int, best: float) -> list[dict]:
    """Return runs whose losses are a parabola in the logarithm of the rate."""
    runs = []
    for rate in (2e-3, 4e-3, 8e-3, 16e-3):
        loss = 2 + 0.1 * math.log2(rate / best) ** 2
        run = {"width": width, "rate": rate, "loss": [5.0, loss], "flags": {"steps": 200}}
        runs.append(run | {"tokens_per_step": 2048})
    return runs


@pytest.mark.parametrize("best", [3e-3, 5e-3, 8e-3, 11e-3])
def test_the_best_rate_may_lie_between_those_tried(best):
    assert rates.best_rate(made(128, best)) == pytest.approx(best)


def test_at_the_edge_or_beside_what_diverged_it_is_one_of_those_tried():
    runs = made(128, 1e-3)
    assert rates.best_rate(runs) == 2e-3 and rates.parabola(runs) is None
    assert rates.rows(runs)[0]["best"] == "0.002 (at the edge)"
    assert rates.next_rate(runs, quick=False) == 1e-3 and rates.next_rate(runs, quick=True) is None
    runs = made(128, 8e-3)
    runs[3]["loss"] = []
    assert rates.best_rate(runs) == 8e-3
    assert rates.next_rate(runs[:2], quick=False) == 8e-3


def test_a_table_compares_the_best_rates_with_the_rule(tmp_path):
    runs = made(384, 3e-3) + made(128, 6e-3)
    first, second = rates.rows(runs)
    assert (first["channels"], first["best"], second["best"]) == ("128", "0.006", "0.003")
    assert float(first["rule / best"]) == pytest.approx(
        config.muon_learning_rate(128) / 6e-3, abs=0.005
    )
    pytest.importorskip("matplotlib")
    rates.draw(runs, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 10_000


def test_the_rule_predicts_the_measured_rates():
    """Within a factor of 1.5, for the longest run of each width in all results that are kept."""
    for path in rates.machine.RESULTS.glob("rates-*.json"):
        rows = {row["channels"]: row for row in rates.rows(json.loads(path.read_text())["runs"])}
        assert len(rows) == 4
        for row in rows.values():  # the last of a width has the most steps
            assert 1 / 1.5 < float(row["rule / best"]) < 1.5, (path, row)


@pytest.mark.slow
def test_the_search_is_kept_and_continued(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rates.machine, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rates.py", "--quick", "--resume", "--only", "128"])
    assert rates.main() == 0
    [path] = tmp_path.glob("rates-*.json")
    content = json.loads(path.read_text())
    assert [run["rate"] for run in content["runs"]] == [*rates.RATES] * 2
    assert all(run["loss"] for run in content["runs"])
    content["runs"] = content["runs"][:7]
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert rates.main() == 0
    first, *table = capsys.readouterr().out.splitlines()  # what was missing, and both networks
    assert "0.016" in first and len(table) == 4


@pytest.mark.slow
def test_ranks_share_the_work_of_muon():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(BENCHMARKS / "muon_ranks.py"), "--n-layer=1", "--rounds=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^share / all: \d\.\d\d$", done.stdout, re.M)
