"""Schedules with a flush as rows of a comparison: idle time, what they refuse, what is given."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest

from pipeplan.baselines import flush
from pipeplan.baselines.listed import ListedSchedule, Lists
from pipeplan.compare import Absent, Row
from pipeplan.compare.families import FAMILIES, listed
from pipeplan.compare.field import prepared
from pipeplan.compare.rows import check
from pipeplan.errors import InputError
from pipeplan.torch_schedules import TORCH_SCHEDULES
from tests.baselines import chain, setting


@pytest.mark.parametrize("name", ["GPipe", "1F1B with flush"])
def test_fill_and_drain_of_a_flush_are_the_known_bubble(name: str) -> None:
    """Equal stages: (P - 1) / (m + P - 1) of the time, and no other cause."""
    (row,) = FAMILIES[name](setting(chain([(2, 4)] * 4), 4), name, 8)
    assert row.bubble.fill_drain == pytest.approx(3 / 11)
    assert row.bubble.imbalance == row.bubble.communication == row.bubble.waiting == 0


def test_zb_h1_is_a_row_where_the_chain_tells_weight_gradients_apart() -> None:
    """Four stages of f = i = w = 2, eight micro-batches: 8 * 6 of work and 3 * 2 of bubble."""
    of = setting(chain([(2, 4)] * 4, weight_ns=2, saved_for_weight=0), 4)
    (row,) = FAMILIES["ZB-H1"](of, "ZB-H1", 8)
    assert row.period_ns == Fraction(8 * 6 + 3 * 2, 8)
    assert row.bubble.fill_drain == pytest.approx(6 / 54)
    assert row.bubble.total == pytest.approx(6 / 54)
    assert (row.semantics, row.fits) == ("flush", True)
    assert [stage.split_backward for stage in row.plan.stages] == [False, True, True, True]
    check(row)


def test_what_a_micro_batch_adds_is_seen_at_a_multiple_that_the_schedule_takes() -> None:
    """9 and 27 micro-batches are taken, 18 are not; 8 give no row but the reason."""

    def lists(gpus: int, microbatches: int) -> Lists:
        if microbatches not in (9, 27):
            raise InputError(f"got {microbatches}, need 9 or 27")
        return flush.one_f_one_b(gpus, microbatches)

    of = setting(chain([(2, 4)] * 4), 4)
    (whole,) = listed(ListedSchedule(lists, range))(of, "whole rounds", 9)
    (plain,) = FAMILIES["1F1B with flush"](of, "plain", 9)
    assert whole.bubble == plain.bubble
    with pytest.raises(InputError, match="9 or 27"):
        list(listed(ListedSchedule(lists, range))(of, "whole rounds", 8))


def test_schedules_that_are_given_are_rows_also_from_other_processes() -> None:
    """What everyone else did comes back from its process; a refusal is the row's reason."""
    more = {
        "mine": (ListedSchedule(flush.one_f_one_b, range, "as given"),),
        "torch": TORCH_SCHEDULES["torch, DualPipeV"],
    }
    of = setting(chain([(2, 4)] * 4), 4, memory=1000)
    field = pickle.loads(pickle.dumps(prepared(of, 8, more, 0)))
    rows = {row.name: row for row in field.rows(of.cluster)}
    mine, plain = rows["mine"], rows["1F1B with flush"]
    assert isinstance(mine, Row)
    assert isinstance(plain, Row)
    assert mine.period_ns == plain.period_ns
    assert mine.detail == "equal times, as given"
    assert isinstance(rows["torch"], Absent)
    assert rows["torch"].reason == "the chain has too few layers or tied ones"
