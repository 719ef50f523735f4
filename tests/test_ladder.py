"""benchmarks/ladder.py and doctor.py, as programs, in a copy of the project that a test breaks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from importlib import import_module
from inspect import getsource
from multiprocessing import get_context
from pathlib import Path

import ladder
import machine
import pytest
from conftest import ended, program_main, redirect, server

import train_gpt2

REPO = Path(__file__).resolve().parent.parent
BREAKS = {  # what a wrong speed-up would do: the rung, the file, the line, what becomes of it
    "no scale": ("flash", "model.py", "is_causal=is_causal)", "is_causal=is_causal, scale=1.0)"),
    "no mask": ("flash", "model.py", "is_causal=is_causal)", "is_causal=False)"),
    "padded targets": ("pad-vocab", "model.py", "is_padding = ids >=", "is_padding = ids > 63 +"),
    "a sum for a mean": ("accumulation", "train_gpt2.py", "net(x, y) / num_micro", "net(x, y)"),
    "the same data": (
        "2 ranks",
        "train_gpt2.py",
        "seq_len, world.rank, world.size",
        "seq_len, 0, 2",
    ),
}


def copy_of_project(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of the programs, with edits: file, old, new; the ladder waits for no idle machine, and
    the rate of small products is measured."""
    for name in ("", "benchmarks", "support"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in (REPO / name).glob("*.py"):
            shutil.copy(path, folder / name)
    at_once = ("benchmarks/ladder.py", "IDLE_WITHIN_S = 5", "IDLE_WITHIN_S = 0")
    small = ("support/device.py", "device.type, 1024)", "device.type, 64)")
    for name, old, new in (at_once, small, *edits):
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    return folder


def benchmark_main(script: Path, argv: list[str], out: Path):
    """What python script does, a benchmark in a copy of the project, except that it and its runs of
    train_gpt2.py on one rank have imported torch before, which takes most of their time."""
    own = (REPO, REPO / "support", REPO / "benchmarks")
    for name, module in list(sys.modules.items()):  # the copy has its own
        if Path(getattr(module, "__file__", None) or "/").resolve().parent in own:
            del sys.modules[name]
    sys.path[:0] = [str(script.parent), str(script.parent.parent)]
    copy = import_module("ladder")
    plain = copy.finish

    def finish(program: list[str], env: dict) -> tuple[int, str]:
        if Path(program[1]).name != "train_gpt2.py":
            return plain(program, env)
        line = (program[2:], script.parent.parent, env, out / "run", str(program[1]))
        fork = get_context("fork" if os.name == "posix" else "spawn")
        code, _, errors = ended(fork.Process(target=program_main, args=line), out / "run")
        return code, errors

    copy.finish = finish
    os.chdir(script.parent.parent)
    redirect(out)
    sys.argv = [str(script), *argv]
    sys.exit(import_module(script.stem).main())


def benchmark(project: Path, name: str, *argv) -> tuple[int, str, str]:
    """A benchmark's exit code, output and errors."""
    script, out = project / "benchmarks" / name, project / "said"
    arguments = (script, [*map(str, argv)], out)
    return ended(server().Process(target=benchmark_main, args=arguments), out)


def line(data_dir: Path, *flags: str) -> list:
    small = ["--model", "nano", "--steps", "2", "--micro-batch-size", "4", "--seq-len", "16"]
    return [*small, "--data-dir", data_dir, *flags]


def climb(project: Path, data_dir: Path, *flags: str, code: int = 0) -> tuple[dict, str]:
    """The results of a whole ladder, and what it printed."""
    found, out, err = benchmark(project, "ladder.py", *line(data_dir, *flags))
    assert found == code, err
    return results(project), out


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
    content, text = climb(project, data_dir, "--ranks", "2", "--only", name, code=1)
    assert states(content) == {"base": "measured", name: "refused"}
    assert "differs from the base's by" in text


@pytest.mark.slow
def test_ranks_whose_gradients_are_not_averaged_end_their_rung(tmp_path, data_dir):
    """The trainer itself compares the weights."""
    edit = ("train_gpt2.py", "enabled=micro_step ==", "enabled=micro_step == -")
    project = copy_of_project(tmp_path / "project", edit)
    content, text = climb(project, data_dir, "--ranks", "2", "--only", "2 ranks", code=1)
    assert states(content) == {"base": "measured", "2 ranks": "failed"}
    assert "holds other weights than the others" in text


@pytest.mark.slow
def test_the_rungs_above_do_without_a_refused_one(tmp_path, data_dir):
    name, *edit = BREAKS["no scale"]
    project = copy_of_project(tmp_path / "project", edit)
    content, text = climb(project, data_dir, "--only", name, "fused", code=1)
    assert states(content) == {"base": "measured", name: "refused", "fused": "measured"}
    assert f"--no-{name}" in content["rungs"][2]["command"]


@pytest.mark.slow
def test_what_does_not_fit_is_measured_with_half_the_micro_batch(tmp_path, data_dir):
    too_large = (
        "train_gpt2.py",
        "    for micro_step in range(num_micro):\n",
        "    if config.flash and config.micro_batch_size > 1:\n"
        "        raise torch.OutOfMemoryError('no room')\n"
        "    for micro_step in range(num_micro):\n",
    )
    project = copy_of_project(tmp_path / "project", too_large)
    content, text = climb(project, data_dir, "--only", "flash")
    base, flash = content["rungs"]
    assert [run["flags"]["micro-batch-size"] for run in base["runs"]] == [4, 4]
    assert [run["flags"]["micro-batch-size"] for run in flash["runs"]] == [1, 1]
    assert "4 sequences do not fit in a pass" in text and "=1 " in flash["command"]
    assert max(flash["difference"][key] for key in ("loss", "grad_norm")) < 1e-5


@pytest.mark.slow
def test_the_whole_ladder(tmp_path, data_dir):
    """Every rung is measured or says why not; JSON, picture, README block and comparison. Without
    compile, which takes minutes for all rungs."""
    project = copy_of_project(tmp_path / "project")
    skipped = ("compile", "ranks-muon")
    content, text = climb(project, data_dir, "--ranks", "2,999", "--skip", *skipped)
    names = [name for name in (*ladder.SPEED_UPS, *ladder.BEYOND) if name not in skipped]
    expected = dict.fromkeys(["base", *names, "accumulation", "2 ranks"], "measured")
    missing = dict.fromkeys(["tf32", "999 ranks"], "not on this device")
    assert states(content) == expected | missing
    for rung in content["rungs"]:
        assert rung["why"] if rung["name"] in missing else len(rung["runs"]) == 2
        for run in rung["runs"]:
            assert len(run["ms"]) == len(run["loss"]) == 2 + ladder.LEFT_OUT
    alone = [rung["name"] for rung in content["rungs"] if "alone" in rung]
    memory = ["loss-chunk-tokens", "recompute"]
    assert alone == ["flash", "pad-vocab", "fused", *memory, "accumulation", "2 ranks"]
    commands = {rung["name"]: rung["command"] for rung in content["rungs"]}
    assert "--recompute" in commands["recompute"] and "--fp16" in commands["fp16"]
    assert not re.search("--recompute|--fp16|--loss-chunk|--bf16-res", commands["accumulation"])
    assert content["complete"] and "Not finished" not in text
    [picture] = (project / "out" / "ladder").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")

    path = picture.with_suffix(".json")
    for again in range(2):  # the second time replaces what the first one wrote
        page = project / "benchmarks" / "README.md"
        page.write_text(f"a\n<!-- ladder -->{again * 'x'}<!-- end of ladder -->\nb\n")
        program = [sys.executable, project / "benchmarks" / "ladder.py"]
        subprocess.run([*program, "--readme", path], check=True)
        readme = page.read_text()
        assert readme.startswith("a\n") and readme.endswith("b\n")
        assert ladder.report(content, path.name) in readme and "not measured yet" in readme
    done = subprocess.run([*program, "--compare", path, path], capture_output=True, text=True)
    assert done.stdout.count("| 1.00 |") >= 7  # B / A


@pytest.mark.slow
def test_leave_one_out(tmp_path, data_dir):
    project = copy_of_project(tmp_path / "project")
    content, _ = climb(project, data_dir, "--leave-one-out", "--skip", "compile", "bf16")
    names = ["without flash", "without pad-vocab", "without fused", "without accumulation"]
    assert states(content) == dict.fromkeys(["all", *names], "measured")
    for rung in content["rungs"][1:4]:
        assert rung["command"].count("--no-") == content["rungs"][0]["command"].count("--no-") + 1


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
    assert not before.get("complete")
    after, _ = climb(project, data_dir, *flags, "--resume")
    assert after["complete"] and len(after["rungs"]) == 3
    assert after["rungs"][0]["runs"][0] == before["rungs"][0]["runs"][0]

    other = json.loads(next(folder.glob("*.json")).read_text())
    other["complete"], other["environment"]["torch"] = False, "0.1"
    other["rungs"] = other["rungs"][:1]
    next(folder.glob("*.json")).write_text(json.dumps(other))
    code, _, err = benchmark(project, "ladder.py", *line(data_dir, *flags, "--resume"))
    assert code == 2 and "torch 0.1" in err.splitlines()[-1]


def measured(monkeypatch, folder: Path, *flags: str) -> tuple[int, Namespace]:
    """The exit code of a ladder in this folder whose runs take no time, and its flags. A rung's
    step takes 10 ms less than one of the rung before, and a run says when it begins."""

    def attempt(flags: dict) -> tuple[dict, int, str]:
        print("a run")
        on, count = sum(map(bool, (flags["bf16"], flags["muon"]))), flags["steps"]
        env = {"device": "cpu", "device_name": "it", "torch": "2", "commit": "0123456789"}
        run = {"loss": [4.0] * count, "grad_norm": [1.0] * count, "ms": [40.0 - 10 * on] * count}
        facts = {"matmul_share": 0.5, "peak_mib": 1.0, "busy": 0.0, "environment": env}
        return run | facts | {"flags": flags}, 0, ""

    monkeypatch.chdir(folder)
    monkeypatch.setattr(ladder, "attempt", attempt)
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    monkeypatch.setattr(machine, "RESULTS", folder / "kept")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    ladder.settle(args := ladder.make_parser().parse_args(["--only", "bf16", "muon", *flags]))
    return ladder.measure(args), args


def test_each_rung_is_told_as_soon_as_it_is_measured(tmp_path, monkeypatch, capsys):
    code, _ = measured(monkeypatch, tmp_path)
    base, bf16, muon = "float32, everything off", "+ BF16 autocast", "+ Muon for the matrices"
    said = [
        f"{base}: 40.0 ms, 51,200 tokens/s (first round, 2 left)",
        f"{bf16}: 30.0 ms, 68,267 tokens/s (first round, 1 left)",
        f"{muon}: 20.0 ms, 102,400 tokens/s (first round, 0 left)",
        f"{muon}: 20.0 ms, 102,400 tokens/s (second round, 2 left)",
        f"{bf16}: 30.0 ms, 68,267 tokens/s (second round, 1 left)",
        f"{base}: 40.0 ms, 51,200 tokens/s (second round, 0 left)",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[:12] == [line for told in said for line in ("a run", told)]


def test_results_go_to_out_or_are_kept_and_resume_looks_there(tmp_path, monkeypatch):
    for flags, name in (((), "out/ladder"), (("--keep",), "kept")):
        _, args = measured(monkeypatch, tmp_path, *flags)
        paths = sorted((tmp_path / name).iterdir())
        assert [path.suffix for path in paths] in ([".json"], [".json", ".png"])
        content = machine.load(paths[0])
        args.resume = True
        assert ladder.start(args).path is None  # complete
        machine.save(paths[0], content | {"complete": False})
        assert ladder.start(args).path.resolve() == paths[0]
    assert sorted(os.listdir(tmp_path)) == ["kept", "out"]


@pytest.mark.parametrize(
    "path", sorted(machine.RESULTS.glob("ladder-*.json")), ids=lambda p: p.stem
)
@pytest.mark.parametrize("one_out", [False, True])
def test_the_table_fits_a_terminal(path, one_out):
    content = machine.load(path)
    content["settings"]["leave_one_out"] = one_out
    text = ladder.summary(content)
    assert max(map(len, text.splitlines())) <= 80
    table = [line for line in text.splitlines() if re.search(r"\S  +\S", line)]
    assert len(table) == 1 + len(content["rungs"])
    columns = ["brings"] if one_out else ["x before", "x base"]
    for line, row in zip(table[1:], ladder.rows(content), strict=True):
        cells = [row.get(name) for name in ("rung", "ms", "tokens/s", *columns)]
        assert re.split("  +", line) == [cell for cell in cells if cell]


def test_rungs_that_this_machine_lacks_are_refused_before_anything_runs(tmp_path):
    program = [sys.executable, REPO / "benchmarks" / "ladder.py", "--model", "nano"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    only = ("--ranks", "999", "--only", "tf32", "999 ranks")
    done = subprocess.run([*program, *only], cwd=tmp_path, env=env, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout, os.listdir(tmp_path)) == (2, "", [])
    assert line.startswith(
        "ladder.py: error: none of the rungs of --only can be measured here: tf32: --tf32 "
    )
    assert "needs an NVIDIA GPU of 2020 or later, this is cpu" in line and "; 999 ranks" in line


@pytest.mark.parametrize("flag", ["--steps", "--seq-len", "--batch-tokens", "--micro-batch-size"])
def test_a_size_of_0_is_refused(flag):
    with pytest.raises(ValueError, match="^0: sizes and steps must be at least 1"):
        ladder.settle(ladder.make_parser().parse_args([flag, "0"]))


@pytest.mark.parametrize("rung, refused", [("fused", False), ("999 ranks", True)])
def test_a_rung_that_can_be_had_lets_the_ladder_begin(monkeypatch, rung, refused):
    """Whatever else was asked for."""
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    line = ["--model", "nano", "--ranks", "999", "--only", rung, "999 ranks"]
    ladder.settle(args := ladder.make_parser().parse_args(line))
    with pytest.raises(ValueError, match="999 ranks, ") if refused else nullcontext():
        ladder.check_any(args)


def test_the_gpu_script_keeps_its_ladders():
    text = (REPO / "benchmarks" / "gpu.sh").read_text("utf-8").replace("\\\n", "")
    calls = [line for line in text.splitlines() if "ladder.py" in line]
    assert len(calls) == 2 and all("--keep" in call for call in calls)


def test_nothing_is_compared_after_a_step_that_overflows():
    """It makes no update: from there on it is another run. Its loss, of before, is the same."""
    flags = {"batch-tokens": 8, "fp16": True}
    base = {"flags": flags, "loss": [4.0, 3.0, 2.0], "grad_norm": [1.0, 1.0, 1.0]}
    found = ladder.difference(
        base | {"loss": [4.0, 3.03, 9.0], "grad_norm": [1.0, None, 9.0]}, base
    )
    assert found["loss"] == pytest.approx(0.01) and found["grad_norm"] == 0
    found = ladder.difference(base | {"loss": [4.4, 9.0, 9.0], "grad_norm": [None, 9.0, 9.0]}, base)
    assert found["loss"] == pytest.approx(0.1) and ladder.too_large(found).startswith(
        "loss differs"
    )


@pytest.mark.parametrize("name", ["ladder", "peers", "data", "tokens"])
def test_the_readme_shows_the_results_that_are_kept(name):
    """Its tables are what --readme makes of all results of a program."""
    program = pytest.importorskip(
        {"tokens": "tokens_to_loss"}.get(name, name)
    )  # Windows has not all that they measure with
    text = machine.README.read_text(encoding="utf-8")
    contents = {p.name: machine.load(p) for p in sorted(machine.RESULTS.glob(f"{name}-*.json"))}
    assert contents and machine.with_block(text, name, program.block(contents)) == text


def speed_up_rows(page: str) -> list[list[str]]:
    section = page.partition("## One speed-up after the other")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:3] == "| `"]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_front_page_says_where_each_speed_up_is():
    rows = speed_up_rows((REPO / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == 8
    for _, _, where, *_ in rows:
        words, place = where.replace("`", "").split(" in ")
        is_file = place.endswith(".py")
        text = (REPO / place).read_text("utf-8") if is_file else getsource(vars(train_gpt2)[place])
        assert words in text, where


def test_the_front_page_has_the_figures_of_the_ladder():
    """What each speed-up brought, here and in the lecture, and in the picture beside it."""
    page = (REPO / "README.md").read_text(encoding="utf-8")
    [picture] = re.findall(r"!\[.*\]\(benchmarks/results/(ladder-.*)\.png\)", page)
    content = machine.load(machine.RESULTS / f"{picture}.json")
    measured = dict(zip([r["name"] for r in content["rungs"]], ladder.rows(content), strict=True))
    lecture = ladder.PUBLISHED[ladder.LECTURE]
    before = dict(zip(lecture, [None, *lecture.values()], strict=False))
    shown = speed_up_rows(page)
    for name, (flag, *_, here, there) in zip(ladder.SPEED_UPS, shown[:6], strict=True):
        assert flag == f"`--{name}`" and here == measured[name].get("x before", "-")
        assert there == f"{lecture[name] / before[name]:.2f}"
    after = [here for *_, here, _ in shown[6:]]
    assert after == [measured[name]["x before"] for name in ("accumulation", "2 ranks")]


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", "tests/README.md"])
def test_the_links_of_a_page_lead_to_what_is_there(page):
    text, folder = (REPO / page).read_text(encoding="utf-8"), (REPO / page).parent
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (folder / link).exists(), link


@pytest.mark.parametrize("name", ["doctor", "ladder", "plot"])
def test_a_benchmark_says_what_it_takes_and_does_no_more(monkeypatch, capsys, name):
    program = import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        program.main()
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: {name}.py") and "--help" in said.out and not said.err

    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--nonsense", "1"])
    with pytest.raises(SystemExit, match="^2$"):
        program.main()
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert line.startswith(f"{name}.py: error: ") and line.endswith("; see --help") and not said.out


@pytest.mark.slow
def test_the_doctor_says_what_it_would_type():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, REPO / "benchmarks" / "doctor.py"]
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert not done.stderr
    assert lines[-1].startswith("flags:      --model nano --no-tf32")
