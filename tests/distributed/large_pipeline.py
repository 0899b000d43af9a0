"""Two ranks that train what a function makes; each writes the weights it hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pipeplan import Pipeline
from pipeplan.capture import estimate
from pipeplan.capture.split import module_of
from pipeplan.devices import find_device
from pipeplan.repeat import seed_all
from pipeplan.task import load
from tests import launch_task
from tests.forked import run_joined

REFERENCE = "tests.large_task:large(form='exported', blocks=4, width=16)"


def work(folder: Path) -> None:
    """Two steps; the parameters of the other rank have no memory."""
    torch.set_num_threads(1)
    chain = launch_task.leveled(estimate(REFERENCE, find_device("h100")))
    plan = launch_task.plan_of(chain, 2, "flush")
    seed_all(0)
    with Pipeline(lambda: load(REFERENCE), plan) as pipeline:
        pipeline.run(2)
        state = pipeline.state_dict()
        rank = pipeline.mesh.get_rank()
    mine = {
        key.removeprefix("model."): value.clone()
        for key, value in state.items()
        if key.startswith("model.")
    }
    for name, parameter in module_of(pipeline.task).named_parameters():
        assert parameter.is_meta == (name not in mine), name
    torch.save(mine, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    run_joined(lambda: work(Path(sys.argv[1])), 2)
