"""Parameters that pass from layer to layer, as activations do, instead of being in several layers.

The first layer that reads such a parameter owns it and hands on a copy with each micro-batch; the
gradient of the copy comes back with the other gradients. So what all layers add to the gradient
in one micro-batch is one sum, in autograd's order for a model in one piece. PiPPy, the origin of
torch.distributed.pipelining, has the same choice (`MultiUseParameterConfig.TRANSMIT`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx, nn

from pipeplan.capture.graph.data_flow import DataFlow
from pipeplan.capture.graph.operations import node_storages


def transmitting(flow: DataFlow, parameters: Collection[nn.Parameter]) -> DataFlow | None:
    """The flow in which all that reads one of `parameters` reads a copy, made before the first.

    A parameter that a forward writes stays as it is, for a copy would not see what is written; so
    does one of a module that stays eager, which reads its own.

    Args:
        flow: its graph is changed.
        parameters: to pass on; those that the graph does not read are left out.

    Returns:
        None where there is nothing to pass on.
    """
    exported = flow.exported
    eager = {one for module in exported.calls.modules.values() for one in module.parameters()}
    wanted, copied = {*parameters} - eager, {*exported.copies.values()}
    passing = [
        node
        for node, (_, tensor) in exported.states.items()
        if tensor in wanted and node.users and node not in copied
        if not node_storages(node) & flow.writers.keys()
    ]
    if not passing:
        return None
    copies = {node: _copied(flow, node) for node in passing}
    outputs = tuple(copies.get(node, node) for node in exported.outputs)
    known = {**exported.copies, **{copy: node for node, copy in copies.items()}}
    return DataFlow(replace(exported, outputs=outputs, copies=known))


def _copied(flow: DataFlow, node: fx.Node) -> fx.Node:
    """Puts a copy of `node` before its first use, in the module that this one is in."""
    first = min(node.users, key=flow.position.__getitem__)
    with node.graph.inserting_before(first):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    with torch.no_grad():
        copy.meta["val"] = node.meta["val"].clone()
    if "nn_module_stack" in first.meta:
        copy.meta["nn_module_stack"] = first.meta["nn_module_stack"]
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy
