"""train_gpt2.py on an NVIDIA GPU: what the other tests promise on a CPU. Five minutes on one card;
skipped where there is none. Each run is a process of its own, as users have it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import digest, flags, losses, records

import train_gpt2
from support.checkpoint import checkpoints, read_checkpoint

ENV = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
ENV |= {"CUDA_VISIBLE_DEVICES": gpus} if (gpus := os.environ["GPUS_OF_TESTS"]) else {}
PLAIN = {"tf32": False, "bf16": False, "compile": False, "flash": False, "pad_vocab": False,
         "fused": False}  # fmt: skip


def num_gpus() -> int:
    """Asked in another process, since the tests hide them from this one."""
    if not shutil.which("nvidia-smi"):
        return 0
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(ask, env=ENV, capture_output=True, text=True).stdout or 0)


GPUS = num_gpus()
pytestmark = pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU")


def on(where: str, data_dir: Path, out_dir: Path, ranks: int = 1, **changes) -> Path:
    """The folder of a run on the CPU or the GPU, which must succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), train_gpt2.__file__]
    command += flags(data_dir=data_dir, out_dir=out_dir, **changes)
    env = ENV | ({"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out_dir


@pytest.fixture(scope="session")
def plain(once, data_dir) -> Path:
    """A run on a GPU without any speed-up."""
    return once("on-a-gpu", lambda folder: on("gpu", data_dir, folder / "run", **PLAIN)) / "run"


def differ(one: Path, other: Path) -> float:
    """The largest relative difference of their losses."""
    pairs = zip(losses(one).values(), losses(other).values(), strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


def test_float32_losses_are_the_cpus(plain, data_dir, tmp_path):
    assert len(losses(plain)) == 12
    assert differ(plain, on("cpu", data_dir, tmp_path / "cpu", **PLAIN)) < 1e-4


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tf32", 1e-2), ("bf16", 3e-2), ("compile", 1e-4), ("flash", 1e-4), ("pad_vocab", 1e-4),
        ("fused", 1e-4), ("fp16", 3e-2), ("recompute", 1e-5),
    ],
)  # fmt: skip
def test_each_speed_up_alone_changes_no_more_than_its_precision(
    plain, data_dir, tmp_path, name, most
):
    assert differ(plain, on("gpu", data_dir, tmp_path / "run", **PLAIN | {name: True})) < most


@pytest.mark.parametrize("changes", [{}, {"compile": True}, {"fp16": True}, {"muon": False}])
def test_a_resumed_run_is_the_whole_one_bit_for_bit(data_dir, tmp_path, changes):
    exact = {"bf16": "fp16" not in changes, "compile": False, "deterministic": True} | changes
    whole = on("gpu", data_dir, tmp_path / "whole", **exact)
    (tmp_path / "resumed").mkdir()
    shutil.copy(whole / "checkpoint_000005.pt", tmp_path / "resumed")
    resumed = on("gpu", data_dir, tmp_path / "resumed", resume=True, **exact)
    assert [*losses(resumed)] == [*range(6, 13)]
    assert digest(resumed) == digest(whole)


def test_a_save_in_the_background_is_what_a_save_that_is_waited_for_is(data_dir, tmp_path):
    """It copies the weights while the next step changes them; a run waits for its last save."""
    exact = {"bf16": True, "compile": False, "deterministic": True, "cosine": False}
    often = on("gpu", data_dir, tmp_path / "often", save_every=1, keep=20, **exact)
    assert len(checkpoints(often)) == 12
    for step in (3, 8):
        waited = on("gpu", data_dir, tmp_path / f"{step}", steps=step, **exact)
        name = f"checkpoint_{step:06d}.pt"
        one, other = (read_checkpoint(folder / name) for folder in (often, waited))
        pairs = [(weights, other["model"][key]) for key, weights in one["model"].items()]
        for key, own in one["optimizer"].items():
            pairs += [(value, other["optimizer"][key][name]) for name, value in own.items()]
        assert all(torch.equal(*pair) for pair in pairs)


def zeros(folder: Path) -> Path:
    import memory

    folder.mkdir()
    return memory.make_data(folder)


LARGE = {"model": "gpt2", "n_layer": None, "n_head": None, "n_embd": None, "seq_len": None,
         "bf16": None, "batch_tokens": 65536, "eval_tokens": 8192, "steps": 4, "save_every": 0,
         "compile": False, "sample_tokens": 1}  # fmt: skip


def test_the_memory_flags_save_memory(tmp_path):
    data, peaks = zeros(tmp_path / "data"), {}
    for name, more in {"plain": {}, "less": {"recompute": True, "loss_chunk_tokens": 1024}}.items():
        out_dir = on("gpu", data, tmp_path / name, **LARGE | {"micro_batch_size": 8} | more)
        peaks[name] = max(records(out_dir, "peak_mib").values())
    assert peaks["less"] < 0.6 * peaks["plain"]


def test_the_micro_batch_is_found_soon_and_leaves_room(tmp_path):
    out_dir = on(
        "gpu", zeros(tmp_path / "data"), tmp_path / "run", **LARGE | {"micro_batch_size": 0}
    )
    lines = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    ready = next(line for line in lines if "val_loss" in line)
    assert ready["time"] - lines[0]["time"] < 20
    ask = "import torch; print(torch.cuda.mem_get_info()[1] / 2**20)"
    done = subprocess.run([sys.executable, "-c", ask], env=ENV, capture_output=True, text=True)
    assert max(records(out_dir, "peak_mib").values()) < float(done.stdout) - 200
    assert lines[0]["flags"]["micro_batch_size"] >= 1


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("changes", [{}, {"compile": True}])
def test_two_gpus_have_the_losses_of_one(plain, data_dir, tmp_path, changes):
    out_dir = on("gpu", data_dir, tmp_path / "run", 2, **PLAIN | {"fused": True} | changes)
    assert differ(plain, out_dir) < 1e-4
    assert torch.isfinite(torch.tensor([*losses(out_dir).values()])).all()
