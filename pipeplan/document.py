"""What every file of the project shares: strict models, exact JSON, one clear error.

A document is a frozen pydantic model. Reading rejects wrong types, unknown and duplicate fields,
NaN, and oversized numbers with an `InputError` that names the place; writing is canonical, so a
digest of it identifies the content.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeplan.errors import InputError
from pipeplan.units import MAX_INT

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
"""A size in bytes, a time in nanoseconds, or an index: an integer from 0 to 2**62."""

Positive = Annotated[int, Field(ge=1, le=MAX_INT)]

_Value = TypeVar("_Value")


class Record(BaseModel):
    """A frozen value: compared by content, unknown fields refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )


class Document(Record):
    """A record that is a whole file."""

    def to_json(self) -> str:
        """The file's text: indented, every field written, ends with a newline."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def digest(self) -> str:
        """SHA-256 of the content as JSON with sorted keys and no white space."""
        return digest(self.model_dump(mode="json", by_alias=True))

    @classmethod
    def from_json(cls, text: str, where: str = "input") -> Self:
        """The document in `text`; `where` names it in errors.

        Raises:
            InputError: if the text is not JSON or breaks a rule of the format.
        """
        return cls.from_data(parse_json(text, where), where)

    @classmethod
    def from_data(cls, data: object, where: str = "input") -> Self:
        """The document in already parsed JSON `data`.

        Raises:
            InputError: if it breaks a rule of the format.
        """
        try:
            return cls.model_validate_json(json.dumps(data))
        except (ValidationError, ValueError, RecursionError) as error:
            raise InputError(describe(error, where)) from None

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The document in the file at `path`.

        Raises:
            InputError: if the file cannot be read or breaks a rule of the format.
        """
        return cls.from_json(read_text(path), str(path))


def digest(data: object) -> str:
    """SHA-256 of `data` as JSON with sorted keys and no white space."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: str | Path) -> str:
    """The text of the file at `path`.

    Raises:
        InputError: if it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}. Check the path.") from None


def parse_json(text: str, where: str) -> Any:
    """`text` as JSON, with duplicate keys and NaN refused.

    Raises:
        InputError: if it is not such JSON.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise InputError(f"{where}: field {twice[0]!r} is given twice in one object")
        return dict(pairs)

    def refuse(constant: str) -> object:
        raise InputError(f"{where}: got {constant}, need a finite number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not JSON: {error}") from None


def describe(error: Exception, where: str) -> str:
    """One line for a failed validation: the first place, what it got, what it needs."""
    if not isinstance(error, ValidationError):
        return f"{where}: {error}"
    first, count = error.errors()[0], error.error_count()
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    got = first["input"]
    shown = "" if isinstance(got, dict | list) else f" (got {str(got)[:60]!r})"
    more = f"; {count - 1} more problems" if count > 1 else ""
    return f"{where}: {place or 'document'}: {first['msg']}{shown}{more}"
