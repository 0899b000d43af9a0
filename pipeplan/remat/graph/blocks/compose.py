"""From steps over blocks to one order of the whole graph."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.remat.graph.blocks.block import GraphBlock
from pipeplan.remat.graph.blocks.options import BlockOption
from pipeplan.remat.graph.blocks.rk_rotor import RotorStep
from pipeplan.remat.graph.ledger import END_F, START, Ledger, Order
from pipeplan.remat.graph.orders import tidy


def compose(
    ledger: Ledger,
    blocks: Sequence[GraphBlock],
    options: Sequence[Sequence[BlockOption]],
    steps: Sequence[RotorStep],
) -> Order:
    """The order of all operations; a run of which nothing is used is left out.

    Args:
        ledger: the whole graph.
        blocks: its chain.
        options: of each block.
        steps: what RK-Rotor decided.
    """
    order: list[int] = [START] if ledger.received else []
    ended = False
    for step in steps:
        block = blocks[step.block]
        if step.option is None:
            runs: tuple[int, ...] = tuple(range(block.graph.forwards))
        elif step.backward:
            runs = options[step.block][step.option].backward
        else:
            runs = options[step.block][step.option].forward
        order.extend(block.operations[at] for at in runs)
        if step.block == len(blocks) - 1 and step.option is not None and not ended:
            order.append(END_F)
            ended = True
    return tidy(ledger, tuple(order))
