"""torch.export of a model in the mode it is in, and what to say where that is not possible.

The graph has every operation on tensors in the order of the program, before autograd: running it
records the same autograd graph as the model does. Training mode, dropout and in-place operations
are in it as they are in the model; nothing is made functional and nothing is decomposed.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves, tree_unflatten

from pipeplan.capture.operations import returns_argument
from pipeplan.capture.whole import call_options
from pipeplan.errors import InputError

_LIST = "Or give the model's layers as a Python list, which may do anything inside."


@dataclass(frozen=True, slots=True)
class Exported:
    """A model as one graph, with the tensors it reads."""

    module: fx.GraphModule
    """Its graph; attributes are graphs of regions inside it (such as no_grad)."""
    states: Mapping[fx.Node, tuple[str, Tensor]]
    """Placeholders of parameters, buffers and constants: name in the model, and the object."""
    inputs: tuple[fx.Node, ...]
    """Placeholders of the model's inputs."""
    output: fx.Node
    """The one tensor that the model returns."""


def export(model: nn.Module, inputs: tuple[Tensor, ...]) -> Exported:
    """The graph of `model` for inputs like these; the model is left as it is.

    Raises:
        InputError: if its operations depend on values, its tensors are on several devices, it
            returns anything but one tensor, or torch cannot export it.
    """
    _check_devices(model, inputs)
    try:
        with _quiet():
            program = torch.export.export(model, inputs, call_options(model), strict=False)
    except Exception as error:
        raise InputError(_reason(model, error)) from error
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    states: dict[fx.Node, tuple[str, Tensor]] = {}
    fed = []
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, TensorArgument):
                fed.append(node)
            continue
        assert spec.target is not None
        tensor = _state(model, program, spec.kind, spec.target)
        states[node] = names.get(id(tensor), spec.target), tensor
    _name_buffers(states)
    return Exported(program.graph_module, states, tuple(fed), _output(model, program))


def _name_buffers(states: Mapping[fx.Node, tuple[str, Tensor]]) -> None:
    """Lets every use of a changed buffer name the buffer, not the operation that changed it.

    An operation in place returns its argument, so they are one object; but a value that is made
    by an operation would have to be sent.
    """
    for buffer in states:
        for user in list(buffer.users):
            if returns_argument(user) and user.args[0] is buffer:
                user.replace_all_uses_with(buffer)


def _state(
    model: nn.Module, program: torch.export.ExportedProgram, kind: InputKind, target: str
) -> Tensor:
    if kind is InputKind.PARAMETER:
        return model.get_parameter(target)
    if kind is InputKind.BUFFER:
        return model.get_buffer(target)
    constant = program.constants[target]
    if not isinstance(constant, Tensor):
        raise InputError(
            f"task: model {type(model).__name__}: {target}: got a {type(constant).__name__},"
            f" need tensors only. {_LIST}"
        )
    return constant


def _output(model: nn.Module, program: torch.export.ExportedProgram) -> fx.Node:
    """The graph's output node, if the model returns one tensor and nothing else.

    What is no tensor (None, numbers) is ignored, so a structure with one tensor will do.
    """
    output = next(iter(program.graph.find_nodes(op="output")))
    spec = program.call_spec.out_spec
    assert spec is not None
    found = [leaf for leaf in tree_leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    if len(found) == 1:
        return found[0]
    form = type(tree_unflatten(list(range(spec.num_leaves)), spec)).__name__
    got = f"{len(found)} tensors in a {form}" if found else "no tensor"
    raise InputError(
        f"task: model {type(model).__name__}: returned {got}, need one for the loss."
        " Wrap it in a module that returns the tensor that the loss compares with the target."
    )


def _check_devices(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
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


def _reason(model: nn.Module, error: Exception) -> str:
    """What to tell the user about a failed export: the kind of failure, the place, what to do."""
    where = f"task: model {type(model).__name__}"
    text = str(error)
    place = _place(error)
    if re.search(r"data-dependent|data dependent|unbacked|bool\(\) is not supported", text, re.I):
        return (
            f"{where}: its operations depend on the values of tensors{place}, need the same ones"
            " for every micro-batch. Replace the branch by torch.where, fixed sizes or a mask."
            f" {_LIST}"
        )
    if "Mutating module attribute" in text or "assigned during export" in text:
        return (
            f"{where}: it stores tensors in its attributes while it runs{place}, need a forward"
            f" that keeps state in buffers only. {_LIST}"
        )
    first = " ".join(text.split("\n")[0].split())[:300]
    return (
        f"{where}: torch.export failed{place}: {type(error).__name__}: {first}."
        f" Check that model(data(0)[0]) works. {_LIST}"
    )


def _place(error: BaseException) -> str:
    """` at file.py:12 (code)` of the innermost frame outside of torch; empty if there is none."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    users = [frame for frame in frames if not _is_machinery(frame[0])]
    if not users:
        return ""
    file, line, name = users[-1]
    return f" at {file.rpartition('/')[2]}:{line} ({name})"


def _is_machinery(file: str) -> bool:
    return bool(re.search(r"/torch/|/contextlib\.py$|/pipeplan/capture/|^<", file))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what torch logs and prints of a failed export: the error says it.

    The graph so far, which torch prints to stderr, is the error's; what the model itself prints
    there is passed on.
    """
    logger = logging.getLogger("torch")
    before, said, graph = logger.level, io.StringIO(), ""
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", "")
        raise
    finally:
        logger.setLevel(before)
        text = said.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)
