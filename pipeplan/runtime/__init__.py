"""The runtime: what one rank executes, from a lowered plan to trained weights.

`build` makes a worker out of plan, pattern, split model and task; `Executor.run` trains. Nothing
here plans, lowers or captures: `launch` composes.
"""

from pipeplan.runtime.build import Worker, build, refuse_split_ties
from pipeplan.runtime.feed import TaskFeed

__all__ = ["TaskFeed", "Worker", "build", "refuse_split_ties"]
