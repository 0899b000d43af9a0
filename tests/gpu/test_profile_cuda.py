"""Measured profiles on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeplan.capture import profile_task
from pipeplan.task import Task
from tests.capture_tasks import conv, gpt2, mlp

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
