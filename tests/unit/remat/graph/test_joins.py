"""Joins with unequal steps: found in graphs, the best of all nested schedules, judged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeplan.errors import InputError
from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.remat.graph import Budget, GraphProblem, SearchLimits, solve
from pipeplan.remat.graph.blocks.rk_rotor import ChainBlock, RkRotor, RotorStep
from pipeplan.remat.graph.joins.join import JoinChains
from pipeplan.remat.graph.joins.split import find_join
from pipeplan.remat.graph.joins.table import JoinTable, PartStep, Position
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import further, peak_bytes
from pipeplan.remat.programs import judge
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from tests import grids
from tests.unit.remat.graph.test_rk_rotor import random_chain, schedules

Chains = Sequence[Sequence[ChainBlock]]


def _parts(seed: int, *lengths: int) -> list[list[ChainBlock]]:
    """Chains whose gradients are as large as their values, with two options each."""
    return [
        [
            replace(block, gradient_bytes=block.value_bytes, options=block.options[:2])
            for block in random_chain(100 * seed + index, length)
        ]
        for index, length in enumerate(lengths)
    ]


def _nested(parts: Chains, position: Position) -> Iterator[list[PartStep]]:
    """All that the ways of a table give, without any bytes; the last part is the tail."""
    branches, tail = parts[:-1], parts[-1]
    if all(at == len(each) for at, each in zip(position, branches, strict=True)):
        yield from (
            [PartStep(len(branches), each) for each in steps]
            for steps in schedules(tail, 0, len(tail))
        )
        return
    for branch, at in enumerate(position):
        for end in range(at + 1, len(branches[branch]) + 1):
            rest = [*_nested(parts, (*position[:branch], end, *position[branch + 1 :]))]
            ways = [
                ([RotorStep(each, None) for each in range(at, end)], again)
                for again in schedules(branches[branch], at, end)
            ]
            if end == at + 1:
                ways += [
                    ([RotorStep(at, index)], [RotorStep(at, index, backward=True)])
                    for index in range(len(branches[branch][at].options))
                ]
            for ahead, back in ways:
                for between in rest:
                    yield [
                        *(PartStep(branch, each) for each in ahead),
                        *between,
                        *(PartStep(branch, each) for each in back),
                    ]


def _time(parts: Chains, steps: Sequence[PartStep]) -> int:
    total = 0
    for each in steps:
        block, step = parts[each.part][each.step.block], each.step
        if step.option is None:
            total += block.forward_ns
        elif not step.backward:
            total += block.options[step.option].time_ns
    return total


def _needs(parts: Chains, steps: Sequence[PartStep]) -> int:
    """Bytes by replay: values that are still read, what options save, gradients that wait."""
    tail, peak = len(parts) - 1, 0
    values: set[tuple[int, int]] = set()
    saved: dict[tuple[int, int], int] = {}
    waiting: dict[int, int] = {}
    for position, each in enumerate(steps):
        part, step = each.part, each.step
        at, block = (part, step.block), parts[part][step.block]
        held = sum(parts[p][b].value_bytes for p, b in values)
        held += sum(size for key, size in saved.items() if key != at)
        if step.backward:
            assert step.option is not None
            others = sum(size for p, size in waiting.items() if p != part)
            peak = max(peak, held + block.options[step.option].backward_peak + others)
            del saved[at]
            waiting[part] = parts[part][step.block - 1].gradient_bytes if step.block else 0
            if at == (tail, 0):
                waiting |= {p: parts[p][-1].gradient_bytes for p in range(tail)}
        else:
            option = None if step.option is None else block.options[step.option]
            own = block.forward_peak if option is None else option.forward_peak
            peak = max(peak, held + own + sum(waiting.values()))
            values.add(at)
            if option is not None:
                saved[at] = option.saved
        values = {key for key in values if _wanted(parts, key, steps[position + 1 :])}
    return peak


def _wanted(parts: Chains, value: tuple[int, int], later: Sequence[PartStep]) -> bool:
    """Whether the block behind a value uses it before it is made again."""
    part, block = value
    last = part < len(parts) - 1 and block == len(parts[part]) - 1
    reader = (len(parts) - 1, 0) if last else (part, block + 1)
    for each in later:
        if (each.part, each.step.block) == reader:
            return True
        if (each.part, each.step.block) == value:
            return False
    return False


@pytest.mark.parametrize("lengths", [(1, 2, 1), (2, 2, 1), (1, 1, 1, 1)])
@grids.first(2, seed=range(12))
def test_best_of_all_nested_schedules(seed: int, lengths: tuple[int, ...]) -> None:
    """At every memory: the least time of all schedules whose own accounting fits; its steps do."""
    parts = _parts(seed, *lengths)
    start = (0,) * (len(parts) - 1)
    every = [(_time(parts, each), _needs(parts, each)) for each in _nested(parts, start)]
    table = JoinTable(parts[:-1], parts[-1], 60, slots=60)
    assert table.unit == 1
    for memory in range(61):
        best = min((time for time, need in every if need <= memory), default=None)
        assert table.time_ns(memory) == best
        steps = table.steps(memory)
        assert (steps is None) == (best is None)
        if steps is not None:
            assert _time(parts, steps) == best
            assert _needs(parts, steps) <= memory


def test_a_branch_waits_for_what_it_needs() -> None:
    """Where the second branch needs all of the first one, no step of it comes earlier."""
    parts = _parts(3, 2, 2, 1)
    needs = [[(0, 0)] * 3, [(0, 0), (2, 0), (2, 0)]]
    table = JoinTable(parts[:-1], parts[-1], 60, slots=60, needs=needs)
    found = [steps for memory in range(61) if (steps := table.steps(memory)) is not None]
    assert found
    for steps in found:
        order = [each.part for each in steps if not each.step.backward]
        assert [each.step.block for each in steps[: order.index(1)]] == [0, 1]


def test_one_branch_is_a_chain() -> None:
    """Never faster than RK-Rotor on both in a row, which need not keep the branch's value."""
    branch, tail = _parts(5, 3, 2)
    table, whole = JoinTable([branch], tail, 60, slots=60), RkRotor([*branch, *tail], 60, slots=60)
    for memory in range(61):
        mine, best = table.time_ns(memory), whole.time_ns(memory)
        assert mine is None or (best is not None and mine >= best)
    assert table.time_ns(60) == whole.time_ns(60)


def towers(*branches: Sequence[tuple[int, int]]) -> OperatorGraph:
    """Towers of (bytes, ns) whose last values one operation reads; backwards take longer."""
    storages = [Storage(name="x", bytes=8, kind=StorageKind.INPUT)]
    operations: list[Operation] = []
    inputs: list[list[int]] = []

    def made(size: int, kind: StorageKind) -> int:
        storages.append(Storage(name=str(len(storages)), bytes=size, kind=kind))
        return len(storages) - 1

    def run(phase: Phase, reads: Sequence[int], writes: Sequence[int], time_ns: int) -> None:
        operations.append(
            Operation(
                name=f"o{len(operations)}",
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                time_ns=time_ns,
            )
        )

    for branch in branches:
        chain = [0]
        for size, time_ns in branch:
            chain.append(made(size, StorageKind.ACTIVATION))
            run(Phase.FORWARD, chain[-2:-1], chain[-1:], time_ns)
        inputs.append(chain)
    ends = [chain[-1] for chain in inputs]
    loss, tangent = made(4, StorageKind.ACTIVATION), made(4, StorageKind.TANGENT)
    run(Phase.FORWARD, ends, [loss], 1)
    front = [made(storages[end].bytes, StorageKind.GRADIENT) for end in ends]
    run(Phase.INPUT_GRADIENT, [tangent, *ends], front, 2)
    for branch, chain, gradient in reversed([*zip(branches, inputs, front, strict=True)]):
        came = gradient
        for (before, _), (_, time_ns) in reversed([*zip(pairwise(chain), branch, strict=True)]):
            goes = made(storages[before].bytes, StorageKind.GRADIENT)
            run(Phase.INPUT_GRADIENT, [came, before], [goes], 2 * time_ns)
            came = goes
    return OperatorGraph(
        name="towers",
        storages=tuple(storages),
        operations=tuple(operations),
        outputs=(loss,),
        input_gradients=(),
    )


UNEQUAL = towers([(9, 3), (5, 1), (7, 4)], [(4, 6), (8, 2)])


def test_parts_of_towers() -> None:
    """Two branches with their backwards, the tail, and nothing else."""
    found = find_join(Ledger(UNEQUAL))
    assert found is not None
    assert [each.operations for each in found.branches] == [(0, 1, 2, 9, 10, 11), (3, 4, 7, 8)]
    assert found.tail.operations == (5, 6)
    assert found.loose == ()


def test_unequal_steps_against_the_proven_optimum() -> None:
    """A block per layer: a plan within every budget, at 14 of 19 the proven optimum.

    At the other five the optimum gives up a value in the midst of a branch, and keeps those around
    it, which no nested schedule does.
    """
    ledger = Ledger(UNEQUAL)
    found = find_join(ledger)
    assert found is not None
    chains = JoinChains(ledger, found, most=2)
    assert [len(each.blocks) for each in chains.chains] == [3, 2, 1]
    first = peak_bytes(ledger, ledger.first_order())
    budgets = range(ledger.least_peak, first + 1)
    exact = solve(GraphProblem(UNEQUAL), [*map(Budget, budgets)], 60, "intervals").answers
    equal = 0
    for budget, order, answer in zip(budgets, chains.orders(budgets), exact, strict=True):
        assert answer.proven
        if answer.option is None:
            assert order is None
            continue
        assert order is not None
        assert not judge(UNEQUAL, program(ledger, order), budget).violations
        least = answer.option.outcome.compute_ns - UNEQUAL.compute_ns
        assert further(ledger, order) >= least
        equal += further(ledger, order) == least
    assert (equal, len(budgets)) == (14, 19)


def test_random_operations_keep_their_order() -> None:
    """The last layer of the first tower could be of the tail, but the other tower draws after it.

    It adds what went around a random operation, and takes no time: both cuts have equal shares.
    """
    plain = towers([(9, 3), (5, 0), (9, 0)], [(4, 6), (8, 2)])
    changes = {1: {"random": True}, 2: {"reads": (1, 2)}, 3: {"random": True}}
    operations = [
        each.model_copy(update=changes.get(index, {}))
        for index, each in enumerate(plain.operations)
    ]
    graph = plain.model_copy(update={"operations": tuple(operations)})
    ledger = Ledger(graph)
    budgets = range(ledger.least_peak, peak_bytes(ledger, ledger.first_order()) + 1)
    answers = solve(GraphProblem(graph), [*map(Budget, budgets)], 20, "join").answers
    assert answers[-1].option is not None


def test_a_random_operation_of_no_branch_comes_before_the_branches() -> None:
    """A short tower that the tail reads draws first: it is neither a branch nor of the tail."""
    plain = towers([(9, 1)], [(9, 6), (5, 3)], [(3, 4), (9, 4)])
    operations = [
        each.model_copy(update={"random": index < 2})
        for index, each in enumerate(plain.operations)
    ]
    graph = plain.model_copy(update={"operations": tuple(operations)})
    ledger = Ledger(graph)
    found = find_join(ledger)
    assert found is not None
    assert 0 in found.loose
    budgets = range(ledger.least_peak, peak_bytes(ledger, ledger.first_order()) + 1)
    answers = solve(GraphProblem(graph), [*map(Budget, budgets)], 20, "join").answers
    assert answers[-1].option is not None


def test_a_chain_is_no_join() -> None:
    """It is refused with what to use."""
    graph = gpt_graph(Gpt(2, width=16, heads=2, tokens=8, batch=2, vocabulary=16))
    with pytest.raises(InputError, match="no branches that meet"):
        solve(GraphProblem(graph), [Budget(2**20)], 5, "join", SearchLimits(1))


@pytest.mark.long
def test_branches_of_thirty_steps_are_planned_soon() -> None:
    """(30, 30, 30) blocks of different sizes with 40 slots take at most 5 s of CPU."""
    parts = [
        [replace(block, options=block.options[:1]) for block in random_chain(seed, 30)]
        for seed in range(3)
    ]
    (tail,) = _parts(9, 1)
    begin = time.process_time()
    table = JoinTable(parts, tail, 200, slots=40)
    assert table.steps(200) is not None
    assert time.process_time() - begin < 5
