"""The page of the zoo: which architectures work, and with which bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.markdown import bullets, table

Row = dict[str, Any]
HEAD = ("architecture", "works", "layers", "stages", "weights", "`transmit`", "why")
_WORKS = ("equal", "rounding")


def page(found: dict[str, Row]) -> Iterator[str]:
    """What became of each architecture."""
    yield "# Architectures as people have them"
    yield (
        "The command `python -m tests.zoo` takes each of these architectures from `profile`"
        " through `plan` for two GPUs to two optimizer steps of four micro-batches, and compares"
        " every weight and buffer with a plain loop of one process. All are small"
        " configurations; nothing is downloaded. Dropout is off, so that the plain loop has the"
        " same numbers to add; rows marked *drawn* keep their random numbers, and the loop beside"
        " them runs the layers one by one with the seeds of the run. `weights` is the largest"
        " difference of any weight or buffer over the largest change of any weight. Where layers"
        ' share parameters, `transmit` is the same with `Task(tied="transmit")`.'
    )
    yield "## Summary"
    yield bullets(summary(found))
    for group, members in groupby(found.items(), lambda each: str(each[1]["group"])):
        yield f"## {group}"
        yield table(HEAD, (cells(name, row) for name, row in members))


def summary(found: dict[str, Row]) -> Iterator[str]:
    """Shares of all architectures."""
    count = len(found)
    how = Counter(_how(row) for row in found.values())
    works = how["as it is"] + how["with a setting"]
    yield (
        f"{count} architectures: {how['as it is']} work as they are, {how['with a setting']} with"
        f" one setting, together {works / count:.1%}."
    )
    bad = f"{how['refused']} are refused, {how['differs']} differ in silence"
    yield f"{bad}, {how['failed']} fail without a message of ours."
    equal = sum(_last(row)["verdict"] == "equal" for row in found.values())
    yield (
        f"{equal} of those that work have the bits of the plain loop ({equal / works:.1%}),"
        f" {works - equal} differ by rounding."
    )
    for cause, models in Counter(map(_shared_or_not, found.values())).most_common():
        if cause:
            yield f"{models} of these {works - equal} {cause}."
    passed = {name: row["transmitted"] for name, row in found.items() if "transmitted" in row}
    rest = [name for name, trial in passed.items() if trial["verdict"] != "equal"]
    more = len(passed) - len(rest)
    yield (
        f"{more} of the {len(passed)} that share parameters have the plain loop's bits with"
        f' `Task(tied="transmit")`, so {equal + more} of all that work can have them'
        f" ({(equal + more) / works:.1%}). Not so: {', '.join(rest)} ([exceptions]"
        "(../explanation/runtime.md#what-is-bit-exact))."
    )
    exported = sum(_is_exported(row) for row in found.values())
    if exported:
        yield (
            f"{exported} run as for an export: they compute what the plain loop may leave out (a"
            " mask that masks nothing), so other kernels may run, and whether the last bits are"
            " equal may depend on the machine."
        )


def _is_exported(row: Row) -> bool:
    return any(note.startswith(_EXPORTED) for note in _last(row).get("notes", []))


def _shared_or_not(row: Row) -> str:
    """What a model that differs by rounding does."""
    last = _last(row)
    if last["verdict"] != "rounding":
        return ""
    if any(_SHARED in note for note in last.get("notes", [])):
        return (
            "share parameters between layers: a run adds up the gradients of each layer over the"
            " micro-batches and then those of the layers, so that every plan gives the same bits;"
            " a plain loop adds up all layers of a micro-batch first, as `transmit` does ([what"
            " that costs](tied-bits.md))"
        )
    return "differ for another reason, which their row gives"


def cells(name: str, row: Row) -> tuple[str, ...]:
    """Of one architecture."""
    last = _last(row)
    marked = f"{name} (*drawn*)" if row.get("draws") else name
    works = {"as it is": "as it is", "with a setting": row.get("setting", "")}
    return (
        marked,
        works.get(_how(row), f"**{_how(row)}**"),
        str(last.get("layers", "-")),
        str(last.get("stages", "-")),
        _weights(last),
        _weights(row["transmitted"]) if "transmitted" in row else "",
        _why(row).replace("|", "\\|").replace("\n", " "),
    )


def _last(row: Row) -> Row:
    """Of the form that works, or the first one."""
    last: Row = row.get("changed") or row["as it is"]
    return last


def _how(row: Row) -> str:
    if row["as it is"]["verdict"] in _WORKS:
        return "as it is"
    last = _last(row)["verdict"]
    return "with a setting" if last in _WORKS else str(last)


def _weights(last: Row) -> str:
    if last["verdict"] == "equal":
        return "equal"
    return f"{last['difference']:.0e}" if "difference" in last else "-"


def _why(row: Row) -> str:
    """The message of a refusal, and what explains a difference."""
    first, last = row["as it is"], _last(row)
    said = [first["message"]] if "message" in first else []
    if last["verdict"] == "rounding":
        found = [row["reason"]] if "reason" in row else map(_cause, last.get("notes", []))
        said += dict.fromkeys(each for each in found if each) or [_UNEXPLAINED]
    if "message" in last and last is not first:
        said.append(last["message"])
    return "; ".join(said)


_SHARED = "added up layer by layer"
_EXPORTED = "the model runs as for an export"
_UNEXPLAINED = "not found out; the layers in one process have the model's bits"


def _cause(note: str) -> str:
    """The reason for other last bits that a note of the profile tells, if any."""
    if _SHARED in note:
        return "shared parameters: gradients are added up layer by layer"
    if note.startswith(_EXPORTED):
        place = note.partition("reads values at ")[2].partition(",")[0]
        return f"in training it reads values at {place}: its graph has what all values need"
    return note if note.startswith("in one process") else ""
