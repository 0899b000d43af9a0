"""Options of layers: device programs over the operators of a task's layers, found by `profile`.

docs/reference/model.md, (V5), says how plans use them.
"""

from pipeplan.layer_options.task_options import SECONDS, add_options, task_options

__all__ = ["SECONDS", "add_options", "task_options"]
