"""The tasks that the package has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeplan import tasks
from pipeplan.task import Task
from tests.zoo.architecture import LENGTH, SIDE, Architecture, Make, sgd


def ours(make: Callable[..., Task], **words: Any) -> Make:
    """With the optimizer of all others: Adam makes a difference in the last bits a large one."""
    return lambda: replace(make(**words), optimizer=sgd)


PACKAGE_TASKS = (
    Architecture("resnet", ours(tasks.resnet, side=SIDE, width=8)),
    Architecture("densenet", ours(tasks.densenet, side=SIDE)),
    Architecture("inception", ours(tasks.inception, modules=3, side=SIDE)),
    Architecture("unet", ours(tasks.unet, side=16)),
    Architecture("mlp-mixer", ours(tasks.mixer)),
    Architecture("siamese", ours(tasks.siamese)),
    Architecture("vision transformer", ours(tasks.vit, dropout=0.0)),
    Architecture(
        "gpt-2, own code, tied", ours(tasks.gpt2, dropout=0.0, tied=True, sequence=LENGTH)
    ),
    Architecture("gpt-2, own code, dropout", ours(tasks.gpt2, sequence=LENGTH), draws=True),
    Architecture("t5, own code", ours(tasks.t5, dropout=0.0, sequence=LENGTH)),
    Architecture("text and image, cross attention", ours(tasks.crossmodal)),
)
