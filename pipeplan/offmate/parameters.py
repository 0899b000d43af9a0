"""A model's parameters: which layers use each, and what their updates take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.capture.layer_costs.optimizer_cost import median_timer, step_cost, step_kind
from pipeplan.errors import InputError
from pipeplan.offmate.trial import REPEATS
from pipeplan.remat.states.problem import ParameterGroup, StateTensor
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by their names in it, and which layers use each.

    Attributes:
        by_name: each tensor once.
        users: name -> indices of layers.
    """

    by_name: dict[str, nn.Parameter]
    users: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: SplitModel) -> Parameters:
        """Those of all layers.

        Raises:
            InputError: if two of them lie in one storage.
        """
        names: dict[int, str] = {}
        by_name: dict[str, nn.Parameter] = {}
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(model.layers):
            for local, parameter in layer.named_parameters():
                name = names.setdefault(id(parameter), model.fqns[index][local])
                by_name[name] = parameter
                users.setdefault(name, []).append(index)
        for name, parameter in by_name.items():
            if parameter.untyped_storage().nbytes() != parameter.nbytes:
                raise InputError(
                    f"parameter {name}: got a part of a storage of"
                    f" {parameter.untyped_storage().nbytes()} bytes, need one of its own, to leave"
                    " alone. Clone it."
                )
        return cls(by_name, {name: tuple(sorted(set(each))) for name, each in users.items()})


@dataclass(frozen=True, slots=True)
class Update:
    """Of one parameter, on the device; `trained`: whether there is one."""

    trained: bool
    bytes: int
    time_ns: int = 0
    workspace: int = 0


def updates_of(task: Task, parameters: Parameters) -> dict[str, Update]:
    """What the update of each parameter takes; those of one shape and group are alike.

    Also of those that one micro-batch leaves without a gradient (an expert that it does not
    choose): another one may reach them.
    """
    known: dict[object, Update] = {}
    found: dict[str, Update] = {}
    timer = median_timer(REPEATS, ModelDevice(torch.device("cpu")))
    for name, each in parameters.by_name.items():
        if not each.requires_grad:
            found[name] = Update(False, each.nbytes)
            continue
        kind = step_kind(task, [each], {})
        if kind not in known:
            copy = nn.Parameter(each.detach().clone())
            vars(copy).update(vars(each))
            copy.grad = torch.zeros_like(copy)
            cost = step_cost(task, [copy], timer, {copy: each})
            known[kind] = Update(True, each.nbytes, cost.step_ns, cost.workspace_bytes)
        found[name] = known[kind]
    return found


def rate_of(updates: Mapping[str, Update]) -> int:
    """Bytes of parameters that are updated per second."""
    size = sum(each.bytes for each in updates.values() if each.trained)
    time_ns = sum(each.time_ns for each in updates.values())
    return max(1, size * 10**9 // max(1, time_ns))


def groups_of(parameters: Parameters, updates: Mapping[str, Update]) -> tuple[ParameterGroup, ...]:
    """Parameters that the same blocks use come and go together."""
    by_users: dict[tuple[int, ...], list[StateTensor]] = {}
    for name, users in parameters.users.items():
        each = updates[name]
        tensor = StateTensor(name, each.bytes, each.trained, each.workspace)
        by_users.setdefault(users, []).append(tensor)
    return tuple(
        ParameterGroup(f"blocks {', '.join(map(str, users))}", tuple(tensors), users)
        for users, tensors in by_users.items()
    )
