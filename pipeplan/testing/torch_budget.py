"""PyTorch's own budget as a device program: `activation_memory_budget` of its partitioner.

The partitioner decides which operators of a joint graph run again in the backward and in which
order (torch 2.13, `torch._functorch.partitioners`). Its two graphs, operator by operator, are an
order of the operators that were captured; the judge says what it holds and takes, by the same
sizes and times as for every other method, and a storage goes at the earliest moment. Nothing is
compiled: inductor might fuse or reorder what is emitted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import OperatorGraph
from pipeplan.operators.joint_graph import Handed, JointGraph, joint_graph
from pipeplan.operators.simplify import simplify
from pipeplan.remat.graph.ledger import END_F, START, Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import tidy

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def partitioned(
    module: nn.Module, args: tuple[Any, ...], graph: OperatorGraph, budget: float
) -> DeviceProgram:
    """What torch's partitioner makes of a call of `module`.

    Args:
        module: whose operators `graph` has.
        args: of the captured call.
        graph: sizes and times.
        budget: torch's share of the bytes that are saved without recomputation.
    """
    joint = joint_graph(module, args, {})
    simplify(joint.module)
    forward, backward = _parts(joint, budget)
    index = {each.name: place for place, each in enumerate(graph.operations)}
    ledger = Ledger(graph)
    begin = (START,) if ledger.received else ()
    order = (*begin, *_runs(forward, index), END_F, *_runs(backward, index))
    missing = set(index.values()) - set(order)
    if missing:
        raise ValueError(f"partitioned: operators {sorted(missing)} are in neither graph")
    return program(ledger, tidy(ledger, order))


def _parts(joint: JointGraph, budget: float) -> tuple[GraphModule, GraphModule]:
    outputs = sum(each.kind in (Handed.OUTPUT, Handed.NEW_BUFFER) for each in joint.results)
    with (
        # Equal operators stay two: they have names and storages of their own.
        config.patch(activation_memory_budget=budget, cse=False),
        torch.random.fork_rng(devices=[]),
    ):
        return min_cut_rematerialization_partition(joint.module, None, num_fwd_outputs=outputs)


def _runs(part: GraphModule, index: dict[str, int]) -> list[int]:
    return [index[node.name] for node in part.graph.nodes if node.name in index]
