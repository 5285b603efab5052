"""Reads Markdown pages: their fenced blocks and their links.

The rule for blocks: a page is one session in one empty folder, worked through from top to bottom. A `python` or
`toml` block whose first line is `# name.py` (`# name.toml`) is saved under that name; any other `python` block and
every `bash` block is run. Other languages (`text`, `console`, none) are pictures. `<!-- not run: reason -->` above a
block leaves it out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Block", "anchors", "blocks", "links"]

_FENCE = re.compile(r"^(`{3,})(.*)$")
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$")
_FILE_NAME = re.compile(r"^# ([\w./-]+\.(?:py|toml))$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int  # of the opening fence, from 1
    not_run: str = ""  # the reason, where it is left out

    @property
    def file_name(self) -> str:
        """The name to save it under; empty where it has none."""
        found = _FILE_NAME.match(self.text.split("\n", 1)[0])
        return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    """All fenced blocks; raises ValueError for a fence that is never closed."""
    found: list[Block] = []
    fence, language, start, reason = "", "", 0, ""
    body: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        match = _FENCE.match(line)
        if fence:
            if match and match[1] == fence and not match[2]:
                found.append(
                    Block(language=language, text="".join(f"{row}\n" for row in body), line=start, not_run=reason)
                )
                fence, reason = "", ""
            else:
                body.append(line)
        elif match:
            fence, language, start, body = match[1], match[2].strip(), number, []
        elif line.strip():
            mark = _NOT_RUN.match(line.strip())
            reason = mark[1] if mark else ""
    if fence:
        raise ValueError(f"{page}: the block that opens in line {start} is never closed")
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """(line, target) of every link and image outside fenced blocks."""
    return [(number, link[1] or link[2]) for number, line in _prose(page) for link in _LINK.finditer(line)]


def anchors(page: Path) -> set[str]:
    """The names that `page#name` may use: its headings, spelled as GitHub and MyST spell them."""
    headings = [match[1] for _, line in _prose(page) if (match := _HEADING.match(line))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines outside fenced blocks."""
    inside = {number for block in blocks(page) for number in range(block.line, block.line + block.text.count("\n") + 2)}
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if number not in inside:
            yield number, line
