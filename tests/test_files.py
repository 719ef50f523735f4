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
