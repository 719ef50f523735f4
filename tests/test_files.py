"""Tests ../prepare/files.py."""

import errno
import itertools
import os

import pytest
from conftest import NEEDS_POSIX

from prepare import files


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_is_written_whole_or_not_at_all(error, tmp_path):
    with files.whole_file(tmp_path / "a") as f:
        f.write(b"old")
    with pytest.raises(error), files.whole_file(tmp_path / "a") as f:
        f.write(b"new")
        raise error
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("a", b"old")]


@NEEDS_POSIX
def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "a.tmp").symlink_to(tmp_path / "mine")
    with files.whole_file(tmp_path / "a") as f:
        f.write(b"new")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY])
def test_a_file_that_a_scanner_has_open_for_a_moment_is_renamed(number, tmp_path, monkeypatch):
    replace, calls = os.replace, itertools.count(1)

    def in_use(source, target):
        if next(calls) < 4:
            raise OSError(number, "used by another program")
        replace(source, target)

    monkeypatch.setattr(os, "replace", in_use)
    with files.whole_file(tmp_path / "a") as f:
        f.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and next(calls) == 5


def test_no_other_failure_to_rename_is_tried_again(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(files.time, "sleep", calls.append)
    with pytest.raises(FileNotFoundError):
        files.rename(tmp_path / "a", tmp_path / "b")
    assert not calls


@pytest.mark.parametrize(
    ("typed", "there"),
    [
        ("out/novla", "out/novela"),
        ("ouut/novela/step_000100", "out/novela/step_000100"),
        ("out/novela/step_000200", ""),  # of a series
        ("questions.json", "questions.jsonl"),
        ("out/zebra", ""),
        ("out/novela", ""),  # is there itself, and nothing else is like it
        ("nowhere/at/all", ""),
        ("x" * 5000, ""),
    ],
)
def test_a_near_name_is_offered(typed, there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("out/novela/step_000100")
    (tmp_path / "questions.jsonl").touch()
    found = files.did_you_mean(typed)
    assert found == (f"; did you mean {os.path.normpath(there)}?" if there else "")
    assert files.did_you_mean("novela", "out") == f"; did you mean {os.path.join('out', 'novela')}?"
    assert files.did_you_mean("zebra", "out") == files.did_you_mean("x" * 5000, "out") == ""
