"""The optimizer of one parameter tensor, whose states have a place of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeplan.capture.layer_costs.optimizer_cost import step_kind
from pipeplan.errors import InputError
from pipeplan.gradients import MakeOptimizer, optimizer_of
from pipeplan.task import Task

_COUNTER = "step"
"""What torch calls counters of steps, which it keeps on the processor: they do not move."""


def state_names(task: Task, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """What the task's optimizer keeps of each of `parameters` that is trained, in its shape.

    Raises:
        InputError: if a state has another shape or type, or parameters differ in their states.
    """
    kinds: dict[object, str] = {}
    for name, each in parameters.items():
        if each.requires_grad:
            kinds.setdefault(step_kind(task, [each], {}), name)
    found = {name: _states_of(task.optimizer, parameters[name]) for name in kinds.values()}
    first = next(iter(found), "")
    other = next((name for name, states in found.items() if states != found[first]), None)
    if other is not None:
        raise InputError(
            f"task: optimizer: got states {list(found[first])} of {first} and"
            f" {list(found[other])} of {other}, need the same of all parameters, so that a plan"
            " can count them. Give all groups the same kind of states (momentum for all or none)."
        )
    return found.get(first, ())


def _states_of(make: MakeOptimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of states behind a first step of what stands for `parameter`."""
    probe = nn.Parameter(parameter.detach().clone())
    optimizer = optimizer_of(make, {parameter: probe})
    probe.grad = torch.ones_like(probe)
    with torch.no_grad():
        optimizer.step()
    names = []
    for name, value in optimizer.state[probe].items():
        if name == _COUNTER or not isinstance(value, Tensor):
            continue
        if (value.shape, value.dtype) == (probe.shape, probe.dtype):
            names.append(name)
        elif value.numel() > 1:
            raise InputError(
                f"task: optimizer: state {name!r} has shape {list(value.shape)} and {value.dtype}"
                f" for a parameter of {list(probe.shape)} and {probe.dtype}, need that shape and"
                " type, so that states can move. Take SGD or AdamW."
            )
    return tuple(names)


class TensorOptimizer:
    """Steps one parameter; its states lie in `states` between two steps."""

    def __init__(
        self,
        make: MakeOptimizer,
        parameter: nn.Parameter,
        names: Sequence[str],
        on_host: nn.Parameter | None = None,
        places: Sequence[Tensor] | None = None,
    ) -> None:
        """Nothing is stepped yet.

        Args:
            make: the task's.
            parameter: the user's own.
            names: `state_names`.
            on_host: what is stepped in its place; None: itself.
            places: where states are to lie; None: where the optimizer makes them.
        """
        self.parameter = parameter if on_host is None else on_host
        self._names = tuple(names)
        self._places = places
        self._optimizer = optimizer_of(make, {parameter: self.parameter})
        made = (torch.zeros_like(parameter.detach()) for _ in names)
        self.states = list(made if places is None else places)
        """Zeros until the optimizer makes them: as it is made, or in the first step."""
        self._take_states()

    def step(self) -> None:
        """Makes new values of the parameter's gradient."""
        first = not self._has_states()
        if first:
            self.states = []  # the bytes of those that are made take their place
        with torch.no_grad():
            self._optimizer.step()
        if first:
            self._take_states()

    def _has_states(self) -> bool:
        own = self._optimizer.state.get(self.parameter, {})
        return all(isinstance(own.get(name), Tensor) for name in self._names)

    def _take_states(self) -> None:
        """Those that the optimizer has made lie where they are to lie."""
        if not self._has_states():
            return
        own = self._optimizer.state.get(self.parameter, {})
        for name, place in zip(self._names, self._places or (), strict=False):
            own[name] = place.copy_(own[name])
        self.states = [own[name] for name in self._names]

    @property
    def counters(self) -> list[Tensor]:
        """Tensors of the optimizer that are none of its moving states."""
        own = self._optimizer.state.get(self.parameter, {})
        rest = (value for name, value in own.items() if name not in self._names)
        return [value for value in rest if isinstance(value, Tensor)]

    def named_states(self) -> dict[str, Tensor]:
        """The states by their names in the optimizer."""
        return dict(zip(self._names, self.states, strict=True))
