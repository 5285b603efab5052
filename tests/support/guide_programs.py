"""A program of TensorFlow's own guides, made of its notebook when a test runs: nothing of it is kept here.

PACELINE_TENSORFLOW_DOCS names a clone of github.com/tensorflow/docs, bare or not. What is changed of a guide's code is
what follows from running it as a program, with a fixed seed and on this machine's disk; each change is listed here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap

import pytest

__all__ = ["parameter_server_training"]

FOLDER = "site/en/tutorials/distribute"
SEED = "tf.keras.utils.set_random_seed(1)"


def parameter_server_training() -> str:
    """The guide to parameter servers. Its notebook makes a cluster within one process; its section on real clusters
    says what takes that place."""
    cells = _cells("parameter_server_training")
    (real,) = [
        text for kind, text in cells if kind == "markdown" and "If you use the same binary for all tasks" in text
    ]
    branches, serve = re.findall(r"```python\n(.*?)```", real, re.DOTALL)
    branches = branches[: branches.index("  # Start a TensorFlow server")]
    head = f"{branches}{textwrap.indent(serve, '  ')}\nNUM_PS = 2\n"
    made = [(kind, head if kind == "code" and "create_in_process_cluster" in text else text) for kind, text in cells]
    program = _program(made).replace("import portpicker\n", "")
    return program.replace('"/tmp/my_working_dir"', '"working_dir"')


def _program(cells: list[tuple[str, str]]) -> str:
    """The code of a notebook, without the shell's lines; the seed is fixed where TensorFlow is imported first."""
    code = "\n\n".join(text for kind, text in cells if kind == "code")
    code = "".join(line for line in code.splitlines(keepends=True) if not line.startswith(("!", "%")))
    return code.replace("import tensorflow as tf\n", f"import tensorflow as tf\n{SEED}\n", 1)


def _cells(name: str) -> list[tuple[str, str]]:
    """Kind and text of each cell of a guide's notebook; skips the test where there are no guides."""
    place = os.environ.get("PACELINE_TENSORFLOW_DOCS")
    if place is None:
        pytest.skip("needs TensorFlow's guides: name a clone of github.com/tensorflow/docs in PACELINE_TENSORFLOW_DOCS")
    words = ["git", "-C", place, "show", f"HEAD:{FOLDER}/{name}.ipynb"]
    text = subprocess.run(words, check=True, capture_output=True, timeout=60).stdout
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
