"""What a task trains with, in words: functions by name and code, others as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from pipeplan.runtime.checkpoint.recipe import differences, recipe
from pipeplan.task import LossScale, Task

CODE = """
from torch import nn
from pipeplan.runtime.checkpoint.recipe import recipe
from pipeplan.task import Task
def loss(output, target):
    return {0}.sum() if output.dtype in {{"a", "b", "c"}} else (lambda x: x + 1)(output)
given = dict(model=[nn.Linear(1, 1)], loss=loss, optimizer=len, data=len)
print(recipe(Task(**given))["loss"])
"""


def task(**fields: Any) -> Task:
    """One layer."""
    given = {"model": [nn.Linear(2, 2)], "loss": nn.MSELoss(), "optimizer": SGD} | fields
    return Task(data=lambda number: (torch.zeros(1, 2), torch.zeros(1, 2)), **given)


def rate(factor: float) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of a rate that its code does not show."""
    return lambda parameters: SGD(parameters, lr=factor)


def absolute(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (output - target).abs().mean()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"loss": nn.MSELoss(reduction="sum")}, []),
        ({}, {"loss": nn.L1Loss()}, ["loss: .* with MSELoss\\(\\), this run has L1Loss\\(\\)"]),
        (
            {"loss": absolute},
            {"loss": None},
            [r"loss: .* with absolute \(code [0-9a-f]{8}, Python"],
        ),
        ({}, {"optimizer": AdamW}, ["optimizer: .* with SGD, this run has AdamW"]),
        (
            {"optimizer": partial(SGD, lr=0.1)},
            {"optimizer": partial(SGD, lr=0.2)},
            [r"optimizer: .* with SGD\(lr=0.1\), this run has SGD\(lr=0.2\)"],
        ),
        (
            {"optimizer": lambda parameters: SGD(parameters, lr=0.1)},
            {"optimizer": lambda parameters: SGD(parameters, lr=0.2)},
            ["optimizer: .*<lambda> "],
        ),
        ({"optimizer": rate(0.1)}, {"optimizer": rate(0.2)}, []),
        (
            {"clip_norm": 1.0, "loss_scale": LossScale(initial=8.0)},
            {"autocast": torch.bfloat16},
            ["clip_norm: .* 1.0, this run has None", "loss_scale: ", "autocast: .*torch.bfloat16"],
        ),
    ],
)
def test_what_differs_is_told(
    before: dict[str, Any], after: dict[str, Any], told: list[str]
) -> None:
    """Field by field; what a function holds from outside, or a loss does not show, is not seen."""
    found = differences(recipe(task(**before)), recipe(task(**after)))
    assert len(found) == len(told)
    for remark, expected in zip(found, told, strict=True):
        assert re.search(f"^goes on with another {expected}", remark)


def test_checkpoints_of_earlier_versions_tell_nothing() -> None:
    """They have no recipe."""
    assert differences({}, recipe(task())) == []


def test_processes_agree(tmp_path: Path) -> None:
    """The order of sets and where a function is written make no difference, its code does."""
    said = []
    for number, text in enumerate((CODE.format("output"), "\n\n" + CODE.format("output"))):
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONHASHSEED": str(number), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    assert said[0] == said[1]
