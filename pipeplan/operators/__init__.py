"""Modules as graphs of operators: captured, timed, and run by device programs.

docs/reference/device-programs.md is the contract.
"""

from pipeplan.operators.agreement import check_agreement
from pipeplan.operators.capture import capture
from pipeplan.operators.captured import Captured
from pipeplan.operators.module import by_operators
from pipeplan.operators.refusals import UncapturableError
from pipeplan.operators.rehearsal import estimated, measured

__all__ = [
    "Captured",
    "UncapturableError",
    "by_operators",
    "capture",
    "check_agreement",
    "estimated",
    "measured",
]
