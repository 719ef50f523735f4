"""benchmarks/peers.py: its parts, and as a program beside made-up clones, which print what the real
ones do. Only the slow test runs the real train_gpt2.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peers
import pytest
from conftest import NEEDS_GPT2

REPO = Path(peers.__file__).resolve().parent.parent
TORCH = """
class cuda:
    is_available = lambda: {is_gpu}
    device_count = lambda: int({is_gpu})
    max_memory_allocated = lambda: 345 * 2**20
"""
PREPARE = """
import sys
from array import array
from pathlib import Path

flags = dict(flag[2:].split("=") for flag in sys.argv[1:])
assert flags["tokenizer"] == "gpt2"
tokens = array("H", (n % 50257 for n in range(9999)))
folder = Path(flags["data-dir"])
folder.mkdir()
for split in ("train", "val"):
    (folder / f"{split}_000000.bin").write_bytes(bytes(1024) + tokens[-5000:].tobytes())
"""
# What all made-up programs end with. The tokens show up in the losses.
LOOP = """
import time
from pathlib import Path
import torch

def train(tokens, steps, line, batch_tokens, passes):
    assert batch_tokens % passes == 0
    print("a line of another kind: 12 ms")
    for step in range(steps):
        time.sleep(0.001)
        print(line.format(step=step, loss=10 + sum(tokens[:50]) / 50e3, ms=0.5))
    Path("finished").write_text("what a real one does after its last step")
"""
FLAGS = """
import sys
from array import array
flags = dict(word[2:].split("=") for word in sys.argv[1:] if "=" in word)
get = lambda name: int(flags[name])
"""
OURS = (
    FLAGS
    + LOOP
    + """
Path("out").mkdir()
device = "cuda" if torch.cuda.is_available() else "cpu"
name = {"device": device, "device_name": "a GPU", "commit": "0123456789", "torch": "2"}
Path("out/log.jsonl").write_text(__import__("json").dumps({"environment": name}) + "\\n")
tokens = array("H", Path(flags["data_dir"], "train_000000.bin").read_bytes()[1024:])
line = "step {step}/9 | loss {loss:.4f} | lr 6.0e-04 | norm 1.5 | {ms:.1f} ms | 9 tokens/s"
B = get("micro_batch_size")
assert sys.argv[-1] != "--no-fast", "is not known"
train(tokens, get("steps"), line, get("batch_tokens"), B * get("seq_len"))
"""
)
BUILD_NANOGPT = (
    """
import numpy as np
from hellaswag import iterate_examples, render_example
"""
    + LOOP
    + """
def load():
    data_root = "edu_fineweb10B"
    [shard] = [path for path in Path(data_root).iterdir() if "train" in path.name]
    return np.load(shard).tolist()

total_batch_size = 524288 # ~0.5M
B = 64 # micro batch size
T = 1024
use_compile = False
max_steps = 19073
for _ in range(1):
    val_loss_steps = 20
line = "step {step:5d} | loss: {loss:.6f} | lr 6.0000e-04 | norm: 1.5 | dt: {ms:.2f}ms | tok/sec: 9"
assert use_compile and val_loss_steps == 1
train(load(), max_steps, line, total_batch_size, B * T)
"""
)
NANOGPT = (
    FLAGS
    + LOOP
    + """
from model import GPT
assert Path("configurator.py").exists()
tokens = array("H", Path(flags["dataset"], "train.bin").read_bytes())
print("step 0: train loss 9.9, val loss 9.9")
line = "iter {step}: loss {loss:.4f}, time {ms:.2f}ms, mfu -100.00%"
per_pass = get("batch_size") * get("block_size") * get("gradient_accumulation_steps")
train(tokens, get("max_iters"), line, per_pass, per_pass)
"""
)
LLM_C = (
    FLAGS
    + LOOP
    + """
assert flags["write_tensors"] == flags["overfit_single_batch"] == "0"
tokens = array("H", Path(flags["input_bin"]).read_bytes()[1024:])
line = "step {step:4d}/9 | train loss {loss:.6f} | norm 1.5 | lr 1.00e-04 | ({ms:.2f} ms | 9 tok/s)"
per_pass = get("batch_size") * get("sequence_length")
train(tokens, get("num_iterations"), line, get("total_batch_size"), per_pass)
"""
)
SCRIPTS = {
    "build-nanogpt": {"train_gpt2.py": BUILD_NANOGPT, "hellaswag.py": "1 / 0"},
    "nanoGPT": {"train.py": NANOGPT, "model.py": "GPT = 1", "configurator.py": ""},
    "llm.c": {"train_gpt2.py": LLM_C},
}


def make_clone(folder: Path, name: str, **changes: str) -> Path:
    """Write the scripts of a clone; changes are scripts by name without .py."""
    texts = SCRIPTS[name] | {f"{script}.py": text for script, text in changes.items()}
    for file, text in texts.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text)
    return folder / name


def make_project(folder: Path) -> Path:
    """Write the benchmarks, with made-up programs beside them."""
    (folder / "benchmarks").mkdir(parents=True)
    for name in ("peers", "machine"):
        shutil.copy(REPO / "benchmarks" / f"{name}.py", folder / "benchmarks")
    (folder / "train_gpt2.py").write_text(OURS)
    (folder / "prepare_data.py").write_text(PREPARE)
    return folder


def run_program(tmp_path: Path, *flags, is_gpu=False):
    """Run peers.py in a project of its own, with as many GPUs as torch says."""
    if not (project := tmp_path / "project").exists():
        make_project(project)
    (tmp_path / "torch.py").write_text(TORCH.format(is_gpu=is_gpu))
    program = [sys.executable, project / "benchmarks" / "peers.py", "--steps", "3", *flags]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    return subprocess.run(program, env=env, capture_output=True, text=True, cwd=tmp_path)


def results(project: Path) -> dict:
    [path] = (project / "benchmarks" / "results").glob("peers-*.json")
    return json.loads(path.read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SIZES = ["--micro-batch-size", "2", "--seq-len", "8", "--batch-tokens", "32"]


def test_on_a_gpu_all_run_on_the_same_tokens_and_in_turn(tmp_path):
    clones = [make_clone(tmp_path / "clones", name) for name in peers.CLONES]
    before = files(tmp_path / "clones")
    flags = zip(("--build-nanogpt", "--nanogpt", "--llm-c"), clones, strict=True)
    flags = [word for pair in flags for word in pair]
    done = run_program(tmp_path, *flags, *SIZES, "--rounds", "2", is_gpu=True)
    assert done.returncode == 0, done.stderr
    [(model, result)] = results(tmp_path / "project")["results"].items()
    assert (model, result["device"]) == ("gpt2", "cuda")
    orders = [list(number) for number in result["rounds"]]
    assert orders == [[peers.OURS, *peers.CLONES], [peers.OURS, *peers.CLONES][::-1]]
    for run in (run for number in result["rounds"] for run in number.values()):
        num_steps = 1 + peers.WARM_UP + 3
        assert run["loss"] == pytest.approx([15.0235] * num_steps)  # of tokens 4999 ... 5048
        assert len(run["ms"]) == num_steps - 1 and min(run["ms"]) > 0 and run["peak_mib"] == 345
        assert run["variant"] == {"B": 2, "compile": 1}
    assert "| nanoGPT B=2 compile=1 " in done.stdout
    assert files(tmp_path / "clones") == before
    assert not list(tmp_path.rglob("finished"))


def test_on_a_cpu_the_peak_is_the_processs(tmp_path):
    clone = make_clone(tmp_path, "nanoGPT")
    done = run_program(tmp_path, "--nanogpt", clone, *SIZES, "--rounds", "1", "--no-compile")
    assert done.returncode == 0, done.stderr
    result = results(tmp_path / "project")["results"]["gpt2"]
    [last] = result["rounds"]
    assert {run["variant"]["compile"] for run in last.values()} == {0}
    assert all(5 < run["peak_mib"] < 300 for run in last.values())


def test_a_program_that_does_not_run_says_why_and_what_ran_is_kept(tmp_path):
    clone = make_clone(tmp_path, "llm.c", train_gpt2="import not_here")
    flags = ["--llm-c", clone, *SIZES, "--rounds", "2"]
    done = run_program(tmp_path, *flags, "--flags=--no-bf16 --no-fast", is_gpu=True)
    why = "train_gpt2.py: AssertionError: is not known"
    assert (done.returncode, done.stderr) == (2, f"peers.py: error: {why}\n")
    done = run_program(tmp_path, *flags, is_gpu=True)
    why = "llm.c: ModuleNotFoundError: No module named 'not_here'"
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"peers.py: error: {why}"
    unfinished = results(tmp_path / "project")
    assert "train_gpt2.py B=2" in peers.block({"peers-x.json": unfinished})
    make_clone(tmp_path, "llm.c")
    done = run_program(tmp_path, *flags, is_gpu=True)  # and nothing is overwritten
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "project").glob("benchmarks/results/peers-*.json")]) == 2


@NEEDS_GPT2
@pytest.mark.slow
def test_the_real_train_gpt2(tmp_path):
    """Its flags and its lines are known."""
    project = make_project(tmp_path / "project")
    for path in REPO.glob("*.py"):
        shutil.copy(path, project)
    shutil.copytree(REPO / "support", project / "support")
    clone = make_clone(tmp_path, "nanoGPT", train=NANOGPT.replace("import torch", ""))
    program = [sys.executable, project / "benchmarks" / "peers.py", "--nanogpt", clone]
    small = "--n-layer=1 --n-head=2 --n-embd=32 --no-fused"
    flags = [*SIZES, "--no-compile", "--rounds", "1", "--steps", "5", f"--flags={small}"]
    done = subprocess.run([*program, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = results(project)["results"]["gpt2"]["rounds"][0][peers.OURS]
    assert 10 < run["loss"][0] < 12 and run["peak_mib"] > 100
    assert results(project)["environment"]["torch"]


def test_constants_are_replaced_by_name_and_nothing_else():
    script = "B = 64 # micro\nif 1:\n    root = 'a' # B = 1\n    self.B = B\nuse = (B == 64)\n"
    new = peers.set_constants(script, {"B": 4, "root": "it's", "use": True})
    assert new == 'B = 4\nif 1:\n    root = "it\'s"\n    self.B = B\nuse = True\n'
    for text, count in (("A = 1\n", 0), ("B = 1\nif A:\n    B = 2\n", 2)):
        with pytest.raises(ValueError, match=f"B is assigned on {count} lines instead of 1"):
            peers.set_constants(text, {"B": 4})


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("step 7/50 | loss 10.98 | lr 8.39e-07 | norm 15.2 | 1234 ms | 9 tokens/s", 10.98),
        ("step   3 | loss: 9.53 | lr 3.3e-06 | norm: 8 | dt: 812.25ms | tok/sec: 9", 9.53),
        ("iter 12: loss 4.2361, time 1034.50ms, mfu -100.00%", 4.2361),
        ("step  1/9 | train loss 8.5 | norm 9.0 | lr 1.00e-04 | (15.25 ms | 9 tok/s)", 8.5),
        ("step 0: train loss 10.8, val loss 10.9", None),
        ("validation after step 0: loss 5.5, perplexity 9", None),
        ("final 20 iters avg: 15.250ms", None),
        ("step 4 | loss nan | 12 ms", None),
    ],
)
def test_the_lines_of_a_step_are_read_and_no_others(line, loss):
    match = peers.STEP.search(line)
    assert (float(match[1]) if match else None) == loss


def test_the_table_shows_medians_ranges_and_ratios_of_the_same_round():
    def run(ms: float) -> dict:
        times = [9999.0] * peers.WARM_UP + [ms, 9999.0, ms]
        return {"variant": {"B": 2}, "ms": times, "loss": [10.0, 9.5], "peak_mib": ms}

    times = [(100, 200), (125, 100), (80, 100)]
    rounds = [{peers.OURS: run(a), "llm.c": run(b)} for a, b in times]
    ours, theirs = peers.rows({"rounds": [*rounds, {}], "batch_tokens": 1000})
    assert ours["tokens/s"] == "10,000 (8,000 to 12,500)" and ours["peak MiB"] == "125"
    assert theirs["tokens/s"] == "10,000 (5,000 to 10,000)"
    assert theirs["train_gpt2.py is faster by"] == "1.25 (2.00, 0.80, 1.25)"


def test_a_mistake_is_one_line_with_its_cure(tmp_path):
    clone = make_clone(tmp_path, "build-nanogpt", train_gpt2="B = 64\n")
    cases = {
        (): "nothing to compare with: give --build-nanogpt, --nanogpt or --llm-c",
        ("--nanogpt", clone): f"{clone}/train.py is missing: git clone"
        " https://github.com/karpathy/nanoGPT",
        ("--build-nanogpt", clone): "train_gpt2.py of --build-nanogpt: T is assigned on 0 lines"
        " instead of 1: take another commit",
        ("--build-nanogpt", clone, "--micro-batch-size", "3"): "--batch-tokens must be a multiple"
        " of --micro-batch-size * --seq-len 768: try --batch-tokens 768",
    }
    for flags, why in cases.items():
        done = run_program(tmp_path, *flags)
        assert (done.returncode, done.stderr) == (2, f"peers.py: error: {why}\n")
