"""Programs and patterns as text, and how a pattern unrolls."""

from __future__ import annotations

import pytest

from pipeplan.errors import InputError
from pipeplan.program import Action, ActionKind, Pattern, PeriodicAction, Program
from tests import documents

TWO_RANKS = """\
pattern k=2 semantics={semantics} microbatches=2
0: 0F0+0 0F1+0 0B0+1 0B1+1 {opt}
1: 1F0+0 1F1+0 1B0+0 1B1+0 {opt1}
"""
TWO_BW = TWO_RANKS.format(semantics="2bw", opt="0OPT1+1", opt1="1OPT1+0")
FLUSH = TWO_RANKS.format(semantics="flush", opt="", opt1="")


def test_actions() -> None:
    """The text of an action names stage, kind and micro-batch; an update has no micro-batch."""
    assert Action.parse("2F0") == Action(ActionKind.F, 2, 0)
    assert Action.parse("12SEND_B345") == Action(ActionKind.SEND_B, 12, 345)
    assert Action.parse("2OPT") == Action(ActionKind.OPT, 2)
    assert PeriodicAction.parse("2F1-3") == PeriodicAction(ActionKind.F, 2, 1, -3)


def test_offloading_round_trips() -> None:
    """OFFLOAD, FREE_O and PREFETCH are read and written again, in programs and patterns."""
    text = "0F0 0OFFLOAD0 0FREE_O0 0PREFETCH0 0B0\n"
    assert str(Program.parse(text)) == text
    assert Action.parse("3FREE_O12") == Action(ActionKind.FREE_O, 3, 12)
    period = "0OFFLOAD0+0 0B0+1 0FREE_O0+0 0PREFETCH0-1"
    pattern = f"pattern k=1 semantics=flush microbatches=2\n0: {period}\n"
    assert str(Pattern.parse(pattern)) == pattern
    assert PeriodicAction.parse("0PREFETCH0-1").kind is ActionKind.PREFETCH
    with pytest.raises(InputError, match="action: got '0FREE_O'"):
        Action.parse("0FREE_O")


def test_golden_texts() -> None:
    """The documented texts are read and written again byte for byte, and belong together."""
    pattern, program = documents.golden("pattern"), documents.golden("program")
    assert str(Pattern.parse(pattern)) == pattern
    assert str(Program.parse(program)) == program
    assert str(Pattern.parse(pattern).unroll(4)) == program


def test_unroll_2bw() -> None:
    """Under 2bw micro-batches flow across updates, one update after each complete step."""
    program = Pattern.parse(TWO_BW).unroll(4)
    assert str(program).splitlines() == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0OPT 0B2 0B3 0OPT",
        "1F0 1F1 1B0 1B1 1OPT 1F2 1F3 1B2 1B3 1OPT",
    ]


def test_a_program_that_takes_gigabytes_is_refused() -> None:
    """A pattern of a plan file may have any number of micro-batches per step."""
    pattern = Pattern.parse(TWO_BW)
    with pytest.raises(InputError, match=rf"got 1000000000 .* at most {pattern.most_unrolled}: "):
        pattern.unroll(10**9)


def test_few_micro_batches_of_a_far_shift() -> None:
    """Only periods that have one are visited, also where a shift is below zero."""
    shifts = (ActionKind.F, -2), (ActionKind.F, 0), (ActionKind.SEND_F, 10**17)
    period = tuple(PeriodicAction(kind, 0, 0, shift) for kind, shift in shifts)
    pattern = Pattern(1, "2bw", 1, (period,), ((0,),))
    actions = [(action.kind, action.microbatch) for action in pattern.actions(0, 2)]
    kinds = [ActionKind.F] * 4 + [ActionKind.SEND_F] * 2
    assert actions == list(zip(kinds, [0, 1, 0, 1, 0, 1], strict=True))


def test_unroll_flush() -> None:
    """Under flush every step drains before its update; an incomplete step has no update."""
    program = Pattern.parse(FLUSH).unroll(3)
    assert str(program).splitlines() == [
        "0F0 0F1 0B0 0B1 0OPT 0F2 0B2",
        "1F0 1F1 1B0 1B1 1OPT 1F2 1B2",
    ]


def test_unroll_later_part() -> None:
    """A run that continues at micro-batch 4 does what a longer run does from there on."""
    whole = Pattern.parse(FLUSH).unroll(6)
    head, tail = Pattern.parse(FLUSH).unroll(4), Pattern.parse(FLUSH).unroll(2, first=4)
    assert whole.ranks == tuple(a + b for a, b in zip(head.ranks, tail.ranks, strict=True))


def test_idle_rank() -> None:
    """A rank without stages has an empty line in both texts."""
    pattern = Pattern.parse("pattern k=1 semantics=2bw microbatches=1\n0: 0F0+0 0B0+0\n: \n")
    assert pattern.hosted == ((0,), ())
    assert str(pattern.unroll(1)) == "0F0 0B0\n\n"
    assert Program.parse("0F0 0B0\n\n").ranks[1] == ()
    assert Program.parse("").ranks == ()
    assert Program.parse("\n").ranks == ((),)


@pytest.mark.parametrize(
    "text",
    [
        "F0",
        "2F",
        "2G0",
        "2OPT3",
        "-2F0",
        "2F-1",
        "2F0+1",
        "2f0",
        "2F٣",
        "2F" + "9" * 30,
        "9" * 5000,
    ],
)
def test_no_action(text: str) -> None:
    """A word that is no action is refused and repeated, shortened where it is long."""
    with pytest.raises(InputError, match="action: got ") as caught:
        Program.parse(f"0F0 {text} 0B0")
    assert text[:40] in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pattern: got first line ''"),
        ("pattern", "pattern: got first line 'pattern'"),
        ("pattern k=0 semantics=2bw microbatches=1", "k=<1 or more>"),
        ("pattern k=1 semantics=3bw microbatches=1", "semantics=<2bw or flush>"),
        ("pattern k=1 semantics=2bw microbatches=0", "microbatches=<1 or more>"),
        ("pattern k=-1 semantics=2bw microbatches=1", "got first line"),
        (TWO_BW.replace("0:", "0"), "need '<stages>: <actions>'"),
        (TWO_BW.replace("0:", "0,:"), "need '<stages>: <actions>'"),
        (TWO_BW.replace("0F0+0", "0F0"), "action: got '0F0'"),
        (TWO_BW.replace("0F0+0", "0F0+99999999"), "action: got '0F0+99999999'"),
        (TWO_BW.replace("0F0+0", "0F2+0"), "rank 0: got 0F2+0, need a copy below k = 2"),
        (TWO_BW.replace("0F0+0", "1F0+0"), "rank 0: got 1F0+0, need a stage that the rank hosts"),
        (TWO_BW.replace("1:", "1,0:"), "rank 1: got stage 0 again, need it once"),
        (TWO_BW.replace("1:", "1,1:"), "rank 1: got stage 1 again, need it once"),
    ],
)
def test_no_pattern(text: str, message: str) -> None:
    """A text that is no pattern is refused with the line or action that is wrong."""
    with pytest.raises(InputError) as caught:
        Pattern.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
