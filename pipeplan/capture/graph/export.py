"""torch.export of a model in the mode it is in, and what to say where that is not possible.

The graph has every operation on tensors in the order of the program, before autograd: running it
records the same autograd graph as the model does. Training mode, dropout and in-place operations
are in it as they are in the model; nothing is made functional and nothing is decomposed.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, _subclasses, fx, nn
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import tree_leaves, tree_unflatten

from pipeplan.capture.eager_modules.eager_operation import EagerCalls, UnfitError
from pipeplan.capture.graph.constant_propagation import ConstantPropagation
from pipeplan.capture.graph.operations import returns_argument
from pipeplan.capture.graph.refusals import LIST, check_devices, checked_sizes, refusal
from pipeplan.capture.user_model.model_call import call_options, quiet
from pipeplan.capture.user_model.user_code import is_machinery, place_of
from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments, Structure, returned


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model as one graph, with the tensors it reads."""

    module: fx.GraphModule
    """Its graph; attributes are graphs of regions inside it (such as no_grad)."""
    states: Mapping[fx.Node, tuple[str, Tensor]]
    """Placeholders of parameters, buffers and constants: name in the model, and the object."""
    inputs: tuple[fx.Node, ...]
    """Placeholders of the model's inputs."""
    outputs: tuple[fx.Node, ...]
    """The tensors that the loss is given, or the loss that the model computes itself."""
    returned: Structure | None
    """How they lie in what the loss is given; None: there is one."""
    calls: EagerCalls
    """Of the modules that stay eager."""
    note: str = ""
    """What the user should know of how it was exported."""
    copies: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    """Of parameters that pass from layer to layer, and the placeholder of each."""


def export_graph(
    model: nn.Module,
    arguments: ModelArguments,
    calls: EagerCalls | None = None,
    *,
    own_loss: bool = False,
) -> ExportedModel:
    """The graph of `model` for arguments like these; the model is left as it is.

    Args:
        model: in the mode to export.
        arguments: of one micro-batch.
        calls: of modules that stay eager, recorded in this mode; None: there are none.
        own_loss: whether the model computes its loss itself.

    Raises:
        UnfitError: if a module that stays eager is called in another way than was recorded.
        InputError: if its operations depend on values, its tensors are on several devices, it
            returns no tensor, or torch cannot export it.
    """
    check_devices(model, arguments.tensors)
    calls = calls or EagerCalls({})
    try:
        with quiet(), _no_stacks():
            program, note = _program(model, arguments, calls)
    except UnfitError:
        raise
    except Exception as error:
        raise InputError(refusal(model, error, own_loss)) from error
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
    ends = _outputs(model, program, own_loss)
    note = "; ".join(filter(None, (note, checked_sizes(model, program, ends[0]))))
    return ExportedModel(program.graph_module, states, tuple(fed), *ends, calls, note)


def _program(
    model: nn.Module, arguments: ModelArguments, calls: EagerCalls
) -> tuple[torch.export.ExportedProgram, str]:
    """The program that the model runs when nobody exports it; where it is not that one, a note.

    Libraries ask torch whether an export is under way, and of a tensor whether it has values, and
    then compute in another way, with other last bits (Hugging Face builds masks that it leaves
    out otherwise). Here they hear that it is a usual run, and what they read of tensors made from
    numbers alone has its value. Where that way cannot be exported, they hear of the export.
    """
    positional, named = arguments.filled()
    named = {**call_options(model), **named}
    asked: list[str] = []
    try:
        with quiet(), warnings.catch_warnings(), calls.exported(), _as_if_eager(model, asked):
            # Recurrent modules store their weights anew in every forward, which changes nothing.
            warnings.filterwarnings("ignore", "The tensor attributes .* were assigned during")
            return torch.export.export(model, positional, named, strict=False), ""
    except UnfitError:
        raise
    except Exception as error:
        if not asked:
            raise
        note = (
            f"the model runs as for an export: in training it reads values{place_of(error)},"
            " which may differ by micro-batch; its last bits may differ from those of training"
        )
    with calls.exported():
        return torch.export.export(model, positional, named, strict=False), note


@contextmanager
def _no_stacks() -> Iterator[None]:
    """Nodes keep no stack of what made them: nobody reads it, and it takes much time."""
    config = getattr(fx, "config", None)  # torch's own, which not every version has
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    _set(config, {"do_not_emit_stack_traces": True})
    try:
        yield
    finally:
        _set(config, {"do_not_emit_stack_traces": before})


@contextmanager
def _as_if_eager(model: nn.Module, asked: list[str]) -> Iterator[None]:
    """While `model` runs, torch says that nothing is exported or compiled.

    Args:
        model: its forward is replaced meanwhile.
        asked: gets what the model has asked torch.
    """
    usual, kept = model.forward, model.__dict__.get("forward")
    functions = {name: getattr(torch.compiler, name) for name in ("is_exporting", "is_compiling")}
    flags = ("_is_exporting_flag", "_is_compiling_flag")

    def no(name: str) -> Callable[[], bool]:
        def answer() -> bool:
            if not is_machinery(sys._getframe(1).f_code.co_filename):  # noqa: SLF001
                asked.append(name)
            return False

        return answer

    @functools.wraps(usual)
    def unaware(*arguments: Any, **named: Any) -> Any:
        before = {flag: getattr(torch.compiler, flag) for flag in flags}
        _set(torch.compiler, dict.fromkeys(flags, False) | {name: no(name) for name in functions})
        fake = _subclasses.FakeTensor
        _set(_subclasses, {"FakeTensor": _unseen(fake, asked)})
        try:
            with ConstantPropagation():
                return usual(*arguments, **named)
        finally:
            _set(_subclasses, {"FakeTensor": fake})
            _set(torch.compiler, before | functions)

    model.__dict__["forward"] = unaware
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if kept is not None:
            model.__dict__["forward"] = kept


def _unseen(fake: type, asked: list[str]) -> type:
    """A class of which, for all but torch itself, nothing is an instance."""

    class Unseen(type):
        def __instancecheck__(cls, instance: object) -> bool:
            if is_machinery(sys._getframe(1).f_code.co_filename):  # noqa: SLF001
                return isinstance(instance, fake)
            asked.append("FakeTensor")
            return False

    return Unseen("FakeTensor", (), {})


def _set(owner: object, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _name_buffers(states: Mapping[fx.Node, tuple[str, Tensor]]) -> None:
    """Lets every use of a changed buffer name the buffer, not the operation that changed it.

    An operation in place returns its argument, so they are one object; but a value that is made
    by an operation would have to be sent. Where a forward assigns it (`self.n += 1`), the graph
    ends with a copy of the buffer into itself, which autograd would count as a write: it goes.
    """
    for buffer in states:
        for user in list(buffer.users):
            if returns_argument(user) and user.args[0] is buffer:
                user.replace_all_uses_with(buffer)
        for user in list(buffer.users):
            if user.target is torch.ops.aten.copy_.default and user.args[:2] == (buffer, buffer):
                buffer.graph.erase_node(user)


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
            f" need tensors only. {LIST}"
        )
    return constant


def _outputs(
    model: nn.Module, program: torch.export.ExportedProgram, own_loss: bool
) -> tuple[tuple[fx.Node, ...], Structure | None]:
    """The nodes of the tensors that the loss is given, and how they lie in it.

    What is no tensor (None, numbers) is kept beside them.
    """
    output = next(iter(program.graph.find_nodes(op="output")))
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves = tree_leaves(output.args[0], is_leaf=lambda value: value is None)
    found, structure = returned(tree_unflatten(leaves, spec), own_loss=own_loss)
    if not found:
        raise InputError(
            f"task: model {type(model).__name__}: returned no tensor, need what the loss compares"
            " with the target"
        )
    return tuple(found), structure
