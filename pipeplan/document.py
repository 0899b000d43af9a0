"""What every file of the project shares: strict models, exact JSON, one clear error.

A document is a frozen pydantic model. Reading rejects wrong types, unknown and duplicate fields,
NaN, and oversized numbers with an `InputError` that names the place; writing is canonical, so a
digest of it identifies the content.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeplan.errors import InputError
from pipeplan.units import MAX_INT
from pipeplan.validation_errors import describe, show

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
"""A size in bytes, a time in nanoseconds, or an index: an integer from 0 to 2**62."""

Signed = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
"""A difference of sizes: an integer from -2**62 to 2**62."""

Positive = Annotated[int, Field(ge=1, le=MAX_INT)]

_TOO_DEEP = "got lists or objects nested too deeply, need at most 100 levels"


class Record(BaseModel):
    """A frozen value: compared by content, unknown fields refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
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
            text = json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise InputError(f"{where}: got half a character, {half!r}, need UTF-8 text") from None
        except RecursionError:
            raise InputError(f"{where}: {_TOO_DEEP}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: is not JSON: {error}") from None
        try:
            return cls.model_validate_json(text, by_alias=True, by_name=False)
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise InputError(f"{where}: {_TOO_DEEP}") from None
            raise InputError(describe(error, where, cls)) from None

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
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or "unknown reason"
        step = _step_from(str(path)) or "Check the path."
        raise InputError(f"{path}: cannot be read: {reason}. {step}") from None
    except ValueError as error:
        raise InputError(f"{str(path)!r}: cannot be read: {error}. Check the path.") from None
    return decoded(data, str(path))


def decoded(data: bytes, where: str) -> str:
    """`data` as text with plain line ends, whatever the locale is.

    Raises:
        InputError: if it is not UTF-8.
    """
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: byte {error.start}: got {data[error.start]:#04x}, need UTF-8 text"
        ) from None


def parse_json(text: str, where: str) -> Any:
    """`text` as JSON, with duplicate keys, NaN and numbers too large for a float refused.

    Raises:
        InputError: if it is not such JSON.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{where}: got the field {show(twice)} twice in one object, need one")
        return found

    def refuse(constant: str) -> object:
        raise InputError(f"{where}: got {constant}, need a finite number")

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else cast("float", refuse(show(number)))

    try:
        return json.loads(
            text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite
        )
    except json.JSONDecodeError as error:
        found = show(text[error.pos : error.pos + 20]) if text[error.pos :] else "the end"
        step = f". {_step_from(where)}" if _step_from(where) else ""
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            step = ". The file ends early: copy it again, or make it anew"
        raise InputError(
            f"{where}: line {error.lineno}, column {error.colno}: got {found}, need JSON:"
            f" {error.msg}{step}"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: {_TOO_DEEP}") from None
    except InputError:
        raise
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise InputError(f"{where}: got an integer of more than {most} digits") from None


def _step_from(name: str) -> str:
    """What to do where a task, or a run, was given in place of a file; empty for other names."""
    if os.path.isfile(os.path.join(name, "run.json")):  # Path raises where a name is too long
        return f"The folder of a run is for pipeplan report {name}"
    _, suffix, function = name.partition(".py")
    if not suffix or function[:1] not in ("", ":"):
        return ""
    task = name if function else f"{name}:task"
    return f"A task becomes a chain first: pipeplan profile {task} -o chain.json"
