"""From a task to a chain: cut the model into layers, measure or estimate what each costs."""

from pipeplan.capture.estimated import estimate_task
from pipeplan.capture.measured import profile_task
from pipeplan.capture.profile import estimate, profile
from pipeplan.capture.split import split

__all__ = ["estimate", "estimate_task", "profile", "profile_task", "split"]
