"""What ranks import, slowly, and what is measured alike for all; see forked_commands.py."""

from __future__ import annotations

import gc

import torch
import torch._dynamo  # what every rank would import for itself
import torch.distributed.checkpoint.filesystem

from pipeplan import Pipeline, capture  # noqa: F401
from pipeplan.capture.layer_costs import optimizer_cost
from pipeplan.launch import train  # noqa: F401
from tests import launch_task

optimizer_cost.COLD_BYTES = 1  # as in conftest.py
torch.set_num_threads(1)
launch_task.chain()
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), strict=False)  # imports much
gc.collect()
gc.freeze()  # ranks search, and so copy, none of this when they collect their garbage
