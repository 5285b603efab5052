"""How Sphinx builds the documentation: Markdown pages, warnings are errors (`make docs`)."""

import re
import tomllib
from pathlib import Path
from typing import Any

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "Paceline"
author = "the Paceline authors"
copyright = author
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
exclude_patterns = ["_build"]
myst_heading_anchors = 3
highlight_language = "text"  # blocks without a language are what a terminal shows

html_theme = "furo"
html_title = f"Paceline {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]


def _as_literals(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with code in single backticks, which reStructuredText would read otherwise."""
    for number, line in enumerate(lines):
        text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        lines[number] = re.sub(r"(\w)_(?=[\s(,.;:)]|$)", r"\1\\_", text) if "`" not in text else text


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_literals)
