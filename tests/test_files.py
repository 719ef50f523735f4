"""Tests ../support/files.py."""

import errno
import os

import pytest
from conftest import NEEDS_POSIX

from support import files


@NEEDS_POSIX
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_kept(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="lock is a link or no file: remove it"):
        files.locked(tmp_path / "data")
    (tmp_path / "data" / "a.tmp").symlink_to(tmp_path / "mine")
    with files.whole_file(tmp_path / "data" / "a") as f:
        f.write(b"new")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "data" / "a").read_bytes() == b"new"


@NEEDS_POSIX
def test_a_file_system_without_locks_is_told_with_the_cure(tmp_path, monkeypatch):
    """Lustre has none unless it is mounted with them."""

    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="can't be locked .Function not implemented.: name a folder"):
        files.locked(tmp_path)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_is_written_whole_or_not_at_all(error, tmp_path):
    with files.whole_file(tmp_path / "a") as f:
        f.write(b"old")
    with pytest.raises(error), files.whole_file(tmp_path / "a") as f:
        f.write(b"new")
        raise error
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("a", b"old")]


def test_missing_vocab_names_the_files_that_tiktoken_looks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    names = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    assert files.missing_vocab() == [tmp_path / name for name in names]
    for name in names:
        (tmp_path / name).touch()
    assert files.missing_vocab() == []
