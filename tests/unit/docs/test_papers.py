"""docs/reference/papers.md leaves out no number of a paper, and names only what is there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "papers.md"
_CHAPTERS = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
PAPERS = dict(zip(_CHAPTERS[1::2], _CHAPTERS[2::2], strict=True))
_ROW = re.compile(r"^\| (?!in the paper|-)(.*) \|$", re.MULTILINE)
_NAME = re.compile(r"\[`(\w+)`\]\(([^)]+\.py)\)")
_NUMBERS = re.compile(r"([A-Z][a-z]+) (\d[\d.]*)(?:-([\d.]+))?")
_EQUATIONS = re.compile(r"\(([\d.]+)\)(?:-\(([\d.]+)\))?")


def upto(*counts: str) -> list[str]:
    """`upto("7", "3.4")` is 1 to 7 and 3.1 to 3.4."""
    found = []
    for count in counts:
        before, dot, last = count.rpartition(".")
        found += [f"{before}{dot}{number}" for number in range(1, int(last) + 1)]
    return found


NUMBERED = {
    "Pipelined model parallelism": {
        "Definition": upto("2"),
        "Lemma": upto("11"),
        "Theorem": upto("4"),
        "Figure": upto("16"),
        "equation": upto("36"),
    },
    "Offloading": {
        "Problem": upto("2"),
        "Proposition": upto("3"),
        "Lemma": upto("3"),
        "Theorem": upto("3"),
        "Algorithm": upto("1"),
        "Figure": upto("19"),
        "equation": upto("10"),
    },
    "Joins": {
        "Definition": upto("8"),
        "Problem": upto("4"),
        "Property": upto("1"),
        "Notation": upto("3"),
        "Lemma": upto("4"),
        "Theorem": upto("3"),
        "Figure": upto("10"),
        "Table": upto("3"),
        "equation": upto("5"),
    },
    "Rematerialization and offloading together": {
        "Lemma": upto("1"),
        "Theorem": upto("1"),
        "Figure": upto("1"),
        "Table": upto("2"),
    },
    "The thesis": {
        "Assumption": ["2.1.1"],
        "Definition": [*upto("3.2.4"), "3.3.1"],
        "Problem": upto("1"),
        "Property": upto("3"),
        "Lemma": ["3.2.1", *upto("3.3.2")],
        "Theorem": ["3.3.2", "4.2.1"],
        "Algorithm": upto("8"),
        "Figure": ["1.1", "1.3", "1.4", *upto("2.8", "3.14", "4.9")],
        "Table": upto("4.2"),
        "equation": upto("2.22", "3.34", "4.23"),
    },
}
"""What each paper numbers; the thesis has no Figure 1.2."""


def items(cell: str) -> Iterator[tuple[str, str]]:
    """(kind, number) of all that a first cell names: `Figures 2-3, (1)-(4)`."""
    for word, first, last in _NUMBERS.findall(cell):
        kind = word.removesuffix("s").replace("ie", "y")
        if kind != "Section":
            yield from ((kind, number) for number in _between(first, last))
    for first, last in _EQUATIONS.findall(cell):
        yield from (("equation", number) for number in _between(first, last))


def _between(first: str, last: str) -> list[str]:
    before, dot, begin = first.rpartition(".")
    end = (last or first).rpartition(".")[2]
    return [f"{before}{dot}{number}" for number in range(int(begin), int(end) + 1)]


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_number_of_a_paper_is_listed_once(paper: str) -> None:
    """A theorem, figure or equation that no row names, or two rows do, is a mistake."""
    named = Counter(chain.from_iterable(items(row.split(" | ")[0]) for row in rows(paper)))
    numbered = {(kind, number) for kind, all_ in NUMBERED[paper].items() for number in all_}
    assert dict(named) == dict.fromkeys(numbered, 1)


def rows(paper: str) -> list[str]:
    """The rows of the paper's tables."""
    return _ROW.findall(PAPERS[paper])


def test_every_paper_is_listed() -> None:
    """The page has a chapter for each, and no other."""
    assert PAPERS.keys() == NUMBERED.keys()


@pytest.mark.parametrize("paper", NUMBERED)
def test_a_row_has_code_or_says_why_not(paper: str) -> None:
    """Names are defined where they link to; no code means `not here` and a reason."""
    for row in rows(paper):
        item, _, code, tests, _ = row.split(" | ")
        assert code.startswith("not here: ") or _NAME.search(code), item
        for name, path in _NAME.findall(code + tests):
            text = (PAGE.parent / path).read_text(encoding="utf-8")
            assert re.search(rf"^ *(?:def|class) {name}\b|^{name}\b.*? = ", text, re.MULTILINE), (
                f"{item}: {path} defines no {name}"
            )
