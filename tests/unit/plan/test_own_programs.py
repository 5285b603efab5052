"""Programs of the package are named by their place in it; others keep their path."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline.cli.doctor import PROGRAM
from paceline.plan.own_programs import program_here, sent_program


def test_a_program_of_the_package_is_found_again_wherever_the_package_is() -> None:
    assert sent_program(str(PROGRAM)) == "paceline:doctor/doctor.py"
    assert program_here("paceline:doctor/doctor.py") == str(Path(paceline.__file__).parent / "doctor" / "doctor.py")


def test_other_programs_keep_their_path() -> None:
    for path in ("/data/train.py", "train.py", "paceline/train.py"):
        assert sent_program(path) == path
        assert program_here(path) == path
