"""The parser of flags that verbs and the launcher share."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Any


class FlagParser(argparse.ArgumentParser):
    """Refuses what it does not know with its own usage, and names the flag that is meant.

    What begins with a minus and a digit is a value, which its flag may refuse: no flag does.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        """As argparse has it."""
        super().__init__(*args, **fields)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, which leaves what is not known to the parser of all verbs."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word, known = unknown[0].partition("=")[0], self._option_string_actions
            close = get_close_matches(word, known, n=1) if word.startswith("-") else ()
            meant = f", perhaps {close[0]}" if close else ""
            self.error(f"unrecognized argument: {unknown[0]}{meant}")
        return found, unknown
