"""Programs of TensorFlow's own guides, made of their notebooks when a test runs: nothing of them is kept here.

PACELINE_TENSORFLOW_DOCS names a clone of github.com/tensorflow/docs, bare or not. What is changed of a guide's code is
what follows from running it as a program, with a fixed seed and on this machine's disk; each change is listed here.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

__all__ = ["custom_training", "parameter_server_training", "write_fashion_mnist"]

FOLDER = "site/en/tutorials/distribute"
SEED = "tf.keras.utils.set_random_seed(1)"


def custom_training() -> str:
    """The guide to loops of one's own under MirroredStrategy."""
    return _program(_cells("custom_training"))


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


def write_fashion_mnist(home: Path, *, num: int = 1024) -> None:
    """Put handwritten digits where Keras looks for Fashion-MNIST before it downloads it, below the user's home: the
    files have one format."""
    folder = home / ".keras/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    digits: Any = load_digits()
    images = np.kron((digits.images * 15).astype(np.uint8), np.ones((1, 3, 3), np.uint8))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    for name, begin, end in (("train", 0, num), ("t10k", num, len(images))):
        shape = images[begin:end].shape
        data = {
            "images-idx3": struct.pack(">4i", 2051, *shape) + images[begin:end].tobytes(),
            "labels-idx1": struct.pack(">2i", 2049, shape[0]) + digits.target[begin:end].astype(np.uint8).tobytes(),
        }
        for kind, content in data.items():
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


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
