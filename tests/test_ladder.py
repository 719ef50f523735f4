"""benchmarks/ladder.py and doctor.py as programs, in a copy of the project that a test breaks."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import ladder
import ladder_report
import machine
import pytest
import tables

REPO = Path(__file__).resolve().parent.parent
# What a wrong speed-up would do: the rung, the file, a pattern in it, what becomes of it
BREAKS = {
    "no scale": ("flash", "model.py", r"(is_causal=q\.shape.*)\)", r"\1, scale=1.0)"),
    "no mask": ("flash", "model.py", r"is_causal=q\.shape.*\)", "is_causal=False)"),
    "padded targets": ("pad-vocab", "model.py", r"ids < self", "ids < 63 + self"),
    "a sum for a mean": ("accumulation", "train_gpt2.py", r"net\(x, y\) / \w+", "net(x, y)"),
    "the same data": ("2 ranks", "train_gpt2.py", r"(data\.train, B, T), rank, size", r"\1, 0, 2"),
}


def copy_of_project(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """Copy the programs, with edits: file, pattern, replacement."""
    for name in (".", "benchmarks", "support"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in (REPO / name).glob("*.py"):
            shutil.copy(path, folder / name)
    for name, pattern, new in edits:
        text, count = re.subn(pattern, new, (folder / name).read_text(encoding="utf-8"))
        assert count, pattern
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def benchmark(project: Path, name: str, *argv) -> subprocess.CompletedProcess:
    program = [sys.executable, project / "benchmarks" / name, *argv]
    return subprocess.run(program, cwd=project, capture_output=True, text=True)


def line(data_dir: Path, *flags: str) -> list:
    small = ["--model", "nano", "--steps", "2", "--micro-batch-size", "4", "--seq-len", "16"]
    return [*small, "--data-dir", data_dir, *flags]


def climb(project: Path, data_dir: Path, *flags: str, code: int = 0) -> tuple[dict, str]:
    """Return the results of a whole ladder, and what it printed."""
    done = benchmark(project, "ladder.py", *line(data_dir, *flags))
    assert done.returncode == code, done.stderr
    return results(project), done.stdout


def results(project: Path) -> dict:
    [path] = (project / "out" / "ladder").glob("ladder-*.json")
    return json.loads(path.read_text())


def states(content: dict) -> dict[str, str]:
    return {rung["name"]: rung["state"] for rung in content["rungs"]}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BREAKS)
def test_a_rung_that_changes_the_mathematics_is_refused(tmp_path, data_dir, fault):
    name, *edit = BREAKS[fault]
    project = copy_of_project(tmp_path / "project", edit)
    content, text = climb(project, data_dir, "--only", name, code=3)
    assert states(content) == {"base": "measured", name: "refused"}
    assert "differs from the base's by" in text


@pytest.mark.slow
def test_ranks_whose_gradients_are_not_averaged_end_their_rung(tmp_path, data_dir):
    """The trainer itself compares the weights."""
    edit = ("train_gpt2.py", r"enabled=\w+ == num_micro\w* - 1", "enabled=False")
    project = copy_of_project(tmp_path / "project", edit)
    content, _ = climb(project, data_dir, "--only", "2 ranks", code=1)
    assert states(content) == {"base": "measured", "2 ranks": "failed"}


@pytest.mark.slow
def test_the_rungs_above_do_without_a_refused_one(tmp_path, data_dir):
    name, *edit = BREAKS["no scale"]
    project = copy_of_project(tmp_path / "project", edit)
    content, _ = climb(project, data_dir, "--only", name, "fused", code=3)
    assert states(content) == {"base": "measured", name: "refused", "fused": "measured"}
    assert f"--no-{name}" in content["rungs"][2]["command"]


@pytest.mark.slow
def test_a_ladder_that_does_not_fit_has_half_the_micro_batch(tmp_path, data_dir):
    pattern = r"( +)(for \w+ in .*range\(num_micro)"
    fails = r"\1if config.micro_batch_size > 1:\n"
    fails += r"\1    raise torch.OutOfMemoryError('out of memory')\n\1\2"
    project = copy_of_project(tmp_path / "project", ("train_gpt2.py", pattern, fails))
    content, _ = climb(project, data_dir, "--quick", "--only", "fused")
    assert [rung["flags"]["micro-batch-size"] for rung in content["rungs"]] == [1, 1]
    assert states(content) == {"base": "measured", "fused": "measured"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a run for each rung, beside three other tests on two cores
def test_the_whole_ladder(tmp_path, data_dir):
    """Every rung is measured or says why not. Without compile, which takes minutes."""
    project = copy_of_project(tmp_path / "project")
    names = [*(name for name in ladder.CHANGES if name != "compile"), "accumulation", "2 ranks"]
    content, text = climb(project, data_dir, "--only", *names)
    expected = dict.fromkeys(["base", *names], "measured") | {"tf32": "not on this device"}
    assert states(content) == expected
    for rung in content["rungs"]:
        assert rung["why"] if rung["name"] == "tf32" else len(rung["runs"]) == 2, rung
        for run in rung["runs"]:
            assert len(run["ms"]) == len(run["loss"]) == 2 + machine.WARM_UP
    alone = {rung["name"] for rung in content["rungs"] if "alone" in rung}
    assert alone == {*ladder.SAME_NUMBERS} - {"compile"}
    commands = {rung["name"]: rung["command"] for rung in content["rungs"]}
    assert "--recompute" in commands["recompute"] and "--fp16" in commands["fp16"]
    assert not re.search("--recompute|--fp16|--loss-chunk|--bf16-res", commands["accumulation"])
    [picture] = (project / "out" / "ladder").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ladder_report.block({picture.with_suffix(".json").name: content}) in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
def test_an_interrupted_ladder_keeps_its_runs_and_goes_on(tmp_path, data_dir):
    project = copy_of_project(tmp_path / "project")
    flags = ["--only", "flash", "fused"]
    program = [sys.executable, project / "benchmarks" / "ladder.py", *line(data_dir, *flags)]
    process = subprocess.Popen(program, cwd=project)
    folder = project / "out" / "ladder"
    while not list(folder.glob("ladder-*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    before = results(project)
    assert len(before["rungs"]) < 3
    after, _ = climb(project, data_dir, *flags, "--resume")
    assert [len(rung["runs"]) for rung in after["rungs"]] == [2, 2, 2]
    assert after["rungs"][0]["runs"][0] == before["rungs"][0]["runs"][0]

    other = results(project)
    other["environment"]["torch"] = "0.1"
    other["rungs"] = other["rungs"][:1]
    next(folder.glob("*.json")).write_text(json.dumps(other))
    done = benchmark(project, "ladder.py", *line(data_dir, *flags, "--resume"))
    assert done.returncode == 2 and "torch was 0.1" in done.stderr.splitlines()[-1]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a function that measures a ladder whose runs take no time; it returns all results.

    A rung's step takes 10 ms less than one of the rung before.
    """

    def train(flags: dict) -> dict:
        num_on, count = flags["bf16"] + flags["muon"], flags["steps"]
        env = {"device": "cpu", "device_name": "it", "torch": "2", "commit": "0123456789"}
        run = {"loss": [4.0] * count, "grad_norm": [1.0] * count, "flags": flags}
        run |= {"ms": [40.0 - 10 * num_on] * count, "matmul_share": 0.5, "peak_mib": 1.0}
        return run | {"environment": env}

    def measure(*flags: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["ladder.py", *flags])
        assert ladder.main() == 0
        return [machine.load(path) for path in tmp_path.rglob("ladder-*.json")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "train", train)
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return measure


def test_rungs_run_up_and_down_and_are_told_at_once(measured, capsys):
    measured("--only", "muon", "bf16")
    base = "float32, everything off: 40.0 ms, 25,600 tokens/s"
    bf16 = "+ BF16 autocast: 30.0 ms, 34,133 tokens/s"
    muon = "+ Muon for the matrices: 20.0 ms, 51,200 tokens/s"
    assert capsys.readouterr().out.splitlines()[:6] == [base, bf16, muon, muon, bf16, base]


def test_a_quick_ladder_grows_by_what_a_resume_asks_for(measured):
    """First one round of few rungs; then another rung and the second round, in the same file."""
    [content] = measured("--quick", "--only", "bf16", "accumulation", "--out", "kept")
    assert [len(rung["runs"]) for rung in content["rungs"]] == [1, 1, 1]
    assert machine.ONE_ROUND in ladder_report.notes(content)
    [content] = measured("--out", "kept", "--resume", "--only", "bf16", "muon", "accumulation")
    assert [rung["name"] for rung in content["rungs"]] == ["base", "bf16", "muon", "accumulation"]
    assert [len(rung["runs"]) for rung in content["rungs"]] == [2, 2, 2, 2]
    assert machine.ONE_ROUND not in ladder_report.notes(content)
    # With flash attention below it, accumulation is another rung.
    both = measured("--out", "kept", "--resume", "--only", "bf16", "flash", "accumulation")
    assert len(both) == 2 and content in both


def test_what_failed_is_tried_again(measured, tmp_path):
    measured("--only", "bf16")
    [path] = tmp_path.rglob("ladder-*.json")
    content = machine.load(path)
    content["rungs"][1] |= {"state": "failed", "why": "stopped by a signal", "runs": []}
    machine.save(path, content)
    [content] = measured("--only", "bf16", "--resume")
    assert states(content) == {"base": "measured", "bf16": "measured"}


def test_each_rung_is_on_the_disk_before_the_next_one_begins(measured, monkeypatch, tmp_path):
    train, seen = ladder.train, []

    def watched(flags: dict) -> dict:
        for path in tmp_path.rglob("ladder-*.json"):
            seen.append([rung["name"] for rung in machine.load(path)["rungs"]])
        return train(flags)

    monkeypatch.setattr(ladder, "train", watched)
    measured("--only", "flash", "fused")
    assert seen[:3] == [["base"], ["base", "flash"], ["base", "flash"]]  # fused after flash alone


@pytest.mark.parametrize(
    "flags",
    [["--only", "999 ranks"], ["--only", "nonsense"], ["--steps", "0"], ["--nonsense"]],
)
def test_what_can_not_be_measured_is_refused_in_one_line(flags, capsys, monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    with pytest.raises(SystemExit, match="^2$"):
        ladder.parse_args(flags)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ladder.py: error: ")


def test_nothing_is_compared_after_a_step_that_overflows():
    """It makes no update: from there on it is another run. Its loss, of before, is the same."""
    flags = {"batch-tokens": 8, "fp16": True}
    base = {"flags": flags, "loss": [4.0, 3.0, 2.0], "grad_norm": [1.0, 1.0, 1.0]}
    later = base | {"loss": [4.0, 3.03, 9.0], "grad_norm": [1.0, None, 9.0]}
    found = ladder.difference(later, base)
    assert found["loss"] == pytest.approx(0.01) and found["grad_norm"] == 0
    at_once = base | {"loss": [4.4, 9.0, 9.0], "grad_norm": [None, 9.0, 9.0]}
    found = ladder.difference(at_once, base)
    assert found["loss"] == pytest.approx(0.1)
    assert ladder.too_large(found).startswith("loss differs")


@pytest.mark.parametrize(("name", "program"), [("ladder", "ladder_report"), ("peers", "peers")])
def test_the_readme_shows_the_results_that_are_kept(name, program):
    """Its tables are what the program makes of all its results."""
    block = pytest.importorskip(program).block  # Windows can't import peers
    contents = {p.name: machine.load(p) for p in sorted(machine.RESULTS.glob(f"{name}-*.json"))}
    page = (REPO / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert contents and tables.put(page, name, block(contents)) == page


@pytest.mark.parametrize("name", ["ladder", "peers", "sweep"])  # those that name it
def test_a_table_names_the_programs_that_differ_from_its_commit(name):
    for path in machine.RESULTS.glob(f"{name}-*.json"):
        content = machine.load(path)
        content["environment"]["changed"] = ["model.py", "config.py"]
        shown = tables.PROGRAMS[name].block({path.name: content})
        assert f"{content['environment']['commit'][:7]} and changes to model.py, config.py" in shown


def test_the_front_page_has_the_figures_of_the_ladder():
    """Its table shows what each speed-up brought in the ladder of the picture above."""
    page = (REPO / "README.md").read_text(encoding="utf-8")
    [picture] = re.findall(r"!\[.*\]\(benchmarks/results/(ladder-.*)\.png\)", page)
    content = machine.load(machine.RESULTS / f"{picture}.json")
    table = zip(content["rungs"], ladder_report.rows(content), strict=True)
    brought = {f"--{rung['name']}": row.get("x before", "") for rung, row in table}
    section = page.partition("## The speed-ups")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:5] == "| `--"]
    shown = {cells[0].strip(" `"): cells[-1].strip() for cells in rows}
    assert [*shown] == [f"--{name}" for name in (*ladder.SPEED_UPS, "bf16-residual")]
    assert shown == {name: brought[name] for name in shown}


@pytest.mark.parametrize("name", ["doctor", "ladder", "plot"])
def test_a_benchmark_says_what_it_takes_and_does_no_more(monkeypatch, capsys, name):
    program = import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        program.main()
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: {name}.py") and "--help" in said.out and not said.err


@pytest.mark.slow
def test_the_doctor_says_ten_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = benchmark(copy_of_project(tmp_path / "project"), "doctor.py")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 10 and not done.stderr
    assert lines[-1].startswith("flags:      --model nano --no-tf32")
