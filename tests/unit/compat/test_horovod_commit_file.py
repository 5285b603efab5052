"""The file that commits of an elastic program are written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.horovod.commit_file import CommitFile
from paceline.errors import RunFileError


def file_of(
    folder: Path, function: str = "__main__.train", *, call: int = 1, command: int = 1, is_fresh: bool = False
) -> CommitFile:
    return CommitFile(folder, function, call=call, command=command, is_fresh=is_fresh)


def test_the_newest_commit_is_read_back_until_it_is_removed(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    assert file.read() is None
    for step in range(3):
        file.write({"step": step})
    file.wait()
    assert file.read() == {"step": 2}
    assert file_of(tmp_path, command=2, is_fresh=True).read() is None  # of an earlier command
    assert file_of(tmp_path, call=2).read() is None  # of another call of the function
    file.remove()
    assert file.read() is None


def test_each_function_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = ["__main__.train", "__main__.build.<locals>.train", "__main__.<lambda>", "other." + "a" * 300 + ".train"]
    files = [file_of(tmp_path, name) for name in names]
    for name, file in zip(names, files, strict=True):
        assert file.read() is None
        file.write(name)
        file.wait()
    assert [file.read() for file in files] == names
    for file in files:
        file.remove()
    assert not list(tmp_path.iterdir())


def test_a_commit_that_cannot_be_written_is_an_error_where_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "horovod_commit.__main__.train.new").mkdir()  # in the way of the temporary file
    file = file_of(tmp_path)
    file.write({"step": 1})
    for _ in range(2):
        with pytest.raises(RunFileError, match=r"horovod_commit\.__main__\.train\.pt"):
            file.wait()
    with pytest.raises(RunFileError):
        file.write({"step": 2})
    file.remove()  # the program has come to its end: nothing of it is needed
