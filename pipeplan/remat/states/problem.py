"""What OffMate plans: blocks with options, parameters that they use, one device and its host.

Names in parentheses are those of X. Zhao's thesis, section 4.5.1. A step of training is a forward
of each block, then a backward of each in the opposite order; steps follow each other without end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.errors import InputError


@dataclass(frozen=True, slots=True)
class StateBlockOption:
    """One way to run a block, whatever its parameters cost.

    Attributes:
        name: for people.
        forward_ns: time of its forward (T^o of the step).
        backward_ns: time of its backward, with what it computes again.
        kept_bytes: internal activations on the device from forward to backward (S^o).
        offloaded_bytes: internal activations that wait on the host meanwhile (O^o). They leave
            during the next step and are back before the step of the backward begins.
        forward_workspace_bytes: what the forward takes beyond what it keeps and its output.
        backward_workspace_bytes: what the backward takes beyond what was kept, the gradients of
            input and output, and those of parameters.
        keeps_output: whether its own backward reads the output, too, which then stays so long.
    """

    name: str
    forward_ns: int
    backward_ns: int
    kept_bytes: int
    offloaded_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    keeps_output: bool = False


@dataclass(frozen=True)
class StateBlock:
    """A part of the model; each block reads the output of the one before.

    Attributes:
        name: for people.
        options: ways to run it.
        output_bytes: what it hands to the next block, kept until that one's backward, or its own.
        gradient_bytes: of the gradient of that output.
    """

    name: str
    options: tuple[StateBlockOption, ...]
    output_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter tensor.

    Attributes:
        name: for people.
        bytes: of its values.
        trained: whether it has a gradient and optimizer states.
        update_workspace_bytes: what its update takes on the device while it runs.
    """

    name: str
    bytes: int
    trained: bool = True
    update_workspace_bytes: int = 0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the same blocks use, which come and go in parts (w).

    Attributes:
        name: for people.
        tensors: none is split in the end.
        blocks: indices of those that use them, in ascending order.
        on_host: where its trained tensors are updated; None: part of them here, part there.
    """

    name: str
    tensors: tuple[StateTensor, ...]
    blocks: tuple[int, ...]
    on_host: bool | None = None

    @cached_property
    def bytes(self) -> int:
        """Of all tensors (|w|)."""
        return sum(each.bytes for each in self.tensors)

    @cached_property
    def trained_bytes(self) -> int:
        """Of those that are trained (|w|_g)."""
        return sum(each.bytes for each in self.tensors if each.trained)


@dataclass(frozen=True)
class DeviceAndHost:
    """One device, its host, and the way between.

    Attributes:
        device_bytes: what a plan may use of the device (M_GPU).
        host_bytes: what it may use of the host (M_CPU).
        bandwidth: bytes per second of the way (beta).
        device_update: bytes of parameters that the device updates per second (alpha_G).
        host_update: bytes that the host updates per second (alpha_C); None: it updates none.
        management_ns: the host's own time for each block's forward and backward (H).
        duplex: whether each direction has all of the bandwidth, as in (4.21) and (4.22), or both
            together have.
    """

    device_bytes: int
    host_bytes: int
    bandwidth: int
    device_update: int
    host_update: int | None
    management_ns: int = 0
    duplex: bool = True


@dataclass(frozen=True)
class StateProblem:
    """A model and a machine.

    Attributes:
        blocks: in the order of their forwards.
        groups: every parameter of the model, each in one group.
        machine: where it trains.
        states_per_value: values of optimizer states for each trained one (k; 2 for Adam).
        input_bytes: what the first block reads; it stays.
        name: for people.
    """

    blocks: tuple[StateBlock, ...]
    groups: tuple[ParameterGroup, ...]
    machine: DeviceAndHost
    states_per_value: int = 2
    input_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        """Checks indices and rates.

        Raises:
            InputError: if one means nothing.
        """
        self._check_machine()
        if not self.blocks:
            raise InputError(
                "step of training: got no blocks, need at least one. Give the layers."
            )
        for group in self.groups:
            if not group.blocks or list(group.blocks) != sorted(set(group.blocks)):
                raise InputError(
                    f"group {group.name}: got blocks {group.blocks}, need one or several indices"
                    " in ascending order"
                )
            if group.blocks[-1] >= len(self.blocks):
                raise InputError(
                    f"group {group.name}: got block {group.blocks[-1]}, need one below"
                    f" {len(self.blocks)}"
                )
        empty = next((each.name for each in self.blocks if not each.options), None)
        if empty is not None:
            raise InputError(f"block {empty}: got no option, need at least one")
        last = self.blocks[-1]
        if any(option.offloaded_bytes for option in last.options):
            raise InputError(
                f"block {last.name}: got an option with offloaded_bytes, need none: the last"
                " block's backward follows its forward at once"
            )

    def _check_machine(self) -> None:
        for name in ("bandwidth", "device_update", "host_update"):
            rate = getattr(self.machine, name)
            if rate is not None and rate <= 0:
                way_out = " Give None where the host updates nothing." if "host" in name else ""
                raise InputError(
                    f"machine: {name}: got {rate}, need bytes per second above 0.{way_out}"
                )
        if self.machine.management_ns < 0:
            raise InputError(
                f"machine: management_ns: got {self.machine.management_ns}, need 0 or more"
            )

    @property
    def steps(self) -> int:
        """Forwards and backwards of blocks in a step of training (2L)."""
        return 2 * len(self.blocks)

    def block_of(self, step: int) -> int:
        """Which block step 0..2L-1 runs (B(t)): forwards, then backwards (t >= L)."""
        return min(step, self.steps - 1 - step)

    def first_use(self, group: ParameterGroup) -> int:
        """The forward that reads a group first (f_w)."""
        return group.blocks[0]

    def last_gradient(self, group: ParameterGroup) -> int:
        """The backward that makes the last part of a group's gradient (g_w)."""
        return self.steps - 1 - group.blocks[0]

    @cached_property
    def compute_ns(self) -> int:
        """Of a step without limits: quickest options, updates on the device."""
        blocks = sum(
            min(option.forward_ns + option.backward_ns for option in block.options)
            for block in self.blocks
        )
        trained = sum(group.trained_bytes for group in self.groups)
        return blocks + trained * 10**9 // self.machine.device_update
