"""What of a model a pipeline takes over when it is made, and what may not change behind it.

Which parameters are trained decides about gradients, optimizers and bytes. Where a model was cut
as a graph of operations, layers do what its modules did at that time: their modes are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from pipeplan.errors import InputError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that do the same in both modes."""


class AsMade:
    """Flags of a model's parameters and modules."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Takes them as they are now.

        Args:
            model: the user's.
            layers: what runs; modules among them are asked for their mode in each forward.
        """
        self._model = model
        running = {module for layer in layers for module in layer.modules()}
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
        trained = {name: each.requires_grad for name, each in self._model.named_parameters()}
        modes = {name: module.training for name, module in self._model.named_modules()}
        _compare(where, "requires_grad", trained, self._trained)
        _compare(where, "training", modes, self._modes)


def _compare(where: str, flag: str, now: Mapping[str, bool], made: Mapping[str, bool]) -> None:
    for name, before in made.items():
        if now.get(name, before) != before:
            raise InputError(
                f"{where}: {name or 'the model'}: got {flag}={not before}, need {before} as it was"
                " when the pipeline was made: its layers and optimizers would not follow. Keep"
                " state_dict(), close the pipeline, profile and plan the changed model, and load"
                " the state into a new one."
            )
