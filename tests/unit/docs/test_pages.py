"""Generated pages are what their generators write; pages and help fit on screens."""

from __future__ import annotations

import argparse
import re
import runpy
from pathlib import Path

import pytest

from pipeplan.cli import entry
from pipeplan.cli.helptext import SCREEN
from pipeplan.launch import options

ROOT = Path(__file__).parents[3]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "make.py"))
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
_HEADING = re.compile(r"^(?:#|\*\*)", re.MULTILINE)


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_reference_pages_are_up_to_date(name: str) -> None:
    """They say what parsers and docstrings say; else run `python docs/make.py`."""
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == REFERENCE["PAGES"][name]()


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The whole command line, each verb, and the launcher."""
    top = entry.parser()
    (verbs,) = (each for each in top._actions if isinstance(each, argparse._SubParsersAction))
    return {"pipeplan": top, **verbs.choices, "launch": options.parser()}


@pytest.mark.parametrize("name", parsers())
def test_help_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many lines of so many columns, examples included."""
    lines, columns = SCREEN
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = parsers()[name].format_help().splitlines()
    assert len(shown) <= lines
    assert max(map(len, shown)) <= columns


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_a_heading_every_two_screens(page: Path) -> None:
    """Readers see where they are; a bold line that begins a paragraph counts, too."""
    sections = _HEADING.split(page.read_text(encoding="utf-8"))
    assert max(section.count("\n") for section in sections) <= 2 * SCREEN[0]
