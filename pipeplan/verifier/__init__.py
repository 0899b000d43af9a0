"""The closed-form voice: judges a plan against every rule of docs/reference/model.md, modulo the
period.

Nothing is replayed or unrolled. Counts of micro-batches follow from where intervals begin and end
within one period, so the answer is exact for the infinite steady state. The simulator reaches the
same numbers by replaying the lowered program; the two share data types and no formulas.
"""

from pipeplan.verifier.host_states import movable_states, stage_on_host
from pipeplan.verifier.rules import Audit, audit, check, verify
from pipeplan.verifier.stage_bytes import offloaded
from pipeplan.verifier.violation import Rule, Violation

__all__ = [
    "Audit",
    "Rule",
    "Violation",
    "audit",
    "check",
    "movable_states",
    "offloaded",
    "stage_on_host",
    "verify",
]
