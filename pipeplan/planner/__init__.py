"""The planner: chain and cluster in, verified plan out."""

from pipeplan.planner.config import Config, Method, default_microbatches
from pipeplan.planner.solve import Progress, solve

__all__ = ["Config", "Method", "Progress", "default_microbatches", "solve"]
