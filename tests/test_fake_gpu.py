"""train_gpt2.py on a GPU that can't compute (fake_gpu.py): what reviews of its CUDA paths looked
for by eye."""

import shutil
from pathlib import Path

import memory
import pytest
from conftest import flags, questions, run
from test_ladder import copy_of_project

CXX = shutil.which(memory.CXX)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CXX, reason="needs a C++ compiler")]
STEPS, PASSES = 3, 12  # of a run, of a step
FLAGS = (
    "", "--no-fused", "--fp16", "--no-bf16 --muon", "--bf16-residual --no-tf32", "--no-flash",
    "--loss-chunk-tokens=16", "--recompute --no-pad-vocab", "--dropout=0.1 --muon",
)  # fmt: skip


@pytest.fixture(scope="session")
def stand_in(once) -> Path:
    return once("fake-gpu", memory.build) / "fake_gpu.so"


@pytest.fixture(scope="session")
def shards(once) -> Path:
    return once("zeros", memory.make_data)


def tiny(data_dir: Path, tmp_path: Path, **changes) -> list[str]:
    """The run of the tests, as it is on a GPU, with all that is watched."""
    default = dict.fromkeys(("model", "bf16", "flash")) | {"steps": STEPS, "warmup_steps": 1}
    watched = {"eval_every": 2, "sample_tokens": 2, "eval_tokens": 64}
    watched["hellaswag"] = questions(tmp_path, 2)
    return flags(data_dir=data_dir, **default | watched | changes)


def waits_in(found: dict, function: str) -> int:
    """How often a function waited for the GPU."""
    return sum(n for line, n in found["waits"].items() if line.startswith(f"{function}: "))


@pytest.mark.parametrize("more", FLAGS)
def test_a_run_has_no_tensor_on_two_devices_and_waits_once_a_step(
    stand_in, data_dir, tmp_path, more
):
    found = memory.on_gpu(stand_in, *tiny(data_dir, tmp_path), *more.split())
    assert found["code"] == 0, found["stderr"]
    assert waits_in(found, "train_step") == STEPS
    assert waits_in(found, "apply_gradients") == (STEPS if "--no-fused" in more else 0)
    operations = found["operations"]
    assert bool(operations.get("_fused_adamw_")) == ("--no-fused" not in more)
    assert not {"scatter_add_", "_pin_memory", "pin_memory"} & operations.keys()
    assert 20 * waits_in(found, "matmul_tflops") <= operations["mm"]
    for name in ("validation after", "sample after", "questions after", "saved"):
        assert name in found["stdout"]


def test_a_run_goes_on_on_a_gpu(stand_in, data_dir, tmp_path):
    folder = run(tmp_path, data_dir, micro_batch_size=2)
    line = tiny(data_dir, tmp_path, micro_batch_size=2, steps=14, model="nano", out_dir=folder)
    found = memory.on_gpu(stand_in, *line, "--resume")
    assert found["code"] == 0 and "resumed after step 12" in found["stdout"], found["stderr"]


def test_eval_only_takes_32_sequences_a_pass(stand_in, data_dir, tmp_path):
    source = run(tmp_path, data_dir)
    line = ("--resume", f"--out-dir={source}", "--eval-only", "--eval-tokens=784")
    found = memory.on_gpu(stand_in, *line)
    assert found["code"] == 0 and "784 validation tokens" in found["stdout"], found["stderr"]
    assert (
        found["operations"]["embedding"] == 2 * 2
    )  # 49 sequences of 16; of tokens and of positions


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "stop = torch.full((), float(asked()), device=device)",
            "stop = torch.full((), float(asked()))",
            "aten.stack",
        ),
        ("loss_sum += loss.detach()", "loss_sum += loss.item()", "loss_sum += loss.item()"),
    ],
)
def test_a_planted_fault_is_found(stand_in, data_dir, tmp_path, old, new, said):
    """A scalar that was left on the CPU; a wait in each pass."""
    project = copy_of_project(tmp_path / "project", ("train_gpt2.py", old, new))
    (project / "tests").mkdir()
    shutil.copy(memory.PROGRAM, project / "tests")
    try:
        line = tiny(data_dir, tmp_path)
        found = memory.on_gpu(stand_in, *line, program=project / "tests" / "fake_gpu.py")
    except OSError as error:
        assert said in str(error)
    else:
        assert waits_in(found, "train_step") == STEPS * (1 + PASSES)


@pytest.mark.parametrize(("model", "more", "B"), [
    ("gpt2", (), 4), ("gpt2", memory.LESS, 8), ("gpt2-xl", memory.LESS, 1),
])  # fmt: skip
def test_a_step_takes_the_memory_of_the_table(stand_in, shards, model, more, B):
    """Within a tenth; of what it says, the micro-batches for cards are made."""
    rows = memory.machine.load(memory.RESULTS)["rows"]
    [known] = [
        r["peak_mib"] for r in rows if (r["model"], *r["flags"], r["B"]) == (model, *more, B)
    ]
    found = memory.step(stand_in, shards, model, more, B)
    assert found["code"] == 0, found["stderr"]
    assert found["peak_mib"] == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("gib", [8, 16, 24, 80])
def test_a_card_gets_the_micro_batch_that_fits(stand_in, shards, gib):
    rows = memory.machine.load(memory.RESULTS)["rows"]
    found = memory.step(stand_in, shards, "gpt2", (), gib=gib - memory.HEADROOM)
    assert found["code"] == 0, found["stderr"]
    assert f"--micro-batch-size={memory.fitting(rows, gib)['gpt2']}" in found["stdout"]


def test_8_gb_train_124m_with_the_full_batch(stand_in, shards):
    line = ("--model=gpt2", f"--data-dir={shards}", "--steps=1", "--eval-tokens=8192")
    found = memory.on_gpu(stand_in, *line, *memory.LESS, "--sample-tokens=1", gib=6.5)
    assert found["code"] == 0 and "step 1/1" in found["stdout"], found["stderr"]


@pytest.mark.parametrize("more", ["", "--no-fused", "--fp16", "--recompute --loss-chunk-tokens=16"])
def test_a_macs_gpu_gets_nothing_that_it_lacks(stand_in, data_dir, tmp_path, more):
    """No float64, no pinned memory, no tensor of another device."""
    found = memory.on_gpu(
        stand_in, *tiny(data_dir, tmp_path, bf16=None), *more.split(), capability="mps"
    )
    assert found["code"] == 0, found["stderr"]
    assert f"step {STEPS}/{STEPS}" in found["stdout"]
    assert not {"_pin_memory", "pin_memory"} & found["operations"].keys()


def test_a_card_from_before_2020_trains_in_float16(stand_in, data_dir, tmp_path):
    line = tiny(data_dir, tmp_path)
    found = memory.on_gpu(stand_in, *line, capability="7.5")
    assert found["code"] == 0, found["stderr"]
    assert "--fp16=True" in found["stdout"] and "; --bf16 is emulated by" in found["stdout"]
    found = memory.on_gpu(stand_in, *line, "--bf16", capability="7.5")
    assert found["code"] == 2 and found["stderr"].endswith(
        "a GPU that can't compute: --fp16 instead\n"
    )


def test_a_card_without_kernels_is_refused(stand_in, data_dir, tmp_path):
    found = memory.on_gpu(stand_in, *tiny(data_dir, tmp_path), capability="7.0")
    assert found["code"] == 2 and len(found["stderr"].splitlines()) == 1
    assert "no kernels for a GPU that can't compute (compute capability 7.0)" in found["stderr"]
    assert found["stderr"].endswith("or set CUDA_VISIBLE_DEVICES= for the CPU\n")
