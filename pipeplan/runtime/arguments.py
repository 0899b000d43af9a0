"""What `Pipeline` is given besides model and plan: refused where nothing can be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pipeplan.errors import InputError
from pipeplan.runtime.transport.backend import Wanted
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import walked
from pipeplan.units import shown


def check_ranks(
    seed: int,
    replicas: int,
    mesh: DeviceMesh | None,
    backend: Wanted,
    transport: Transport | None = None,
) -> None:
    """Refuse what no ranks can be made of, before the model is split.

    Raises:
        InputError: if a number is none or too small, backend or mesh are something else, or there
            is a transport beside what ranks would be made of.
    """
    whole("pipeline: seed", seed)
    whole("pipeline: replicas", replicas, least=1)
    if backend not in get_args(Wanted):
        raise InputError(
            f"pipeline: backend: got {shown(backend)}, need one of {', '.join(get_args(Wanted))}"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"pipeline: mesh: got a {type(mesh).__name__}, need a DeviceMesh of"
            " torch.distributed, or None for the ranks that torchrun started"
        )
    given = {"replicas": replicas != 1, "mesh": mesh is not None, "backend": backend != "auto"}
    others = [name for name, is_given in given.items() if is_given]
    if transport is not None and others:
        raise InputError(
            f"pipeline: transport: got a {type(transport).__name__} and {', '.join(others)},"
            " need it alone: it is between the ranks of one replica and carries their messages."
            " Leave one or the other out."
        )


def whole(where: str, number: object, least: int = 0) -> int:
    """`number` if it is an integer from `least` on.

    Raises:
        InputError: if it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InputError(f"{where}: got {shown(number)}, need an integer from {least} on")
    return number


def numbers_of(value: Sequence[int]) -> list[int]:
    """The numbers of micro-batches in `value`.

    Raises:
        InputError: if it is no row of such numbers.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(f"evaluate: numbers: got {shown(value)}, need a list of integers")
    return [whole("evaluate: numbers", number) for number in value]


def rows_in(where: str, value: object) -> Any:
    """The nested tensors of a batch, in plain containers.

    Raises:
        InputError: if there is a tensor in it that has no rows, or something else.
    """
    return walked(_with_rows, value, where)


def _with_rows(tensor: Tensor, where: str) -> Tensor:
    if not tensor.dim():
        raise InputError(
            f"{where}: got a tensor without dimensions, need tensors whose first dimension counts"
            " rows, in tuples, lists or dicts"
        )
    return tensor


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """How far a training was, out of a state dict."""

    step: int
    scales: Sequence[float]
    good_steps: int
    drawn: int | None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedProgress:
        """The progress in `state`.

        Raises:
            InputError: if it lacks a part of it, or one makes no sense.
        """
        if not isinstance(state, Mapping):
            raise InputError(
                f"load_state_dict: state: got a {type(state).__name__}, need the mapping that"
                " state_dict() returned"
            )
        missing = [name for name in ("step", "scales", "good_steps") if name not in state]
        if missing:
            raise InputError(
                f"load_state_dict: state: got {len(state)} entries without {missing[0]!r}, need"
                " step, scales and good_steps beside the weights. Give what state_dict() of a"
                " Pipeline returned, not the model's; merge the parts of several ranks."
            )
        where = "load_state_dict: state"
        scales = state["scales"]
        numbers = isinstance(scales, tuple | list) and all(
            isinstance(each, int | float) for each in scales
        )
        if not numbers:
            raise InputError(f"{where}: scales: got {shown(scales)}, need a list of numbers")
        drawn = state.get("drawn")
        return cls(
            step=whole(f"{where}: step", state["step"]),
            scales=scales,
            good_steps=whole(f"{where}: good_steps", state["good_steps"]),
            drawn=None if drawn is None else whole(f"{where}: drawn", drawn),
        )
