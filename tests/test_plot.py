"""Tests ../benchmarks/plot.py: what it takes a mean of, and in which unit it draws."""

import json
import sys
from pathlib import Path

import plot
import pytest

from support.log import LOG

FLAGS = {"model": "nano", "batch_tokens": 2048, "data_dir": "data", "init_from": ""}
FLAGS |= {"n_layer": 4, "n_embd": 128}


def write_run(out_dir: Path, seed: int, losses: list[float], is_complete: bool = True, **more):
    """Write a log with a step and a validation for each loss."""
    records = [{"flags": FLAGS | {"seed": seed}, "tokenizer": "bytes"}]
    for step, loss in enumerate(losses, 1):
        records.append({"step": step, "loss": loss, "ms": 10.0, "tokens_per_s": 100.0})
        records.append({"step": step, "val_loss": loss, **more})
    records += [{"done": len(losses)}] if is_complete else []
    out_dir.mkdir(parents=True)
    (out_dir / LOG).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_mean_of_complete_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "1", 1, [4.0, 3.4])
    write_run(tmp_path / "2", 2, [4.0, 3.6])
    write_run(tmp_path / "3", 3, [9.0], is_complete=False)
    words = ["plot.py", str(tmp_path), "--out", str(tmp_path / "x.svg"), "--x", "tokens"]
    monkeypatch.setattr(sys, "argv", words)
    plot.main()
    printed = capsys.readouterr().out
    mean = next(line for line in printed.splitlines() if "2 of 3 runs, 1 not complete" in line)
    assert "3.5000 ± 0.1414" in mean
    [group] = plot.by_setting(plot.read_runs([str(tmp_path)])).values()
    legend = plot.describe("setting", group, "val_loss")
    assert "3.5000 ± 0.1414, mean of 2 of 3 runs, 1 not complete" in legend
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_unit(tmp_path):
    write_run(tmp_path / "1", 1, [3.0], bits_per_byte=1.5)
    assert plot.find_unit(plot.read_runs([str(tmp_path)]), []) == "bits_per_byte"
    write_run(tmp_path / "2", 2, [3.0])
    assert plot.find_unit(plot.read_runs([str(tmp_path)]), []) == "val_loss"
