"""What a device program does: rules that it breaks, bytes, times."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.device_program import Instruction


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One replayed instruction: when it runs, the bytes on device and host meanwhile (B1)-(B4).

    A copy's times are those on its lane, its bytes those from its issue on.
    """

    instruction: Instruction
    start_ns: int
    end_ns: int
    bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class ProgramOutcome:
    """Of one micro-batch; times in ns, sizes in bytes, equations of device-programs.md.

    With violations, it is that of the instructions before the one that is not allowed.
    """

    steps: tuple[ProgramStep, ...]
    """One per instruction."""
    violations: tuple[str, ...]
    """Each names the instruction, the rule and what is needed; empty: the program is allowed."""
    static_bytes: int
    """There all the time: parameters, buffers, optimizer states, gradients of parameters."""
    saved_bytes: int
    """At the end of the forward, less static bytes, inputs and outputs (B5)."""
    forward_peak_bytes: int
    """Up to the end of the forward, static bytes included."""
    backward_peak_bytes: int
    """From the end of the forward on, static bytes included."""
    forward_ns: int
    """Time of the operations up to the end of the forward, waits left out."""
    backward_ns: int
    """Time of the operations behind it, waits left out."""
    makespan_ns: int
    """Until all lanes are done, waits included (T1)-(T4)."""
    host_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes, static ones included."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def peak_step(self) -> int:
        """Index of the first instruction that reaches the peak; -1 where there is none."""
        peak = self.peak_bytes
        return next((i for i, step in enumerate(self.steps) if step.bytes == peak), -1)

    @property
    def compute_ns(self) -> int:
        """Time of all operations, waits left out."""
        return self.forward_ns + self.backward_ns

    @property
    def idle_ns(self) -> int:
        """Time in which the device computes nothing."""
        return self.makespan_ns - self.compute_ns
