"""What a task trains with, in words: functions by name and code, others as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from pipeplan.runtime.checkpoint.recipe import differences, recipe
from pipeplan.task import LossScale, Task

CODE = """
from functools import partial
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from pipeplan.runtime.checkpoint.recipe import recipe
from pipeplan.task import Task
def loss(output, target):
    return {0}.sum() if output.dtype in {{"a", "b", "c"}} else (lambda x: x + 1)(output)
class Held:
    pass
given = dict(model=[nn.Linear(1, 1)], loss=loss, optimizer=partial(len, Held()), data=len)
print(recipe(Task(**given, scheduler=partial(LambdaLR, lr_lambda=loss))))
"""


def task(**fields: Any) -> Task:
    """One layer."""
    given = {"model": [nn.Linear(2, 2)], "loss": nn.MSELoss(), "optimizer": SGD} | fields
    return Task(data=lambda number: (torch.zeros(1, 2), torch.zeros(1, 2)), **given)


def rate(factor: float) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of a rate that its code does not show."""
    return lambda parameters: SGD(parameters, lr=factor)


def absolute(output: Tensor, target: Tensor, power: float = 1.0) -> Tensor:
    """A loss."""
    return ((output - target).abs() ** power).mean()


def again(output: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    """The same with another default."""
    return ((output - target).abs() ** power).mean()


again.__name__ = again.__qualname__ = "absolute"


def timed(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator."""

    @wraps(loss)
    def inner(*given: Any) -> Tensor:
        return loss(*given)

    return inner


class Weighing:
    """A loss with a method, and an object that holds itself."""

    def __init__(self, factor: float) -> None:
        self.factor, self.whole = factor, self

    def one(self, output: Tensor, target: Tensor) -> Tensor:
        """A loss."""
        return self.factor * (output - target).sum()

    def other(self, output: Tensor, target: Tensor) -> Tensor:
        """Another one."""
        return self.factor * (output - target).prod()


def warm(step: int) -> float:
    """A schedule's factor."""
    return min(1.0, step / 10)


def smoothed(amount: float) -> nn.Module:
    """A loss whose text does not show what it does."""
    return nn.CrossEntropyLoss(torch.ones(2), label_smoothing=amount)


Adam = type("Adam", (AdamW,), {"__module__": "mine"})


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"loss": nn.MSELoss(reduction="sum")}, ["loss: .*reduction='mean'.*='sum'"]),
        ({}, {"loss": nn.L1Loss()}, ["loss: .* with MSELoss.*, this run has L1Loss"]),
        ({"loss": smoothed(0.1)}, {"loss": smoothed(0.2)}, ["loss: .*label_smoothing=0.1"]),
        ({"loss": absolute}, {"loss": None}, [r"loss: .* absolute \(code [0-9a-f]{8}, Python"]),
        ({"loss": absolute}, {"loss": again}, ["loss: .* with 1, .* with 2"]),
        ({"loss": timed(absolute)}, {"loss": absolute}, []),
        ({"loss": Weighing(1).one}, {"loss": Weighing(1).other}, ["loss: .*Weighing.one"]),
        ({"loss": Weighing(1).one}, {"loss": Weighing(2).one}, ["loss: .*factor=1, whole"]),
        ({"loss": functional.gelu}, {"loss": torch.tanh}, ["loss: .*gelu, this run has .*tanh"]),
        ({}, {"optimizer": AdamW}, ["optimizer: .* with SGD, this run has AdamW"]),
        ({"optimizer": torch.optim.Adam}, {"optimizer": Adam}, ["optimizer: .*has mine.Adam"]),
        (
            {"optimizer": partial(SGD, lr=0.1)},
            {"optimizer": partial(SGD, lr=0.2)},
            [r"optimizer: .* with SGD\(lr=0.1\S*\), this run has SGD\(lr=0.2\S*\)"],
        ),
        (
            {"optimizer": lambda parameters: SGD(parameters, lr=0.1)},
            {"optimizer": lambda parameters: SGD(parameters, lr=0.2)},
            ["optimizer: .*<lambda> "],
        ),
        ({"optimizer": rate(0.1)}, {"optimizer": rate(0.2)}, []),
        ({"scheduler": partial(LambdaLR, lr_lambda=warm)}, {"scheduler": None}, ["scheduler: "]),
        ({"clip_norm": 1}, {"clip_norm": 1.0}, []),
        (
            {"clip_norm": 1.0, "loss_scale": LossScale(interval=50)},
            {"autocast": torch.bfloat16, "loss_scale": LossScale()},
            [
                "clip_norm: .* 1, this run has None",
                "loss_scale: .*interval=50.*interval=2000",
                "autocast: .*torch.bfloat16",
            ],
        ),
    ],
)
def test_what_differs_is_told(
    before: dict[str, Any], after: dict[str, Any], told: list[str]
) -> None:
    """Field by field; what a function holds from outside is not seen."""
    found = differences(recipe(task(**before)), recipe(task(**after)))
    assert len(found) == len(told)
    for remark, expected in zip(found, told, strict=True):
        assert re.search(f"^goes on with another {expected}", remark)


def test_a_function_without_a_module_is_described() -> None:
    """Code that was made by `exec` may belong to none."""
    made: dict[str, Any] = {}
    exec("def loss(output, target): return output.sum()", {}, made)
    made["loss"].__module__ = None
    assert recipe(task(loss=made["loss"]))["loss"].startswith("loss (code ")


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
