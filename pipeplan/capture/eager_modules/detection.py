"""Detection of modules that a graph of operations cannot hold, by watching the model run.

An export follows operations on tensors. It loses what stands beside them: the backward of a
`torch.autograd.Function`, hooks, activation checkpointing, compiled code, gradients and seeds
taken inside a forward, attributes that count, numbers drawn from Python's or numpy's generator.
Modules that do such things are kept as they are (`eager_operation`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from pipeplan.capture.boundary_trace import fake_mode, has_fakes
from pipeplan.capture.eager_modules.run_watch import OpaqueModule, RunWatch
from pipeplan.capture.user_model.interception import HOOKS, OwnCall, intercepted_calls
from pipeplan.capture.user_model.model_call import quiet, result_of
from pipeplan.capture.user_model.module_attributes import AttributeSnapshot, restored
from pipeplan.capture.user_model.user_code import module_of_frame, names_by_identity, place_of_line
from pipeplan.empty import has_empty
from pipeplan.errors import InputError
from pipeplan.nested import ModelArguments
from pipeplan.repeat import kept_generators

_Any = TypeVar("_Any")


def opaque_modules(model: nn.Module, arguments: ModelArguments) -> dict[str, OpaqueModule]:
    """The modules of `model` that a graph cannot hold, by name; the model itself has the name ''.

    The model runs on fake tensors where it can, twice where the first run changes it, and is left
    as it was. What fails to run is not watched: the export that follows says why.

    Args:
        model: in the mode to watch it in.
        arguments: of one micro-batch.
    """
    watch = RunWatch(names_by_identity(model))
    for name, module in model.named_modules():
        if reason := _standing(module):
            watch.note(name, reason)
    compiled = {name: module for name, module in model.named_modules() if is_compiled(module)}
    with (
        restored([model]),
        kept_generators(),
        intercepted_calls(outermost_modules(compiled), _without_compiling),
    ):
        _run(model, arguments, watch)
    return watch.found


def _without_compiling(
    _: str, real: OwnCall, given: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """A compiler would follow the watching, too."""
    with torch.compiler.set_stance("force_eager"):
        return real(*given, **named)


def outermost_modules(found: Mapping[str, _Any]) -> dict[str, _Any]:
    """`found`, by name of a module, without those inside another one of them."""
    return {
        name: opaque
        for name, opaque in found.items()
        if not any(name.startswith(f"{other}.") for other in found if other != name)
    }


def eager_notes(kept: Mapping[str, OpaqueModule]) -> tuple[str, ...]:
    """What to tell the user about modules that run as they are, a line for all of one kind."""
    alike: dict[OpaqueModule, list[str]] = {}
    for name, opaque in kept.items():
        alike.setdefault(opaque, []).append(name)
    return tuple(_note(opaque, names) for opaque, names in alike.items())


def _note(opaque: OpaqueModule, names: Sequence[str]) -> str:
    if not names[0]:
        return f"the model's forward {opaque.reason}: that runs as it is"
    more = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
    return (
        f"module {names[0]!r}{more} {opaque.reason}: it runs as it is"
        + (", its generators set for each layer and micro-batch" if opaque.draws else "")
        + ("; no checkpoint holds what it changes" if opaque.counts else "")
    )


def innermost_module(model: nn.Module, error: BaseException) -> tuple[str, str] | None:
    """Name of the innermost module of `model` in whose code `error` was raised, and the line.

    None if no module but the model itself was running.
    """
    names, found, trace = names_by_identity(model), None, error.__traceback__
    while trace is not None:
        if name := module_of_frame(trace.tb_frame, names):
            found = name, place_of_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is the result of `torch.compile`, or was compiled in place."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def before_compile(model: nn.Module) -> nn.Module:
    """What `torch.compile` was given, if `model` is its result; else `model`."""
    inner = dict(model.named_children()).get("_orig_mod") if is_compiled(model) else None
    return model if inner is None else inner


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, `model` itself, compiled in place, runs as it would without; parts of it stay."""
    kept = model.__dict__.get("_compiled_call_impl")
    model.__dict__["_compiled_call_impl"] = None
    try:
        yield
    finally:
        model.__dict__["_compiled_call_impl"] = kept


def _standing(module: nn.Module) -> str | None:
    """What can be seen of a module before it runs."""
    if is_compiled(module):
        return "is compiled"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted"
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
    if hooks:
        return f"has a hook, {getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}"
    return None


def _run(model: nn.Module, arguments: ModelArguments, watch: RunWatch) -> None:
    """What only the first run of a model changes is a cache: then it runs once more."""
    try:
        with quiet(), fake_mode([model]) as fake, watch.watching():
            first = AttributeSnapshot([model])
            result_of(model, arguments.mapped(fake.from_tensor))
            # Values steer nothing here, so a model that has not changed does the same again.
            if not first.untouched():
                _watch_changes(model, arguments.mapped(fake.from_tensor), watch)
            return
    except Exception as error:  # values are looked at: then real ones are needed
        if has_fakes([model]):
            return
        if has_empty([model]):
            raise InputError(
                f"task: model {type(model).__name__}: looks at values, and there are none:"
                f" {type(error).__name__}: {error}"
            ) from error
    with watch.watching(), restored([model], all_frozen=True):
        try:
            result_of(model, arguments)
            _watch_changes(model, arguments, watch)
        except Exception:  # the export says why
            return


def _watch_changes(model: nn.Module, arguments: ModelArguments, watch: RunWatch) -> None:
    """Note the attributes that one more run changes."""
    before = AttributeSnapshot([model])
    result_of(model, arguments)
    for name, attribute in before.changed():
        watch.note(name, f"changes its attribute {attribute!r} while it runs", counts=True)
