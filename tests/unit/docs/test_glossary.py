"""The glossary names what is there: each name of its tables is one of the package."""

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "glossary.md"
NAMES = sorted(set(re.findall(r"^\|[^|]+\|[^|]+\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE)))


def test_glossary_has_names() -> None:
    """Every row of each table of our own words says where its word is defined."""
    _, _, own = PAGE.read_text().partition("\n## Problem and schedule\n")
    rows = [line for line in own.splitlines() if line.startswith("| ")]
    headers = [line for line in rows if line.startswith("| our word")]
    named = [line for line in rows if re.match(r"^\|[^|]+\|[^|]+\| `[\w.]+` \|", line)]
    assert len(headers) == 7
    assert len(named) == len(rows) - len(headers)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_glossary_exist(name: str) -> None:
    """A renamed class, function or method is renamed in the glossary, too."""
    parts = name.split(".")
    package = (
        "pipeplan" if parts[0] in ("baselines", "capture", "layer", "remat") else "pipeplan.ilp"
    )
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join([package, *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"no module of {package} defines {name}")
