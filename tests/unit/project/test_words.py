"""Code, documentation and messages use the field's words: the words that they replaced are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLACES = ["src", "tests", "examples", "benchmarks", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
NOT_READ = {  # these name old words, or are about walks through the code
    "docs/explanation/glossary.md",
    "docs/explanation/walks.md",
    "tests/unit/project/test_design_pages.py",
    "tests/unit/project/test_words.py",
}

# An old word, whole or as a part of a name (in_snake_case or InCamelCase), and what is said in its place.
OLD_WORDS = {
    r"bequests?|bequeath\w*": "pending commit",
    r"boards?": "key-value store",
    r"bookkeeping|bookkeeper|booked|books": "step log; counted as",
    r"crews?": "local workers",
    r"cutters?|sharers?|exchangers?": "tensor group, context group, expert group",
    r"dealt|dealing|dealer": "handed out, asynchronous batches",
    r"die|dies|died|dying": "fail, exit, be lost",
    r"doors?|doorkeepers?": "admission",
    r"errands?": "transfer, collective",
    r"gatherings?": "rendezvous, step (all-gather: gather)",
    r"ghosts?|hollow": "placeholder, fake weights, meta device",
    r"guests?": "remote host",
    r"guilty": "faulty",
    r"lookouts?": "hang monitor",
    r"prelude": "set-up replay",
    r"retold": "attempt history",
    r"tally|tallies": "step metadata",
    r"twins?": "expert replica group",
    r"vaults?|vaulted|vaulting": "memory checkpoint",
    r"visits?|visitors?": "join request",
    r"walk|walks|walked|walker|walkers": "gradient pass; executor",
    r"whoever|whom|whomever": "(a process is a thing: the worker that, each worker that)",
}
PLAIN = [  # lines where such a word has its plain meaning, or is a key that travels between processes
    r"ast\.NodeVisitor|visit_[A-Z]|generic_visit",
    r"zmq\.DEALER|TensorBoard",
    r"\"(doors|errands|dealt|walk|walks)\"",
    r"(ast|os)\.walk\b|walk_packages|def walk\(name: str, module|\bwalk\(f?\"",
    r"(?i:three) walks|walks\.md|cycle walking",
]


def pattern() -> re.Pattern[str]:
    words = "|".join(OLD_WORDS)
    return re.compile(rf"(?<![A-Za-z])(?:{words})(?![a-z])|(?<=[a-z])(?:{_in_camel_case()})(?![a-z])", re.IGNORECASE)


def _in_camel_case() -> str:
    return (
        r"(?-i:"
        + "|".join(alternative[:1].upper() + alternative[1:] for key in OLD_WORDS for alternative in key.split("|"))
        + ")"
    )


def files() -> list[Path]:
    found = []
    for place in PLACES:
        path = ROOT / place
        found += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md"), *path.rglob("*.toml")]
    return sorted(path for path in found if str(path.relative_to(ROOT)) not in NOT_READ and "_build" not in path.parts)


def test_the_old_words_are_gone() -> None:
    old, plain, letters = pattern(), re.compile("|".join(PLAIN)), re.compile(r"[A-Za-z]+")
    texts = {path: path.read_text() for path in files()}
    parts = {path: set(letters.findall(text)) for path, text in texts.items()}  # whole words, or parts of names
    found = {part for part in set().union(*parts.values()) if old.search(part)}
    hits = []
    for path in [path for path in texts if parts[path] & found]:
        for number, line in enumerate(texts[path].splitlines(), 1):
            if (word := old.search(line)) and not plain.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {word.group()}: {line.strip()[:120]}")
    assert not hits, f"{len(hits)} lines have a word that was replaced (see OLD_WORDS):\n" + "\n".join(hits)


@pytest.mark.parametrize("name", ["vault", "Vaults", "the_crew", "TokenDoor", "VAULT_DIR", "whoever", "take_books"])
def test_an_old_word_is_found_alone_and_inside_a_name(name: str) -> None:
    assert pattern().search(f"x = {name}")


@pytest.mark.parametrize("name", ["default", "diet", "indoors", "twinkle", "visitation"])
def test_another_word_that_contains_one_is_not(name: str) -> None:
    assert not pattern().search(f"x = {name}")
