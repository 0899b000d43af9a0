"""A model cut into the layers of its chain. Data only; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pipeplan.document import digest
from pipeplan.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pipeplan.nested import Structure
    from pipeplan.task import Tied

_Each = TypeVar("_Each")
_REAL = ("torch.float", "torch.bfloat", "torch.complex")
"""How the names of types begin whose tensors may have a gradient."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one boundary tensor; `differentiable` ones get a gradient back."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it: `torch.float32`."""
    differentiable: bool
    order: tuple[int, ...] = ()
    """Its dimensions as they travel, the outermost in memory first; empty: as they are."""

    @property
    def told(self) -> list[object]:
        """What a digest has of it."""
        return [list(self.shape), self.dtype, *([list(self.order)] if self.order else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model cut into the layers of its chain; made by `capture`, run by `runtime`.

    Layer l is called as `layers[l](*boundary)` with the tensors of boundary l and returns a
    tensor or a tuple, which is boundary l+1. Boundary 0 are those tensors of the model's input
    that the first layer takes. The loss applies to the last layer's output and counts as part of
    the last layer. A layer that needs tensors of the model's input later is fed them from the
    data: it gets `fed[l]` behind its boundary.
    """

    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    fqns: tuple[dict[str, str], ...]
    """Per layer: parameter or buffer name inside the layer -> its name in the user's model."""
    parameter_order: tuple[str, ...] = ()
    """Names of parameters as the user's model lists them; empty: as the layers do."""
    modules: tuple[tuple[str, ...], ...] = ()
    """Per layer: modules of the user's model whose code runs in it; empty: names tell them."""
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """Boundary l is the input of layer l; one entry per layer."""
    microbatch_size: int
    fed: tuple[tuple[int, ...], ...] = ()
    """Per layer: which of the model's inputs it gets behind its own; empty: none for any layer."""
    inputs: tuple[TensorSpec, ...] = ()
    """All tensors of the model's input; empty: those of boundary 0."""
    entering: tuple[int, ...] = ()
    """Which of them boundary 0 is; empty: all."""
    arguments: Structure | None = None
    """How they lie in the arguments of the model; None: not known."""
    target: Structure | None = None
    """How what the loss compares with is nested; None: not known."""
    returned: Structure | None = None
    """How the last layer's tensors lie in what the loss is given; None: there is one."""
    autocast: torch.dtype | None = None
    """What layers and loss run under: `Task.autocast`."""
    accumulate: torch.dtype | None = None
    """`Task.accumulate`, of which bytes depend."""
    master_weights: bool = False
    """`Task.master_weights`, likewise."""
    compile: str | None = None
    """The backend of torch.compile that layers are compiled by: `Task.compile`."""
    eager: tuple[int, ...] = ()
    """Layers that run as they are though others are compiled; known where `compile` is given."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the model was cut, a line each."""
    drawing: tuple[str, ...] = ()
    """Modules of the model that draw from Python's or numpy's generator, by name."""
    counting: tuple[int, ...] = ()
    """Layers that change Python attributes in their forward: computed again, they count twice."""
    transmits: bool = False
    """Whether parameters that layers would share pass from layer to layer: `Task.tied`."""
    originals: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Copies of shared parameters, of layers on several GPUs -> the model's parameters."""

    device: str = "cpu"
    """Where the layers are, if they have no tensor that says it."""

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of parameters as the user's model lists them, which its norms are added up in."""
        places = {name: place for place, name in enumerate(self.parameter_order)}
        return sorted(names, key=lambda name: places.get(name, len(places)))

    def tied(self, wanted: Tied) -> Tied:
        """How its layers hold what they share: as `wanted`, or together where nothing passes."""
        return "colocate" if wanted == "transmit" and not self.transmits else wanted

    def fed_to(self, layer: int) -> tuple[int, ...]:
        """Which of the model's inputs `layer` (0-based) gets behind its boundary."""
        return self.fed[layer] if self.fed else ()

    def entry(self, inputs: Sequence[_Each]) -> tuple[_Each, ...]:
        """Those of the model's `inputs` that boundary 0 is."""
        return tuple(inputs[place] for place in self.entering) if self.entering else tuple(inputs)

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Of all tensors of the model's input."""
        return self.inputs or self.boundaries[0]

    def check_again(self, layers: Iterable[int], where: str) -> None:
        """Refuse to compute layers again that would count twice.

        Args:
            layers: 0-based.
            where: what wants to, for the message.

        Raises:
            InputError: if one of `layers` changes Python attributes in its forward.
        """
        for layer in layers:
            if layer in self.counting:
                raise InputError(
                    f"{where}: computes layer {self.names[layer]!r} again, which changes Python"
                    " attributes in its forward, need one whose second forward changes nothing."
                    " Keep what it counts in a buffer, or keep the layer: --recompute off."
                )

    def check_torch_draws(self, where: str) -> None:
        """Refuse layers that only a pipelined run can seed: it does so per layer and micro-batch.

        Args:
            where: what trains without, for the message.

        Raises:
            InputError: if a layer draws from Python's or numpy's generator in its forward.
        """
        if self.drawing:
            raise InputError(
                f"{where}: module {self.drawing[0]!r} draws from Python's or numpy's generator in"
                " its forward, need draws from torch's, whose state is kept for a second forward:"
                " torch.rand(()) in place of random.random()."
            )

    def _frozen(self) -> Iterator[str]:
        """Names of parameters that are not trained, which have no gradient and no state."""
        for layer, fqns in zip(self.layers, self.fqns, strict=True):
            for local, value in layer.named_parameters():
                if not value.requires_grad:
                    yield fqns[local]

    def _detached(self) -> Iterator[list[int]]:
        """(layer, place) of numbers between layers for which no gradient comes back."""
        for layer, boundary in enumerate(self.boundaries[1:], 1):
            for place, spec in enumerate(boundary):
                if not spec.differentiable and spec.dtype.startswith(_REAL):
                    yield [layer, place]

    def digest(self) -> str:
        """What `task_digest` is: names, shapes and dtypes of all that a plan depends on.

        So are parameters that are frozen, and tensors between layers without a gradient.
        """
        fed: dict[str, object] = {}
        if any(self.fed):
            fed["fed"] = [list(indices) for indices in self.fed]
        if self.entering:
            fed["inputs"] = [spec.told for spec in self.inputs]
            fed["entering"] = list(self.entering)
        names = ("autocast", "accumulate", "master_weights", "compile")
        given = {name: str(value) for name in names if (value := getattr(self, name))}
        if frozen := list(self._frozen()):
            fed["frozen"] = frozen
        if detached := list(self._detached()):
            fed["detached"] = detached
        return digest(
            fed
            | given
            | {
                "microbatch_size": self.microbatch_size,
                "boundaries": [[spec.told for spec in boundary] for boundary in self.boundaries],
                "layers": [
                    {
                        "name": name,
                        "parameters": [
                            [fqns[local], list(value.shape), str(value.dtype)]
                            for local, value in layer.named_parameters()
                        ],
                    }
                    for name, layer, fqns in zip(self.names, self.layers, self.fqns, strict=True)
                ],
            }
        )
