"""The library of ready tasks: each trains, repeats, and needs no memory to be described."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from pipeplan import tasks
from pipeplan.task import Task, load

NAMES = sorted(set(tasks.__all__) - {"save_pretrained", "transformers"})
"""Those that need no folder (test_transformers.py)."""


def _loss(task: Task, microbatch: int) -> torch.Tensor:
    assert isinstance(task.model, nn.Module)
    source, target = task.microbatch(microbatch)
    return task.loss(task.model(source), target)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name: str) -> None:
    """One backward reaches every parameter with a finite gradient."""
    torch.manual_seed(0)
    task = load(f"pipeplan.tasks:{name}")
    _loss(task, 0).backward()  # type: ignore[no-untyped-call]
    assert isinstance(task.model, nn.Module)
    missing = [
        name
        for name, parameter in task.model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str) -> None:
    """The task's own optimizer gets better at the same few micro-batches."""
    torch.manual_seed(0)
    task = load(f"pipeplan.tasks:{name}")
    assert isinstance(task.model, nn.Module)
    optimizer = task.optimizer(task.model.parameters())
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = _loss(task, step % 2)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-2:]) < sum(losses[:2])


@pytest.mark.parametrize("name", NAMES)
def test_data_repeats(name: str) -> None:
    """A micro-batch's number decides its tensors, in any order and process."""
    one, two = (load(f"pipeplan.tasks:{name}", seed=3) for _ in range(2))
    two.microbatch(0)
    for left, right in zip(one.microbatch(5), two.microbatch(5), strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(one.microbatch(5)[0], one.microbatch(6)[0])


@pytest.mark.parametrize("name", NAMES)
def test_models_can_be_built_without_memory(name: str) -> None:
    """On the meta device a model has shapes and no data, and the data stay real."""
    with torch.device("meta"):
        task = load(f"pipeplan.tasks:{name}")
    assert isinstance(task.model, nn.Module)
    assert all(parameter.is_meta for parameter in task.model.parameters())
    assert not any(part.is_meta for part in task.microbatch(0))


def test_published_sizes() -> None:
    """Shapes with published parameter counts have them, to the parameter."""
    published = {
        "gpt2(size='small', tied=True)": 124_439_808,
        "gpt2(size='medium', tied=True)": 354_823_168,
        "llama(size='7b')": 6_738_415_616,
        "resnet(size=18, classes=1000)": 11_689_512,
        "resnet(size=50, classes=1000)": 25_557_032,
        "densenet(size=121, classes=1000)": 7_978_856,
        "vit(size='base', side=224, classes=1000)": 86_567_656,
    }
    for reference, expected in published.items():
        with torch.device("meta"):
            task = load(f"pipeplan.tasks:{reference}")
        assert isinstance(task.model, nn.Module)
        assert sum(parameter.numel() for parameter in task.model.parameters()) == expected


def test_every_task_takes_a_seed_and_keywords_only() -> None:
    """All tasks are called alike, so that a reference can hold any of their arguments."""
    for name in NAMES:
        first, *others = inspect.signature(getattr(tasks, name)).parameters.values()
        assert first.name == "seed"
        assert all(other.kind is other.KEYWORD_ONLY for other in others)
