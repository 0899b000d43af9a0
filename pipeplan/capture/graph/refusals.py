"""What to tell of a model that torch.export does not take, or not as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from pipeplan.capture.graph.operations import node_tensors
from pipeplan.capture.user_model.user_code import is_under, place_of
from pipeplan.errors import InputError
from pipeplan.layout import has_size

_BY_VALUE = (
    r"data-dependent|data dependent|unbacked|bool\(\) is not supported|data is not allocated yet"
    r"|BooleanAtom"
)
"""What torch says where a value is read while a model is exported."""
LIST = "Or give the model's layers as a Python list, which may do anything inside."
_SAME = (
    "need the same ones for every micro-batch. Do it in an nn.Module of its own inside the model,"
    f" which then runs as it is, or use torch.where, fixed sizes or a mask. {LIST}"
)

_LOSS = (
    " Or leave the labels out of its input and give the task a loss, which may look at values,"
    " where only the model's own loss does so."
)
_CHECKS = (
    " Distributions look at values to check their arguments: validate_args=False, or"
    " torch.distributions.Distribution.set_default_validate_args(False)."
)


def checked_sizes(
    model: nn.Module, program: torch.export.ExportedProgram, outputs: Sequence[fx.Node]
) -> str:
    """What to tell of tensors as large as values say (`logits[mask]`), which no cut passes.

    Raises:
        InputError: if the loss is given one: the bytes of what passes are not known.
    """
    for node in program.graph.nodes:
        if all(map(has_size, node_tensors(node))):
            continue
        *_, (_, kind) = (node.meta.get("nn_module_stack") or {"": ("", type(model))}).values()
        size = f"the size of what {node.target} makes in {kind} depends on the values of tensors"
        if all(has_size(tensor) for output in outputs for tensor in node_tensors(output)):
            return f"{size}: it stays inside of one layer, whose figures are those of data(0)"
        raise InputError(f"task: model {type(model).__name__}: {size}, {_SAME}")
    return ""


def check_devices(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Refuse a model that is spread over devices."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        first, there = named[0]
        if tensor.device != there.device:
            raise InputError(
                f"task: model {type(model).__name__}: got {first} on {there.device} and {name} on"
                f" {tensor.device}, need one device. The plan decides which layer goes where:"
                " build the model on one device."
            )
        for value in inputs:
            if value.device != there.device:
                raise InputError(
                    f"task: got input on {value.device} and {first} on {there.device}, need one"
                    " device. Build model and data on the same device."
                )


def refusal(model: nn.Module, error: Exception, own_loss: bool) -> str:
    """What to tell the user about a failed export: the kind of failure, the place, what to do.

    Args:
        model: that was exported.
        error: what torch raised.
        own_loss: whether the model computes its loss itself.
    """
    where = f"task: model {type(model).__name__}"
    text = str(error)
    place = place_of(error)
    if re.search(_BY_VALUE, text, re.I):
        depends = f"{where}: its operations depend on the values of tensors{place}, {_SAME}"
        return depends + _LOSS * own_loss + _CHECKS * is_under(error, "/torch/distributions/")
    if "Mutating module attribute" in text or "assigned during export" in text:
        return (
            f"{where}: it stores tensors in its attributes while it runs{place}, need a forward"
            f" that keeps state in buffers only. {LIST}"
        )
    first = " ".join(text.split("\n")[0].split())[:300]
    return (
        f"{where}: torch.export failed{place}: {type(error).__name__}: {first}."
        f" Check that model(data(0)[0]) works. {LIST}"
    )
