"""Tests train_gpt2.py on a GPU that can't compute (fake_gpu.py): what is else looked for by eye."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import machine
import memory
import pytest
import stand_in
import traffic
from conftest import flags, questions, run
from test_pretrained import copy_of_program

CXX = shutil.which(stand_in.CXX)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CXX, reason="needs a C++ compiler")]
NEEDS_TRITON = pytest.mark.skipif(not find_spec("triton"), reason="needs triton")
STEPS, PASSES = 3, 6  # of a run, of a step
FLAGS = ["", "--no-fused", "--fp16", "--no-bf16 --muon", "--bf16-residual --no-tf32", "--no-flash"]
FLAGS += ["--loss-chunk-tokens=16", "--recompute --no-pad-vocab", "--dropout=0.1 --muon"]
COMPILED = ["--compile --muon", "--compile --recompute --loss-chunk-tokens=8"]
FLAGS += [pytest.param(line, marks=NEEDS_TRITON) for line in COMPILED]


@pytest.fixture(scope="session")
def library(once) -> Path:
    return once("fake-gpu", stand_in.build) / "fake_gpu.so"


@pytest.fixture(scope="session")
def shards(once) -> Path:
    return once("zeros", stand_in.make_data)


def tiny(data_dir: Path, tmp_path: Path, **changes) -> list[str]:
    """Return the flags of the tests' run, as it is on a GPU, with all that it can watch."""
    line = dict.fromkeys(("model", "bf16", "flash")) | {"steps": STEPS, "warmup_steps": 1}
    line |= {"eval_every": 2, "eval_tokens": 64, "sample_tokens": 2}
    return flags(data_dir=data_dir, hellaswag=questions(tmp_path, 2), **line | changes)


def waits_in(result: dict, function: str) -> int:
    """Return how often a function waited for the GPU."""
    return sum(n for line, n in result["waits"].items() if line.startswith(f"{function}: "))


@pytest.mark.parametrize("more", FLAGS)
def test_a_run_has_no_tensor_on_two_devices_and_waits_once_a_step(
    library, data_dir, tmp_path, more
):
    result = stand_in.on_gpu(library, *tiny(data_dir, tmp_path), *more.split())
    assert result["code"] == 0, result["stderr"]
    assert waits_in(result, "train_step") == STEPS, result["waits"]
    operations = result["operations"]
    assert bool(operations.get("_fused_adamw_")) == ("--no-fused" not in more)
    assert not {"scatter_add_", "_pin_memory", "pin_memory"} & operations.keys()
    assert 20 * waits_in(result, "matmul_tflops") <= operations["mm"]
    for name in ("validation after", "sample after", "questions after", "saved"):
        assert name in result["stdout"]


def test_a_run_goes_on_and_is_evaluated_on_a_gpu(library, data_dir, tmp_path):
    folder = run(tmp_path, data_dir, micro_batch_size=2)
    changes = {"micro_batch_size": 2, "steps": 14, "model": "nano", "out_dir": folder}
    result = stand_in.on_gpu(library, *tiny(data_dir, tmp_path, **changes), "--resume")
    assert result["code"] == 0, result["stderr"]
    assert "resumed after step 12" in result["stdout"] and "step 14/14" in result["stdout"]
    line = (f"--out-dir={folder}", "--eval-only", "--eval-tokens=784")
    result = stand_in.on_gpu(library, *line)
    assert result["code"] == 0 and ": loss " in result["stdout"], result["stderr"]
    # 49 sequences of 16 in two passes of 32, and one on trial, each with two embeddings
    assert result["operations"]["embedding"] == 2 * (1 + 2)
    # They take 1.46 MiB, so that in half of it 16 may fit, and 8 do.
    result = stand_in.on_gpu(library, *line, gib=0.75 / 1024)
    assert result["code"] == 0 and ": loss " in result["stdout"], result["stderr"]
    assert result["operations"]["embedding"] in (2 * (2 + 4), 2 * (3 + 7))


@pytest.mark.parametrize(
    ("old", "new", "operation"),
    [
        ("float(signals.received), device=world.device", "float(0)", "aten.stack"),
        ("loss_of_rank += loss.detach()", "loss_of_rank += loss.item()", ""),
    ],
)
def test_a_planted_fault_is_found(library, data_dir, tmp_path, old, new, operation):
    """A scalar that was left on the CPU; a wait in each pass."""
    copy_of_program(tmp_path, {"train_gpt2.py": {old: new}})
    (tmp_path / "tests").mkdir()
    program = shutil.copy(stand_in.PROGRAM, tmp_path / "tests")
    line = tiny(data_dir, tmp_path)
    if operation:
        with pytest.raises(OSError, match=operation):
            stand_in.on_gpu(library, *line, program=program)
    else:
        result = stand_in.on_gpu(library, *line, program=program)
        assert waits_in(result, "train_step") == STEPS * (1 + PASSES)


@pytest.mark.parametrize(
    ("model", "more", "B"), [("gpt2", (), 4), ("gpt2", memory.LESS, 8), ("gpt2-xl", memory.LESS, 1)]
)
def test_a_step_takes_the_memory_of_the_table(library, shards, model, more, B):
    """Within a tenth: the micro-batches for cards are made of what it says."""
    rows = machine.load(memory.RESULTS)["rows"]
    known = [r for r in rows if (r["model"], *r["flags"], r["B"]) == (model, *more, B)]
    result = stand_in.step(library, shards, model, more, B)
    assert result["code"] == 0, result["stderr"]
    assert result["peak_mib"] == pytest.approx(known[0]["peak_mib"], rel=0.1)


@pytest.mark.parametrize(("gib", "most"), [(8, 4), (24, 16), (80, 64)])
def test_a_card_gets_the_micro_batch_that_fits(library, shards, gib, most):
    """As benchmarks/README.md says, with 1.5 GiB of the card that PyTorch can't use."""
    result = stand_in.step(library, shards, "gpt2", (), gib=gib - 1.5)
    assert result["code"] == 0, result["stderr"]
    assert f"--micro-batch-size {most}" in result["stdout"]


def test_8_gb_train_124m_with_the_full_batch(library, shards):
    line = ("--model=gpt2", f"--data-dir={shards}", "--steps=1", "--eval-tokens=8192")
    result = stand_in.on_gpu(library, *line, *memory.LESS, "--sample-tokens=1", gib=6.5)
    assert result["code"] == 0 and "step 1/1" in result["stdout"], result["stderr"]


@NEEDS_TRITON
def test_8_gb_train_124m_compiled_with_the_full_batch(library, shards):
    """With the logits of all chunks in memory at once it took 12.7 GiB."""
    result = stand_in.step(library, shards, "gpt2", ("--compile", *memory.LESS), B=32, gib=6.5)
    assert result["code"] == 0, result["stderr"]


@NEEDS_TRITON
def test_the_traffic_of_a_step_is_told_by_kind(library, shards):
    found = stand_in.step(library, shards, "gpt2", ("--compile", "--n-layer=1"), B=2)
    launches = found["launches"]
    moved = {kind: 0 for kind in traffic.KINDS}
    for name, num_bytes in launches:
        moved[traffic.kind_of(name)] += num_bytes
    assert all(moved.values()), moved
    # Two passes of 2 x 1,024 tokens: the head multiplies three times, of logits in bfloat16.
    logits, head = 2 * 1024 * 50304 * 2, 50304 * 768 * 2
    products = [
        num_bytes for name, num_bytes in launches if num_bytes > logits + head and "mm" in name
    ]
    assert len(products) == 6
    assert f" {len(launches)} |" in traffic.table(launches)


@pytest.mark.parametrize("more", ["", "--no-fused", "--fp16", "--recompute --loss-chunk-tokens=16"])
def test_a_macs_gpu_gets_nothing_that_it_lacks(library, data_dir, tmp_path, more):
    """No float64, no pinned memory, no tensor of another device."""
    line = tiny(data_dir, tmp_path, bf16=None)
    result = stand_in.on_gpu(library, *line, *more.split(), capability="mps")
    assert result["code"] == 0, result["stderr"]
    assert f"step {STEPS}/{STEPS}" in result["stdout"]
    assert not {"_pin_memory", "pin_memory"} & result["operations"].keys()


LESS_MEMORY = " ".join(memory.LESS)
CARDS = [("gpt2", card, "") for card in ("8.0", "8.9", "9.0", "10.0", "12.0")]
CARDS += [("gpt2", "7.5", "--fp16"), ("gpt2", "9.0", "--no-bf16"), ("gpt2", "8.9", LESS_MEMORY)]
CARDS += [("gpt2-xl", "7.5", f"--fp16 {LESS_MEMORY}"), ("gpt2-xl", "9.0", LESS_MEMORY)]


def kernels_of(folder: Path, capability: str) -> dict:
    program = Path(stand_in.__file__).with_name("ptx.py")
    command = [sys.executable, program, folder, capability]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@NEEDS_TRITON
@pytest.mark.parametrize(("model", "card", "more"), CARDS)
def test_each_kernel_compiles_without_spilling(library, shards, tmp_path, model, card, more):
    """Inductor tries several configurations of some kernels, of which one must do."""
    flags = ("--compile", "--n-layer=2", *more.split())
    found = stand_in.step(library, shards, model, flags, B=4, capability=card, kernels=tmp_path)
    assert found["code"] == 0, found["stderr"]
    compiled = kernels_of(tmp_path, card)
    names, good = set(), set()
    for row in compiled["rows"]:
        names.add(row["kernel"])
        fits = row.get("shared_memory", 1 << 30) <= compiled["shared_memory"]
        if fits and row["stack"] <= 16:  # a frame of its own takes up to 16 bytes
            good.add(row["kernel"])
    assert len(names) > 20 and good == names, [
        row for row in compiled["rows"] if row["kernel"] not in good
    ]
