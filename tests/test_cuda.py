"""Tests train_gpt2.py on an NVIDIA GPU: what the other tests promise on a CPU. Five minutes on one
card; skipped where there is none. Each run is a process of its own, as users have it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import digest, flags, losses, records, write_shard

import train_gpt2

ENV = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
if os.environ["GPUS_OF_TESTS"]:
    ENV["CUDA_VISIBLE_DEVICES"] = os.environ["GPUS_OF_TESTS"]
SPEED_UPS = ("tf32", "bf16", "compile", "flash", "pad_vocab", "fused", "bf16_residual")
PLAIN = dict.fromkeys(SPEED_UPS, False)


def ask_gpu(expression: str) -> float:
    """Evaluate it in another process, since the tests hide the GPUs from this one."""
    command = [sys.executable, "-c", f"import torch; print({expression})"]
    return float(subprocess.run(command, env=ENV, stdout=subprocess.PIPE, check=True).stdout)


GPUS = ask_gpu("torch.cuda.device_count()") if shutil.which("nvidia-smi") else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU")


def on(where: str, data_dir: Path, out_dir: Path, ranks: int = 1, **changes) -> Path:
    """Return the folder of a run on the "cpu" or the "gpu", which must succeed."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [train_gpt2.__file__, *flags(data_dir=data_dir, out_dir=out_dir, **changes)]
    env = ENV | ({"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out_dir


@pytest.fixture(scope="session")
def plain(once, data_dir) -> Path:
    """The folder of a run on a GPU without any speed-up."""
    return once("on-a-gpu", lambda folder: on("gpu", data_dir, folder / "run", **PLAIN)) / "run"


def difference(one: Path, other: Path) -> float:
    """Return the largest relative difference of their losses."""
    pairs = zip(losses(one).values(), losses(other).values(), strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


def test_float32_losses(plain, data_dir, tmp_path):
    assert len(losses(plain)) == 12
    assert difference(plain, on("cpu", data_dir, tmp_path / "cpu", **PLAIN)) < 1e-4


@pytest.mark.parametrize(
    ("names", "most"),
    [(name, 1e-4) for name in ("compile", "flash", "pad_vocab", "fused", "recompute")]
    + [("tf32", 5e-3), ("bf16", 5e-3), ("bf16 bf16_residual", 5e-3), ("fp16", 5e-3)],
)
def test_speed_ups(plain, data_dir, tmp_path, names, most):
    changes = PLAIN | dict.fromkeys(names.split(), True)
    found = difference(plain, on("gpu", data_dir, tmp_path / "run", **changes))
    assert found < most
    assert found > 0 or "16" not in names  # 16 bits can't give the same


@pytest.mark.parametrize("changes", [{}, {"compile": True}, {"fp16": True}, {"muon": False}])
def test_exact_resume(data_dir, tmp_path, changes):
    exact = {"bf16": "fp16" not in changes, "compile": False, "deterministic": True, "keep": 9}
    whole = on("gpu", data_dir, tmp_path / "whole", **exact | changes)
    shutil.copytree(whole / "step_000005", tmp_path / "resumed" / "step_000005")
    resumed = on("gpu", data_dir, tmp_path / "resumed", resume=True, **exact | changes)
    assert [*losses(resumed)] == [*range(6, 13)]
    assert digest(resumed) == digest(whole)


def zeros(folder: Path):
    """Write shards of zeros, enough for a step."""
    for split, count in (("train", 70_000), ("val", 9000)):
        write_shard(folder / f"{split}_000000.bin", np.zeros(count))


LARGE = dict.fromkeys(("n_layer", "n_head", "n_embd", "seq_len", "bf16"))
LARGE |= {"model": "gpt2", "batch_tokens": 65536, "eval_tokens": 8192, "steps": 4}
LARGE |= {"save_every": 0, "compile": False, "sample_tokens": 1, "micro_batch_size": 8}


def test_memory_flags(once, tmp_path):
    data, peaks = once("zeros", zeros), []
    for changes in ({}, {"recompute": True, "loss_chunk_tokens": 1024}):
        out_dir = on("gpu", data, tmp_path / f"{len(peaks)}", **LARGE | changes)
        peaks.append(max(records(out_dir, "peak_mib").values()))
    assert peaks[1] < 0.6 * peaks[0]


def test_micro_batch_that_fits(once, tmp_path):
    data, started = once("zeros", zeros), time.time()
    out_dir = on("gpu", data, tmp_path / "run", **LARGE | {"micro_batch_size": 0})
    first = json.loads((out_dir / "log.jsonl").read_text().splitlines()[0])
    assert first["time"] - started < 60  # the imports are in it
    total = ask_gpu("torch.cuda.mem_get_info()[1] / 2**20")
    assert first["flags"]["micro_batch_size"] >= (32 if total > 70_000 else 1)
    assert max(records(out_dir, "peak_mib").values()) < total - 200


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_gpus(plain, data_dir, tmp_path, compiled):
    changes = PLAIN | {"fused": True, "compile": compiled}
    assert difference(plain, on("gpu", data_dir, tmp_path / "run", 2, **changes)) < 1e-4
