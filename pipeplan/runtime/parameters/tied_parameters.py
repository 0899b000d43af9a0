"""Parameters that several layers share: who owns them, and how their gradients become one.

Every layer that uses a shared parameter has its own sum of gradients over the micro-batches of a
step; before the update these sums are added in chain order. That order is the same under every
plan. The first layer of the chain owns the parameter: its stage adds up, since its backwards are
the last ones. On the same GPU (`colocate`) the layers share the owner's storage; else
(`synchronize`) each has a copy, gets the owner's gradient, and makes the same update with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.plan import Stage as PlannedStage
from pipeplan.runtime.parameters.hooks import hooks_of
from pipeplan.split_model import SplitModel
from pipeplan.task import Tied


@dataclass(frozen=True, slots=True)
class Use:
    """One layer that uses a shared parameter."""

    layer: int
    stage: int
    rank: int
    parameter: nn.Parameter
    """The shared one, or the layer's copy."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A trainable parameter that several layers use; `uses` in chain order, the first one owns."""

    name: str
    uses: tuple[Use, ...]

    @property
    def owner(self) -> Use:
        """The first layer."""
        return self.uses[0]


def tags_of(ties: Sequence[Tie], first: int) -> dict[int, int]:
    """The tag of each use, by its `id`: `first + n` for the n-th of all ties."""
    uses = [use for tie in ties for use in tie.uses]
    return {id(use): first + number for number, use in enumerate(uses)}


def untie(split: SplitModel, tied: Tied) -> SplitModel:
    """`split` with no module in two layers; under `synchronize` no trainable parameter either.

    Later layers get copies of such modules, for leaves of their own: what these hold as buffers
    and tensors stays one. Call it before training starts.

    Raises:
        InputError: if layers that get copies share what nothing would keep equal: buffers under
            `synchronize`, and what they count in Python attributes.
    """
    _check_counting(split)
    seen: set[int] = set()
    layers, changed = [], False
    originals: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in zip(split.names, split.layers, strict=True):
        tensors = [*layer.parameters(), *layer.buffers()]
        again = [tensor for tensor in tensors if id(tensor) in seen]
        modules = [id(module) for module in layer.modules()]
        if tied == "synchronize" and any(tensor.requires_grad for tensor in again):
            if any(id(buffer) in seen for buffer in layer.buffers()):
                raise InputError(
                    f"task: layer {name!r} shares buffers with an earlier one, which"
                    " tied='synchronize' cannot keep equal. Use tied='colocate'."
                )
            shared = [tensor for tensor in tensors if id(tensor) not in seen]
            before = [*layer.parameters()]
            layer = copy.deepcopy(layer, {id(tensor): tensor for tensor in shared})
            pairs = zip(layer.parameters(), before, strict=True)
            originals.update((each, known) for each, known in pairs if each is not known)
            changed = True
        elif seen.intersection(modules):
            layer = copy.deepcopy(layer, {id(each): each for each in (*tensors, *_held(layer))})
            changed = True
        seen.update(modules, map(id, tensors))
        layers.append(layer)
    return replace(split, layers=tuple(layers), originals=originals) if changed else split


def _held(layer: nn.Module) -> Iterator[object]:
    """Places of buffers, where a forward may put others, and tensors that are plain attributes."""
    for module in layer.modules():
        yield module._buffers  # noqa: SLF001  torch has no public name for it
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _check_counting(split: SplitModel) -> None:
    """Refuse one module in two layers that changes its Python attributes: each copy has its own.

    Raises:
        InputError: if there is one.
    """
    users: dict[int, str] = {}
    for index in split.counting:
        modules = [id(module) for module in split.layers[index].modules()]
        first = next((users[each] for each in modules if each in users), None)
        if first is not None:
            raise InputError(
                f"task: layers {first!r} and {split.names[index]!r} are or have one module, which"
                " changes Python attributes in its forward, need attributes that stay: each layer"
                " would count for itself. Keep what it counts in a buffer that it changes in"
                " place, or give each layer a module of its own."
            )
        users.update(dict.fromkeys(modules, split.names[index]))


def find_ties(stages: Sequence[PlannedStage], split: SplitModel) -> tuple[Tie, ...]:
    """The shared trainable parameters, in chain order of their owners.

    Raises:
        InputError: if layers on two GPUs share one storage, or a shared parameter has hooks.
    """
    uses: dict[str, list[Use]] = {}
    for stage in stages:
        for layer in range(stage.first, stage.last + 1):
            fqns = split.fqns[layer]
            for local, parameter in split.layers[layer].named_parameters():
                if parameter.requires_grad:
                    use = Use(layer, stage.id, stage.gpu, parameter)
                    uses.setdefault(fqns[local], []).append(use)
    ties = [Tie(name, tuple(found)) for name, found in uses.items() if len(found) > 1]
    for tie in ties:
        _check_together(tie, split)
        check_hooks(tie)
    return tuple(ties)


def check_hooks(tie: Tie) -> None:
    """Refuse hooks on a shared parameter: each layer has a sum of its own, which they would see.

    Raises:
        InputError: if there is one.
    """
    if any(hooks_of(use.parameter) for use in tie.uses):
        raise InputError(
            f"task: parameter {tie.name!r}: has hooks and is shared by {len(tie.uses)} layers,"
            " whose gradients add up at the end of a step: no hook sees a micro-batch's."
            " Let the task say tied='transmit', put a hook on the outputs of these layers, or"
            " share nothing."
        )


def _check_together(tie: Tie, split: SplitModel) -> None:
    first = tie.owner
    for use in tie.uses:
        if use.parameter is first.parameter and use.rank != first.rank:
            one, two = split.names[first.layer], split.names[use.layer]
            raise InputError(
                f"plan: layers {one!r} and {two!r} share parameter {tie.name!r} but sit on GPUs"
                f" {first.rank} and {use.rank}; need one GPU. Plan again from a chain that names"
                " the parameter in both layers, or let the task say tied='synchronize'."
            )
