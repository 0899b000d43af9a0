"""Modules that keep a budget on a CUDA device, with copies on a stream of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeplan import pinned, rematerialize, tasks
from pipeplan.remat import DeviceOpKind, HostLink, budgets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("offload", [False, True])
def test_gpu_module_within_a_budget_is_the_plain_module(offload: bool) -> None:
    """Losses, gradients and the device's generator are bit-equal at four budgets."""
    torch.manual_seed(0)
    task = tasks.gpt2(0)
    assert isinstance(task.model, nn.Module)
    plain = task.model.to("cuda")
    pair = tuple(part.to("cuda") for part in task.microbatch(0))
    options = {"loss": task.loss, "repeats": 2, "offload": offload, "method": "layers"}
    options |= {"host_bandwidth": "20GB/s"} if offload else {}

    def trained(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        losses = [task.loss(module(pair[0]), pair[1]) for _ in range(2)]
        for loss in losses:
            loss.backward()
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return [*(loss.detach() for loss in losses), *gradients, torch.cuda.get_rng_state()]

    expected = trained(copy.deepcopy(plain))
    free = rematerialize(plain, pair, "1TiB", **options)
    channel = HostLink(20 * 10**9) if offload else None
    moved = 0
    for budget in budgets(free.rematerialization_costs, channel, 4):
        lean = rematerialize(copy.deepcopy(plain), pair, budget, **options)
        assert all(map(torch.equal, expected, trained(lean)))
        moved += sum(op.kind is DeviceOpKind.OFFLOAD for op in lean.rematerialization.schedule.ops)
    assert bool(moved) == offload


def test_host_memory_is_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal locks what the module uses; locking takes longer than the copies it times."""
    locked: list[int] = []

    def counted(address: int, size: int) -> None:
        locked.append(size)
        lock(address, size)

    lock = pinned._register
    monkeypatch.setattr(pinned, "_register", counted)
    task = tasks.gpt2(0)
    assert isinstance(task.model, nn.Module)
    model = task.model.to("cuda")
    pair = tuple(part.to("cuda") for part in task.microbatch(0))
    options = {"loss": task.loss, "repeats": 2, "offload": True, "method": "layers"}
    free = rematerialize(model, pair, "1TiB", host_bandwidth="20GB/s", **options)
    budget = budgets(free.rematerialization_costs, HostLink(20 * 10**9), 4)[1]
    lean = rematerialize(model, pair, budget, host_bandwidth="20GB/s", **options)
    found = sum(op.kind is DeviceOpKind.OFFLOAD for op in lean.rematerialization.schedule.ops)
    assert locked
    once = len(locked)
    for _ in range(3):
        task.loss(lean(pair[0]), pair[1]).backward()
    assert len(locked) == once
    assert found
