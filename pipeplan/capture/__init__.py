"""From a task to a chain: cut the model into layers, measure or estimate what each costs."""

from pipeplan.capture.agreement import agreement, check_output
from pipeplan.capture.estimated import estimate_task
from pipeplan.capture.measured import profile_task
from pipeplan.capture.profile import estimate, profile, profile_stages
from pipeplan.capture.split import split
from pipeplan.capture.stages import fuse, measure_stages

__all__ = [
    "agreement",
    "check_output",
    "estimate",
    "estimate_task",
    "fuse",
    "measure_stages",
    "profile",
    "profile_stages",
    "profile_task",
    "split",
]
