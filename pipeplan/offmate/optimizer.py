"""The optimizer of one parameter tensor, whose states have a place of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan.errors import InputError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def state_names(make: MakeOptimizer) -> tuple[str, ...]:
    """What an optimizer keeps of each parameter, in the parameter's shape.

    Counters of steps, which torch keeps on the processor, are no part of it.

    Raises:
        InputError: if a state has another shape.
    """
    parameter = nn.Parameter(torch.ones(3, 5))
    parameter.grad = torch.ones(3, 5)
    optimizer = make([parameter])
    with torch.no_grad():
        optimizer.step()
    names = []
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            names.append(name)
        elif isinstance(value, Tensor) and value.numel() > 1:
            raise InputError(
                f"task: optimizer: state {name!r} has shape {list(value.shape)} for a parameter of"
                f" {list(parameter.shape)}, need that shape, so that states can move. Take SGD or"
                " AdamW."
            )
    return tuple(names)


class TensorOptimizer:
    """Steps one parameter; its states lie in `states` between two steps."""

    def __init__(
        self,
        make: MakeOptimizer,
        parameter: nn.Parameter,
        names: Sequence[str],
        places: Sequence[Tensor] | None = None,
    ) -> None:
        """Nothing is stepped yet.

        Args:
            make: the task's.
            parameter: what it steps.
            names: `state_names`.
            places: where states are to lie; None: where the optimizer makes them.
        """
        self.parameter = parameter
        self._names = tuple(names)
        self._places = places
        self._optimizer = make([parameter])
        made = (torch.zeros_like(parameter.detach()) for _ in names)
        self.states = list(made if places is None else places)
        """Zeros until the first step, which makes them."""

    def step(self) -> None:
        """Makes new values of the parameter's gradient."""
        first = not self._optimizer.state
        if first:
            self.states = []  # the bytes of those that are made take their place
        with torch.no_grad():
            self._optimizer.step()
        if not first:
            return
        own = self._optimizer.state[self.parameter]
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
