"""How Sphinx builds the documentation: Markdown pages, warnings are errors (`make docs`)."""

import tomllib
from pathlib import Path

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
