"""The file that commits of an elastic program are written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.horovod.commit_file import CommitFile
from paceline.errors import RunFileError


def test_the_newest_commit_is_read_back_until_it_is_removed(tmp_path: Path) -> None:
    file = CommitFile(tmp_path, command=1, is_fresh=False)
    assert file.read() is None
    for step in range(3):
        file.write({"step": step})
    file.wait()
    assert file.read() == {"step": 2}
    assert CommitFile(tmp_path, command=2, is_fresh=True).read() is None  # of an earlier command
    file.remove()
    assert file.read() is None


def test_a_commit_that_cannot_be_written_is_an_error_where_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "horovod_commit.new").mkdir()  # in the way of the temporary file
    file = CommitFile(tmp_path, command=1, is_fresh=False)
    file.write({"step": 1})
    for _ in range(2):
        with pytest.raises(RunFileError, match=r"horovod_commit\.pt"):
            file.wait()
    with pytest.raises(RunFileError):
        file.write({"step": 2})
    file.remove()  # the program has come to its end: nothing of it is needed
