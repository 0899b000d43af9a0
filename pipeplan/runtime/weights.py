"""The parameters of one stage in one version (`flush`) or two (`2bw`), and their update.

Step t reads version t - (V-1), never below 0; its update writes version t+1 into slot (t+1) mod V.
With V = 1 that is ordinary training; with V = 2 it is W(t+1) = opt(W(t), grad f(W(t-1))) with
W(-1) = W(0), the recurrence of PipeDream-2BW (Narayanan et al. 2021, section 3.1).

The optimizer and the checkpoint see one `nn.Parameter` per weight, always the newest version.
Graphs only ever see the leaves of a slot: changing `parameter.data` under a live graph would be
silently wrong for some operations, so a slot may be written only when no graph uses it, and that
is checked on every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan.errors import InternalError


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute of a module that holds a parameter; tied ones have several places."""

    module: nn.Module
    name: str


class Weights:
    """Trainable parameters of one stage: slots, one gradient buffer each, the optimizer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        versions: int,
        microbatches: int,
        owned_elsewhere: Iterable[nn.Parameter] = (),
    ) -> None:
        """Takes the parameters of `modules` over, zero steps done.

        Args:
            modules: the stage's layers.
            optimizer: called once, with the parameters that this stage updates.
            versions: 1 (flush) or 2 (2bw).
            microbatches: gradients are divided by it before each update.
            owned_elsewhere: parameters that another stage of this rank updates (tied weights).
        """
        self._versions = versions
        self._microbatches = microbatches
        foreign = {id(parameter) for parameter in owned_elsewhere}
        places: dict[nn.Parameter, list[Place]] = {}
        for module in dict.fromkeys(m for layer in modules for m in layer.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in foreign:
                    places.setdefault(parameter, []).append(Place(module, name))
        self.parameters = tuple(places)
        self._places = tuple(tuple(found) for found in places.values())
        self._gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._slots = self._make_slots()
        self._users = [0] * versions
        self._bound = -1
        self.optimizer = optimizer(list(self.parameters)) if self.parameters else None
        self.restore(0)

    def _make_slots(self) -> list[list[nn.Parameter]]:
        """Slot 0 is the parameters' own storage, slot 1 a copy.

        `.data` and not `.detach()`: updates of a parameter must not count as writes to slot 0, or
        autograd would take them for changes of what its graphs saved.
        """
        if self._versions == 1:
            return [list(self.parameters)]
        own = [nn.Parameter(parameter.data) for parameter in self.parameters]
        copy = [nn.Parameter(parameter.data.clone()) for parameter in self.parameters]
        return [own, copy]

    def restore(self, step: int) -> None:
        """Say that `step` updates have been made and every slot holds its version of them."""
        self.version = step
        self._point_at(step % self._versions)
        for slot in self._slots:
            for leaf, gradient in zip(slot, self._gradients, strict=True):
                leaf.grad = gradient

    def _point_at(self, slot: int) -> None:
        newest = zip(self.parameters, self._slots[slot], self._gradients, strict=True)
        for parameter, leaf, gradient in newest:
            if parameter is not leaf:
                parameter.data = leaf.data
                parameter.grad = gradient

    def read_by(self, step: int) -> int:
        """The slot that graphs of `step` use."""
        return (step - (self._versions - 1)) % self._versions

    def begin_graph(self, step: int) -> None:
        """Bind the version that a forward of `step` reads.

        Raises:
            InternalError: if that version is not there any more or not yet.
        """
        oldest = self.version - (self._versions - 1)
        wanted = step - (self._versions - 1)
        if not oldest <= wanted <= self.version:
            raise InternalError(
                f"weights: a forward of step {step} reads version {wanted}, but the stage holds"
                f" {oldest}..{self.version}. The program breaks rule `versions`."
            )
        self.bind(step)
        self._users[self.read_by(step)] += 1

    def end_graph(self, step: int) -> None:
        """Say that a backward of `step` has ended and its graph is gone."""
        self._users[self.read_by(step)] -= 1

    def bind(self, step: int) -> None:
        """Let the modules use the leaves that graphs of `step` use."""
        slot = self.read_by(step)
        if self._versions == 1 or slot == self._bound:
            return
        for places, leaf in zip(self._places, self._slots[slot], strict=True):
            for place in places:
                _set(place, leaf)
        self._bound = slot

    def update(self, step: int) -> None:
        """Make version `step + 1` out of version `step` and the gradients of `step`.

        Raises:
            InternalError: if a graph still uses the slot that would be overwritten.
        """
        slot = (step + 1) % self._versions
        if self._users[slot] or step != self.version:
            raise InternalError(
                f"weights: step {step} would overwrite slot {slot}, which {self._users[slot]}"
                f" graphs still use, holding version {self.version}. The program breaks rule"
                " `versions`."
            )
        with torch.no_grad():
            for new, old in zip(
                self._slots[slot], self._slots[step % self._versions], strict=True
            ):
                if new is not old:
                    new.copy_(old)
            self._point_at(slot)
            for gradient in self._gradients:
                gradient.div_(self._microbatches)
            if self.optimizer:
                self.optimizer.step()
            for gradient in self._gradients:
                gradient.zero_()
        self.version = step + 1

    def newest(self) -> list[Tensor]:
        """Version `self.version` of each parameter."""
        return [leaf.detach() for leaf in self._slots[self.version % self._versions]]

    def previous(self) -> list[Tensor]:
        """The version before the newest (2bw); empty under flush."""
        if self._versions == 1:
            return []
        return [leaf.detach() for leaf in self._slots[(self.version - 1) % self._versions]]

    def tensors(self) -> list[Tensor]:
        """Everything that lives for the whole run: slots, gradients, optimizer state."""
        slots = [leaf.detach() for slot in self._slots for leaf in slot]
        state = self.optimizer.state.values() if self.optimizer else ()
        kept = [value for entry in state for value in entry.values() if isinstance(value, Tensor)]
        return [*slots, *self._gradients, *kept]


def _set(place: Place, leaf: nn.Parameter) -> None:
    """Put `leaf` in its place, the fast way unless the module watches its attributes (RNNs do)."""
    if type(place.module).__setattr__ is nn.Module.__setattr__:
        place.module.register_parameter(place.name, leaf)
    else:
        setattr(place.module, place.name, leaf)
