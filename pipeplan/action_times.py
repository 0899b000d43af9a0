"""When each action of one step of a run happened: the data that `launch` writes and pages read."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from pipeplan.document import Count, Document, Positive, Record
from pipeplan.plan import Semantics
from pipeplan.program import Action

FILE = "actions.json"
"""Such data in the folder of a run."""


class TimedAction(Record):
    """An action of a rank, in ns since the first one that is told of any rank."""

    action: str
    """`1B3`: stage, kind, micro-batch from the start of training."""
    start_ns: Count
    waited_ns: Count = 0
    """From its start on, for messages."""
    end_ns: Count

    @property
    def parsed(self) -> Action:
        """What was done."""
        return Action.parse(self.action)


class ActionTimes(Document):
    """One step of a run, action by action; under 2bw the steps beside it, too."""

    format: Literal["pipeplan-actions/1"] = "pipeplan-actions/1"
    plan_digest: str
    semantics: Semantics
    microbatches: Positive
    """Per step."""
    step: Positive
    """As metrics.jsonl counts steps; of those in `lengths_ns` it lasted the median time."""
    lengths_ns: tuple[Count, ...]
    """Of the last steps, from one first forward of the last stage to the next."""
    ranks: tuple[tuple[TimedAction, ...], ...]
    """In the order in which each rank acted."""

    @property
    def first(self) -> int:
        """The first micro-batch of the step."""
        return (self.step - 1) * self.microbatches

    @model_validator(mode="after")
    def _check(self) -> Self:
        for rank, actions in enumerate(self.ranks):
            for index, each in enumerate(actions):
                Action.parse(each.action)
                if each.start_ns + each.waited_ns > each.end_ns:
                    raise ValueError(
                        f"ranks[{rank}][{index}]: got {each.action} from {each.start_ns} to"
                        f" {each.end_ns} ns that waits for {each.waited_ns} ns, need no longer one"
                    )
        return self
