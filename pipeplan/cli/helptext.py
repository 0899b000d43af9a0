"""Help that fits a screen: one line per flag. docs/reference/cli.md has room for the rest."""

from __future__ import annotations

import argparse
from typing import Final

SCREEN: Final = (50, 100)
"""Lines and columns that the help of every verb stays within."""
_COLUMN = 32
"""Where the texts of flags begin."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's own, with room for a flag and its choices beside their text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_COLUMN)


def detail(action: argparse.Action, text: str) -> None:
    """Sentences about a flag for docs/reference/cli.md that `--help` has no room for."""
    action.detail = text  # type: ignore[attr-defined]


def detail_of(action: argparse.Action) -> str:
    """What `detail` said of a flag; empty if nothing."""
    text: str = getattr(action, "detail", "")
    return text
