"""Tests ../support/files.py."""

import pytest
from conftest import NEEDS_POSIX

from support import files


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


def test_missing_vocab_names_the_files_that_tiktoken_looks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    assert files.missing_vocab() == [tmp_path / name for name in names]
    assert all(name in files.vocab_cure() for name in (*names, "TIKTOKEN_CACHE_DIR"))
    for name in names:
        (tmp_path / name).touch()
    assert files.missing_vocab() == []
