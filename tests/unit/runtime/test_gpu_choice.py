"""A model on another GPU than the current one: refused, and never seeded on the wrong one."""

from __future__ import annotations

import pytest
import torch

from pipeplan import Pipeline
from pipeplan.errors import InputError
from pipeplan.pipeline import pipeline
from pipeplan.runtime.stages.random_state import layer_seed, seed_layer
from pipeplan.runtime.transport.backend import check_current
from tests import launch_task


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_the_current_gpu_and_the_processor_are_accepted(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to say; a GPU with another number than that of this process is refused."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device(device), "task", "Say `cuda`.")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if device == "cuda:0":
        with pytest.raises(InputError, match=r"task: model: got it on cuda:0, .*Say `cuda`\."):
            check_current(torch.device(device), "task", "Say `cuda`.")


def test_a_model_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the call that is missing; before ranks are joined."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pipeline, "device_of", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(pipeline, "for_pipeline", pytest.fail)
    with pytest.raises(InputError, match=r"cuda:1, need it on cuda:0.*set_device\(1\) before"):
        Pipeline(launch_task.task(0), launch_task.plan(1, "flush"))


@pytest.mark.parametrize(("device", "seeded"), [("cuda:1", 1), ("cuda", 0), ("cpu", 0)])
def test_the_generator_of_the_layers_device_is_seeded(
    device: str, seeded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That GPU's alone, beside the processor's."""
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    seed_layer(3, 4, 5, torch.device(device))
    value = layer_seed(3, 4, 5)
    assert torch.default_generator.initial_seed() == value
    assert generators[seeded].initial_seed() == value
    assert generators[1 - seeded].initial_seed() == 1
