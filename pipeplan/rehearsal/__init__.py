"""Trial runs of captured operators: whether they give the module's bits, and what they take."""

from pipeplan.rehearsal.agreement import check_agreement
from pipeplan.rehearsal.operations import estimated, measured
from pipeplan.rehearsal.task_graph import estimate_operators, profile_operators

__all__ = [
    "check_agreement",
    "estimate_operators",
    "estimated",
    "measured",
    "profile_operators",
]
