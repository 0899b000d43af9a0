"""From a task to a chain: cut the model into layers, measure what each costs."""

from pipeplan.capture.profile import profile, profile_task
from pipeplan.capture.split import split

__all__ = ["profile", "profile_task", "split"]
