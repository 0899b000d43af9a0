"""The chain: what is trained, layer by layer, in integer nanoseconds and bytes.

`chain.json` is this model as a file; docs/reference/formats.md describes each field,
docs/reference/model.md how the fields become time and memory.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Positive, Record
from pipeplan.layer import Layer, LayerOption, OperatorProgram, RidingTensor
from pipeplan.units import counted

__all__ = ["Agreement", "Chain", "Layer", "LayerOption", "OperatorProgram", "RidingTensor"]


class Agreement(Record):
    """How far a model's layers were seen to train as the model itself does."""

    microbatches: Positive
    """How many were compared, each with a seed of its own."""
    largest_relative_difference: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Of outputs, gradients and buffers; 0: all were equal bit for bit."""
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, exclude_if=lambda most: most is None
    )
    """Up to which compiled layers count as the model's; None: layers are not compiled."""
    repeats: bool = Field(default=True, exclude_if=bool)
    """Whether the model gave the same bits twice; asked where its layers gave others."""

    @property
    def is_exact(self) -> bool:
        """Whether all were equal bit for bit; nobody promises that of compiled layers."""
        return self.largest_relative_difference == 0 and self.tolerance is None

    @property
    def told(self) -> str:
        """The same in words, for people."""
        if self.tolerance is not None:
            return (
                "compiled layers train as the model does within a tolerance of"
                f" {self.tolerance:.1e}, not bit for bit: largest relative difference"
                f" {self.largest_relative_difference:.1e} on {self.microbatches} micro-batches"
            )
        if self.is_exact:
            return (
                "layers train as the model does, bit for bit on"
                f" {counted(self.microbatches, 'micro-batch')}"
            )
        how = "" if self.repeats else ", as the model itself repeats its bits only up to rounding"
        return (
            f"layers train as the model does only up to rounding{how}: largest relative difference"
            f" {self.largest_relative_difference:.1e} on {self.microbatches} micro-batches"
        )


class Chain(Document):
    """An ordered model: layers 0..L-1 in files (1..L in formulas) and the size of its input.

    `layers[l].saved_input_bytes` may not exceed the boundary before layer l; the loss belongs to
    the last layer, whose output is the loss.
    """

    format: Literal["pipeplan-chain/1"] = "pipeplan-chain/1"
    name: str
    source: str = ""
    task: str | None = None
    """The task reference this chain was profiled from (`package.module:function`)."""
    task_digest: str | None = None
    mode: Literal["measured", "estimated", "imported"] = "imported"
    microbatch_size: Positive = 1
    input_bytes: Count = 0
    device: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    tied: Literal["colocate", "synchronize", "transmit"] = Field(
        default="colocate", exclude_if=lambda how: how == "colocate"
    )
    """Layers that share a parameter name: on one GPU, or anywhere, each with a copy of its own;
    `transmit`: on one GPU, and others pass from layer to layer as activations do."""
    agreement: Agreement | None = Field(default=None, exclude_if=lambda how: how is None)
    """How far the layers train as the model does; None: nobody has compared them."""
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=100_000)]
    programs: tuple[OperatorProgram, ...] = Field(default=(), exclude_if=lambda each: not each)
    """Device programs that options of layers name by index."""

    @property
    def doubt(self) -> str | None:
        """Why a run may not be bit-equal to the model's own training; None: nothing says so."""
        if self.mode == "imported" or (self.agreement and self.agreement.is_exact):
            return None
        if self.agreement and self.agreement.tolerance is not None:
            return (
                f"{self.agreement.told}; their bytes are those that torch's allocator recorded,"
                " without what a generated kernel takes past it"
            )
        if self.agreement:
            return self.agreement.told
        return "nobody has compared the layers with the model: pipeplan profile does"

    def input_of(self, layer: int) -> int:
        """Bytes of the boundary before `layer` (0-based)."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes

    def gradient_of_input(self, layer: int) -> int:
        """Bytes of the gradient that `layer` (0-based) sends back; none for the model's input."""
        return self.layers[layer - 1].gradient_of_output_bytes if layer else 0

    def may_split(self, first: int, last: int) -> bool:
        """Whether the backward of a stage first..last (0-based) may be I and W, and W takes time.

        (S1) of docs/reference/model.md, as far as the chain decides it.
        """
        layers = self.layers[first : last + 1]
        return (
            first > 0
            and all(layer.tells_split for layer in layers)
            and any(layer.backward_weight_ns for layer in layers)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            where = f"layers[{index}]"
            if layer.name in names:
                raise ValueError(
                    f"{where}.name: got {layer.name!r}, which layers[{names[layer.name]}]"
                    " has already; need distinct names"
                )
            names[layer.name] = index
            self._check_bytes(where, index, layer)
            self._check_riding(where, index, layer)
            for number, option in enumerate(layer.options):
                self._check_option(f"{where}.options[{number}]", layer, option)
                self._check_bytes(f"{where}.options[{number}]", index, layer.under(option))
        return self

    def _check_option(self, where: str, layer: Layer, option: LayerOption) -> None:
        """The program is there, and nothing is quicker than the layer's own: bounds rely on it.

        Raises:
            ValueError: if not.
        """
        if option.program >= len(self.programs):
            raise ValueError(
                f"{where}.program: got {option.program}, need an index below"
                f" {len(self.programs)}, of the chain's programs"
            )
        for name in ("forward_ns", "backward_ns"):
            if getattr(option, name) < getattr(layer, name):
                raise ValueError(
                    f"{where}.{name}: got {getattr(option, name)}, need at least"
                    f" {getattr(layer, name)}, the layer's own"
                )

    def _check_riding(self, where: str, index: int, layer: Layer) -> None:
        """What a layer passes on is what the next one is told to have got.

        Raises:
            ValueError: if not.
        """
        before = self.layers[index - 1].riding if index else ()
        passed = [tensor.size_bytes for tensor in before if tensor.passed]
        got = [tensor.size_bytes for tensor in layer.riding[: len(passed)]]
        if got != passed:
            raise ValueError(
                f"{where}.riding: got tensors of {got} bytes first, need {passed}, which the layer"
                " before passes on"
            )
        if sum(tensor.size_bytes for tensor in layer.riding) > self.input_of(index):
            raise ValueError(
                f"{where}.riding: got tensors of more than {self.input_of(index)} bytes, the size"
                " of the boundary before it: they are parts of it"
            )
        if index + 1 == len(self.layers) and any(tensor.passed for tensor in layer.riding):
            raise ValueError(f"{where}.riding: got one that is passed on, need a layer behind")

    def _check_bytes(self, where: str, index: int, layer: Layer) -> None:
        """What is saved is there; no operation holds less than it keeps.

        A of (M2) is part of pF, pB and pI of (M3), (S4).

        Raises:
            ValueError: if a size says otherwise.
        """
        if layer.saved_input_bytes > self.input_of(index):
            raise ValueError(
                f"{where}.saved_input_bytes: got {layer.saved_input_bytes}, need at most"
                f" {self.input_of(index)}, the size of the boundary before it"
            )
        kept = layer.saved_input_bytes
        if index:
            before = self.layers[index - 1]
            options = (option.saved_output_bytes for option in before.options)
            kept = max(kept, before.saved_output_bytes, *options)
        there = self.input_of(index) + layer.output_bytes
        gradients = self.gradient_of_input(index) + layer.gradient_of_output_bytes
        for name, got, least, why in (
            (
                "forward_workspace_bytes",
                layer.forward_workspace_bytes,
                kept + layer.saved_output_bytes - there,
                "what is kept of input and output less both: a forward holds all it keeps",
            ),
            (
                "forward_light_workspace_bytes",
                layer.forward_light_workspace_bytes or 0,
                -layer.output_bytes,
                "less the output: a forward without autograd holds its input",
            ),
            (
                "backward_workspace_bytes",
                layer.backward_workspace_bytes,
                -gradients,
                "no less than the gradients of input and output take",
            ),
            (
                "input_backward_workspace_bytes",
                layer.input_backward_workspace_bytes,
                -gradients,
                "no less than the gradients of input and output take",
            ),
        ):
            if got < least:
                raise ValueError(f"{where}.{name}: got {got}, need at least {least}, {why}")
