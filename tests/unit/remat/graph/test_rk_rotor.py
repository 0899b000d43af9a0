"""RK-Rotor: the best of all schedules of its kind, replayed block by block."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from pipeplan.errors import InputError
from pipeplan.remat.graph.blocks.options import BlockOption
from pipeplan.remat.graph.blocks.rk_rotor import ChainBlock, RkRotor, RotorStep


def random_chain(seed: int, length: int) -> list[ChainBlock]:
    """Blocks of three options, small sizes."""
    draw = Random(seed)
    found = []
    for _ in range(length):
        forward, value, gradient = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 4)
        options = [
            BlockOption(
                (),
                value + saved + draw.randint(0, 3),
                saved + gradient + draw.randint(1, 4),
                saved,
                3 * forward + again,
            )
            for saved, again in ((6, 0), (3, draw.randint(1, 3)), (1, forward))
        ]
        found.append(ChainBlock(options, value, gradient, forward, value + draw.randint(0, 3)))
    return found


def schedules(chain: list[ChainBlock], begin: int, end: int) -> Iterator[list[RotorStep]]:
    """All that the two cases (2.20) and (2.21) give, without any bytes."""
    for index in range(len(chain[begin].options)):
        rests = [[]] if end == begin + 1 else schedules(chain, begin + 1, end)
        for rest in rests:
            yield [RotorStep(begin, index), *rest, RotorStep(begin, index, backward=True)]
    for place in range(begin + 1, end):
        alone = [RotorStep(each, None) for each in range(begin, place)]
        for later in schedules(chain, place, end):
            for earlier in schedules(chain, begin, place):
                yield [*alone, *later, *earlier]


def _time(chain: list[ChainBlock], steps: list[RotorStep]) -> int:
    return sum(
        chain[each.block].forward_ns
        if each.option is None
        else 0
        if each.backward
        else chain[each.block].options[each.option].time_ns
        for each in steps
    )


def _needs(chain: list[ChainBlock], steps: list[RotorStep]) -> int:
    """Bytes by replay: values that blocks start from, saved bytes, the gradient that waits."""
    peak, gradient = 0, 0
    values: set[int] = set()
    saved: dict[int, int] = {}
    for position, step in enumerate(steps):
        block, before = chain[step.block], step.block - 1
        held = sum(chain[each].value_bytes for each in values)
        held += sum(size for each, size in saved.items() if each != step.block)
        if step.backward:
            assert step.option is not None
            peak = max(peak, held + block.options[step.option].backward_peak)
            del saved[step.block]
            gradient = chain[before].gradient_bytes if step.block else 0
        else:
            option = None if step.option is None else block.options[step.option]
            own = block.forward_peak if option is None else option.forward_peak
            peak = max(peak, held + own + gradient)
            values.add(step.block)
            if option is not None:
                saved[step.block] = option.saved
        values = {each for each in values if _wanted(each, steps[position + 1 :])}
    return peak


def _wanted(value: int, later: list[RotorStep]) -> bool:
    """Whether the block behind a value uses it before it is made again."""
    for each in later:
        if each.block == value + 1:
            return True
        if each.block == value:
            return False
    return False


@pytest.mark.parametrize("seed", range(20))
def test_best_of_all_schedules(seed: int) -> None:
    """At every memory: the least time of all schedules whose own accounting fits."""
    chain = random_chain(seed, 3)
    whole = [(_time(chain, steps), _needs(chain, steps)) for steps in schedules(chain, 0, 3)]
    table = RkRotor(chain, 60, slots=60)
    assert table.unit == 1
    for memory in range(61):
        fitting = [time for time, need in whole if need <= memory]
        assert table.time_ns(memory) == min(fitting, default=None)
        steps = table.steps(memory)
        assert (steps is None) == (not fitting)
        if steps is not None:
            assert _time(chain, steps) == min(fitting)
            assert _needs(chain, steps) <= memory


def test_too_long_a_chain() -> None:
    """A table that is too large is refused by name."""
    with pytest.raises(InputError, match="blocks"):
        RkRotor(random_chain(0, 2), 10, slots=10**9)
