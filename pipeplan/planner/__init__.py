"""The planner: chain and cluster in, verified plan out."""

from pipeplan.ilp import Report as Progress
from pipeplan.planner.config import Config, Method, default_microbatches
from pipeplan.planner.in_turn import in_turn
from pipeplan.planner.solve import solve

__all__ = ["Config", "Method", "Progress", "default_microbatches", "in_turn", "solve"]
