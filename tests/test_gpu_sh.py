"""benchmarks/gpu.sh with nano's sizes on a CPU, which it is tried with before a GPU can be had."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import resume
import sizes
import tables
import traffic
from conftest import NEEDS_POSIX
from test_ladder import REPO, copy_of_project


@NEEDS_POSIX
@pytest.mark.slow
def test_all_parts_run_also_after_one_was_killed(tmp_path):
    project = copy_of_project(tmp_path / "project")
    for name in ("gpu.sh", "README.md", "reference.json"):
        shutil.copy(REPO / "benchmarks" / name, project / "benchmarks" / name)
    shutil.copytree(REPO / "tests", project / "tests", ignore=shutil.ignore_patterns(".*"))
    env = os.environ | {
        "TINY": "1",
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "brought back"),
    }
    program = ["bash", project / "benchmarks" / "gpu.sh"]
    results = project / "benchmarks" / "results"
    with open(tmp_path / "killed.txt", "w") as output:
        killed = subprocess.Popen(
            program, env=env, stdout=output, stderr=output, start_new_session=True
        )
        while killed.poll() is None and not [*results.glob("ladder-*.json")]:
            time.sleep(0.1)
        os.killpg(killed.pid, signal.SIGKILL)  # in the middle of part 2
        assert killed.wait() == -signal.SIGKILL, (tmp_path / "killed.txt").read_text()
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    here = project / "out" / "gpu"
    assert sorted(path.stem for path in here.glob("*.done")) == [
        f"part-{n}" for n in (1, 2, 4, 5, 6, 7)
    ]
    assert "== part 1" not in done.stdout and "== part 2" in done.stdout
    ladders = [json.loads(path.read_text()) for path in results.glob("ladder-*.json")]
    names = sorted([rung["name"] for rung in ladder["rungs"]] for ladder in ladders)
    assert names == [["base", "bf16", "fused"], ["base", "muon"]]
    assert all(ladder["complete"] for ladder in ladders)
    page = (project / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name, program in (("resume", resume), ("sizes", sizes)):
        [path] = results.glob(f"{name}-*.json")
        shown = re.search(f"<!-- {name} -->(.*)<!-- end of {name} -->", page, re.DOTALL)[1]
        assert shown.strip() == program.block({path.name: json.loads(path.read_text())})
    assert "Not yet." not in page
    with tarfile.open(Path(env["OUT"], "gpu.tgz")) as archive:
        brought = archive.getnames()
    for name in ("gpu-muon/log.jsonl", "gpu-adamw/log.jsonl", "gpu-long.png"):
        assert f"benchmarks/results/{name}" in brought
    assert not [name for name in brought if name.endswith("safetensors")]


def test_a_table_goes_between_its_comments():
    page = "a\n<!-- sizes -->\nold\n<!-- end of sizes -->\nb"
    new = tables.put(page, "sizes", lambda contents: f"of {len(contents)} files", {"x": {}})
    assert new == "a\n<!-- sizes -->\n\nof 1 files\n\n<!-- end of sizes -->\nb"
    assert tables.put(page, "sizes", len, {}) == page  # no results: as it was


def test_without_triton_the_traffic_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["traffic.py"])
    monkeypatch.setattr(traffic, "find_spec", lambda _: None)
    assert traffic.main() == 2
    assert "pip install triton" in capsys.readouterr().err


def test_a_log_is_read_while_it_is_written(tmp_path):
    assert resume.losses(tmp_path) == {}
    (tmp_path / "log.jsonl").write_text('{"a": 1}\n{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert resume.losses(tmp_path) == {1: 2.5}


def test_a_size_that_does_not_fit_says_why():
    fits = {"model": "gpt2", "flags": [], "micro_batch_size": 64, "tokens_per_s": 1e6}
    fits |= {"matmul_share": 0.5, "mfu": 0.0, "peak_mib": 2048.0}
    runs = [fits, {"model": "gpt2-xl", "flags": ["--recompute"], "why": "does not fit"}]
    env = {"device_name": "a card", "torch": "2.13.0"}
    text = sizes.block({"sizes-x.json": {"environment": env, "runs": runs}})
    assert "1,000,000 |       50% |     | 2.0 |" in text and "does not fit" in text


def test_a_comparison_that_is_done_is_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def compare(flags):
        made.append(flags)
        if len(made) == 2:
            raise KeyboardInterrupt
        run = {"flags": flags, "same_losses": True, "same_weights": True, "difference": 0.0}
        return run | {"environment": {"device": "cpu", "device_name": "a CPU", "torch": "2.13"}}

    monkeypatch.setattr(resume, "compare", compare)
    monkeypatch.setattr(resume.machine, "RESULTS", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        resume.measure(["--model=nano"], go_on=False)
    assert resume.measure(["--model=nano"], go_on=True) == 0
    deterministic = ["--model=nano", "--deterministic"]
    assert made == [["--model=nano"], deterministic, deterministic]
    assert capsys.readouterr().out.count(" yes |") == 4 and len([*tmp_path.iterdir()]) == 1


@NEEDS_POSIX
def test_without_a_gpu_it_ends_in_one_line(tmp_path):
    project = copy_of_project(tmp_path / "project")
    shutil.copy(REPO / "benchmarks" / "gpu.sh", project / "benchmarks")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    program = ["bash", project / "benchmarks" / "gpu.sh"]
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch("gpu.sh: error: PyTorch finds no GPU: .*\n", done.stderr)
