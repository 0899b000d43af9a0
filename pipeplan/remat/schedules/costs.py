"""What one device pays for a chain: times and bytes of each layer, indexed 0..L-1.

docs/reference/remat-rules.md §1 gives the meaning of each number; boundary l lies before layer l,
boundary L behind the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.chain import Chain
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind
from pipeplan.sums import check_sums


@dataclass(frozen=True)
class SharedStorage:
    """One piece of memory that boundaries and tapes share."""

    size: int
    boundaries: frozenset[int]
    """Those that it is a part of while they are full."""
    tapes: frozenset[int]
    """Those that keep it."""


@dataclass(frozen=True)
class Costs:
    """Times in ns and sizes in bytes; `boundary` has L + 1 entries, all others L."""

    names: tuple[str, ...]
    forward: tuple[int, ...]
    """Of a forward that keeps all."""
    light: tuple[int, ...]
    """Of a forward that keeps nothing, or its input."""
    backward: tuple[int, ...]
    boundary: tuple[int, ...]
    """Full tensor at boundary l."""
    gradient: tuple[int, ...]
    """Gradient at boundary l + 1, behind layer l."""
    saved_input: tuple[int, ...]
    saved: tuple[int, ...]
    saved_output: tuple[int, ...]
    forward_work: tuple[int, ...]
    """Working space of a forward that keeps all, beside input, saved bytes and output."""
    light_work: tuple[int, ...]
    """Working space of a forward that keeps nothing, beside input and output."""
    backward_work: tuple[int, ...]
    static: int = 0
    """Bytes that are there all the time: weights, their gradients, optimizer states."""
    left: tuple[int, ...] = ()
    """Bytes that each backward leaves until the end (R6); empty: none."""
    storages: tuple[SharedStorage, ...] = ()
    """Of all boundaries, where one rides along in the next (R5); empty where none does."""

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.forward)

    def time(self, op: DeviceOp) -> int:
        """Time that `op` takes of the device; none for what only moves or frees."""
        if not op.computes:
            return 0
        if op.kind is DeviceOpKind.BACKWARD:
            return self.backward[op.index]
        return (self.forward if op.kind is DeviceOpKind.KEEP_ALL else self.light)[op.index]

    @property
    def compute(self) -> int:
        """Time of all forwards that keep all and all backwards: no schedule is faster."""
        return sum(self.forward) + sum(self.backward)

    def gradient_in(self, layer: int) -> int:
        """Bytes of the gradient at boundary `layer`; the model's input has none."""
        return self.gradient[layer - 1] if layer else 0

    def incoming(self, layer: int) -> int:
        """Bytes of the gradient that waits at boundary `layer + 1` before the backward of `layer`.

        The loss's own gradient is made by the backward of the last layer.
        """
        return self.gradient[layer] if layer < self.layers - 1 else 0

    def kept(self, boundary: int, *, before: bool, behind: bool) -> int:
        """Part of `boundary` that the tapes of the layers before and behind it keep (R1)."""
        output = self.saved_output[boundary - 1] if before and boundary else 0
        entry = self.saved_input[boundary] if behind and boundary < self.layers else 0
        return max(output, entry)


def from_chain(chain: Chain) -> Costs:
    """The costs of `chain` on one device.

    A chain may not tell what a forward that keeps nothing needs (R2), nor its time; then it is
    charged what one that keeps all needs and takes.

    Raises:
        InputError: if times or bytes add up to too much.
    """
    check_sums(chain)
    layers = chain.layers
    return Costs(
        names=tuple(layer.name for layer in layers),
        forward=tuple(layer.forward_ns for layer in layers),
        light=tuple(layer.light_ns for layer in layers),
        backward=tuple(layer.backward_ns for layer in layers),
        boundary=(chain.input_bytes, *(layer.output_bytes for layer in layers)),
        gradient=tuple(layer.gradient_of_output_bytes for layer in layers),
        saved_input=tuple(layer.saved_input_bytes for layer in layers),
        saved=tuple(layer.saved_bytes for layer in layers),
        saved_output=tuple(layer.saved_output_bytes for layer in layers),
        forward_work=tuple(layer.forward_workspace_bytes for layer in layers),
        light_work=tuple(layer.light_workspace_bytes for layer in layers),
        backward_work=tuple(layer.backward_workspace_bytes for layer in layers),
        static=sum(
            layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in layers
        ),
    )
