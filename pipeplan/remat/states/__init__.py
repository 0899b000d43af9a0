"""OffMate: parameters, gradients, optimizer states and activations of one device on its host.

X. Zhao's thesis, chapter 4; docs/reference/offmate.md says what is as printed.
"""

from pipeplan.remat.states.problem import (
    DeviceAndHost,
    ParameterGroup,
    StateBlock,
    StateBlockOption,
    StateProblem,
    StateTensor,
)
from pipeplan.remat.states.solve import Relaxation, StatePlan, plan_states, relax

__all__ = [
    "DeviceAndHost",
    "ParameterGroup",
    "Relaxation",
    "StateBlock",
    "StateBlockOption",
    "StatePlan",
    "StateProblem",
    "StateTensor",
    "plan_states",
    "relax",
]
