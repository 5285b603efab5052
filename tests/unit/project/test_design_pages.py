"""The design pages describe the sources as they are: the tree of folders, the layers, and every file that they name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PACKAGE = ROOT / "src" / "paceline"
PAGES = sorted((ROOT / "docs" / "explanation").glob("*.md"))
DESIGN = (ROOT / "docs" / "explanation" / "design.md").read_text()
WALKS = ROOT / "docs" / "explanation" / "walks.md"


def test_tree_of_folders_is_that_of_the_sources() -> None:
    drawn = DESIGN[DESIGN.index("src/paceline/\n") :].split("```")[0].splitlines()[1:]
    found: list[str] = []
    parent = ""
    for line in drawn:
        indent = len(line) - len(line.lstrip())
        name, text = line.split("/", 1)
        assert text.strip(), f"{line!r} does not say what the folder is for"
        parent = name.strip() if indent == 2 else parent
        found.append(name.strip() if indent == 2 else f"{parent}/{name.strip()}")
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert sorted(found) == sorted(folders)


def test_picture_of_layers_is_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one.get("containers") == ["paceline"])
    picture = DESIGN[DESIGN.index("```text") :].split("```")[1].splitlines()[1:]
    drawn = [set(re.findall(r"(\w+)(?:/|\.py)", line)) for line in picture]
    assert drawn == [set(re.findall(r"\w+", layer)) for layer in layers]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_named_file_exists(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", page.read_text())
    missing = [name for name in named if not any((root / name).exists() for root in (PACKAGE, ROOT))]
    assert not missing


@pytest.mark.parametrize(("way", "most"), [("A micro-batch", 25), ("A plan", 20), ("A lost worker", 25)])
def test_walks_name_few_files_each_once(way: str, most: int) -> None:
    text = WALKS.read_text()
    part = text[text.index(f"## {way}: ") :].split("\n## ")[0]
    numbered = re.findall(r"^(\d+)\. `([^`]+)`: \S", part, re.MULTILINE)
    files = [name for _, name in numbered]
    assert [int(number) for number, _ in numbered] == list(range(1, len(files) + 1))
    assert f"{len(files)} files" in part.splitlines()[0]
    assert len(files) <= most
    assert len(set(files)) == len(files)
    assert all((PACKAGE / name).is_file() for name in files)
