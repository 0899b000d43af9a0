"""OffMate, executed: tasks that train under plans of `pipeplan.remat.states`.

docs/reference/offmate.md says what is counted.
"""

from pipeplan.offmate.measured import MachineLimits, MeasuredTask, measure_task, measured_problem
from pipeplan.offmate.training import StateTraining, StepFigures

__all__ = [
    "MachineLimits",
    "MeasuredTask",
    "StateTraining",
    "StepFigures",
    "measure_task",
    "measured_problem",
]
