"""The leaves that graphs use in place of parameters, and the gradients that add up behind them.

A layer finds its weights where it always does; `bind` puts the leaves of the wanted version there.
A parameter that several layers share has leaves and gradients of its own for each layer, all on
one storage: so the sum of its gradients has the same order under every plan
(docs/explanation/runtime.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.errors import InternalError
from pipeplan.gradients import give_sum, sum_dtype


@dataclass(frozen=True, slots=True)
class ModuleAttribute:
    """An attribute of a module that holds a parameter."""

    module: nn.Module
    name: str

    def set(self, leaf: nn.Parameter) -> None:
        """Put `leaf` here, the fast way unless the module watches its attributes (RNNs do)."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module.register_parameter(self.name, leaf)
        else:
            setattr(self.module, self.name, leaf)


def attributes_of(layer: nn.Module) -> dict[nn.Parameter, list[ModuleAttribute]]:
    """Where `layer` holds each of its trainable parameters, in the order of its parameters."""
    found: dict[nn.Parameter, list[ModuleAttribute]] = {}
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                found.setdefault(parameter, []).append(ModuleAttribute(module, name))
    return found


class ParameterSlots:
    """Some parameters of one stage as its graphs see them."""

    borrows = False
    """Whether another one has and updates them."""

    def __init__(
        self,
        places: Mapping[nn.Parameter, Sequence[ModuleAttribute]],
        leaves: Sequence[Sequence[nn.Parameter]],
        *,
        banks: int,
        accumulate: torch.dtype | None = None,
    ) -> None:
        """Gives every leaf its gradient.

        Args:
            places: where each parameter is used.
            leaves: per slot, one per parameter.
            banks: gradients per parameter: 1, or as many as slots.
            accumulate: in which gradients of weights in 16 bits add up; None: in theirs.
        """
        self.parameters = tuple(places)
        self.leaves = leaves
        self.versions = len(leaves)
        self.users = [0] * self.versions
        self._places = tuple(map(tuple, places.values()))
        self._banks = [
            [torch.zeros_like(p, dtype=sum_dtype(p, accumulate)) for p in self.parameters]
            for _ in range(banks)
        ]
        self._marks = [_writes(bank) for bank in self._banks]
        self._reached = [[False] * len(bank) for bank in self._banks]
        self._bound: int | None = None
        for slot, row in enumerate(leaves):
            for leaf, gradient in zip(row, self._banks[slot % banks], strict=True):
                give_sum(leaf, gradient)

    @property
    def version(self) -> int:
        """Updates made."""
        raise NotImplementedError

    @property
    def banks(self) -> Sequence[Sequence[Tensor]]:
        """All gradients: of one step, or of two in turn."""
        return self._banks

    def settle(self) -> None:
        """Return when the newest version is there, wherever it is made."""

    def read_by(self, step: int) -> int:
        """The slot that graphs of `step` use."""
        return (step - (self.versions - 1)) % self.versions

    def gradients(self, step: int) -> list[Tensor]:
        """Where the gradients of `step` add up."""
        return self._banks[self._bank(step)]

    def reached(self, step: int) -> list[bool]:
        """Which gradients of `step` anything has been added to since they were zero.

        A plain loop has no gradient for the others, and its optimizer leaves their parameters as
        they are: no weight decay, no momentum (torch.optim, `set_to_none`).
        """
        bank = self._bank(step)
        return [
            known or now != mark
            for known, now, mark in zip(
                self._reached[bank], _writes(self._banks[bank]), self._marks[bank], strict=True
            )
        ]

    def say_reached(self, step: int, reached: list[bool]) -> None:
        """Take `reached` for `step` as given; what is written from now on counts again."""
        bank = self._bank(step)
        self._reached[bank] = reached
        self._marks[bank] = _writes(self._banks[bank])

    def has_reached(self, parameter: nn.Parameter, step: int) -> bool:
        """`reached` of one parameter."""
        return self.reached(step)[self.index(parameter)]

    def say_has_reached(self, parameter: nn.Parameter, step: int, *, reached: bool) -> None:
        """`say_reached` of one parameter; of the others stays what is known."""
        known = self.reached(step)
        known[self.index(parameter)] = reached
        self.say_reached(step, known)

    def _bank(self, step: int) -> int:
        return self.read_by(step) % len(self._banks)

    def gradient(self, parameter: nn.Parameter, step: int) -> Tensor:
        """Where the gradient of one parameter adds up."""
        return self.gradients(step)[self.index(parameter)]

    def index(self, parameter: nn.Parameter) -> int:
        """Its place in `parameters`."""
        (index,) = (i for i, known in enumerate(self.parameters) if known is parameter)
        return index

    def places(self, parameter: nn.Parameter) -> tuple[ModuleAttribute, ...]:
        """Where modules have it as an attribute."""
        return self._places[self.index(parameter)]

    def begin_graph(self, step: int) -> None:
        """Bind the version that a forward of `step` reads.

        Raises:
            InternalError: if that version is not there any more or not yet.
        """
        oldest = self.version - (self.versions - 1)
        wanted = step - (self.versions - 1)
        if not oldest <= wanted <= self.version:
            raise InternalError(
                f"weights: a forward of step {step} reads version {wanted}, but the stage holds"
                f" {oldest}..{self.version}. The program breaks rule `versions`."
            )
        if wanted == self.version:
            self.settle()
        self.bind(step)
        self.users[self.read_by(step)] += 1

    def end_graph(self, step: int) -> None:
        """Say that a backward of `step` has ended and its graph is gone."""
        self.users[self.read_by(step)] -= 1

    def bind(self, step: int) -> None:
        """Let the modules use the leaves that graphs of `step` use."""
        self._bind(self.read_by(step))

    def bind_newest(self) -> None:
        """Let the modules use the newest version."""
        self.settle()
        self._bind(self.version % self.versions)

    def release(self) -> None:
        """Give the modules the parameters themselves back, which hold the newest version."""
        self.settle()
        self._put(self.parameters)
        self._bound = None

    def _bind(self, slot: int) -> None:
        if slot != self._bound:
            self._put(self.leaves[slot])
            self._bound = slot

    def _put(self, leaves: Sequence[nn.Parameter]) -> None:
        for places, leaf in zip(self._places, leaves, strict=True):
            for place in places:
                if getattr(place.module, place.name) is not leaf:
                    place.set(leaf)

    def tensors(self) -> list[Tensor]:
        """The gradients."""
        return [gradient for bank in self._banks for gradient in bank]


def _writes(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written into, by torch's own count."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001


class SharedSlots(ParameterSlots):
    """Parameters that another layer of this rank owns and updates."""

    borrows = True

    def __init__(
        self,
        places: Mapping[nn.Parameter, Sequence[ModuleAttribute]],
        owner: ParameterSlots,
        accumulate: torch.dtype | None = None,
    ) -> None:
        """Makes leaves on the owner's storages.

        Args:
            places: where each parameter is used.
            owner: who has and updates them all.
            accumulate: as for `ParameterSlots`.
        """
        rows = [
            [nn.Parameter(row[owner.index(parameter)].data) for parameter in places]
            for row in owner.leaves
        ]
        super().__init__(places, rows, banks=len(rows), accumulate=accumulate)
        self._owner = owner

    @property
    def version(self) -> int:
        """Updates made by the owner."""
        return self._owner.version

    def settle(self) -> None:
        """Of the owner."""
        self._owner.settle()
