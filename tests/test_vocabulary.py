"""Tests ../benchmarks/vocabulary.py."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")
import vocabulary  # in benchmarks


@pytest.mark.slow
def test_each_vocabulary_has_its_bits_per_byte_and_a_second_call_trains_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vocabulary.machine, "RESULTS", tmp_path)
    monkeypatch.setattr(vocabulary, "VOCABULARIES", ("bytes", "300"))
    (tmp_path / "a.txt").write_text("some words and other words " * 1000)
    flags = "--model nano --n-layer 1 --n-embd 32 --n-head 2 --seq-len 16 --batch-tokens 32"
    argv = ["vocabulary.py", "--steps", "3,2", "a.txt", "--", *flags.split(), "--eval-tokens=64"]
    outputs = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", argv)
        vocabulary.main()
        outputs.append(capsys.readouterr().out)
        assert len(list(tmp_path.glob("vocabulary-*.png"))) == 1
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 4
    (result,) = tmp_path.glob("vocabulary-*.json")
    rows = json.loads(result.read_text())["nano"]
    assert [row["steps"] for row in rows] == [3, 2, 3, 2]
    assert all(1 < row["bits_per_byte"] < 9 for row in rows)
