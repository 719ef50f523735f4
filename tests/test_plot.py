"""benchmarks/plot.py, as a program and its parts, and a run's own picture, on logs written here."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import plot
import pytest

from support.log import draw_loss

PROGRAM = Path(plot.__file__)
FLAGS = {
    "model": "gpt2", "n_layer": 12, "n_embd": 768, "data_dir": "data/mine",
    "batch_tokens": 1_000_000,
}  # fmt: skip
KEYS = {"name", "what", "value", "step", "tokens", "data", "source", "note"}
CURVE = {  # 1e6 tokens per step, as the runs here
    "name": "one", "what": "val_loss", "value": 4.0, "step": 4000, "tokens": 4_000_000_000,
    "data": "Mine", "points": [[0, 10.0], [1000, 6.0], [2000, 5.0], [4000, 4.0]],
}  # fmt: skip


def write_log(folder: Path, *records: dict | str, **flags) -> str:
    """A run's folder. A record is a dict, or a line as it is."""
    folder.mkdir()
    lines = [
        r if isinstance(r, str) else json.dumps(r) for r in ({"flags": FLAGS | flags}, *records)
    ]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def step(number: int, loss: float | None, ms: float = 3_600_000.0) -> dict:
    return {"step": number, "loss": loss, "ms": ms}


def validated(number: int, loss: float, **more) -> dict:
    return {"step": number, "val_loss": loss} | more


def run_program(*line, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, PROGRAM, *line], capture_output=True, text=True, **options
    )


def words(folder: Path, *validations: dict, references=(CURVE,)) -> list[str]:
    run = plot.read_run(write_log(folder, step(1, 9.0), *validations))
    return [line.removeprefix(f"{folder} on data/mine: ") for line in plot.words(run, references)]


def test_the_second_time_that_a_step_was_made_counts_and_a_torn_line_does_not(tmp_path):
    """Killed after step 4, resumed from step 2, going on after step 3."""
    first = [validated(0, 9.0), step(1, 8.0), step(2, 7.0), step(3, 6.0), step(4, 5.0)]
    again = ['{"step": 5, "los', {"resumed": 2}, step(3, None, 7_200_000.0)]
    run = plot.read_run(write_log(tmp_path / "run", *first, validated(4, 4.9), *again))
    steps, losses = run.series("loss")
    assert (list(steps), list(losses)) == ([1, 2], [8, 7])  # the loss of step 3 is not finite now
    assert list(run.series("val_loss")[0]) == [0]
    assert list(run.hours([0, 2, 3])) == [0, 2, 4]
    assert list(run.tokens(steps)) == [1e6, 2e6]


@pytest.mark.parametrize("number, loss, gap, reference", [
    (1500, 5.4, "0.100 ahead of", "5.5000 at as many tokens, which got there 100.0M tokens later"),
    (1500, 5.6, "0.100 behind", "5.5000 at as many tokens, which got there 100.0M tokens earlier"),
    (3000, 5.5, "1.000 behind", "4.5000 at as many tokens, which got there 1.50B tokens earlier"),
    (3000, 3.9, "0.600 ahead of", "4.5000 at as many tokens, which never got there"),
    (4001, 4.2, "0.200 above", "4.0000, whose training is complete"),
])  # fmt: skip
def test_words_interpolate_a_curve_by_tokens(tmp_path, number, loss, gap, reference):
    [line] = words(tmp_path / "run", validated(0, 9.0), validated(number, loss))
    place = f"validation loss {loss:.4f} after step {number:,} ({plot.short(number * 1e6)} tokens)"
    assert line == f"{place}: {gap} one on Mine, {reference}"


def test_words_of_a_last_figure_and_of_an_accuracy(tmp_path):
    last = CURVE | {"name": "two", "value": 5.25, "step": None, "tokens": None, "points": []}
    rising = CURVE | {"what": "hellaswag_acc", "points": [[0, 0.25], [2000, 0.35]], "data": "it"}
    validation = validated(1000, 5.0, hellaswag_acc=0.28)
    loss, accuracy = words(tmp_path / "run", validation, references=(last, rising))
    assert loss.endswith(": 0.250 below two on Mine, 5.2500, whose training is complete")
    assert accuracy.endswith("(1.00B tokens): 0.020 behind one on it, 0.3000 at as many tokens")


def test_only_references_on_the_same_data_are_taken(tmp_path):
    references = [CURVE, CURVE | {"data": "Other"}, CURVE | {"what": "hellaswag_acc", "data": "it"}]
    mine = plot.read_run(write_log(tmp_path / "a", step(1, 9.0)))
    unknown = plot.read_run(write_log(tmp_path / "b", step(1, 9.0), data_dir="somewhere"))
    assert [r["data"] for r in plot.like(mine, references)] == ["Mine", "it"]
    assert plot.like(unknown, references) == []


def test_the_shards_tell_the_data_set_where_the_folder_has_another_name(tmp_path):
    references = [CURVE | {"data": "FineWeb-Edu"}, CURVE | {"data": "FineWeb"}]
    shards = {"edu_fineweb": ["FineWeb-Edu"], "edufineweb": ["FineWeb-Edu"], "fineweb": ["FineWeb"]}
    for stem, data in (shards | {"mine": []}).items():
        folder = tmp_path / stem / "fineweb"
        folder.mkdir(parents=True)
        (folder / f"{stem}_val_000000.bin").touch()
        log = write_log(tmp_path / f"run-{stem}", step(1, 9.0), data_dir=str(folder))
        assert [r["data"] for r in plot.like(plot.read_run(log), references)] == data


@pytest.mark.parametrize("folder, data", [
    ("data/fineweb-edu", ["FineWeb-Edu"]), ("/disk/edu_fineweb10B", ["FineWeb-Edu"]),
    ("data/fineweb10B", ["FineWeb"]), ("data/openwebtext", ["OpenWebText"]), ("data/webtext", []),
    ("data/my-fineweb", []), ("", []),
])  # fmt: skip
def test_a_folder_that_is_not_here_tells_the_data_set_by_its_name(tmp_path, folder, data):
    run = plot.read_run(write_log(tmp_path / "run", step(1, 9.0), data_dir=folder))
    losses = [r for r in plot.load_references() if r["what"] == "val_loss"]
    assert list(dict.fromkeys(r["data"] for r in plot.like(run, losses))) == data


@pytest.mark.parametrize("flags, bits, said", [
    ({"model": "nano", "n_layer": 6, "n_embd": 192}, 8, "GPT-2 124M, this is nano: 6 layers"),
    ({}, 2.0, "this run's are bytes"),  # 2 bits are 1.39 nats
    ({"data_dir": ""}, 0.5, "Python's own source"),
    ({"data_dir": "data/book"}, 0.5, "FineWeb-Edu, FineWeb, OpenWebText, and this run data/book"),
    ({"init_from": "gpt2"}, 0.5, "began with the weights of another"),
])  # fmt: skip
def test_a_run_unlike_the_references_is_not_compared(tmp_path, flags, bits, said):
    records = [step(1, 2.0), validated(1, 1.386, bits_per_byte=bits, hellaswag_acc_norm=0.25)]
    folder = write_log(tmp_path / "run", *records, **flags)
    done = run_program(folder, "--against", "reference", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    [line] = done.stdout.splitlines()
    assert "can't be compared" in line and said in line


def test_the_tokenizer_that_the_log_names_counts(tmp_path):
    start = {"flags": FLAGS | {"data_dir": "data/fineweb-edu"}, "tokenizer": "bytes"}
    run = plot.read_run(write_log(tmp_path / "run", start, step(1, 9.0)))
    assert plot.why_none(run, plot.load_references()).endswith("this run's are bytes")


def test_the_program_says_how_a_run_compares(tmp_path):
    folder = write_log(tmp_path / "run", step(1, 9.0), validated(5000, 3.5), data_dir="FineWeb-Edu")
    done = run_program(folder, "--against", "reference", cwd=tmp_path)
    line, caveat = done.stdout.splitlines()
    assert re.search(r"behind build-nanogpt.*; 0\.208 above GPT-2 124M \(OpenAI\)", line)
    assert "same data set and tokenizer" in caveat
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no picture


@pytest.mark.parametrize("records, line, cure", [
    (None, (), "name a run's folder"),
    ((), (), "wait for the run's first one"),
    ((step(1, 9.0),), ("--against", "nobody"), "build-nanogpt"),
    ((step(1, 9.0),), ("--out", "."), "name another file with --out"),
])  # fmt: skip
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
    assert (done.returncode, done.stdout, done.stderr) == (0, "loss.png\n", "")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert run_program(folders[0], cwd=tmp_path).returncode == 2
    assert (tmp_path / "loss.png").read_bytes() == picture


def test_a_folder_stands_for_the_runs_below_it(tmp_path):
    for name in ("out/b", "out/more/a", "other/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_log(tmp_path / name, step(1, 9.0))
    waiting = Path(write_log(tmp_path / "out" / "waiting"))
    lines = str(tmp_path / "out"), str(tmp_path / "other" / "c"), "--against", "reference"
    done = run_program(*lines, cwd=tmp_path)
    named = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert named == [str(tmp_path / name) for name in ("out/b", "out/more/a", "other/c")]
    why = (
        f"plot.py: left out: {waiting / 'log.jsonl'} has no step yet: wait for the run's first one"
    )
    assert (done.returncode, done.stderr) == (0, f"{why}\n")


def test_runs_with_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path):
    """The loss of a run of 4 bytes per token is 2.77 nats per token or 1 bit per byte."""
    bits = {"bits_per_byte": 1.0}
    a = write_log(tmp_path / "a", step(1, 1.0), validated(1, math.log(2), **bits))
    b = write_log(tmp_path / "b", step(1, 1.0), validated(1, 4 * math.log(2), **bits))
    c = write_log(tmp_path / "c", {"flags": FLAGS, "tokenizer": "gpt2"}, step(1, 1.0))
    runs = {name: plot.read_run(name) for name in (a, b, c)}
    assert plot.units([runs[b], runs[c]]) == ("nats per token", [1, 1])
    unit, factors = plot.units([runs[a], runs[b]])
    assert unit == "bits per byte"
    assert factors == pytest.approx([1 / math.log(2), 1 / (4 * math.log(2))])
    done = run_program(a, c, cwd=tmp_path)
    why = f"{a} has bytes tokens, {c} gpt2 tokens and no bits per byte in its log: draw them apart"
    assert (done.returncode, done.stderr) == (2, f"plot.py: error: {why}\n")
    assert not list(tmp_path.glob("*.png"))


def seen(figure) -> list:
    """The places of all texts that a picture shows."""
    texts = [*figure.texts, *figure.legends[0].get_texts()]
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        texts += [axis.label, axis.get_offset_text()]
        texts += [tick.label1 for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                  if low <= tick.get_loc() <= high]  # fmt: skip
    texts = [text for text in texts if text.get_visible() and text.get_text()]
    return [text.get_window_extent() for text in texts]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("names, last, flags", [
    ("a", 3.2, {}), ("abc", 3.2, {}), ("abcdefgh", 3.2, {}), ("abcdefghijklmnop", 0.01, {}),
    ("abcdefgh", 3.2, {"model": "gpt2", "data_dir": "data/a-book-with-a-long-name"}),
    ("abc", 3.2, {"data_dir": "data/fineweb-edu"}),  # beside a reference
])  # fmt: skip
def test_no_text_of_a_picture_touches_another_or_the_border(
    tmp_path, monkeypatch, names, last, flags
):
    """Runs that end alike, and runs that differ in what they are."""
    from matplotlib.figure import Figure

    figures, runs = [], []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    for n, name in enumerate(names):
        records = [validated(0, 11.0), step(1, 11.0), step(2, last), validated(2, last + n / 1000)]
        own = {"data_dir": f"{flags['data_dir']}-{n}"} if "model" in flags else flags
        runs.append(plot.read_run(write_log(tmp_path / f"run-{name}", *records, **own)))
    plot.draw(runs, plot.load_references(), tmp_path / "loss.png")
    [figure] = figures
    figure.draw_without_rendering()
    places = seen(figure)
    assert len(places) > 20
    width, height = figure.canvas.get_width_height()
    for n, place in enumerate(places):
        assert place.x0 >= 0 and place.y0 >= 0 and place.x1 <= width and place.y1 <= height
        assert not any(place.overlaps(other) for other in places[:n])


def texts(tmp_path: Path, monkeypatch, *lines: dict | str) -> list[str]:
    """What the loss.png of a run with such a log says: its title and its legend."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda *args, **more: (figures.append(args[0]), save(*args, **more))
    )
    found = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "log.jsonl").write_text("\n".join(found) + "\n")
    assert draw_loss(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    [axes] = figures[0].axes
    return [axes.get_title(), *(text.get_text() for text in axes.get_legend().get_texts())]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_the_picture_of_a_run_says_what_ran_and_how_it_ended(tmp_path, monkeypatch):
    """The flags of its last start, the mean of its last 100 losses, its last validation."""
    flags = {"model": "gpt2", "steps": 300, "batch_tokens": 524_288}
    env = {"ranks": 8, "device_name": "a $GPU_$"}
    start = {"flags": flags | {"steps": 100}, "environment": env}
    steps = [{"step": n, "loss": 3.0 if n > 200 else 9.0} for n in range(1, 301)]
    log = [start, validated(0, 9.5), {"flags": flags, "environment": env}, *steps]
    assert texts(tmp_path, monkeypatch, *log, validated(300, 3.25)) == [
        "gpt2: 300 steps of 524,288 tokens, 8 x a $GPU_$",
        "training: 3.000 over the last 100 steps", "validation: 3.250 after step 300",
    ]  # fmt: skip


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("first", [
    '{"flags": {"mod', {"flags": 5, "environment": []}, {"flags": {"steps": "x"}},
    {"flags": {"model": "gpt2", "steps": "x", "batch_tokens": 1}, "environment": {}},
])  # fmt: skip
def test_a_damaged_log_is_drawn_without_a_title(tmp_path, monkeypatch, first):
    found = texts(tmp_path, monkeypatch, first, {"step": 1, "loss": 3.5}, validated(1, 3.25))
    assert found == ["", "training: 3.500 over the last 1 steps", "validation: 3.250 after step 1"]


def test_every_reference_names_its_source():
    references = plot.load_references()
    assert len({(r["name"], r["what"], r["data"]) for r in references}) == len(references)
    for reference in references:
        assert reference.keys() - {"points"} == KEYS and reference["what"] in plot.QUANTITIES
        assert re.fullmatch(r"https://\S+", reference["source"])
        if points := reference.get("points"):
            assert points[-1] == [reference["step"], reference["value"]]
            assert points == sorted(points) and reference["tokens"] % reference["step"] == 0
            losses = [-value for _, value in points if reference["what"] == "val_loss"]
            assert losses == sorted(losses)  # or a loss would be reached twice


def test_an_axis_is_in_units_that_can_be_read(tmp_path):
    def longest(seconds: float) -> str:
        (tmp_path / "log.jsonl").write_text("".join(
            json.dumps(record) + "\n" for record in (
                {"flags": {"data_dir": "a", "batch_tokens": 8}},
                {"step": 1, "loss": 2.0, "ms": 1000 * seconds},
            )
        ))  # fmt: skip
        *_, (title, place) = plot.axes_of([run := plot.read_run(str(tmp_path))]).items()
        return f"{place(run, 1):g} {title}"

    assert longest(3 * 3600) == "3 hours of steps"
    assert longest(1.5 * 3600) == "90 minutes of steps"
    assert longest(90) == "90 seconds of steps"
    assert [*map(plot.brief, (0, 250, 2e3, 2.5e6, 1e10))] == ["0", "250", "2k", "2.5M", "10B"]
