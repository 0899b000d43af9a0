"""A layer of a chain: what it takes in time and memory, as it is and under device programs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Positive, Record, Signed


class OperatorProgram(Record):
    """A device program over the operators of one or several equal layers."""

    graph_digest: str
    """SHA-256 of the operator graph (`pipeplan.operator_graph.OperatorGraph.structure_digest`)."""
    text: str
    """As `pipeplan.device_program.DeviceProgram.to_text` writes it."""


class LayerOption(Record):
    """What a layer takes when its forward and backward run a device program, (V5).

    Each field stands for the layer's of the same name; times in ns, bytes per micro-batch.
    """

    program: Count
    """Index into the chain's `programs`."""
    forward_ns: Count
    backward_ns: Count
    saved_input_bytes: Count = 0
    saved_bytes: Count = 0
    saved_output_bytes: Count = 0
    saved_passing_bytes: Annotated[int, Field(ge=0, exclude_if=lambda size: size == 0)] = 0
    forward_workspace_bytes: Signed = 0
    backward_workspace_bytes: Signed = 0


class RidingTensor(Record):
    """A tensor of a layer's input that several layers take as it is, in one storage."""

    size_bytes: Positive
    kept: bool = Field(default=False, exclude_if=lambda kept: not kept)
    """Whether autograd keeps it as long as the layer's forward or backward needs most."""
    passed: bool = Field(default=False, exclude_if=lambda passed: not passed)
    """Whether it is part of the layer's output as well."""


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
    """The part that is a kept input, passed on: it is in `saved_input_bytes`, not in the field
    before; of merged layers in `saved_bytes` as well."""
    riding: tuple[RidingTensor, ...] = Field(default=(), exclude_if=lambda riding: not riding)
    """Those that the layer before passes on, in its order; then those that ride from here on."""
    forward_workspace_bytes: Signed = 0
    backward_workspace_bytes: Signed = 0
    """What the peaks are above the sums of (M3); below zero where tensors share storage."""
    forward_light_workspace_bytes: Signed | None = Field(
        default=None, exclude_if=lambda size: size is None
    )
    """Beside input and output, of a forward without autograd; None: unknown (V3)."""
    optimizer_workspace_bytes: Count = 0
    buffer_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """Buffers, part of `optimizer_bytes`: copied while the layer is computed again (V4)."""
    frozen_bytes: Count = Field(default=0, exclude_if=lambda size: size == 0)
    """Parameters that are not trained, part of `optimizer_bytes`."""
    parameters: tuple[str, ...] = ()
    modules: tuple[str, ...] = Field(default=(), exclude_if=lambda names: not names)
    """The modules whose code runs in it, where its name does not tell them: of exporters."""
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
    options: tuple[LayerOption, ...] = Field(default=(), exclude_if=lambda options: not options)
    """Device programs over the layer's operators that keep less of it (V5)."""

    def under(self, option: LayerOption) -> Layer:
        """The layer when it runs the program of one of its options (V5): no split backward."""
        return self.model_copy(update={**_WHOLE, **{n: getattr(option, n) for n in _OPTION}})

    @property
    def light_ns(self) -> int:
        """A forward without autograd; where the chain does not tell, one that keeps all."""
        return self.forward_ns if self.forward_light_ns is None else self.forward_light_ns

    @property
    def light_workspace_bytes(self) -> int:
        """Of a forward without autograd; where the chain does not tell, one that keeps all."""
        told = self.forward_light_workspace_bytes
        return self.forward_workspace_bytes + self.saved_bytes if told is None else told

    @property
    def tells_split(self) -> bool:
        """Whether it is known what a backward in two ops takes and keeps."""
        return self.backward_weight_ns is not None and self.saved_for_weight_bytes is not None

    @property
    def split_forward_ns(self) -> int:
        """A forward whose backward comes in two ops."""
        return self.forward_ns if self.forward_split_ns is None else self.forward_split_ns

    @property
    def input_ns(self) -> int:
        """The gradients of activations, where a backward comes in two ops."""
        told = self.backward_input_ns
        return self.backward_ns - (self.backward_weight_ns or 0) if told is None else told

    @property
    def gradient_of_output_bytes(self) -> int:
        """Size of the gradient that crosses the boundary behind this layer, backwards."""
        given = self.output_gradient_bytes
        return self.output_bytes if given is None else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.name:
            raise ValueError("name: got '', need a non-empty name")
        for number, option in enumerate(self.options):
            if option.saved_output_bytes + option.saved_passing_bytes > self.output_bytes:
                raise ValueError(
                    f"options[{number}]: got {option.saved_output_bytes} saved_output_bytes and"
                    f" {option.saved_passing_bytes} saved_passing_bytes, need at most output_bytes"
                    f" = {self.output_bytes} together: they are parts of the output"
                )
            _check_passing(option, f"options[{number}].")
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
        _check_passing(self, "")
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


def _check_passing(keeps: Layer | LayerOption, where: str) -> None:
    """Messages are less by what passes, since it is kept: so it is part of what is kept.

    Raises:
        ValueError: if not.
    """
    most = keeps.saved_input_bytes + keeps.saved_bytes
    if keeps.saved_passing_bytes > most:
        raise ValueError(
            f"{where}saved_passing_bytes: got {keeps.saved_passing_bytes}, need at most"
            f" saved_input_bytes + saved_bytes = {most}: it is kept as part of them"
        )


_OPTION = tuple(LayerOption.model_fields.keys() - {"program"})
_WHOLE: dict[str, int | tuple[LayerOption, ...] | None] = {
    "forward_light_ns": None,
    "forward_light_workspace_bytes": None,
    "backward_weight_ns": None,
    "backward_input_ns": None,
    "forward_split_ns": None,
    "saved_for_weight_bytes": None,
    "saved_input_for_weight_bytes": 0,
    "input_backward_workspace_bytes": 0,
    "weight_backward_workspace_bytes": 0,
    "options": (),
}
"""What a layer does not tell when it runs a program."""
