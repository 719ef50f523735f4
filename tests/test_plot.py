"""benchmarks/plot.py, as a program and its parts, on logs written here."""

import csv
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import machine
import plot
import pytest

PROGRAM = Path(plot.__file__)
FLAGS = {"model": "gpt2", "n_layer": 12, "n_embd": 768, "data_dir": "data/mine"}
FLAGS["batch_tokens"] = 1_000_000
KEYS = {"name", "what", "value", "step", "tokens", "data", "source", "note"}
CURVE = {"name": "one", "what": "val_loss", "value": 4.0, "step": 4000, "data": "Mine"}
CURVE["tokens"] = 4_000_000_000  # 1e6 per step, as the runs here
CURVE["points"] = [[0, 10.0], [1000, 6.0], [2000, 5.0], [4000, 4.0]]


def write_log(folder: Path, *records: dict | str, tokenizer: str = "gpt2", **flags) -> str:
    """Write a run's folder. A record is a dict, or a line as it is."""
    folder.mkdir()
    start = {"flags": FLAGS | flags, "tokenizer": tokenizer}
    lines = [r if isinstance(r, str) else json.dumps(r) for r in (start, *records)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def step(number: int, loss: float | None, ms: float = 3_600_000.0) -> dict:
    return {"step": number, "loss": loss, "ms": ms, "tokens_per_s": 600.0}


def validated(number: int, loss: float, **more) -> dict:
    return {"step": number, "val_loss": loss} | more


def run_program(*line, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, PROGRAM, *line], capture_output=True, text=True, **options
    )


def words(folder: Path, *validations: dict, references=(CURVE,)) -> list[str]:
    run = plot.read_run(write_log(folder, step(1, 9.0), *validations))
    lines = plot.comparison(run, references)
    return [line.removeprefix(f"{folder} on data/mine: ") for line in lines]


def test_the_second_time_that_a_step_was_made_counts_and_a_torn_line_does_not(tmp_path):
    """Killed after step 4, resumed from step 2, going on after step 3."""
    first = [validated(0, 9.0), step(1, 8.0), step(2, 7.0), step(3, 6.0), step(4, 5.0)]
    again = ['{"step": 5, "los', {"resumed": 2}, step(3, None, 7_200_000.0)]
    run = plot.read_run(write_log(tmp_path / "run", *first, validated(4, 4.9), *again))
    steps, losses = run.series("loss")
    assert (list(steps), list(losses)) == ([1, 2], [8, 7])  # the loss of step 3 is not finite now
    assert list(run.series("val_loss")[0]) == [0]
    assert list(run.x("minutes of steps", [0, 2, 3])) == [0, 120, 240]
    assert list(run.x("tokens", steps)) == [1e6, 2e6]


DAMAGED = ["null", "[]", '"a"', '{"step": null, "ms": 1}', '{"step": "1", "loss": 9}', '{"ms": 1}']
DAMAGED += ['{"step": 1e999, "ms": 1}', "[" * 100_000, "\0", '{"flags": {}, "tokenizer": "gpt2"}']
DAMAGED += [json.dumps({"flags": FLAGS | {"n_layer": "12"}, "tokenizer": "gpt2"})]


def test_a_damaged_line_of_a_log_is_skipped_and_counted(tmp_path):
    records = [step(1, 9.0), *DAMAGED, validated(2, 3.5)]
    folder = write_log(tmp_path / "run", *records, data_dir="FineWeb-Edu")
    done = run_program(folder, "--against", "reference", cwd=tmp_path)
    assert done.returncode == 0 and "3.5000 after step 2" in done.stdout
    log = Path(folder, "log.jsonl")
    assert done.stderr == f"{log}: damaged lines, skipped: {len(DAMAGED)}\n"


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_log_is_a_traceback(count, tmp_path, monkeypatch, capsys):
    records = [validated(0, 9.0), *(step(n, 9.0 - n) for n in range(1, 6)), validated(5, 4.0)]
    folder = write_log(tmp_path / "run", *records)
    whole = (tmp_path / "run/log.jsonl").read_bytes()
    rng = random.Random(count)
    has_matplotlib = importlib.util.find_spec("matplotlib")
    for i in range(count):
        damaged = bytearray(whole)
        for bit in rng.choices(range(8 * len(whole)), k=rng.choice([1, 9])):
            damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "run/log.jsonl").write_bytes(damaged)
        picture = ["--out", str(tmp_path / f"{i}.png")] if i % 20 == 0 and has_matplotlib else []
        monkeypatch.setattr(sys, "argv", ["plot.py", folder, "--against", "reference", *picture])
        assert machine.exit_code("plot.py", plot.main) in (0, 2)
    capsys.readouterr()


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_a_name_in_another_alphabet_or_with_dollars_is_no_traceback(tmp_path):
    """A pipe on Windows may know only Western Europe's; two dollars begin a formula."""
    names = ("書", "$frac_$")
    folders = [
        write_log(tmp_path / name, step(1, 9.0), seed=i, muon=i) for i, name in enumerate(names)
    ]
    env = os.environ | {"PYTHONIOENCODING": "cp1252"}
    done = run_program(*folders, "--out", tmp_path / "ж.png", cwd=tmp_path, env=env)
    assert done.returncode == 0 and "\\u66f8" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "loss", "gap", "reference"),
    [
        (1500, 5.4, "0.100 ahead of", "5.5000 at as many tokens"),
        (1500, 5.6, "0.100 behind", "5.5000 at as many tokens"),
        (4001, 4.2, "0.200 above", "4.0000, whose training is complete"),
    ],
)
def test_words_interpolate_a_curve_by_tokens(tmp_path, number, loss, gap, reference):
    [line] = words(tmp_path / "run", validated(0, 9.0), validated(number, loss))
    place = f"validation loss {loss:.4f} after step {number:,} ({plot.brief(number * 1e6)} tokens)"
    assert line == f"{place}: {gap} one on Mine, {reference}"


def test_words_of_a_last_figure_and_of_an_accuracy(tmp_path):
    last = CURVE | {"name": "two", "value": 5.25, "step": None, "tokens": None, "points": []}
    rising = CURVE | {"what": "hellaswag_acc", "points": [[0, 0.25], [2000, 0.35]], "data": "it"}
    validation = validated(1000, 5.0, hellaswag_acc=0.28)
    loss, accuracy = words(tmp_path / "run", validation, references=(last, rising))
    assert loss.endswith(": 0.250 below two on Mine, 5.2500, whose training is complete")
    assert accuracy.endswith("(1B tokens): 0.020 behind one on it, 0.3000 at as many tokens")


@pytest.mark.parametrize(
    ("folder", "shards", "data"),
    [
        ("data/fineweb-edu", "", ["FineWeb-Edu"]),
        ("/disk/edu_fineweb10B", "", ["FineWeb-Edu"]),
        ("data/fineweb10B", "", ["FineWeb"]),
        ("data/openwebtext", "", ["OpenWebText"]),
        ("data/my-fineweb", "", []),
        ("", "", []),
        ("fineweb", "edufineweb", ["FineWeb-Edu"]),  # the shards know better than the folder
        ("fineweb", "mine", []),
    ],
)
def test_references_are_on_the_data_set_that_shards_or_folder_name(tmp_path, folder, shards, data):
    if shards:
        folder = tmp_path / folder
        folder.mkdir()
        (folder / f"{shards}_val_000000.bin").touch()
    run = plot.read_run(write_log(tmp_path / "run", step(1, 9.0), data_dir=str(folder)))
    references = machine.load(plot.REFERENCES)
    losses = [r for r in plot.alike(run, references) if r["what"] == "val_loss"]
    assert list(dict.fromkeys(r["data"] for r in losses)) == data


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"model": "nano", "n_layer": 6, "n_embd": 192}, "GPT-2 124M, this is nano: 6 layers"),
        ({"tokenizer": "bytes"}, "this run's are bytes"),
        ({"data_dir": ""}, "Python's own source"),
        ({"data_dir": "data/book"}, "FineWeb-Edu, FineWeb, OpenWebText, and this run data/book"),
        ({"init_from": "gpt2"}, "began with the weights of another"),
    ],
)
def test_a_run_unlike_the_references_is_not_compared(tmp_path, flags, said):
    records = [step(1, 2.0), validated(1, 1.386, hellaswag_acc_norm=0.25)]
    folder = write_log(tmp_path / "run", *records, **flags)
    done = run_program(folder, "--against", "reference", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    [line] = done.stdout.splitlines()
    assert "can't be compared" in line and said in line


def test_the_program_says_how_a_run_compares(tmp_path):
    folder = write_log(tmp_path / "run", step(1, 9.0), validated(5000, 3.5), data_dir="FineWeb-Edu")
    done = run_program(folder, "--against", "reference", cwd=tmp_path)
    line, caveat = done.stdout.splitlines()
    assert re.search(r"behind build-nanogpt.*; 0\.208 above GPT-2 124M \(OpenAI\)", line)
    assert "same data set and tokenizer" in caveat
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no picture


@pytest.mark.parametrize(
    ("records", "line", "cure"),
    [
        (None, (), "name a run's folder"),
        ((), (), "wait for the run's first one"),
        ((step(1, 9.0),), ("--against", "nobody"), "reference"),
        ((step(1, 9.0),), ("--out", "."), "name another file with --out"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, records, line, cure):
    folder = tmp_path / "run"
    if records is not None:
        write_log(folder, *records)
    done = run_program(folder, *line, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    [error] = done.stderr.splitlines()
    assert error.startswith("plot.py: error: ") and cure in error


def test_without_matplotlib_a_line_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    folder = write_log(tmp_path / "run", step(1, 9.0))
    done = run_program(folder, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    error = "plot.py: error: drawing needs matplotlib: pip install matplotlib\n"
    assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_runs_are_drawn_and_no_file_is_overwritten(tmp_path):
    records = [validated(0, 9.0), step(1, 9.0), step(2, None), step(3, 7.0), validated(3, 7.0)]
    folders = [write_log(tmp_path / name, *records) for name in "ab"]
    folders.append(write_log(tmp_path / "nano", *records, model="nano"))
    done = run_program(*folders, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *_, path = done.stdout.splitlines()
    assert path == str(tmp_path / "a/curves.png")  # beside the run
    picture = Path(path).read_bytes()
    assert picture.startswith(b"\x89PNG") and picture[16:20] == (3000).to_bytes(4, "big")
    again = run_program(folders[0], cwd=tmp_path)
    assert again.stdout == f"{tmp_path / 'a' / 'curves-2.png'}\n"
    assert Path(path).read_bytes() == picture and not list(tmp_path.glob("*.png"))


def test_a_table_shows_what_differs_between_runs(tmp_path):
    rates = {"a": 1e-3, "b": 2e-3}
    for name, rate in rates.items():
        records = [validated(0, 9.0), step(1, 8.0), validated(1, 5.0), step(2, 7.0)]
        write_log(tmp_path / name, *records, validated(2, 6.0 + rate), learning_rate=rate, steps=2)
    done = run_program(*(tmp_path / name for name in rates), "--csv", "a.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [re.split(r" *\| *", line.strip("| ")) for line in table]
    head_end = ["steps made", "last validation", "best", "bits per byte", "minutes", "tokens/s"]
    assert head == ["run", "learning_rate", *head_end]
    for row, (name, rate) in zip(rows, rates.items(), strict=True):
        last = f"{6 + rate:.4f}"
        assert row == [str(tmp_path / name), str(rate), "2", last, "5.0000", "", "120.0", "600"]
    with open(tmp_path / "a.csv", newline="") as f:
        assert [list(row) for row in csv.reader(f)] == [head, *rows]


def test_runs_that_differ_only_in_their_seed_have_a_mean(tmp_path):
    for name, rate, seed, loss in (("a", 1, 1, 5.0), ("b", 1, 2, 6.0), ("c", 2, 1, 7.0)):
        records = [step(1, 9.0), validated(1, loss, bits_per_byte=loss / 2)]
        write_log(tmp_path / name, *records, learning_rate=rate, seed=seed)
    groups = plot.by_setting([plot.read_run(str(tmp_path / name)) for name in "abc"])
    assert [len(group) for group in groups.values()] == [2, 1]
    assert list(groups) == ["learning_rate 1", str(tmp_path / "c")]
    (row, _) = plot.means_table(groups)
    figures = ["5.5000", "0.7071", "2.7500", "0.3536"]
    assert [*row.values()] == ["learning_rate 1", "2", *figures]
    label = plot.describe(*next(iter(groups.items())))
    assert label == "learning_rate 1: validation 5.5000 ± 0.7071, 2 seeds"
    # The same seed again is no second sample, but is drawn, and flags of samples change nothing.
    write_log(tmp_path / "d", *records, learning_rate=1, seed=1, num_samples=0)
    more = plot.by_setting([plot.read_run(str(tmp_path / name)) for name in "abcd"])
    repetition = f"{tmp_path / 'd'} (same seed)"
    assert list(more) == ["learning_rate 1", str(tmp_path / "c"), repetition]
    assert plot.means_table(more)[0] == row and len(more["learning_rate 1"]) == 2
    write_log(tmp_path / "e", step(1, 9.0), *records, step(2, 8.0), learning_rate=1, seed=2)
    longer = plot.by_setting([plot.read_run(str(tmp_path / name)) for name in "abe"])
    named = {name: [Path(run.name).name for run in group] for name, group in longer.items()}
    assert [*named.values()] == [["a", "e"], ["b"]]  # b was aborted, and begun again as e
    assert [*named][0] == f"{tmp_path / 'a'} and 1 more"
    done = run_program(*(tmp_path / name for name in "abc"), "--csv", "runs", cwd=tmp_path)
    assert done.stdout.endswith("runs.csv\nruns-means.csv\n"), done.stderr
    with open(tmp_path / "runs-means.csv", newline="", encoding="utf-8") as f:
        assert [*csv.DictReader(f)] == plot.means_table(groups)


def test_runs_before_and_after_an_edit_of_model_py_are_two_settings(tmp_path):
    for name, formula, seed in (("a", "8.3", 1), ("b", "8.2", 1), ("c", "8.3", 2), ("d", "8.2", 2)):
        write_log(tmp_path / name, step(1, 9.0), seed=seed)
        log = tmp_path / name / "log.jsonl"
        start, *steps = log.read_text().splitlines(True)
        environment = {"environment": {"formula": formula}}
        log.write_text("".join([json.dumps(json.loads(start) | environment) + "\n", *steps]))
    groups = plot.by_setting([plot.read_run(str(tmp_path / name)) for name in "abcd"])
    assert [*groups] == ["model.py 8.3", "model.py 8.2"]
    assert [len(group) for group in groups.values()] == [2, 2]


def test_a_switch_is_named_as_it_is_typed(tmp_path):
    for name, muon, seed in (("a", True, 1), ("b", True, 2), ("c", False, 1), ("d", False, 2)):
        write_log(tmp_path / name, step(1, 9.0), muon=muon, seed=seed)
    groups = plot.by_setting([plot.read_run(str(tmp_path / name)) for name in "abcd"])
    assert [*groups] == ["muon", "no-muon"]


@pytest.mark.parametrize("names", [["10", "2"], ["20261126", "20261127"]])
def test_a_log_that_logrotate_has_cut_is_read_whole(names, tmp_path):
    folder = Path(write_log(tmp_path / "run", step(1, 9.0)))
    for i, name in enumerate(names):
        mark = "-" if len(name) > 2 else "."
        (folder / "log.jsonl").rename(folder / f"log.jsonl{mark}{name}")
        (folder / "log.jsonl").write_text(json.dumps(step(i + 2, 8.0 - i)) + "\n")
    (folder / "log.jsonl.3.gz").write_bytes(b"packed")
    assert plot.read_run(str(folder)).values["loss"] == {1: 9.0, 2: 8.0, 3: 7.0}


def test_a_folder_stands_for_the_runs_below_it(tmp_path):
    for name in ("out/b", "out/more/a", "other/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_log(tmp_path / name, step(1, 9.0))
    write_log(tmp_path / "out" / "waiting")  # has no step yet
    lines = str(tmp_path / "out"), str(tmp_path / "other" / "c"), "--against", "reference"
    done = run_program(*lines, cwd=tmp_path)
    named = [line.partition(": ")[0] for line in done.stdout.splitlines()]
    assert named == [str(tmp_path / name) for name in ("out/b", "out/more/a", "other/c")]
    assert (done.returncode, done.stderr) == (0, "")


def test_runs_with_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path):
    records = [step(1, 1.5), step(2, 1.0), validated(2, 2.0, bits_per_byte=3.0)]
    a = write_log(tmp_path / "a", *records, tokenizer="bytes")
    b = write_log(tmp_path / "b", step(1, 1.0))
    done = run_program(a, b, cwd=tmp_path)
    why = f"plot.py: error: {b} has no validation in bits per byte, and losses of other"
    assert done.returncode == 2 and done.stderr.startswith(why)
    assert not list(tmp_path.glob("*/*.png"))
    c = write_log(tmp_path / "c", step(1, 1.0), validated(1, 8.0, bits_per_byte=2.0))
    done = run_program(a, c, "--out", "both.png", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "both.png").exists(), done.stderr
    run = plot.in_bits_per_byte(plot.read_run(a))
    # Its training text has another number of bytes per token than its validation text.
    assert run.values["loss"] == {} and run.values["val_loss"] == {2: 3.0}


@pytest.mark.parametrize("files", ["x", "y"])
def test_a_picture_of_runs_on_different_texts_says_so(files, tmp_path, monkeypatch):
    titles = []
    suptitle = "matplotlib.figure.Figure.suptitle"
    monkeypatch.setattr(suptitle, lambda _, text, **__: titles.append(text))
    runs = []
    for name, digest in (("a", "x"), ("b", files)):
        log = write_log(tmp_path / name, step(1, 1.0), validated(1, 2.0))
        runs.append(plot.read_run(log))
        runs[-1].start["preparation"] = {"files": digest}
    plot.draw(runs, [], tmp_path / "both.png")
    assert ("not comparable" in titles[0]) == (files == "y")


def test_every_reference_names_its_source():
    references = machine.load(plot.REFERENCES)
    assert len({(r["name"], r["what"], r["data"]) for r in references}) == len(references)
    for reference in references:
        assert reference.keys() - {"points"} == KEYS and reference["what"] in plot.QUANTITIES
        assert re.fullmatch(r"https://\S+", reference["source"])
        if points := reference.get("points"):
            assert points[-1] == [reference["step"], reference["value"]]
            assert points == sorted(points) and reference["tokens"] % reference["step"] == 0
            losses = [-value for _, value in points if reference["what"] == "val_loss"]
            assert losses == sorted(losses)  # or a loss would be reached twice


def test_a_large_number_is_brief():
    texts = [plot.brief(number) for number in (0, 250, 2e3, 2.5e6, 1e10)]
    assert texts == ["0", "250", "2k", "2.5M", "10B"]
