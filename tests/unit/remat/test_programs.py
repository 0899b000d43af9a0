"""The judge of device programs, by hand: rules, bytes, times; the program that keeps all."""

from __future__ import annotations

from random import Random

import pytest

from pipeplan.device_program import Instruction, InstructionKind
from pipeplan.operator_graph import OperatorGraph, Phase, StorageKind
from pipeplan.remat import HostLink
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.device_programs import random_program, recomputing
from tests.operator_graphs import (
    BUFFER,
    GX,
    KEEP_ALL,
    MASK,
    OPERATIONS,
    STATIC,
    STORAGES,
    H,
    W,
    X,
    hand,
    program,
)

SECOND = 10**9


def before(mark: str, *lines: str) -> list[str]:
    """KEEP_ALL with `lines` before `mark`."""
    at = KEEP_ALL.index(mark)
    return [*KEEP_ALL[:at], *lines, *KEEP_ALL[at:]]


def without(*lines: str) -> list[str]:
    """KEEP_ALL without `lines`."""
    return [line for line in KEEP_ALL if line not in lines]


def test_everything_once_in_the_order_of_the_graph() -> None:
    """Updates before the end of the forward, frees at the latest use, and it is allowed."""
    assert keep_all(hand()) == program(KEEP_ALL)


def test_bytes_of_each_step_are_those_counted_by_hand() -> None:
    """Storages, workspace, static bytes; the peaks, what is saved, and the times."""
    outcome = judge(hand(), keep_all(hand()))
    assert outcome.violations == ()
    base = STATIC + 10
    forward = [base + 25 + 7, base + 25 + 12, base + 37, base + 37]
    turn = [base + 25 + 8 + 8] * 3
    inputs = [base + 33 + 20 + 1, base + 53, base + 33, base + 25 + 10, base + 35, base + 30]
    weights = [base + 30 + 100, base + 130, base + 110, base + 110]
    assert [step.bytes for step in outcome.steps] == [*forward, *turn, *inputs, *weights]
    assert (outcome.forward_peak_bytes, outcome.backward_peak_bytes) == (base + 37, base + 130)
    assert (outcome.peak_bytes, outcome.peak_step) == (base + 130, 13)
    assert (outcome.static_bytes, outcome.saved_bytes) == (STATIC, 25)
    assert (outcome.forward_ns, outcome.backward_ns, outcome.makespan_ns) == (8, 12, 20)


def test_what_is_there_already_is_made_anew_and_dropped() -> None:
    """(A2), (B2): its bytes count during the run alone."""
    lines = [*before("run 3", "free 4", "run 0", "free 3")]
    outcome = judge(hand(), program(lines))
    assert outcome.violations == ()
    plain = judge(hand(), program(KEEP_ALL))
    at = lines.index("run 0", 1)
    held = plain.steps[at - 2].bytes - 8 - 5
    assert outcome.steps[at].bytes == held + 25 + 7
    kept = program([*before("end F", "run 0")])
    assert judge(hand(), kept).violations == ()
    assert judge(hand(), kept).saved_bytes == 25
    assert judge(hand(), kept).forward_peak_bytes == STATIC + 10 + 33 + 25 + 7


RULES = {
    "(A1)": [before("run 0", "run 5"), before("run 0", "free 12")],
    "(A2)": [
        without("run 0"),
        before("run 1", "free 3"),
        before("end F", "run 2"),
        before("run 4", "free 0"),
    ],
    "(A5)": [
        before("run 1", "free 1"),
        before("run 0", "free 3"),
        before("run 2", "offload 4", "free 4"),
        before("run 2", "offload 4", "wait 4", "prefetch 4", "free 4"),
    ],
    "(A6)": [
        before("run 1", "offload 0"),
        before("run 1", "offload 6"),
        before("run 2", "prefetch 3"),
        before("run 2", "wait 3"),
        before("run 2", "offload 4", "offload 4"),
    ],
    "(A7)": [
        before("free 7", "accumulate 7"),
        before("accumulate 9", "accumulate 8"),
        before("accumulate 9", "free 9"),
        without("accumulate 9"),
        before("end F", "accumulate 5"),
    ],
    "(A8)": [
        without("update 5"),
        before("update 5", "update 5"),
        before("run 1", "update 5"),
        before("free 5", "update 6"),
        before("free 6", "update 5"),
    ],
    "(A9)": [
        before("end F", "free 6"),
        before("end F", "offload 6"),
        before("run 2", "end F"),
    ],
    "(A10)": [
        before("run 3", "end I"),
        before("run 4", "end I"),
        before("run 1", "end I"),
        before("run 4", "free 10"),
        before("run 4", "offload 10"),
    ],
    "(A11)": [
        without("free 9"),
        without("end I"),
        without("free 6"),
        before("run 4", "offload 1", "wait 1"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "lines"), [(rule, lines) for rule, cases in RULES.items() for lines in cases]
)
def test_a_program_that_breaks_a_rule_is_refused(rule: str, lines: list[str]) -> None:
    """By the rule's number; the same program without the change keeps all rules."""
    (found,) = judge(hand(), program(lines)).violations
    assert rule in found


def test_a_buffer_is_read_for_the_first_time_before_it_is_updated() -> None:
    """(A4): and may be read again behind it by what does not depend on it."""
    early = OPERATIONS[1].model_copy(update={"reads": (X,)})
    late = OPERATIONS[0].model_copy(update={"reads": (X, W, BUFFER)})
    graph = hand(operations=(early, late))
    (found,) = judge(graph, program(["run 0", "update 5", "run 1"])).violations
    assert found == "step 2, run 1: (A4) reads buffer 2 (buffer), which has been updated already"
    again = ["run 0", "run 1", "update 5", "run 1"]
    assert "(A4)" not in str(judge(graph, program(again)).violations)
    kept = [str(each) for each in keep_all(graph).instructions]
    assert kept.index("update 5") > kept.index("run 1")


def test_what_runs_once_does_not_run_again() -> None:
    """(A3): refused by its own index."""
    twice = program(before("run 1", "run 0"))
    assert judge(hand(), twice).violations == ()
    once = OPERATIONS[0].model_copy(update={"once": True})
    (found,) = judge(hand(operations=(once, *OPERATIONS[1:])), twice).violations
    assert found == "step 1, run 0: (A3) runs a second time, need once"


def test_random_numbers_are_drawn_in_the_order_of_the_graph() -> None:
    """(A3): for the first time; again in any order, and forwards before the end of the forward."""
    second = OPERATIONS[1].model_copy(update={"random": True, "reads": (BUFFER,)})
    graph = hand(operations=(OPERATIONS[0], second, *OPERATIONS[2:]))
    (found,) = judge(graph, program(["run 1", "run 0"])).violations
    assert found.startswith("step 0, run 1: (A3) draws random numbers before operation 0")
    again = judge(graph, program(["run 0", "run 1", "free 6", "run 1", "run 0"]))
    assert "(A3)" not in str(again.violations)
    (found,) = judge(graph, program(["run 0", "end F"])).violations
    assert found == "step 1, end F: (A3) operation 1 draws random numbers and has not run"


def test_an_input_is_the_callers_one_that_was_received_is_not() -> None:
    """(A5): the first stays where it is and is not read any more, the second one's bytes go."""
    lines = [*KEEP_ALL, "free 0"]
    owned = STORAGES[X].model_copy(update={"kind": StorageKind.RECEIVED})
    received = hand(storages=(owned, *STORAGES[1:]))
    assert judge(hand(), program(lines)).steps[-1].bytes == STATIC + 10 + 10
    assert judge(received, program([*lines, "free 10"])).violations[0].count("(A10)") == 1
    outcome = judge(received, program([*before("run 4", "offload 0", "wait 0", "prefetch 0")]))
    assert "(A2) reads storage 0 (x), which is on its way back" in outcome.violations[0]
    (left,) = judge(received, program(KEEP_ALL)).violations
    assert "(A11) storage 0 (x) is still on the device" in left
    assert judge(received, program(lines)).violations == ()
    assert keep_all(received) == program(before("free 8", "free 0"))


def test_parameters_may_wait_on_the_host() -> None:
    """And are back at the end (A11)."""
    away = ["offload 1", "wait 1", "prefetch 1", "wait 1"]
    outcome = judge(hand(), program(before("end F", *away)))
    assert outcome.violations == ()
    assert outcome.steps[5].bytes == outcome.steps[4].bytes
    assert outcome.steps[8].host_bytes == 0
    assert outcome.host_peak_bytes == 100


def test_a_budget_is_reported_where_it_is_exceeded_first() -> None:
    """And the replay goes on."""
    outcome = judge(hand(), keep_all(hand()), budget=STATIC + 10 + 53)
    assert outcome.violations == (
        f"step 7, run 2: holds {STATIC + 64} bytes, need at most {STATIC + 63}",
    )
    assert len(outcome.steps) == len(KEEP_ALL)


@pytest.mark.parametrize("duplex", [False, True])
def test_copies_run_beside_computes(duplex: bool) -> None:
    """(T1)-(T4): 20 bytes go while nothing computes, 5 come back behind them or beside them."""
    lines = before("run 2", "offload 4", "offload 3", "prefetch 4", "wait 3")
    at = lines.index("run 2")
    lines[at:at] = ["prefetch 3", "wait 3"]
    outcome = judge(hand(), program(lines), link=HostLink(SECOND, duplex))
    assert outcome.violations == ()
    # One way: mask out 8-13, h out 13-33, mask back 33-38, h back 38-58.
    # Two: mask out 8-13, h out 13-33, mask back 13-18, h back 33-53.
    begin = 33 if duplex else 38
    steps = {str(step.instruction): step for step in outcome.steps}
    assert (steps["prefetch 4"].start_ns, steps["prefetch 4"].end_ns) == (
        (13, 18) if duplex else (33, 38)
    )
    assert (steps["prefetch 3"].start_ns, steps["prefetch 3"].end_ns) == (begin, begin + 20)
    assert outcome.makespan_ns == begin + 20 + 12
    assert outcome.idle_ns == begin + 20 - 8


def test_a_copy_out_holds_its_bytes_until_it_is_known_to_have_ended() -> None:
    """(B3): then they are gone, and on the host; saved bytes count the worst state (B5)."""
    on_its_way = judge(hand(), program(before("end F", "offload 3")))
    gone = judge(hand(), program(before("end F", "offload 3", "wait 3")))
    assert (on_its_way.saved_bytes, gone.saved_bytes) == (25, 5)
    assert gone.host_peak_bytes == STORAGES[H].bytes


def test_what_waits_on_the_host_may_be_given_up_or_computed_again() -> None:
    """(A5) there, and (A2): the run leaves it where it is."""
    lines = before("run 2", "offload 4", "wait 4", "run 0", "prefetch 4", "wait 4")
    assert judge(hand(), program(lines)).violations == ()
    lines = before("run 2", "offload 4", "wait 4", "free 4", "run 0")
    outcome = judge(hand(), program(lines))
    assert outcome.violations == ()
    assert outcome.steps[lines.index("run 0", 1)].host_bytes == 0


def test_the_end_of_the_inputs_comes_where_their_gradients_are_there() -> None:
    """Behind the last I where the caller wants none; behind `end F` where there is no I."""
    assert hand().operations[3].writes == (GX,)
    bare = hand(input_gradients=())
    text = [str(each) for each in keep_all(bare).instructions]
    assert text.index("end I") > text.index("run 3")
    assert text.index("end I") < text.index("run 4")
    weights = [each.model_copy(update={"phase": Phase.WEIGHT_GRADIENT}) for each in OPERATIONS[2:]]
    none = OperatorGraph(**{**dict(bare), "operations": (*OPERATIONS[:2], *weights)})
    assert judge(none, keep_all(none)).violations == ()
    kinds = [each.kind for each in keep_all(none).instructions]
    at = kinds.index(InstructionKind.END_F)
    assert kinds[at + 1 : at + 3] == [InstructionKind.ACCUMULATE, InstructionKind.END_I]
    assert Instruction(InstructionKind.FREE, MASK) in keep_all(none).instructions


def test_programs_drawn_at_random_are_allowed() -> None:
    """With recomputation and the host; each is read back from its text, and none is like all."""
    graph, seen = hand(), set()
    for seed in range(60):
        drawn = random_program(graph, Random(seed), host=seed % 2 == 1)
        assert judge(graph, drawn).violations == ()
        seen.add(drawn.to_text())
    kinds = {line.split(" ")[0] for text in seen for line in text.splitlines()[1:]}
    assert {"offload", "prefetch", "wait"} <= kinds
    assert len(seen) > 10


def test_what_is_not_kept_is_computed_again() -> None:
    """And nothing else is."""
    assert recomputing(hand(), lambda _: True).instructions.count(_run(0)) == 1
    again = recomputing(hand(), lambda storage: storage == MASK)
    assert [again.instructions.count(_run(index)) for index in range(5)] == [2, 1, 1, 1, 1]
    assert judge(hand(), again).saved_bytes == 5


def _run(index: int) -> Instruction:
    return Instruction(InstructionKind.RUN, index)
