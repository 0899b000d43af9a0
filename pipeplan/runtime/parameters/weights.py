"""The parameters of one stage in one version (`flush`) or two (`2bw`), and their update.

Step t reads version t - (V-1), never below 0; its update writes version t+1 into slot (t+1) mod V.
With V = 1 that is ordinary training; with V = 2 it is W(t+1) = opt(W(t), grad f(W(t-1))) with
W(-1) = W(0), the recurrence of PipeDream-2BW (Narayanan et al. 2021, section 3.1).

Optimizers and checkpoints see one `nn.Parameter` per weight, always the newest version.
Graphs only ever see the leaves of a slot: changing `parameter.data` under a live graph would be
silently wrong for some operations, so a slot may be written only when no graph uses it, and that
is checked on every step.

Where an update must wait for other stages (clipping, loss scaling, ties), the gradients of the
next step need a place meanwhile: then there is a bank of gradients per slot, not one for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from pipeplan.errors import InternalError
from pipeplan.gradients import cast_back, stepped, sum_dtype
from pipeplan.runtime.parameters.host_update import HostQueue, HostUpdate
from pipeplan.runtime.parameters.optimizer_factory import LayerOptimizers, OptimizerFactory
from pipeplan.runtime.parameters.slots import ModuleAttribute, ParameterSlots


class Weights(ParameterSlots):
    """Parameters that are updated together: slots, gradients, an optimizer per layer."""

    def __init__(
        self,
        layers: Sequence[Mapping[nn.Parameter, Sequence[ModuleAttribute]]],
        optimizing: OptimizerFactory,
        *,
        versions: int,
        microbatches: int,
        deferred: bool = False,
        host: HostQueue | None = None,
        beside: bool = False,
    ) -> None:
        """Takes the parameters over, zero steps done.

        Args:
            layers: per layer where each of its parameters is used (`tied_parameters`).
            optimizing: how they are optimized; asked once, and again by `restore`.
            versions: 1 (flush) or 2 (2bw).
            microbatches: gradients are divided by it before each update.
            deferred: whether updates may come after the next step's first backward.
            host: where optimizers step copies and keep their state; None: on the device.
            beside: whether an update there ends before its weights are made (U7).

        Raises:
            RankError: if the host has no room for it.
        """
        self._optimizing = optimizing
        self._microbatches = microbatches
        self._borrowers: list[ParameterSlots] = []
        self._layers = [tuple(places) for places in layers]
        super().__init__(
            {parameter: used for places in layers for parameter, used in places.items()},
            _slots(tuple(chain.from_iterable(self._layers)), versions, optimizing.accumulate),
            banks=versions if deferred else 1,
            accumulate=optimizing.accumulate,
        )
        self._beside = beside
        self.host = (
            HostUpdate(self.parameters, self.gradients(0), host)
            if host is not None and self.parameters
            else None
        )
        """What of them is on the host, if anything."""
        self._begun: bool | None = None
        """Of an update that runs on the host: whether it is skipped."""
        self._narrow = self.host.weights if self.host else list(self.parameters)
        masters = stepped(self._narrow, master_weights=optimizing.master_weights)
        self.stepped = dict(zip(self.parameters, masters, strict=True))
        """Of each parameter what its optimizer steps: itself, its copy on the host, or the master
        weight of either."""
        self._weight_of = dict(zip(masters, self.parameters, strict=True))
        self.restore(0)

    def lend(self, borrower: ParameterSlots) -> None:
        """Say that `borrower` uses some of these slots too."""
        self._borrowers.append(borrower)

    def restore(self, step: int) -> None:
        """Say that `step` updates have been made and every slot holds its version of them.

        The optimizers begin anew, their schedules `step` steps on.
        """
        self.settle()
        self._version = step
        self._point_at(step)
        layers = ({each: self.stepped[each] for each in layer} for layer in self._layers)
        self._optimizers = self._optimizing.begin(layers, step)

    @property
    def version(self) -> int:
        """Updates made, or begun on the host."""
        return self._version

    @property
    def optimizers(self) -> LayerOptimizers:
        """One per layer, behind all updates that have begun."""
        self.settle()
        return self._optimizers

    def _point_at(self, version: int) -> None:
        slot = version % self.versions
        for parameter, leaf in zip(self.parameters, self.leaves[slot], strict=True):
            if parameter is not leaf:
                parameter.data = leaf.data

    def finish(self, step: int, scale: float = 1.0) -> None:
        """Turn the sums of `step` into gradients: of the mean, of the unscaled loss."""
        reached = self.reached(step)
        with torch.no_grad():
            for gradient in self.gradients(step):
                gradient.div_(self._microbatches)
                if scale != 1.0:
                    gradient.mul_(1.0 / scale)
        self.say_reached(step, reached)

    def apply(self, step: int, factor: Tensor | None = None, *, skip: bool = False) -> None:
        """Make version `step + 1` out of version `step` and the finished gradients of `step`.

        Args:
            step: the oldest step that is not applied yet.
            factor: of the gradients; None for 1.
            skip: leave the weights and the optimizers' state as they are.

        Raises:
            InternalError: if a graph still uses the slot that would be overwritten.
        """
        slot = (step + 1) % self.versions
        users = sum(leaves.users[slot] for leaves in (self, *self._borrowers))
        if users or step != self._version:
            raise InternalError(
                f"weights: step {step} would overwrite slot {slot}, which {users}"
                f" graphs still use, holding version {self._version}. The program breaks rule"
                " `versions`."
            )
        self.settle()
        gradients, reached = self.gradients(step), self.reached(step)
        with torch.no_grad():
            if factor is not None:
                for gradient in gradients:
                    gradient.mul_(factor)
            if self.host is None:
                old_slot = self.leaves[step % self.versions]
                for new, old in zip(self.leaves[slot], old_slot, strict=True):
                    if new is not old:
                        new.copy_(old)
                self._point_at(step + 1)
                self._step(gradients, reached, self.leaves[slot], skip=skip)
                self._optimizers.move_on(skipped=skip)
            else:
                copies = self.host.gradients, reached, self.host.weights
                self.host.begin(
                    gradients, self.leaves[slot], partial(self._step, *copies, skip=skip)
                )
                self._begun = skip
                self._point_at(step + 1)
                if not self._beside:
                    self.settle()
            for gradient in gradients:
                gradient.zero_()
        self.say_reached(step, [False] * len(gradients))
        self._version = step + 1

    def settle(self) -> None:
        """Return when the host has made the newest version and brought it back (U7)."""
        skipped, self._begun = self._begun, None
        if self.host is not None and skipped is not None:
            self.host.settle()
            self._optimizers.move_on(skipped=skipped)

    def _step(
        self,
        gradients: Sequence[Tensor],
        reached: Sequence[bool],
        weights: Sequence[Tensor],
        *,
        skip: bool,
    ) -> None:
        """Step what the optimizers step, unless to `skip`; cast it into narrower `weights`."""
        if not skip:
            came = (g if there else None for g, there in zip(gradients, reached, strict=True))
            self._optimizers.step(dict(zip(self.stepped.values(), came, strict=True)))
        cast_back(weights, list(self.stepped.values()))

    def take_newest(self) -> None:
        """Let copies on the host follow weights that were written from outside."""
        self.settle()
        if self.host is not None:
            self.host.take(self.newest())

    def learning_rates(self) -> list[float]:
        """Of the next update, one per parameter; not a number where its optimizer has none."""
        found = self.optimizers.learning_rates()
        return [found.get(self.stepped[each], float("nan")) for each in self.parameters]

    def update(self, step: int) -> None:
        """`finish` and `apply`, where nothing else decides."""
        self.finish(step)
        self.apply(step)

    def newest(self) -> list[Tensor]:
        """Version `self.version` of each parameter."""
        self.settle()
        return [leaf.detach() for leaf in self.leaves[self._version % self.versions]]

    def previous(self) -> list[Tensor]:
        """The version before the newest (2bw); empty under flush."""
        if self.versions == 1:
            return []
        return [leaf.detach() for leaf in self.leaves[(self._version - 1) % self.versions]]

    def masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """The master weight of each parameter that has one; it belongs to the newest version."""
        self.settle()
        pairs = zip(self.stepped.items(), self._narrow, strict=True)
        return {each: master for (each, master), narrow in pairs if master is not narrow}

    def weight_of(self, stepped: nn.Parameter) -> nn.Parameter:
        """The parameter for which an optimizer steps `stepped`."""
        return self._weight_of[stepped]

    def tensors(self) -> list[Tensor]:
        """What is on the device for the whole run: slots, gradients, states if they are there."""
        slots = [leaf.detach() for slot in self.leaves for leaf in slot]
        return [*slots, *super().tensors(), *(self.states() if self.host is None else ())]

    def states(self) -> list[Tensor]:
        """Master weights and optimizer state, wherever they are."""
        states = [
            entry for optimizer in self.optimizers.each for entry in optimizer.state.values()
        ]
        kept = [value for entry in states for value in entry.values() if isinstance(value, Tensor)]
        return [*(master.detach() for master in self.masters().values()), *kept]


def _slots(
    parameters: Sequence[nn.Parameter], versions: int, accumulate: torch.dtype | None
) -> list[list[nn.Parameter]]:
    """Slot 0 is the parameters' own storage, slot 1 a copy.

    With one version the parameters themselves are used, but for those whose gradients add up in
    another type: what becomes of their gradients is no business of the user's parameter.

    `.data` and not `.detach()`: updates of a parameter must not count as writes to slot 0, or
    autograd would take them for changes of what its graphs saved.
    """
    if versions == 1:
        narrow = [sum_dtype(p, accumulate) == p.dtype for p in parameters]
        pairs = zip(parameters, narrow, strict=True)
        return [[p if same else nn.Parameter(p.data) for p, same in pairs]]
    own = [nn.Parameter(parameter.data) for parameter in parameters]
    copy = [nn.Parameter(parameter.data.clone()) for parameter in parameters]
    return [own, copy]
