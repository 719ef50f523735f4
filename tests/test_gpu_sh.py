"""benchmarks/gpu.sh with nano's sizes on a CPU, where we try it before a GPU can be had; and the
programs that it runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import machine
import pytest
import resume
import sweep
import tables
import traffic
from conftest import NEEDS_POSIX
from test_ladder import REPO, copy_of_project


@NEEDS_POSIX
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_run_also_after_one_was_killed(tmp_path):
    project = copy_of_project(tmp_path / "project")
    for name in ("gpu.sh", "README.md", "reference.json"):
        shutil.copy(REPO / "benchmarks" / name, project / "benchmarks" / name)
    shutil.copytree(REPO / "tests", project / "tests", ignore=shutil.ignore_patterns(".*"))
    brought = tmp_path / "brought back"
    env = os.environ | {"TINY": "1", "PYTHON": sys.executable, "OUT": str(brought)}
    program = ["bash", project / "benchmarks" / "gpu.sh"]
    found = project / "benchmarks" / "results"
    with open(tmp_path / "killed.txt", "w") as output:
        killed = subprocess.Popen(
            program, env=env, stdout=output, stderr=output, start_new_session=True
        )
        while killed.poll() is None and not [*found.glob("ladder-*.json")]:
            time.sleep(0.1)
        os.killpg(killed.pid, signal.SIGKILL)  # in the middle of part 2
        assert killed.wait() == -signal.SIGKILL, (tmp_path / "killed.txt").read_text()
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = sorted(path.stem for path in (project / "out" / "gpu").glob("*.done"))
    assert parts == [f"part-{n}" for n in (1, 2, 4, 5, 6, 7)]
    assert "== part 1" not in done.stdout and "== part 2" in done.stdout
    [ladder] = found.glob("ladder-*.json")
    runs = {rung["name"]: len(rung["runs"]) for rung in json.loads(ladder.read_text())["rungs"]}
    assert runs == {"base": 2, "bf16": 2, "fused": 2, "muon": 2}
    page = (project / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name, module in (("resume", resume), ("sweep", sweep)):
        contents = {path.name: machine.load(path) for path in sorted(found.glob(f"{name}-*.json"))}
        assert contents and page == tables.put(page, name, module.block(contents))
    assert "Not yet." not in page
    with tarfile.open(brought / "gpu.tgz") as archive:
        names = archive.getnames()
    for name in ("gpu-muon/log.jsonl", "gpu-adamw/log.jsonl", "gpu-long.png"):
        assert f"benchmarks/results/{name}" in names
    assert not [name for name in names if name.endswith("safetensors")]


@NEEDS_POSIX
def test_without_a_gpu_it_ends_in_one_line():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    program = ["bash", REPO / "benchmarks" / "gpu.sh"]
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch("gpu.sh: error: PyTorch finds no GPU: .*\n", done.stderr)


def test_a_table_goes_between_its_comments():
    page = "a\n<!-- sweep -->\nold\n<!-- end of sweep -->\nb"
    new = "a\n<!-- sweep -->\n\nnew\n\n<!-- end of sweep -->\nb"
    assert tables.put(page, "sweep", "new") == new


def test_without_triton_the_traffic_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["traffic.py"])
    monkeypatch.setattr(traffic, "find_spec", lambda _: None)
    assert machine.exit_code("traffic.py", traffic.main) == 2
    assert "pip install triton" in capsys.readouterr().err


def test_a_log_is_read_while_it_is_written(tmp_path):
    assert resume.losses(tmp_path) == {}
    steps = '{"step": 1, "loss": 2.5, "ms": 1.0}\n{"step": 2, "lo'
    (tmp_path / "log.jsonl").write_text('{"flags": {}}\n' + steps)
    assert resume.losses(tmp_path) == {1: 2.5}


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--deterministic"], 1)])
def test_bits_may_differ_on_a_gpu_unless_they_must_not(tmp_path, monkeypatch, flags, code):
    def compare(flags):
        env = {"device": "cuda", "device_name": "a GPU", "torch": "2.13"}
        run = {"flags": flags, "same_losses": True, "same_weights": False, "difference": 0.0}
        return run | {"environment": env}

    monkeypatch.setattr(resume, "compare", compare)
    monkeypatch.setattr(machine, "new_path", lambda *_: tmp_path / "resume-x.json")
    monkeypatch.setattr(sys, "argv", ["resume.py", "--", *flags])
    assert resume.main() == code
    assert machine.load(tmp_path / "resume-x.json")["flags"] == flags
