"""Places in the user's code, as messages name them."""

from __future__ import annotations

import re


def place_of_line(file: str, line: int) -> str:
    """`model.py:12`."""
    return f"{file.rpartition('/')[2]}:{line}"


def is_machinery(file: str) -> bool:
    """Whether `file` is torch's or ours, so that no user looks there."""
    return bool(re.search(r"/torch/|/contextlib\.py$|/pipeplan/capture/|^<", file))
