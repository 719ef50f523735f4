"""benchmarks/sweep.py: its grid, its table, and as a program beside a made-up train_gpt2.py."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sweep
from test_ladder import REPO, benchmark, copy_of_project

# Its loss falls from 6 by the learning rate after each step of 100 tokens, and by seed.
TRAIN = """
import json, sys
from pathlib import Path

flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
folder = Path(flags["out-dir"])
assert ("resume" in flags) == (folder / "log.jsonl").exists()
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as starts:
    starts.write("x")
(folder / "typed").write_text(" ".join(sys.argv))
ends = {"diverge": (4, "the loss is not finite"), "huge": (2, "one sequence does not fit")}
ends |= {"typo": (2, "--typo is no flag"), "broken": (1, "it is broken")}
ends |= {"live": (2, "--out-dir out belongs to a live run: wait for its end")}
for name, (code, why) in ends.items():
    if name in flags and not Path("repaired").exists():
        (folder / "log.jsonl").touch()
        print(f"train_gpt2.py: error: {why}", file=sys.stderr)
        sys.exit(code)
env = {"commit": "0123456789", "device": "cpu", "device_name": "a CPU", "torch": "2"}
start = {"environment": env, "micro_batch_size": 4, "tokenizer": "bytes"}
start["typed"] = [word.removeprefix("no-").replace("-", "_") for word in flags]
shape = {"model": "nano", "n_layer": 4, "n_embd": 128, "fp16": "fp16" in flags}
# It chooses other speed-ups in each folder, unless they are typed.
for name in ("bf16", "flash", "compile"):
    words = [word for word in sys.argv if word in (f"--{name}", f"--no-{name}")]
    shape[name] = words[-1] == f"--{name}" if words else len(flags["out-dir"]) % 2 == 0
records = [start | {"flags": shape | {"batch_tokens": 100, "data_dir": ""}, "tokenizer": "bytes"}]
rate, seed = float(flags.get("learning-rate", 1)), float(flags.get("seed", 0))
for step in range(5):
    loss = 6 + 0.1 * seed - rate * step
    records.append({"step": step, "val_loss": loss, "bits_per_byte": 2 * loss})
    if step:
        records.append({"step": step, "loss": loss, "ms": 10.0, "tokens_per_s": 1e4, "peak_mib": 9})
(folder / "log.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
(folder / "step_000004").mkdir(exist_ok=True)
"""

MEASURED = ("bf16", "flash", "compile")


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    for name in ("sweep", "machine", "plot"):
        shutil.copy(REPO / "benchmarks" / f"{name}.py", tmp_path / "benchmarks")
    (tmp_path / "train_gpt2.py").write_text(TRAIN)
    return tmp_path


def run_sweep(project: Path, *flags: str, name: str = "it") -> subprocess.CompletedProcess:
    program = [sys.executable, project / "benchmarks" / "sweep.py", "--name", name, *flags]
    return subprocess.run(program, cwd=project, capture_output=True, text=True)


def results(project: Path, name: str = "it") -> list[dict]:
    return json.loads((project / f"out/sweep/sweep-{name}.json").read_text())["runs"]


def rows(text: str) -> dict[str, list[str]]:
    """Return the table that was printed: a row's cells by its setting."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in lines}


@pytest.mark.parametrize(
    ("words", "combinations"),
    [
        (["--a", "1,2"], [["--a=1"], ["--a=2"]]),
        (["--a=1,2", "--b"], [["--a=1", "--b"], ["--a=2", "--b"]]),
        (["--a,--no-a", "--b", "-1"], [["--a", "--b=-1"], ["--no-a", "--b=-1"]]),
        ([",--a --b=1"], [[], ["--a", "--b=1"]]),
        (["--a=1,--b"], [["--a=1"], ["--b"]]),
        (["--a", "1,2", "--b", "3,4"], [[f"--a={a}", f"--b={b}"] for a in "12" for b in "34"]),
    ],
)
def test_commas_separate_alternatives(words, combinations):
    assert sweep.combinations(words) == combinations


def test_tokens_to_a_loss_are_not_guessed_between_two_validations():
    other = {"flags": ["--seed=1"], "val_loss": 3.0, "curve": {"tokens": [0, 100]}}
    for num, cell in ((2, "validate more often (--eval-every)"), (5, "0.50")):
        tokens = [100 * i / (num - 1) for i in range(num)]
        curve = {"tokens": tokens, "val_loss": [5 - n / 25 for n in tokens]}
        run = {"flags": ["--muon", "--seed=1"], "val_loss": 1.0, "curve": curve}
        assert sweep.share_of_tokens([run], [other]) == cell
    third = run | {"flags": ["--muon", "--seed=3"]}  # the other has no run with this seed
    assert sweep.share_of_tokens([run, third], [other]) == "0.50 (of 1 of 2 seeds)"


def test_a_table_has_a_row_for_each_setting_with_the_spread_over_seeds(project):
    grid = ["--", "--model=x", "--learning-rate", "0.5,1", "--seed", "1,2"]
    done = run_sweep(project, "--until-loss-of", "learning-rate=0.5", *grid)
    assert done.returncode == 0, done.stderr
    head, _, slow, fast = rows(done.stdout).items()
    assert head[1][:3] == ["runs", "validation loss", "bits per byte"]
    assert head[1][-1] == "share of tokens"
    # At 0.5 the loss ends at 4.1 and 4.2; at 1 it is there after half of the steps.
    assert slow[0] == "`--learning-rate=0.5`"
    assert slow[1][:2] == ["2 done", "4.150 (4.100, 4.200)"] and slow[1][-1] == "1.00"
    assert fast[0] == "`--learning-rate=1`"
    assert fast[1][:3] == ["2 done", "2.150 (2.100, 2.200)", "4.300 (4.200, 4.400)"]
    assert fast[1][-1] == "0.50"
    assert "--model=x" in done.stdout.splitlines()[0]


def test_what_a_run_chooses_later_runs_get_unless_they_have_flags_of_their_own(project):
    alternatives = ["--no-flash", "", "--flash", "--fp16", "--bf16_residual"]
    done = run_sweep(project, "--", "--learning-rate", "0.5,1", ",".join(alternatives))
    assert done.returncode == 0, done.stderr
    typed, flags = [], []
    for run in results(project):
        typed.append((project / run["folder"] / "typed").read_text().split())
        log = (project / run["folder"] / "log.jsonl").read_text()
        flags.append(json.loads(log.splitlines()[0])["flags"])

    def switch(name: str, number: int) -> str:
        return f"--{name}" if flags[number][name] else f"--no-{name}"

    precision, compiling = switch("bf16", 0), switch("compile", 0)
    flash = switch("flash", 1)  # since the first run has typed one
    speed_ups = [[w for w in words if w.endswith(MEASURED) and "=" not in w] for words in typed]
    assert speed_ups[0] == ["--no-flash"]
    assert {*speed_ups[1]} == {precision, compiling}
    assert speed_ups[2][-1] == "--flash" and len(speed_ups[2]) == 4  # the last one counts
    assert {*speed_ups[3]} == {*speed_ups[4]} == {flash, compiling}
    assert {*speed_ups[6]} == {precision, flash, compiling}
    # Nothing is measured with --fp16, and another shape of the network is measured anew.
    shapes = "--seq-len 8 --n-embd 2,--seq-len 9 --n-embd 2,--steps=5,--init-from=a"
    done = run_sweep(project, "--", f"--fp16,,{shapes}", name="shapes")
    assert done.returncode == 0, done.stderr
    for run in results(project, "shapes"):
        words = (project / run["folder"] / "typed").read_text().split()[1:]
        assert {*words} == {*run["flags"], f"--out-dir={run['folder']}"}


def test_what_diverges_or_does_not_fit_is_a_row(project):
    done = run_sweep(project, "--", ",--diverge,--huge")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["`the defaults`"][0] == "1 done"
    assert table["`--diverge`"][0] == "1 diverged" and table["`--huge`"][0] == "1 does not fit"


def test_a_sweep_continues_and_grows_and_overwrites_nothing(project):
    other = project / "out/sweep/it/a=1"  # of somebody else
    other.mkdir(parents=True)
    grid = ["--", "--a", "1,2", ",--broken"]
    done = run_sweep(project, *grid)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "sweep.py: error: --a=1 --broken: it is broken",
    )
    (project / "repaired").touch()
    done = run_sweep(project, *grid)
    assert done.returncode == 0, done.stderr
    done = run_sweep(project, "--", "--a", "1,2,3", ",--broken")
    assert done.returncode == 0, done.stderr
    runs = results(project)
    assert len(runs) == 6 and {run["state"] for run in runs} == {"done"}
    folders = [project / run["folder"] for run in runs]
    assert len({*folders}) == 6 and other not in folders and not [*other.iterdir()]
    starts = [len((folder / "starts").read_text()) for folder in folders]
    assert starts == [1, 2, 1, 1, 1, 1]  # the one that was broken was continued in its folder


def test_a_mistake_is_one_line(project):
    done = run_sweep(project, "--", "--typo")
    assert done.stderr.splitlines()[-1] == "sweep.py: error: --typo: --typo is no flag"
    assert done.returncode == 2
    done = run_sweep(project, "--", "--live")
    assert "is a live run: wait for the other sweep" in done.stderr and done.returncode == 2
    done = run_sweep(project, "--", "--a", "1,2", "--out-dir=mine")
    assert "leave --out-dir out: the runs are in" in done.stderr and done.returncode == 2
    done = run_sweep(project, "--until-loss-of", "b", "--", "--a", "1,2")
    assert "no finished run has these flags and a loss" in done.stderr and done.returncode == 2


def test_checkpoints_are_deleted_on_request_alone(project):
    for name, flags in (("kept", []), ("gone", ["--discard"])):
        assert run_sweep(project, *flags, "--", "--a", name=name).returncode == 0
        [run] = results(project, name)
        assert (project / run["folder"] / "log.jsonl").exists()
        assert (project / run["folder"] / "step_000004").exists() == (name == "kept")


def test_a_loss_is_reached_between_two_validations():
    curve = {"tokens": [0, 10, 20, 30], "val_loss": [6.0, 4.0, 2.0, 3.0]}
    assert [sweep.tokens_to(loss, curve) for loss in (3.5, 2.0, 1.0)] == [12.5, 20, float("inf")]


@pytest.mark.slow
def test_the_real_train_gpt2(tmp_path, data_dir):
    project = copy_of_project(tmp_path / "project")
    tiny = ["--model", "nano", "--steps", "6", "--batch-tokens", "64", "--seq-len", "16"]
    tiny += ["--eval-every", "1", "--eval-tokens", "512", "--data-dir", str(data_dir)]
    grid = ["--muon,--no-muon", "--learning-rate", "1e-3,2e9"]
    until = ["--until-loss-of", "no-muon"]
    done = benchmark(project, "sweep.py", "--name", "it", *until, "--", *tiny, *grid)
    assert done.returncode == 0, done.stderr
    states = [run["state"] for run in results(project)]
    assert len(states) == 4 and states[0] == states[2] == "done" and "diverged" in states
    assert rows(done.stdout)["`--no-muon --learning-rate=1e-3`"][-1] == "1.00"
