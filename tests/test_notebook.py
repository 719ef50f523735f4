"""Runs ../notebook.ipynb from its first cell to its last, as Jupyter would."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")


@pytest.mark.slow
def test_notebook(tmp_path, monkeypatch):
    from nbclient import NotebookClient

    for name in ("support", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel draws into the cell
    read = nbformat.read(ROOT / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in read.cells)
    for cell in read.cells:  # as long as a test may take
        cell.source = cell.source.replace('"nano", 850', '"nano", 60')
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(read, timeout=400, resources=folder).execute()
    texts, page, num_pictures = [], "", 0
    for cell in read.cells:
        outputs = cell.get("outputs", [])
        num_pictures += sum("image/png" in output.get("data", {}) for output in outputs)
        page += "".join(output.get("data", {}).get("text/html", "") for output in outputs)
        texts.append("".join(output.get("text", "") for output in outputs).replace("\r\n", "\n"))
    assert num_pictures == 3  # losses, attention, the ladder
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", "".join(texts))  # as of a progress bar
    train, plot, resumed, sample, likeliest, scored = [text for text in texts if text]
    assert "out/nano" in plot and "done: 60 steps" in train
    assert 0 < len(re.findall("^step ", train, re.M)) < 30
    assert "resumed after step 60" in resumed and "done: 75 steps" in resumed
    assert sample.startswith("def mean(values):") and len(sample) > 200
    assert len(re.findall(r"^ *\d+\.\d{3}%  ['\"]", likeliest, re.M)) == 10
    assert "nats per token" in scored
    assert page.count("</span>") > 10
