"""A model's graph, in which modules that it cannot hold stay eager."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from pipeplan.capture.attributes import unchanged
from pipeplan.capture.eager import Calls, UnfitError
from pipeplan.capture.export import Exported, export
from pipeplan.capture.flow import Flow
from pipeplan.capture.opaque import (
    innermost,
    kept_generators,
    opaque_modules,
    outermost,
)
from pipeplan.capture.quiet import quiet
from pipeplan.capture.trace import fake_mode, lacks_values
from pipeplan.capture.watch import Opaque
from pipeplan.capture.whole import call_options
from pipeplan.errors import InputError


def graph_of(
    model: nn.Module, inputs: tuple[Tensor, ...], known: Mapping[str, Opaque] | None = None
) -> tuple[Flow, dict[str, Opaque]]:
    """The flow of `model` in its present mode, and which of its modules stay eager in it.

    A module that cannot be exported stays eager, too, and all others of its class; one that fits
    into no graph makes the module around it stay eager.

    Args:
        model: left as it is.
        inputs: of one micro-batch.
        known: modules that stay eager in any case.

    Raises:
        InputError: if that leaves nothing of the model to cut.
    """
    found = outermost({**opaque_modules(model, inputs), **(known or {})})
    while True:
        try:
            return Flow(_exported(model, inputs, found)), found
        except UnfitError as error:
            outer, why = error.path.rpartition(".")[0], f"holds {error.path}, which {error.why}"
            if outer in found and not found[outer].applies:
                raise InputError(f"task: model {type(model).__name__}: {why}") from error
            found = outermost({**found, outer: Opaque(why)})
        except InputError as error:
            more = _failing(model, error)
            if not more or found.keys() & more.keys():
                raise
            found = outermost({**found, **more})


def _exported(
    model: nn.Module, inputs: tuple[Tensor, ...], found: Mapping[str, Opaque]
) -> Exported:
    root = found.get("")
    if root and not root.applies:
        raise InputError(
            f"task: model {type(model).__name__}: its forward {root.reason}, which a graph of"
            " torch's operations cannot hold. Do it in an nn.Module of its own inside the model,"
            " which then runs as it is. Or give the model's layers as a Python list, which may do"
            " anything inside."
        )
    calls = Calls(
        {name: model.get_submodule(name) for name in found if name},
        frozenset(name for name, opaque in found.items() if opaque.draws),
        frozenset(name for name, opaque in found.items() if opaque.counts),
        model if root else None,
    )
    with unchanged([model]), kept_generators():
        if found:
            _record(model, inputs, calls)
        return export(model, inputs, calls)


def _record(model: nn.Module, inputs: tuple[Tensor, ...], calls: Calls) -> None:
    """On fake tensors; on real ones where values are looked at."""
    try:
        with quiet(), fake_mode([model]) as fake, calls.recorded():
            model(*map(fake.from_tensor, inputs), **call_options(model))
            return
    except UnfitError:
        raise
    except Exception as error:
        if lacks_values([model]):
            raise InputError(
                f"task: model {type(model).__name__}: looks at values ({type(error).__name__}),"
                " which it has none of here. Profile it with --mode measured."
            ) from error
    with calls.recorded():
        model(*inputs, **call_options(model))


def _failing(model: nn.Module, error: InputError) -> dict[str, Opaque]:
    """The innermost module that made an export fail, and all others of its class."""
    cause = error.__cause__
    place = innermost(model, cause) if cause is not None else None
    if place is None or "stores tensors in its attributes" in str(error):
        return {}
    name, line = place
    kind = type(model.get_submodule(name))
    return {
        other: Opaque(f"cannot be exported (at {line})")
        for other, module in model.named_modules()
        if type(module) is kind and other
    }
