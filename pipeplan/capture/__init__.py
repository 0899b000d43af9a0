"""From a task to a chain: cut the model into layers, measure or estimate what each costs."""

from pipeplan.capture.agreement import agreement, check_output
from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.capture.measurement.fused_stages import fuse_stages, measure_stages
from pipeplan.capture.measurement.task_profile import profile_task
from pipeplan.capture.profile import estimate, profile, profile_stages
from pipeplan.capture.split import split

__all__ = [
    "agreement",
    "check_output",
    "estimate",
    "estimate_task",
    "fuse_stages",
    "measure_stages",
    "profile",
    "profile_stages",
    "profile_task",
    "split",
]
