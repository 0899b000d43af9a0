"""What refusals say, as numbers."""

from __future__ import annotations


def least_bytes(refusal: BaseException) -> int:
    """The bytes that the refusal of a budget names as the least."""
    return int(str(refusal).split("need at least ")[1].split()[0])
