"""One clear line for a document that breaks a rule of its format: where, got, need.

pydantic finds what is wrong; this module says it in the project's words: JSON's names for what was
given, the place as a path into the file, near names for unknown fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeplan import units
from pipeplan.errors import InputError

_NEEDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_short": "{min_length} items or more",
    "too_long": "{max_length} items or fewer",
}
_UNITS: dict[str, tuple[Callable[[str], int | None], str]] = {
    "_bytes": (units.parse_bytes, "bytes"),
    "_ns": (units.parse_time_ns, "ns"),
    "_bytes_per_s": (units.parse_bandwidth, "bytes per second"),
}
"""How a field's ending says what people may have meant, the longest last."""
_MAKERS = {
    "chain": "`pipeplan profile` and `pipeplan import` make chains",
    "cluster": "`pipeplan calibrate` makes cluster files; docs/reference/formats.md has one",
    "plan": "`pipeplan plan` makes plans",
    "stages": "`pipeplan profile --stages` makes these",
    "devices": "docs/explanation/capture.md has one to copy",
    "run": "`pipeplan.launch --out` writes it",
}
"""Where files of each kind come from."""
_MANY = 16
"""Names of fields that a message lists."""
_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


def describe(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """The first thing to mend, in one line, and how many more there are.

    A wrong `format` comes first (it explains the rest), then unknown fields (a misspelled one is
    missing as well), then everything else in the order of the file.

    Args:
        error: what validating `model` raised.
        where: names the input, such as its path.
        model: the document's class, for the names its fields may have.
    """
    faults = [fault for fault in error.errors(include_url=False) if not _is_echo(fault)]
    first = min(faults, key=_urgency)
    place, at = _place(model, first["loc"])
    if _is_choice(at):  # one fault for each of the alternatives: the same place, told once
        faults = [fault for fault in faults if fault["loc"][:-1] != first["loc"][:-1]] + [first]
    count = len(faults) - 1 if _urgency(first) else 0
    more = f" ({count} more after this one)" if count else ""
    return f"{where}: {_sentence(first, place, at)}{more}"


def show(value: object) -> str:
    """`value` as JSON names it, short and on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}" if value else "an empty list"
    return type(value).__name__


def _is_echo(fault: ErrorDetails) -> bool:
    """Whether pydantic calls a list too short because its items are wrong: they are told."""
    return fault["type"] == "too_short" and len(fault["input"]) >= fault["ctx"]["min_length"]


def _urgency(fault: ErrorDetails) -> int:
    if fault["loc"] == ("format",):
        return 0
    return 1 if fault["type"] == "extra_forbidden" else 2


def _sentence(fault: ErrorDetails, place: str, at: Any) -> str:
    kind, got, last = fault["type"], fault["input"], fault["loc"][-1:]
    if kind == "value_error":
        own = fault["msg"].removeprefix("Value error, ")
        return f"{place}.{own}" if place else own
    place = place or "document"
    if kind == "missing":
        return f"{place}: got nothing, need this {'item' if isinstance(last[0], int) else 'field'}"
    if kind == "extra_forbidden":
        return _unknown(str(last[0]), place, at)
    if _is_choice(at):
        return f"{place}: got {show(got)}, need {_choice(at)}"
    need = _NEEDS.get(kind, "").format(**fault.get("ctx", {})) or f"something else: {fault['msg']}"
    if last == ("format",):
        return f"{place}: got {show(got)}, need {need}{_format_hint(got, need)}"
    return f"{place}: got {show(got)}, need {need}{_meant(got, kind, last)}"


def _meant(got: object, kind: str, last: Sequence[int | str]) -> str:
    """The integer that a quantity with a unit, or a whole number with a point, stands for."""
    if kind not in ("int_type", "int_from_float"):
        return ""
    if isinstance(got, float) and got.is_integer() and abs(got) <= units.MAX_INT:
        return f" without point or exponent: {int(got)}"
    if not isinstance(got, str) or got.strip().isdigit():
        return ""
    meant = ""
    for ending, (parse, unit) in _UNITS.items():
        if str(last[-1]).endswith(ending):
            try:
                meant = f" of {unit}: {show(parse(got))}"
            except InputError:
                meant = f" of {unit}"
    return meant


def _unknown(name: str, place: str, record: Any) -> str:
    known = [field.alias or key for key, field in record.model_fields.items()]
    near = difflib.get_close_matches(name, known, n=1)
    need = f"a known one, perhaps {near[0]!r}" if near else "one of " + _some(known)
    return f"{place}: got the unknown field {show(name)}, need {need}"


def _some(names: Sequence[str]) -> str:
    """`names`, or the first of many and where the others are."""
    if len(names) <= _MANY:
        return ", ".join(names)
    rest = len(names) - _MANY
    return f"{', '.join(names[:_MANY])} or {rest} more (docs/reference/formats.md)"


def _format_hint(got: object, need: str) -> str:
    given, wanted = _kind(show(got)), _kind(need)
    if not given:
        return ". Is it a file of pipeplan?"
    if given == wanted:
        return ". Another version wrote it: make it again."
    made = _MAKERS.get(wanted, "")
    return ". Another kind of file" + (f": {made}." if made else ".")


def _kind(text: str) -> str:
    """`plan` in `'pipeplan-plan/1'`; empty for anything else."""
    name, slash, _ = text.strip("'").partition("/")
    return name.removeprefix("pipeplan-") if slash and name.startswith("pipeplan-") else ""


def _place(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, Any]:
    """`loc` as a path, and the type found there (of an unknown field: the record around it)."""
    at: Any = model
    place = ""
    for part in loc:
        if _is_choice(at):
            break
        if isinstance(part, int):
            place += f"[{part}]"
            items = get_args(at)
            at = _bare(items[0] if items[-1:] == (...,) else items[min(part, len(items) - 1)])
            continue
        if isinstance(at, type) and issubclass(at, BaseModel):
            fields = {field.alias or key: field for key, field in at.model_fields.items()}
            if part not in fields:
                break
            at = _bare(fields[part].annotation)
        else:
            at = _bare((*get_args(at), Any)[-2] if len(get_args(at)) > 1 else Any)
        place += f".{part}" if part.isidentifier() else f"[{show(part)}]"
    return place.removeprefix("."), at


def _bare(annotation: Any) -> Any:
    """`annotation` without its metadata and without `| None`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        kept = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _bare(kept[0]) if len(kept) == 1 else annotation
    return annotation


def _is_choice(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _choice(annotation: Any) -> str:
    names = ["null" if kind is NoneType else _NAMES[kind] for kind in get_args(annotation)]
    return ", ".join(names[:-1]) + " or " + names[-1]
