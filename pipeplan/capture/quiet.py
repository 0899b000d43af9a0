"""What torch says of attempts that may fail: the error tells it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what torch logs and prints of what fails inside: the error says it.

    The graph so far, which torch prints to stderr, is the error's; what the model itself prints
    there is passed on.
    """
    logger = logging.getLogger("torch")
    before, said, graph = logger.level, io.StringIO(), ""
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", "")
        raise
    finally:
        logger.setLevel(before)
        text = said.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)
