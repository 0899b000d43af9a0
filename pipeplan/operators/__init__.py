"""Modules as graphs of operators: captured, and run by device programs.

docs/reference/device-programs.md is the contract.
"""

from pipeplan.operators.capture import capture
from pipeplan.operators.captured import Captured
from pipeplan.operators.layer import capture_layer
from pipeplan.operators.module import by_operators
from pipeplan.operators.refusals import UncapturableError

__all__ = [
    "Captured",
    "UncapturableError",
    "by_operators",
    "capture",
    "capture_layer",
]
