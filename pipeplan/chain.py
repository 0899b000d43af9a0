"""The chain: what is trained, layer by layer, in integer nanoseconds and bytes.

`chain.json` is this model as a file; docs/reference/formats.md describes each field,
docs/reference/model.md how the fields become time and memory.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Positive, Record, Signed


class Layer(Record):
    """The smallest unit that is assigned to a GPU; times in ns, bytes per micro-batch.

    Fields younger than the format are left out of files at their default, which keeps digests.
    """

    name: str
    forward_ns: Count
    forward_light_ns: Count | None = Field(default=None, exclude_if=lambda time: time is None)
    """Of a forward without autograd, as the first of a layer that runs again; None: unknown."""
    backward_ns: Count
    optimizer_ns: Count = 0
    weight_bytes: Count = 0
    gradient_bytes: Count = 0
    waiting_gradient_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """Gradients that wait under 2bw for other stages: the next step's need a place beside them."""
    optimizer_bytes: Count = 0
    output_bytes: Count
    """Size of the boundary behind this layer."""
    output_gradient_bytes: Count | None = None
    """Size of that boundary's gradient; None where it equals `output_bytes`."""
    saved_input_bytes: Count = 0
    """The part of the layer's input that autograd keeps until its backward."""
    saved_bytes: Count = 0
    """What autograd keeps that is neither the layer's input nor its output."""
    saved_output_bytes: Count = 0
    """The part of the layer's output that autograd keeps; at most `output_bytes`."""
    saved_passing_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """The part that is a kept input, passed on: in `saved_input_bytes`, not in the one before."""
    forward_workspace_bytes: Signed = 0
    backward_workspace_bytes: Signed = 0
    """What the peaks are above the sums of (M3); below zero where tensors share storage."""
    optimizer_workspace_bytes: Count = 0
    buffer_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """Buffers, part of `optimizer_bytes`: copied while the layer is computed again (V4)."""
    parameters: tuple[str, ...] = ()
    backward_weight_ns: Count | None = None
    """Of the gradients of weights, where a backward comes in two ops; None: not known."""
    backward_input_ns: Count | None = Field(default=None, exclude_if=lambda time: time is None)
    """Of those of activations then; None: the backward without `backward_weight_ns`."""
    forward_split_ns: Count | None = Field(default=None, exclude_if=lambda time: time is None)
    """Of a forward whose backward comes in two ops; None: as any other."""
    saved_for_weight_bytes: Count | None = None
    """What that part needs of what was saved, and gradients of activations; None: not known."""
    saved_input_for_weight_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """The part of it that is the layer's input."""
    input_backward_workspace_bytes: Signed = Field(default=0, exclude_if=lambda size: size == 0)
    """As `backward_workspace_bytes`, of the gradients of activations alone (S4)."""
    weight_backward_workspace_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """What the gradients of weights need beyond `saved_for_weight_bytes` (S5)."""

    @property
    def light_ns(self) -> int:
        """A forward without autograd; where the chain does not tell, one that keeps all."""
        return self.forward_ns if self.forward_light_ns is None else self.forward_light_ns

    @property
    def gradient_of_output_bytes(self) -> int:
        """Size of the gradient that crosses the boundary behind this layer, backwards."""
        given = self.output_gradient_bytes
        return self.output_bytes if given is None else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.name:
            raise ValueError("name: got '', need a non-empty name")
        if self.saved_output_bytes > self.output_bytes:
            raise ValueError(
                f"saved_output_bytes: got {self.saved_output_bytes}, need at most"
                f" output_bytes = {self.output_bytes}: it is a part of the output"
            )
        if self.saved_output_bytes + self.saved_passing_bytes > self.output_bytes:
            raise ValueError(
                f"saved_passing_bytes: got {self.saved_passing_bytes}, need at most"
                f" {self.output_bytes - self.saved_output_bytes}, output_bytes without"
                " saved_output_bytes: it is another part of the output"
            )
        self._check_split_times()
        kept = self.saved_for_weight_bytes
        if self.saved_input_for_weight_bytes > (kept or 0):
            raise ValueError(
                f"saved_input_for_weight_bytes: got {self.saved_input_for_weight_bytes}, need at"
                f" most saved_for_weight_bytes = {kept}: it is a part of it"
            )
        return self

    def _check_split_times(self) -> None:
        """What bounds say of whole backwards holds for split ones: no op of theirs is quicker.

        Raises:
            ValueError: if one is.
        """
        weight, inputs = self.backward_weight_ns, self.backward_input_ns
        if weight is None and inputs is not None:
            raise ValueError(
                f"backward_input_ns: got {inputs} without backward_weight_ns, need both halves"
            )
        if weight is not None and inputs is None and weight > self.backward_ns:
            raise ValueError(
                f"backward_weight_ns: got {weight}, need at most backward_ns ="
                f" {self.backward_ns} without backward_input_ns: it is a part of the backward"
            )
        if weight is not None and inputs is not None and inputs + weight < self.backward_ns:
            raise ValueError(
                f"backward_input_ns: got {inputs}, need at least {self.backward_ns - weight}:"
                " with backward_weight_ns it is no less than backward_ns"
            )
        if self.forward_split_ns is not None and self.forward_split_ns < self.forward_ns:
            raise ValueError(
                f"forward_split_ns: got {self.forward_split_ns}, need at least forward_ns ="
                f" {self.forward_ns}: it does more than another forward"
            )


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
                f"layers train as the model does, bit for bit on {self.microbatches} micro-batches"
            )
        return (
            "layers train as the model does only up to rounding: largest relative difference"
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
    tied: Literal["colocate", "synchronize"] = Field(
        default="colocate", exclude_if=lambda how: how == "colocate"
    )
    """Layers that share a parameter name: on one GPU, or anywhere, each with a copy of its own."""
    agreement: Agreement | None = Field(default=None, exclude_if=lambda how: how is None)
    """How far the layers train as the model does; None: nobody has compared them."""
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=100_000)]

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
            and all(layer.backward_weight_ns is not None for layer in layers)
            and all(layer.saved_for_weight_bytes is not None for layer in layers)
            and any(layer.backward_weight_ns for layer in layers)
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in names:
                raise ValueError(
                    f"layers[{index}].name: got {layer.name!r}, which layers[{names[layer.name]}]"
                    " has already; need distinct names"
                )
            names[layer.name] = index
            if layer.saved_input_bytes > self.input_of(index):
                raise ValueError(
                    f"layers[{index}].saved_input_bytes: got {layer.saved_input_bytes}, need at"
                    f" most {self.input_of(index)}, the size of the boundary before it"
                )
            self._check_workspaces(index, layer)
        return self

    def _check_workspaces(self, index: int, layer: Layer) -> None:
        """No operation holds less than it keeps: A of (M2) is part of pF, pB and pI of (M3), (S4).

        Raises:
            ValueError: if a workspace below zero says so.
        """
        kept = layer.saved_input_bytes
        if index:
            kept = max(kept, self.layers[index - 1].saved_output_bytes)
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
                raise ValueError(
                    f"layers[{index}].{name}: got {got}, need at least {least}, {why}"
                )
