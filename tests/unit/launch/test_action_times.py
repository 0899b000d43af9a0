"""Which step of a run is told action by action: a median one, whole, where nothing is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeplan.launch.action_times import by_step, chosen, gathered
from pipeplan.plan import Semantics
from pipeplan.program import Action, ActionKind
from pipeplan.runtime.supervision.flight_recorder import Recorded
from tests.samples import two_stages


def recorded(lengths: Sequence[int], first: int = 0) -> list[Recorded]:
    """Of the last of two stages: F and B of 8 micro-batches in each step, then its update."""
    found, now = [], 1000
    for step, length in enumerate(lengths, start=first):
        for number in range(8):
            for kind in (ActionKind.F, ActionKind.B):
                done = Recorded(Action(kind, 1, 8 * step + number), now, now + length // 16, 0)
                found.append(done)
                now = done.end_ns
        found.append(Recorded(Action(ActionKind.OPT, 1), now, now, 0))
    return found


@pytest.mark.parametrize(
    ("semantics", "lengths", "settled", "expected"),
    [
        ("flush", [960, 160, 480, 320, 640, 800], 0, 2),  # the last has none behind it
        ("flush", [960, 160, 480, 320, 640, 800], 3, 3),
        ("flush", [960, 160], 3, 0),  # short: better that than none
        ("flush", [960], 0, None),
        ("2bw", [960, 160, 480, 320, 640, 800], 0, 3),  # steps 1 to 3 have neighbours
        ("2bw", [960, 160, 480], 0, None),
    ],
)
def test_the_median_step_is_chosen(
    semantics: Semantics, lengths: list[int], settled: int, expected: int | None
) -> None:
    """Of the steps from `settled` on that have what they need around them, the lower median."""
    plan = two_stages(semantics=semantics)
    choice = chosen(plan, recorded(lengths), settled)
    assert (choice and choice.step) == expected
    if choice is not None:
        assert lengths[choice.step] in choice.lengths_ns
        assert lengths[-1] not in choice.lengths_ns


def test_updates_belong_to_the_step_before_them() -> None:
    """Each step is its 16 operations and the update; steps count from the start of training."""
    steps = [step for step, _ in by_step(recorded([160, 160], first=5), 8)]
    assert steps == [5] * 17 + [6] * 17


@pytest.mark.parametrize(("semantics", "count"), [("flush", 17), ("2bw", 51)])
def test_all_ranks_tell_their_part(semantics: Semantics, count: int) -> None:
    """Under 2bw the neighbours are told, too; times begin at 0; a rank that has none is empty."""
    plan = two_stages(semantics=semantics)
    mine = recorded([160] * 6, first=2)
    answers = iter(([None, chosen(plan, mine, 0)], None))

    def gather(value: object) -> list[object]:
        known = next(answers)
        return known if known is not None else [[], value]

    times = gathered(plan, 1, mine, gather, 0)
    assert times is not None
    assert [len(rank) for rank in times.ranks] == [0, count]
    assert times.ranks[1][0].start_ns == 0
    assert times.plan_digest == plan.digest()
    assert f"1F{times.first}" in [each.action for each in times.ranks[1]]
    assert gathered(plan, 1, mine[:9], lambda value: [None, value], 0) is None
