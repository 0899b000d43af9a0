"""Who holds which parameter on one rank: its owner, a copy, or a layer that borrows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from pipeplan.runtime.parameters.host_update import HostQueue
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.slots import (
    ModuleAttribute,
    ParameterSlots,
    SharedSlots,
    attributes_of,
)
from pipeplan.runtime.parameters.tied_parameters import Tie, Use
from pipeplan.runtime.parameters.weights import Weights

_Attributes = dict[nn.Parameter, list[ModuleAttribute]]


@dataclass(frozen=True, slots=True)
class StageParameters:
    """The parameters of one stage."""

    weights: Weights
    """What it owns."""
    copies: Weights | None
    """Its copies of what another stage owns."""
    borrowed: tuple[SharedSlots, ...]
    """What it uses of others on this rank, or a second time; one entry per layer and owner."""

    @property
    def units(self) -> tuple[Weights, ...]:
        """What is updated, each by optimizers of its own."""
        return (self.weights,) if self.copies is None else (self.weights, self.copies)

    @property
    def slots(self) -> tuple[ParameterSlots, ...]:
        """Everything that graphs use."""
        return (*self.units, *self.borrowed)


class ParameterOwnership:
    """Makes what the stages of one rank hold, in chain order."""

    def __init__(
        self,
        ties: Sequence[Tie],
        optimizing: OptimizerFactory,
        *,
        versions: int,
        microbatches: int,
        deferred: bool,
    ) -> None:
        """Remembers who owns what.

        Args:
            ties: shared parameters.
            optimizing: the task's optimizer and schedule.
            versions: 1 (flush) or 2 (2bw).
            microbatches: per step.
            deferred: whether every update waits for all stages.
        """
        self.deferred = deferred
        self._optimizing = optimizing
        self._versions = versions
        self._microbatches = microbatches
        self._owners: dict[nn.Parameter, Weights] = {}
        self._by_layer: dict[tuple[int, nn.Parameter], ParameterSlots] = {}
        self._copies = {
            use.parameter
            for tie in ties
            for use in tie.uses
            if use.parameter is not tie.owner.parameter
        }

    def of(self, use: Use) -> ParameterSlots:
        """Who has the gradient of `use`, which is on this rank."""
        return self._by_layer[use.layer, use.parameter]

    def hold(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        on_host: bool = False,
        beside: bool = False,
    ) -> StageParameters:
        """What the stage of `layers`, the first of which has index `first_layer`, holds.

        With `on_host` it is updated there, `beside` what the rank does next (U7).
        """
        own: list[_Attributes] = []
        copies: list[_Attributes] = []
        later: list[tuple[int, _Attributes]] = []
        mine: set[nn.Parameter] = set()
        for layer, module in enumerate(layers, first_layer):
            kinds: tuple[_Attributes, _Attributes, _Attributes] = ({}, {}, {})
            for parameter, places in attributes_of(module).items():
                known = parameter in self._owners or parameter in mine
                kind = 2 if known else 1 if parameter in self._copies else 0
                kinds[kind][parameter] = places
            own.append(kinds[0])
            copies.append(kinds[1])
            later.append((layer, kinds[2]))
            mine.update(kinds[0])
        host = self._host if on_host else None
        weights = self._weights(own, deferred=self.deferred, host=host, beside=beside)
        copied = None
        if any(copies):
            copied = self._weights(copies, deferred=True, host=host, beside=beside)
        for layer, module in enumerate(layers, first_layer):
            for parameter in attributes_of(module):
                holder = copied if copied and parameter in self._copies else weights
                self._by_layer[layer, parameter] = holder
        self._owners.update(dict.fromkeys(mine, weights))
        borrowed = tuple(lent for layer, again in later for lent in self._lend(layer, again))
        return StageParameters(weights, copied, borrowed)

    @cached_property
    def _host(self) -> HostQueue:
        """One for all stages of the rank."""
        return HostQueue()

    def _weights(
        self,
        layers: Sequence[_Attributes],
        *,
        deferred: bool,
        host: HostQueue | None,
        beside: bool,
    ) -> Weights:
        return Weights(
            layers,
            self._optimizing,
            versions=self._versions,
            microbatches=self._microbatches,
            deferred=deferred,
            host=host,
            beside=beside,
        )

    def _lend(self, layer: int, again: _Attributes) -> list[SharedSlots]:
        """One loan per owner."""
        result = []
        for owner in dict.fromkeys(self._owners[parameter] for parameter in again):
            mine = {p: places for p, places in again.items() if self._owners[p] is owner}
            loan = SharedSlots(mine, owner, self._optimizing.accumulate)
            owner.lend(loan)
            self._by_layer.update({(layer, parameter): loan for parameter in mine})
            result.append(loan)
        return result
