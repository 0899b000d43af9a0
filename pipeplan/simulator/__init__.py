"""The replay voice: runs a lowered program with a clock and a byte ledger, action by action.

Nothing is folded into a period: micro-batches enter an empty pipeline, fill it, and drain. What
the verifier derives in closed form is read off here; the two share data types and no formulas.
"""

from pipeplan.simulator.judge import check, disagreements
from pipeplan.simulator.replay import replay, simulate, updates_ns
from pipeplan.simulator.result import Clock, Discrepancy, Peak, Simulation, Span
from pipeplan.simulator.tape import OpTimes

__all__ = [
    "Clock",
    "Discrepancy",
    "OpTimes",
    "Peak",
    "Simulation",
    "Span",
    "check",
    "disagreements",
    "replay",
    "simulate",
    "updates_ns",
]
