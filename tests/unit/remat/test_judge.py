"""The vocabulary, the device's rules and the clock of rematerialization, counted by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeplan.errors import InputError
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.schedules.costs import Costs, SharedStorage, from_chain
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule
from tests.documents import data
from tests.remat_brute import random_costs

HAND = Costs(
    names=("a", "b"),
    forward=(1, 2),
    light=(5, 7),
    backward=(3, 4),
    boundary=(10, 20, 1),
    gradient=(20, 1),
    saved_input=(10, 5),
    saved=(7, 3),
    saved_output=(6, 0),
    forward_work=(2, 0),
    light_work=(9, 3),
    backward_work=(1, 4),
    static=100,
)
PLAIN = "pipeplan-remat/1 2\nF_all 0\nF_all 1\nfree 2\nB 1\nB 0\n"


def test_bytes_of_each_step_are_those_counted_by_hand() -> None:
    """Input, output, tape, what two tapes share of a boundary, gradients and working space."""
    outcome = judge(HAND, DeviceSchedule.from_text(PLAIN))
    assert outcome.violations == ()
    first = 100 + 10 + 7 + 2 + 20
    second = 100 + (7 + 10) + 20 + 3 + 0 + 1
    kept = 100 + (7 + 10) + 6 + 3
    loss = kept + 1
    last, final = kept + 1 + 4 + 20, 100 + (7 + 10) + 6 + 20 + 1 + 0
    assert [step.bytes for step in outcome.steps] == [first, second, loss, last, final]
    assert outcome.makespan_ns == 10
    assert outcome.peak_step.op == DeviceOp(DeviceOpKind.BACKWARD, 1)


def test_kept_inputs_and_dropped_ones() -> None:
    """A kept input stays beside the output; one that is given up makes place for it."""
    text = "pipeplan-remat/1 2\nF_ck 0\nF_all 1\nfree 2\nB 1\nF_all 0\nfree 1\nB 0\n"
    outcome = judge(HAND, DeviceSchedule.from_text(text))
    assert outcome.violations == ()
    assert [step.bytes for step in outcome.steps[:4]] == [139, 134, 119, 143]
    assert outcome.steps[4].bytes == 100 + 10 + 20 + 7 + 2 + 20
    assert outcome.makespan_ns == 5 + 10


def test_transfers_overlap_computation_and_wait_joins_them() -> None:
    """An offload runs beside a forward, a prefetch behind it on the one channel."""
    text = (
        "pipeplan-remat/1 2\nF_all 0\nF_all 1\nfree 2\noffload 0\nwait 0\nprefetch 0\n"
        "B 1\nwait 0\nB 0\n"
    )
    outcome = judge(HAND, DeviceSchedule.from_text(text), channel=HostLink(10**10))
    assert outcome.violations == ()
    times = {str(step.op): (step.start_ns, step.end_ns) for step in outcome.steps}
    assert times["offload 0"] == (3, 4)
    assert times["prefetch 0"] == (4, 5)
    assert times["B 1"] == (4, 8)
    assert outcome.makespan_ns == 11
    assert [step.moved for step in outcome.steps if step.moved] == [10, 10]
    assert outcome.steps[5].bytes == outcome.steps[3].bytes


SWAP = "pipeplan-remat/1 2\nF_all 0\nF_all 1\nfree 2\noffload 0\n"


def test_what_comes_takes_the_place_of_what_left_before_it() -> None:
    """On one way a prefetch behind an offload adds only what exceeds it; on two it adds all."""
    text = SWAP + "wait 0\noffload 1\nprefetch 0\nwait 0\nprefetch 1\nwait 1\nB 1\nB 0\n"
    one = judge(HAND, DeviceSchedule.from_text(text), channel=HostLink(10**9))
    two = judge(HAND, DeviceSchedule.from_text(text), channel=HostLink(10**9, duplex=True))
    assert one.violations == two.violations == ()
    zero, first = 10, 7 + 6
    rest = 100 + 3
    assert [step.bytes for step in one.steps[3:9]] == [
        rest + zero + first,
        rest + zero + first,
        rest + first,
        rest + first,
        rest + first,
        rest + zero + first,
    ]
    assert [step.bytes for step in two.steps[6:8]] == [rest + zero + first] * 2
    assert [step.host_bytes for step in one.steps[3:9]] == [10, 10, 23, 23, 13, 13]
    assert one.host_peak_bytes == 23
    assert one.makespan_ns == 3 + 2 * (10 + 13) + 7
    assert one.idle_ns == 2 * (10 + 13)
    # Both directions at once: 13 ns out beside 10 ns back.
    assert two.makespan_ns == 3 + 10 + 13 + 13 + 7


@pytest.mark.parametrize("duplex", [False, True])
def test_a_unit_may_be_called_back_while_it_leaves(duplex: bool) -> None:
    """Its way back begins behind its own way out, whatever the directions share."""
    text = SWAP + "prefetch 0\nwait 0\nB 1\nB 0\n"
    found = judge(HAND, DeviceSchedule.from_text(text), channel=HostLink(10**9, duplex))
    assert found.violations == ()
    assert found.makespan_ns == 3 + 10 + 10 + 7


def test_with_two_ways_a_wait_ends_only_its_own_direction() -> None:
    """Waiting for what comes says nothing about what leaves meanwhile."""
    text = SWAP + "wait 0\noffload 1\nprefetch 0\nwait 0\nprefetch 1\nwait 1\nB 1\nB 0\n"
    steps = judge(HAND, DeviceSchedule.from_text(text), channel=HostLink(10**9, duplex=True)).steps
    assert steps[8].bytes == 103 + 13 + 10
    late = SWAP + "wait 0\noffload 1\nprefetch 0\nwait 0\nwait 1\nprefetch 1\nwait 1\nB 1\nB 0\n"
    assert (
        judge(HAND, DeviceSchedule.from_text(late), channel=HostLink(1, duplex=True)).violations
        == ()
    )
    found = judge(HAND, DeviceSchedule.from_text(late), channel=HostLink(1)).violations
    assert found == ("step 8, wait 1: no transfer to wait for",)


@pytest.mark.parametrize(
    ("ops", "rule"),
    [
        ("B 1", "no tape"),
        ("F_all 1", "not on the device"),
        ("F_none 0\nF_all 0", "not on the device"),
        ("F_all 0\nF_all 1\nfree 2\nB 0", "the next backward"),
        ("F_ck 0\nF_all 0", "there already"),
        ("F_all 0\nF_all 1\nfree 2\noffload 1\nwait 1\nB 1", "needs unit 1"),
        ("F_all 0\nF_all 1\nfree 2\noffload 1\nwait 1\nprefetch 1\nB 1", "needs unit 1"),
        ("F_ck 0\noffload 0\nF_none 0", "there already"),
        ("offload 0\nF_none 0", "copied to the host"),
        ("prefetch 0", "unit is on the device"),
        ("wait 0", "no transfer"),
        ("free 1", "nothing to free"),
        ("offload 1", "empty"),
        ("F_all 0\nF_all 1\nfree 2", "missing"),
    ],
)
def test_each_rule_is_enforced(ops: str, rule: str) -> None:
    """A schedule that breaks a rule is told which, at which step."""
    found = judge(HAND, DeviceSchedule.from_text(f"pipeplan-remat/1 2\n{ops}\n")).violations
    assert len(found) == 1
    assert rule in found[0]


def test_the_budget_is_kept_at_every_step() -> None:
    """The first step over the budget is named; at the peak itself there is none."""
    schedule = DeviceSchedule.from_text(PLAIN)
    peak = judge(HAND, schedule).peak_bytes
    assert judge(HAND, schedule, peak).violations == ()
    assert "holds 151 bytes, need at most 150" in judge(HAND, schedule, peak - 1).violations[0]


def test_text_round_trip() -> None:
    """A schedule survives its text form, with every kind of operation."""
    ops = tuple(DeviceOp(kind, index) for index, kind in enumerate(DeviceOpKind))
    schedule = DeviceSchedule(9, ops)
    assert DeviceSchedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x 2",
        "pipeplan-remat/1",
        PLAIN + "B",
        PLAIN + "B 2",
        PLAIN + "jump 1",
        PLAIN + "B -1",
        PLAIN + "B 01",
        PLAIN + "B 1 1",
        "pipeplan-remat/1 0",
    ],
)
def test_broken_texts_are_refused_with_their_line(text: str) -> None:
    """Nothing but well-formed lines with indices inside the chain is read."""
    with pytest.raises(InputError, match=r"line [0-9]+: got"):
        DeviceSchedule.from_text(text)


def test_a_schedule_of_another_chain_is_refused() -> None:
    """The number of layers must agree."""
    with pytest.raises(InputError, match="3 layers, need 2"):
        judge(HAND, DeviceSchedule(3, ()))


def test_everything_kept_agrees_with_the_stage_formulas() -> None:
    """With one layer the peak is (M2)-(M3) of docs/reference/model.md on one stage."""
    for seed in range(50):
        c = replace(random_costs(random.Random(seed), 1), static=0)
        forward = c.boundary[0] + c.saved[0] + c.forward_work[0] + c.boundary[1]
        backward = c.saved_input[0] + c.saved[0] + c.saved_output[0]
        backward += c.backward_work[0] + c.gradient[0]
        assert judge(c, keep_all(c)).peak_bytes == max(forward, backward)


def test_costs_of_a_chain_charge_what_it_says() -> None:
    """Sizes come from the layers; what a forward needs that keeps nothing may not be known."""
    from pipeplan.chain import Chain

    chain = Chain.from_data(data("chain"))
    costs, layer = from_chain(chain), chain.layers[0]
    assert costs.layers == len(chain.layers)
    assert costs.boundary[0] == chain.input_bytes
    assert layer.forward_light_workspace_bytes is None
    assert costs.light_work[0] == layer.forward_workspace_bytes + layer.saved_bytes
    known = layer.model_copy(update={"forward_light_workspace_bytes": -1})
    told = chain.model_copy(update={"layers": (known, *chain.layers[1:])})
    assert from_chain(told).light_work == (-1, *costs.light_work[1:])
    assert costs.static == sum(
        each.weight_bytes + each.gradient_bytes + each.optimizer_bytes for each in chain.layers
    )


def test_what_rides_along_counts_once_and_what_a_backward_leaves_stays() -> None:
    """A storage of two boundaries counts once; what a backward leaves counts to the end."""
    rides = replace(
        HAND,
        storages=(
            SharedStorage(10, frozenset({0, 1}), frozenset({0})),
            SharedStorage(10, frozenset({1}), frozenset({0})),
            SharedStorage(1, frozenset({2}), frozenset()),
        ),
        left=(0, 50),
    )
    plain, once = (judge(costs, DeviceSchedule.from_text(PLAIN)).steps for costs in (HAND, rides))
    # Behind layer 0 its tape keeps 10 of boundary 0 and boundary 1 is full: 10 are in both.
    apart = [first.bytes - second.bytes for first, second in zip(plain, once, strict=True)]
    assert apart[0] == 0
    assert apart[1] == 10
    assert apart[4] == (10 + 6) - (10 + 10) - 50
