"""What ranks import, slowly, and what is measured alike for all of them; see preloaded.py."""

from __future__ import annotations

import torch
import torch._dynamo  # what every rank would import for itself
import torch.distributed.checkpoint.filesystem

from pipeplan import Pipeline, capture  # noqa: F401
from pipeplan.launch import train  # noqa: F401
from tests import launch_task

torch.set_num_threads(1)
launch_task.chain()
