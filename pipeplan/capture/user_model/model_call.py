"""Calls of the whole model: its output, the output of all its layers, calls that may fail."""

from __future__ import annotations

import inspect
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

from torch import Tensor, nn

from pipeplan.capture.user_model.user_code import place_of
from pipeplan.errors import InputError, PipeplanError, is_out_of_memory
from pipeplan.nested import ModelArguments, text_of
from pipeplan.split_model import SplitModel


def call_options(model: nn.Module) -> dict[str, object]:
    """Arguments that a model gets beside its input: training has no use for caches of keys."""
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


def check_call(model: nn.Module, arguments: ModelArguments, *, own_loss: bool) -> None:
    """Refuse arguments that the forward of `model` does not take.

    Args:
        model: of the user.
        arguments: what data(0) gives it.
        own_loss: whether it computes its loss itself.

    Raises:
        InputError: if there are too many or too few, or one has another name.
    """
    if type(model).forward is nn.Module.forward:  # modules in a row, without one of their own
        return
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is no Python function
        return
    positional, named = arguments.filled()
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        alone = (
            " Without a loss, data gives the input alone. Where it gives (input, target), the task"
            " needs a loss."
        )
        whole = (
            " Where forward takes the dict itself, data gives it in a tuple: ((inputs,), target)."
        )
        raise InputError(
            f"task: model {type(model).__name__}: data(0) calls it with"
            f" {text_of(arguments.structure, is_call=True)}: {error}, need what"
            f" forward{signature} takes.{whole * (not positional)}{alone * own_loss}"
        ) from None


def result_of(model: nn.Module, arguments: ModelArguments) -> Any:
    """What `model` returns, in whatever structure."""
    return arguments.call(model, **call_options(model))


def run_layers(split: SplitModel, inputs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """The output of all layers in a row, for the tensors of the model's input."""
    values = split.entry(inputs)
    for index, layer in enumerate(split.layers):
        result = layer(*values, *(inputs[place] for place in split.fed_to(index)))
        values = result if isinstance(result, tuple) else (result,)
    return values if len(values) > 1 else values[0]


_ALONE = (
    "Check that a loop without pipeplan trains on it: the loss of what the model returns, and its"
    " backward()."
)
_SMALLER = (
    "A profile needs memory for the whole model and one micro-batch: give --mode fake --device"
    " NAME, which allocates nothing, or make micro-batches smaller."
)


@contextmanager
def told_of(what: str, number: int) -> Iterator[None]:
    """Tells the user of an error in code of the user's that is called inside.

    Args:
        what: fails, such as `model Net: its backward`, for the message.
        number: of the micro-batch it is called for.

    Raises:
        InputError: in place of what was raised; pipeplan's own errors are passed on.
    """
    try:
        yield
    except PipeplanError:
        raise
    except Exception as error:
        said = str(error).rstrip(".")
        step = _SMALLER if is_out_of_memory(error) else _ALONE
        raise InputError(
            f"task: {what} fails on data({number}){place_of(error)}: {type(error).__name__}:"
            f" {said}. {step}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what torch logs and prints of what fails inside: the error says it.

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
