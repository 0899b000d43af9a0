"""Device programs over operator graphs: the judge of all planners, and the program without a plan.

docs/reference/device-programs.md is the contract.
"""

from pipeplan.remat.programs.host_copies import Placement
from pipeplan.remat.programs.judge import judge
from pipeplan.remat.programs.keep_all import keep_all
from pipeplan.remat.programs.outcome import ProgramOutcome, ProgramStep

__all__ = ["Placement", "ProgramOutcome", "ProgramStep", "judge", "keep_all"]
