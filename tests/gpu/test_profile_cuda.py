"""Measured profiles on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan import rematerialize
from pipeplan.capture import profile_task
from pipeplan.task import Task
from tests.capture_tasks import conv, gpt2, mlp, rows, sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def moved(make: Callable[[], Task]) -> Task:
    """The task with its model on the GPU; its data stay on the processor."""
    task = make()
    assert isinstance(task.model, nn.Module)
    return replace(task, model=task.model.to("cuda"))


@pytest.mark.parametrize("make", [mlp, conv, gpt2])
def test_gpu_is_measured_and_rounding_told_apart(make: Callable[[], Task]) -> None:
    """Times are those of the stream, bytes those of tensors, rounding beside them."""
    chain = profile_task(moved(make), repeats=5, warmup=2)
    assert chain.device["device"] == "cuda"
    assert chain.device["gpu"] == torch.cuda.get_device_name()
    assert all(layer.forward_ns > 0 and layer.backward_ns > 0 for layer in chain.layers)
    rounding, scratch = (
        chain.device["allocator_rounding_bytes"],
        chain.device["kernel_scratch_bytes"],
    )
    assert isinstance(rounding, int)
    assert isinstance(scratch, int)
    assert rounding >= 0 <= scratch
    weights = [layer.weight_bytes for layer in profile_task(make(), repeats=1, warmup=0).layers]
    assert [layer.weight_bytes for layer in chain.layers] == weights


def test_bytes_repeat() -> None:
    """Two profiles on a GPU are equal in bytes."""
    first, second = (profile_task(moved(gpt2), repeats=1, warmup=1) for _ in range(2))
    for one, two in zip(first.layers, second.layers, strict=True):
        assert (one.saved_bytes, one.backward_workspace_bytes) == (
            two.saved_bytes,
            two.backward_workspace_bytes,
        )


class AddsUp(nn.Module):
    """Adds thousands of rows up in few places; a GPU does so in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        made = self.linear(value)
        places = torch.arange(len(value), device=value.device) % 3
        return torch.zeros_like(made).index_add(0, places, made)


def adding() -> Task:
    """Batches of 4096 rows."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        return rows(number, 4096, 32), rows(number + 1, 4096, 32)

    model = nn.Sequential(nn.Linear(32, 32), AddsUp(), nn.Linear(32, 32))
    return Task(model=model, loss=functional.mse_loss, optimizer=sgd, data=data)


def test_kernels_that_add_up_in_any_order_are_told_of() -> None:
    """The model itself gives other bits the second time, so its layers and operators may, too."""
    task = moved(adding)
    agreement = profile_task(task, repeats=1, warmup=1).agreement
    assert agreement is not None
    assert not agreement.repeats
    assert "as the model itself" in agreement.told
    assert isinstance(task.model, nn.Module)
    pair = tuple(part.to("cuda") for part in task.microbatch(0))
    assert rematerialize(task.model, pair, "1GiB", loss=task.loss, method="operators")
