"""A model's graph, in which modules that it cannot hold stay eager."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pipeplan.capture.boundary_trace import fake_mode, lacks_values
from pipeplan.capture.eager_modules.detection import (
    innermost_module,
    opaque_modules,
    outermost_modules,
)
from pipeplan.capture.eager_modules.eager_operation import EagerCalls, UnfitError
from pipeplan.capture.eager_modules.run_watch import OpaqueModule
from pipeplan.capture.graph.data_flow import DataFlow
from pipeplan.capture.graph.export import ExportedModel, export_graph
from pipeplan.capture.user_model.model_call import quiet, result_of
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.capture.user_model.user_code import place_of
from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments
from pipeplan.repeat import kept_generators


def graph_of(
    model: nn.Module,
    arguments: ModelArguments,
    known: Mapping[str, OpaqueModule] | None = None,
    *,
    own_loss: bool = False,
) -> tuple[DataFlow, dict[str, OpaqueModule]]:
    """The flow of `model` in its present mode, and which of its modules stay eager in it.

    A module that cannot be exported stays eager, too, and all others of its class; one that fits
    into no graph makes the module around it stay eager.

    Args:
        model: left as it is.
        arguments: of one micro-batch.
        known: modules that stay eager in any case.
        own_loss: whether the model computes its loss itself, beside which nothing is wanted.

    Raises:
        InputError: if that leaves nothing of the model to cut.
    """
    found = outermost_modules({**opaque_modules(model, arguments), **(known or {})})
    while True:
        try:
            return DataFlow(_exported(model, arguments, found, own_loss)), found
        except UnfitError as error:
            outer, why = _around(model, error.path), f"holds {error.path}, which {error.why}"
            if outer in found and not found[outer].applies:
                raise InputError(f"task: model {type(model).__name__}: {why}") from error
            found = outermost_modules({**found, outer: OpaqueModule(why)})
        except InputError as error:
            more = outermost_modules({**found, **_failing(model, error)})
            if more.keys() == found.keys():  # or it would fail like this for ever
                raise
            found = more


def _around(model: nn.Module, path: str) -> str:
    """The innermost module around `path` that can be called; a list of modules cannot."""
    outer = path.rpartition(".")[0]
    while outer and type(model.get_submodule(outer)).forward is nn.Module.forward:
        outer = outer.rpartition(".")[0]
    return outer


def _exported(
    model: nn.Module, arguments: ModelArguments, found: Mapping[str, OpaqueModule], own_loss: bool
) -> ExportedModel:
    root = found.get("")
    if root and not root.applies:
        raise InputError(
            f"task: model {type(model).__name__}: its forward {root.reason}, which a graph of"
            " torch's operations cannot hold. Do it in an nn.Module of its own inside the model,"
            " which then runs as it is. Or give the model's layers as a Python list, which may do"
            " anything inside."
        )
    calls = EagerCalls(
        {name: model.get_submodule(name) for name in found if name},
        frozenset(name for name, opaque in found.items() if opaque.draws),
        frozenset(name for name, opaque in found.items() if opaque.counts),
        model if root else None,
    )
    with restored([model]), kept_generators():
        if found:
            _record(model, arguments, calls)
        return export_graph(model, arguments, calls, own_loss=own_loss)


def _record(model: nn.Module, arguments: ModelArguments, calls: EagerCalls) -> None:
    """On fake tensors; on real ones where values are looked at."""
    try:
        with quiet(), fake_mode([model]) as fake, calls.recorded():
            result_of(model, arguments.mapped(fake.from_tensor))
            return
    except UnfitError:
        raise
    except Exception as error:
        if lacks_values([model]):
            raise InputError(
                f"task: model {type(model).__name__}: looks at values ({type(error).__name__}),"
                " which it has none of here. Profile it with --mode measured."
            ) from error
    try:
        with calls.recorded():
            result_of(model, arguments)
    except UnfitError:
        raise
    except Exception as error:
        raise InputError(
            f"task: model {type(model).__name__}: its forward fails on data(0){place_of(error)}:"
            f" {type(error).__name__}: {error}. Check that the model runs on what data(0) gives."
        ) from error


def _failing(model: nn.Module, error: InputError) -> dict[str, OpaqueModule]:
    """The innermost module that made an export fail, and all others of its class."""
    cause = error.__cause__
    place = innermost_module(model, cause) if cause is not None else None
    if place is None or "stores tensors in its attributes" in str(error):
        return {}
    name, line = place
    kind = type(model.get_submodule(name))
    return {
        other: OpaqueModule(f"cannot be exported (at {line})")
        for other, module in model.named_modules()
        if type(module) is kind and other
    }
