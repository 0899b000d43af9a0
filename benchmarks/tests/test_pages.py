"""Pages of results are what their generators write."""

from __future__ import annotations

import pytest

from benchmarks import pages


@pytest.mark.parametrize("name", pages.PAGES)
def test_result_pages_are_up_to_date(name: str) -> None:
    """They say what the files of results have; else run `python -m benchmarks.pages`."""
    assert pages.path(name).read_text(encoding="utf-8") == pages.page(name)


def test_the_table_of_the_readme_is_up_to_date() -> None:
    """It has the means of the planner's results; else run `python -m benchmarks.pages`."""
    text = pages.README.read_text(encoding="utf-8")
    assert text == pages.readme()
    assert text.count("\n| 1.2 | ") == 1


def test_every_result_page_has_a_generator() -> None:
    """Nobody writes there by hand."""
    assert set(pages.FOLDER.glob("*.md")) == {pages.path(name) for name in pages.PAGES}
