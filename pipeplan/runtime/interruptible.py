"""Waiting inside of torch so that Ctrl-C is heard.

Python runs signal handlers in the main thread, between two steps of its own. A wait of minutes in
a library is one step: whoever presses Ctrl-C meanwhile would sit the timeout out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

_Result = TypeVar("_Result")


def interruptible(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises, from a thread of its own.

    An exception of a signal handler leaves at once; the thread then ends with the process, and
    nothing more can be done with what it worked on.
    """
    results: SimpleQueue[tuple[_Result] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(),))
        except BaseException as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result[0]
