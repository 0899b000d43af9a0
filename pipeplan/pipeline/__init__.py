"""A plan and a model as one Python object that trains."""

from pipeplan.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
