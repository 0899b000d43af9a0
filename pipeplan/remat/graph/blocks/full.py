"""Full recompute: every block keeps its input alone and runs again before its backward."""

from __future__ import annotations

from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph.blocks.chain import BlockChain
from pipeplan.remat.graph.blocks.compose import compose
from pipeplan.remat.graph.blocks.rk_rotor import RotorStep
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program


def recompute_all(graph: OperatorGraph) -> DeviceProgram:
    """Of the last block nothing runs again, as its backward follows at once."""
    chain = BlockChain(Ledger(graph))
    last = len(chain.blocks) - 1
    steps = [
        *(RotorStep(each, None) for each in range(last)),
        RotorStep(last, 0),
        RotorStep(last, 0, True),
    ]
    for each in reversed(range(last)):
        steps += [RotorStep(each, 0), RotorStep(each, 0, True)]
    order = compose(chain.ledger, chain.blocks, chain.options(keep_all=True), steps)
    return program(chain.ledger, order)
