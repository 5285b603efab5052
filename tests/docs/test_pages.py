"""README and documentation do what they show: blocks run, links resolve, and the pages build without a warning."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import warm
from markdown_pages import Block, anchors, blocks, links

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT_S = 300


def first_script() -> str:
    """`train.py` of the first tutorial, which how-to pages use without showing it again."""
    (block,) = [block for block in blocks(ROOT / "docs/tutorials/first-script.md") if block.file_name == "train.py"]
    return block.text


def is_run(block: Block) -> bool:
    return not block.not_run and block.language in ("python", "bash", "toml")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(is_run, blocks(page)))], ids=lambda page: str(page.relative_to(ROOT))
)
@pytest.mark.timeout(500)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    """The first commands of README are started as a reader does; all others are forks that find their imports done."""
    as_they_are = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    forked = warm.shell_path(tmp_path / "bin")
    path = as_they_are if page.name == "README.md" else forked
    if page.parent.name == "how-to":
        (tmp_path / "train.py").write_text(first_script())
    for block in filter(is_run, blocks(page)):
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text)
        elif block.language != "toml":
            if block.language == "python":
                (tmp_path / f"line_{block.line}.py").write_text(block.text)
                words = ["python", f"line_{block.line}.py"]
            else:
                words = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(
                ["env", *words],  # which looks for them in the PATH that is given here
                env=os.environ | {"PATH": path},
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, f"{page.name}, line {block.line}: exit code {done.returncode}\n{done.stdout}"
            path = forked


def test_every_relative_link_resolves() -> None:
    broken = []
    headings = functools.cache(anchors)
    for page in PAGES:
        for line, target in links(page):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, anchor = target.partition("#")
            other = (page.parent / name).resolve() if name else page
            if not other.exists():
                broken.append(f"{page.name}, line {line}: {target} does not exist")
            elif anchor and anchor not in headings(other):
                broken.append(f"{page.name}, line {line}: {other.name} has no heading #{anchor}")
    assert broken == []


def test_every_saved_file_is_used() -> None:
    for page in PAGES:
        found = blocks(page)
        for saved in (block for block in found if block.file_name and not block.not_run):
            used = [block for block in found if block.line > saved.line and saved.file_name in block.text]
            assert used, f"{page.name}, line {saved.line}: {saved.file_name} is shown but nothing runs it"


def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", tmp_path / "html"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "html" / "explanation" / "design.html").exists()


# The reader of pages itself.


def test_reader_finds_blocks_reasons_and_links(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, with `code`\n[one](a.md#b) ![two](c.png)\n\n"
        "```python\n# train.py\nx = [1](2)\n```\n\n<!-- not run: needs a cluster -->\n```bash\nfalse\n```\n\ntext\n\n"
        "````text\n```python\n```\n````\n"
    )
    python, bash, text = blocks(page)
    assert (python.language, python.line, python.file_name, python.not_run) == ("python", 4, "train.py", "")
    assert (bash.text, bash.not_run, bash.file_name) == ("false\n", "needs a cluster", "")
    assert text.text == "```python\n```\n"
    assert links(page) == [(2, "a.md#b"), (2, "c.png")]
    assert anchors(page) == {"a-title-with-code"}


def test_reader_refuses_a_block_that_is_never_closed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx\n")
    with pytest.raises(ValueError, match="line 1 is never closed"):
        blocks(page)
