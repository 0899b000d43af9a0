"""Python attributes of modules: what a forward changes beside parameters, and puts back.

Plain values (numbers, texts, and containers of them) are compared and copied, those in the user's
own objects, too (a schedule that counts its steps); of anything else only which object it is. A
tensor that carries a graph counts as the one before: it is derived of parameters, or shows what
came out.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from pipeplan.capture.user_model.interception import HOOKS
from pipeplan.empty import is_empty
from pipeplan.layout import overwrite

_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes by which a module finds what is registered in it: kept by the objects in them."""


class AttributeSnapshot:
    """The attributes that modules had at some instant."""

    def __init__(self, modules: Iterable[Any]) -> None:
        """Takes a copy of the attributes of `modules` and all modules inside them.

        Other objects with attributes count as modules with no modules inside them.
        """
        seen: set[int] = set()
        self._kept = [
            (where, part, {key: _kept(value) for key, value in attributes_of(part).items()})
            for module in modules
            for where, part in _inside(module, seen)
        ]
        self._objects = [dict(attributes_of(part)) for _, part, _ in self._kept]
        self._tables = [_tables(part) for _, part, _ in self._kept]

    def changed(self) -> list[tuple[str, str]]:
        """(module, attribute) of each plain attribute that is another one by now."""
        return [
            (name, f"{path}{key}")
            for (name, path), part, kept in self._kept
            for key, value in attributes_of(part).items()
            if not _same(value, kept.get(key, _MISSING))
        ]

    def untouched(self) -> bool:
        """Whether all that a module's code finds in it is the same object with the same content.

        Not seen is what happens inside of tensors, and of objects that are neither containers nor
        the user's.
        """
        return all(
            _same(attributes_of(part), kept, operator.is_)
            and _same(_tables(part), tables, operator.is_)
            for (_, part, kept), tables in zip(self._kept, self._tables, strict=True)
        )

    def put_back(self) -> None:
        """Give the modules the attributes they had; containers are the same objects again.

        What was registered meanwhile goes as well: a module that registers hooks once, and marks
        that it did, would register them twice if only its mark were taken away.
        """
        everything = zip(self._kept, self._objects, self._tables, strict=True)
        for (_, part, kept), objects, tables in everything:
            for key in attributes_of(part).keys() - kept.keys():
                del part.__dict__[key]
            for key, value in objects.items():
                _refill(value, kept[key])
                if part.__dict__.get(key, _MISSING) is not value:
                    part.__dict__[key] = value
            for name, table in tables.items():
                _refill_table(part.__dict__.get(name), table)


def held_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """What `modules` find in themselves: parameters, buffers, and tensors that are neither."""
    parts = list(modules)
    for part in parts:
        yield from part.parameters()
        yield from part.buffers()
    yield from attribute_tensors(parts)


def attribute_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Those that are neither, in containers, too, and in the user's own objects."""
    seen: set[int] = set()
    for module in modules:
        for _, part in _inside(module, seen):
            for value in attributes_of(part).values():
                yield from (each for each in _leaves(value) if isinstance(each, Tensor))


@contextmanager
def restored(modules: Iterable[nn.Module], *, all_frozen: bool = False) -> Iterator[None]:
    """Gives buffers, frozen parameters and Python attributes of `modules` their values back.

    A forward moves few frozen parameters (those of a teacher that follows its student), so only
    those are copied of which it is known. Each of these contexts learns of it, also where a
    forward computes nothing: torch counts its writes all the same.

    Args:
        modules: whose forwards run inside.
        all_frozen: copies all of them: inside is the first forward that computes.
    """
    parts = list(modules)
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    frozen = [
        _FrozenParameter.of(p, all_frozen) for x in parts for p in x.parameters() if _is_frozen(p)
    ]
    attributes = AttributeSnapshot(parts)
    try:
        yield
    finally:
        attributes.put_back()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for parameter in frozen:
                parameter.put_back()


_MOVED = WeakIdKeyDictionary()
"""Frozen parameters into which a forward has written, as keys."""


@dataclass(frozen=True, slots=True)
class _FrozenParameter:
    """A parameter that is not trained at some instant."""

    parameter: Tensor
    version: int
    copy: Tensor | None

    @classmethod
    def of(cls, parameter: Tensor, is_copied: bool) -> _FrozenParameter:
        """With a copy if that is wanted, or a forward is known to write into it."""
        wanted = is_copied or parameter in _MOVED
        copied = parameter.detach().clone() if wanted and _has_values(parameter) else None
        return cls(parameter, _version(parameter), copied)

    def put_back(self) -> None:
        """Let it be as it was, and remember whether it was not."""
        is_other = self.copy is not None and not torch.equal(self.parameter, self.copy)
        if is_other or _version(self.parameter) != self.version:
            _MOVED[self.parameter] = True
        if self.copy is not None and is_other:
            overwrite(self.parameter, self.copy)


def is_moved(parameter: Tensor) -> bool:
    """Whether `parameter` is frozen, and a forward was seen to write into it (`restored`)."""
    return parameter in _MOVED and _is_frozen(parameter)


def _is_frozen(parameter: Tensor) -> bool:
    return not (parameter.requires_grad or is_lazy(parameter))


def _has_values(parameter: Tensor) -> bool:
    return not (isinstance(parameter, FakeTensor) or is_empty(parameter) or parameter.is_meta)


def _version(tensor: Tensor) -> int:
    """How often `tensor` has been written into, by torch's own count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


_MISSING = object()


_MOST = 1000
"""The user's objects that are looked into: an attribute may lead to all there is (a trainer)."""
_OTHERS = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects keep what is nobody's to put back."""


def _inside(part: Any, seen: set[int]) -> Iterator[tuple[tuple[str, str], Any]]:
    """What has attributes in `part`: (module, `attribute.` that leads there), and the object.

    Args:
        part: a module or another object.
        seen: identities of the user's objects that have been found; gets those found here.
    """
    named = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
    for name, module in named:
        waiting = deque([("", module)])
        while waiting:
            path, one = waiting.popleft()
            yield (name, path), one
            for key, value in attributes_of(one).items():
                for leaf in _leaves(value):
                    if len(seen) < _MOST and id(leaf) not in seen and _is_users(leaf):
                        seen.add(id(leaf))
                        waiting.append((f"{path}{key}.", leaf))


def _leaves(value: Any) -> Iterator[Any]:
    """What is no container in nested containers."""
    if not isinstance(value, _NESTS):
        yield value
        return
    waiting, met = deque([value]), set[int]()
    while waiting:
        one = waiting.popleft()
        if not isinstance(one, _NESTS):
            yield one
        elif id(one) not in met:
            met.add(id(one))
            waiting.extend(one.values() if isinstance(one, dict) else one)


def _holds_itself(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether nested containers come back to one that they are in."""
    if not isinstance(value, _NESTS):
        return False
    inside = value.values() if isinstance(value, dict) else value
    there = around | {id(value)}
    return id(value) in around or any(_holds_itself(each, there) for each in inside)


def _is_users(value: Any) -> bool:
    """Whether `value` is an object with attributes, of a class that the user may have written."""
    if type(value).__module__.partition(".")[0] in _OTHERS:
        return False
    if isinstance(value, nn.Module | Tensor | type):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def attributes_of(module: Any) -> dict[str, Any]:
    """The attributes of a module by which it finds nothing that is registered in it."""
    return {key: value for key, value in module.__dict__.items() if key not in _TABLES}


def _kept(value: Any) -> Any:
    """What an attribute is compared with: a copy, but of containers that hold themselves."""
    return value if _holds_itself(value) else _plain_copy(value)


def _plain_copy(value: Any) -> Any:
    """A copy of a container down to what is no container, of the same type."""
    if type(value) is tuple:
        return tuple(map(_plain_copy, value))
    if type(value) not in _CONTAINERS:
        return value
    made = copy.copy(value)
    if isinstance(made, set):
        return made
    for key in list(made) if isinstance(made, dict) else range(len(made)):
        made[key] = _plain_copy(made[key])
    return made


def _tables(module: Any) -> dict[str, Any]:
    """Parameters, buffers, modules and hooks by the names that a module has for them."""
    return {name: dict(module.__dict__.get(name) or ()) for name in _TABLES}


def _refill_table(table: object, kept: dict[str, Any]) -> None:
    """Make `table` the one that `kept` is a copy of; a scripted module's is no dict."""
    if isinstance(table, dict) and not _same(dict(table), kept, operator.is_):
        table.clear()
        table.update(kept)


def _alike(value: Any, kept: Any) -> bool:
    """Whether something that is no container counts as what it was."""
    if isinstance(value, _PLAIN):
        return bool(value == kept or value != value)
    return value is kept


def _same(value: Any, kept: Any, alike: Callable[[Any, Any], bool] = _alike) -> bool:
    """Whether `value` still is what the copy `kept` was made of, by what no container holds."""
    if value is kept:
        return True
    if isinstance(value, Tensor) and isinstance(kept, Tensor):
        return value is kept or (alike is _alike and value.grad_fn is not None)
    if type(value) is not type(kept):
        return False
    if isinstance(value, dict) and type(value) in _CONTAINERS:
        return list(value) == list(kept) and all(
            _same(value[key], kept[key], alike) for key in kept
        )
    if type(value) in (list, tuple, deque):
        return len(value) == len(kept) and all(
            _same(*pair, alike) for pair in zip(value, kept, strict=True)
        )
    if isinstance(value, set):
        return bool(value == kept)
    return alike(value, kept)


def _refill(value: Any, kept: Any) -> None:
    """Make the content of the container `value` that of the copy `kept`."""
    if type(value) not in _CONTAINERS or _same(value, kept):
        return
    content = _plain_copy(kept)
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)


_NESTS = (dict, list, tuple, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_CONTAINERS: tuple[type, ...] = (dict, OrderedDict, Counter, defaultdict, list, set, deque)
