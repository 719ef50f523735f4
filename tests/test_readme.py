"""Tests what ../README.md and ../docs show, where no other test runs it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def job() -> str:
    """The script for SLURM."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return next(b for b in re.findall("```\n(.*?)```", text, re.S) if "#SBATCH" in b)


@pytest.mark.skipif(not shutil.which("bash"), reason="SLURM's scripts are bash's")
@pytest.mark.parametrize(
    ("last", "code", "is_queued"),
    [({"stopped": 250}, 1, True), ({"step": 7, "loss": 2.5}, 1, False), (None, 1, False),
     ({"done": 19073}, 0, False)],
)  # fmt: skip
def test_a_job_is_queued_again_if_it_was_stopped_and_not_if_it_failed(
    tmp_path, last, code, is_queued
):
    """torchrun's exit code is 1 for both."""
    stand_ins = {
        "srun": f'echo "$@" > srun.txt; cat new.txt >> out/124M/log.jsonl; exit {code}',
        "scontrol": '[ $1 = show ] && printf "node7\\nnode8\\n" || echo "$@" > scontrol.txt',
    }
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "out/124M").mkdir(parents=True)
    (tmp_path / "out/124M/log.jsonl").write_text(json.dumps({"stopped": 100}) + "\n")  # before
    (tmp_path / "new.txt").write_text(json.dumps({"time": 1.5} | last) + "\n" if last else "")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    env |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    subprocess.run(["bash", "-c", job()], cwd=tmp_path, env=env)
    started = (tmp_path / "srun.txt").read_text()
    assert started.startswith("torchrun --nnodes=2 ") and "--rdzv_endpoint=node7:20077" in started
    queued = tmp_path / "scontrol.txt"
    assert (queued.read_text() if queued.exists() else "") == "requeue 77\n" * is_queued


def test_each_link_and_each_file_that_the_pages_name_is_there():
    for page in (ROOT / "README.md", ROOT / "docs/reference.md", ROOT / "benchmarks/README.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
                assert anchor in anchors, f"{page.name}: {target}"
