"""From a task to a chain: cut the model into layers, measure what each costs."""

from pipeplan.capture.split import split

__all__ = ["split"]
