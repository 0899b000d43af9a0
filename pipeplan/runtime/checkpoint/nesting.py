"""Nested state of an optimizer as entries of a checkpoint, and back.

torch flattens lists and dicts by rules of its own, which lose what was a list, a tuple or a dict
and of which type its keys were. So a value that is nested is stored as its form, under the value's
own key, and as its leaves, under `KEY/0`, `KEY/1` and so on.
"""

from __future__ import annotations

import copy
import io
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeplan.errors import InputError

_TAG = "pipeplan-nested/1 "
"""How the text of a form begins."""
_ROWS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple}
_TABLES: dict[str, Callable[[list[Any]], Any]] = {"dict": dict, "ordered": OrderedDict}
_NAMES: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict", OrderedDict: "ordered"}
_PLAIN = (str, int, float, bool, type(None))
"""Types that JSON gives back as they are, and torch, too."""


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the forms and leaves of what is nested in it.

    Raises:
        InputError: if something is nested in a way, or is a leaf, that could not be read again.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        leaves: list[Any] = []
        form = _form(key, value, leaves)
        if form == 0 and not (isinstance(value, str) and value.startswith(_TAG)):
            found[key] = value
            continue
        found[key] = _TAG + json.dumps(form)
        found |= {f"{key}/{number}": leaf for number, leaf in enumerate(leaves)}
    return found


def is_leaf(key: str) -> bool:
    """Whether `key` is that of a leaf: no field of an optimizer has a slash in its name."""
    return "/" in key.rpartition(".")[2]


def nested(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What `flat` was given, from the entries that it gave.

    Raises:
        InputError: if a leaf is missing or left, or a form is none.
    """
    left = {key: value for key, value in found.items() if is_leaf(key)}
    state: dict[str, Any] = {}
    for key, value in found.items():
        if is_leaf(key):
            continue
        state[key] = value
        if isinstance(value, str) and value.startswith(_TAG):
            try:
                state[key] = _filled(json.loads(value.removeprefix(_TAG)), key, left)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise InputError(
                    f"{where}: {key}: got {value[:80]!r}, need a form whose leaves are there"
                    f" ({type(error).__name__}: {error}). Its files are damaged: go on from the"
                    " checkpoint before it."
                ) from error
    if left:
        raise InputError(
            f"{where}: got {min(left)!r}, need leaves of nested states alone: nothing takes it."
            " Its files are damaged: go on from the checkpoint before it."
        )
    return state


def copied(value: Any) -> Any:
    """Nested `value` of which nobody else has anything."""
    return tree_map(_copied, value)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _form(key: str, value: Any, leaves: list[Any]) -> Any:
    """The form of `value`: a leaf's number, or a kind with what is in it; appends its leaves."""
    kind = _NAMES.get(type(value))
    if kind in _ROWS:
        return {kind: [_form(key, each, leaves) for each in value]}
    if kind in _TABLES:
        odd = next((each for each in value if type(each) not in _PLAIN), None)
        if odd is None:
            return {kind: [[name, _form(key, each, leaves)] for name, each in value.items()]}
        _refuse(key, f"a {type(value).__name__} with a key that is a {type(odd).__name__}")
    if isinstance(value, list | Mapping):  # torch would take it apart
        _refuse(key, f"a {type(value).__name__}")
    if not _is_read_again(value):
        _refuse(key, f"a {type(value).__module__}.{type(value).__qualname__}")
    leaves.append(value)
    return len(leaves) - 1


def _is_read_again(leaf: Any) -> bool:
    """Whether torch reads what it writes of `leaf` without running anything that a file names."""
    if isinstance(leaf, Tensor) or type(leaf) in _PLAIN:
        return True
    written = io.BytesIO()
    try:
        torch.save(leaf, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception:  # a user's class may raise whatever it likes
        return False
    return True


def _refuse(key: str, got: str) -> None:
    raise InputError(
        f"checkpoint: {key}: got {got}, need tensors and numbers in lists, tuples and dicts whose"
        " keys are text or numbers: nothing else is read again as it was. Let the optimizer keep"
        " its state so, or train without checkpoints and keep Pipeline.state_dict() yourself."
    )


def _filled(form: Any, key: str, left: dict[str, Any]) -> Any:
    """`form` with the leaves of `key`, which are taken out of `left`."""
    if type(form) is int:
        return left.pop(f"{key}/{form}")
    ((kind, parts),) = form.items()
    if kind in _ROWS:
        return _ROWS[kind]([_filled(each, key, left) for each in parts])
    return _TABLES[kind]([(name, _filled(each, key, left)) for name, each in parts])
