"""What of a model a pipeline takes over when it is made, and what may not change behind it.

Which parameters are trained decides about gradients, optimizers and bytes. Where a model was cut
as a graph of operations, layers do what its modules did at that time: their modes are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from pipeplan.capture.split import module_of
from pipeplan.errors import InputError
from pipeplan.runtime.parameters.slots import ParameterSlots
from pipeplan.task import Task

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that do the same in both modes."""


class AsMade:
    """Modules and parameters of a model, and their flags."""

    def __init__(
        self, task: Task, layers: Iterable[nn.Module], slots: Sequence[ParameterSlots]
    ) -> None:
        """Takes them as they are now.

        Args:
            task: the user's, whose model may be a list.
            layers: what runs; modules among them are asked for their mode in each forward.
            slots: the parameters of this rank, and what stands in for them while it runs.
        """
        self._task = task
        model = module_of(task)
        running = {module for layer in layers for module in layer.modules()}
        self._modules = _modules(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._own = {each for some in slots for each in some.parameters}
        self._leaves = {leaf for some in slots for row in some.leaves for leaf in row}
        self._trained = {name: each.requires_grad for name, each in model.named_parameters()}
        self._modes = {
            name: module.training
            for name, module in model.named_modules()
            if module not in running and type(module) not in _CONTAINERS
        }

    def check(self, where: str) -> None:
        """Refuse a model that would not be trained as it is by now.

        Raises:
            InputError: if a parameter was frozen or unfrozen, or a module has another mode.
        """
        model = module_of(self._task)
        trained = {name: each.requires_grad for name, each in model.named_parameters()}
        modes = {name: module.training for name, module in model.named_modules()}
        _compare(where, "requires_grad", trained, self._trained)
        _compare(where, "training", modes, self._modes)

    def check_parts(self, where: str) -> None:
        """Refuse a model with other modules or parameters: layers and optimizers have the former.

        Raises:
            InputError: if one was replaced, taken away or added.
        """
        model = module_of(self._task)
        _compare_parts(where, "module", _modules(model), self._modules)
        now = dict(model.named_parameters(remove_duplicate=False))
        for name, made in self._parameters.items():
            # Other ranks look at theirs; where they are threads, a model has their leaves, too.
            if name in now and (made not in self._own or now[name] in self._leaves):
                now[name] = made
        _compare_parts(where, "parameter", now, self._parameters)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """By every name that one has; without the model itself, which may be a list."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if name}


def _compare_parts(
    where: str, kind: str, now: Mapping[str, object], made: Mapping[str, object]
) -> None:
    for name in [*made, *(name for name in now if name not in made)]:
        if now.get(name) is not made.get(name):
            what = "none" if name not in now else "a new one" if name not in made else "another"
            raise InputError(
                f"{where}: {kind} {name!r}: got {what}, need what was there when the pipeline was"
                f" made: its layers and optimizers would not follow. {_WAY_OUT}"
            )


def _compare(where: str, flag: str, now: Mapping[str, bool], made: Mapping[str, bool]) -> None:
    for name, before in made.items():
        if now.get(name, before) != before:
            raise InputError(
                f"{where}: {name or 'the model'}: got {flag}={not before}, need {before} as it was"
                " when the pipeline was made: its layers and optimizers would not follow."
                f" {_WAY_OUT}"
            )


_WAY_OUT = (
    "Keep state_dict(), close the pipeline, profile and plan the changed model, and load the state"
    " into a new one."
)
