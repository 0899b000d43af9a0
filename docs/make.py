"""Writes docs/reference/cli.md from the parsers and docs/reference/python.md from the docstrings.

    python docs/make.py

A test compares both files with what this makes.
"""

# ruff: noqa: SLF001  argparse has no public way to list its flags
from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pipeplan.cli import entry
from pipeplan.cli.helptext import detail_of
from pipeplan.launch import options

FOLDER = Path(__file__).parent / "reference"
_BY = "<!-- Written by `python docs/make.py`: change the {}, not this page. -->\n"
PUBLIC = {
    "pipeplan": None,
    "pipeplan.task": None,
    "pipeplan.callbacks": (
        "RunStart",
        "StepMetrics",
        "ValidationResult",
        "SavedCheckpoint",
        "RunEnd",
    ),
    "pipeplan.capture": None,
    "pipeplan.operators": None,
    "pipeplan.rehearsal": None,
    "pipeplan.layer_options": None,
    "pipeplan.stage_profile": ("refine",),
    "pipeplan.importers": None,
    "pipeplan.exporters": None,
    "pipeplan.cluster": ("uniform",),
    "pipeplan.planner": None,
    "pipeplan.sweep": ("sweep", "Point"),
    "pipeplan.compare": None,
    "pipeplan.verifier": None,
    "pipeplan.lowering": None,
    "pipeplan.simulator": None,
    "pipeplan.remat": None,
    "pipeplan.remat.graph": None,
    "pipeplan.remat.states": None,
    "pipeplan.ilp": None,
}
"""Modules, and the names of each that are public; None: its `__all__`."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")


def cli() -> str:
    """The command line's reference."""
    top = entry.parser()
    (verbs,) = (each for each in top._actions if isinstance(each, argparse._SubParsersAction))
    parts = [
        "# Command line\n\n" + _BY.format("parsers"),
        (top.description or "").strip().split("\n")[0],
        "`pipeplan VERB --help` shows the flags of one verb on one screen; this page adds what has"
        " no room there. A value in brackets is the default. Sizes are written `16GiB`, rates"
        " `12GB/s` or `inf`, times `10us`, `30s` or `5min`, shares `1%`.",
        f"## Exit codes\n\n{(top.epilog or '').removeprefix('exit codes: ')}",
    ]
    for name, verb in verbs.choices.items():
        parts += [f"## pipeplan {name}", *_verb(verb)]
    parts += ["## pipeplan.launch", *_verb(options.parser())]
    return _clean(parts)


def _verb(verb: argparse.ArgumentParser) -> Iterator[str]:
    yield verb.description or ""
    for group in verb._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions:
            rows = "\n".join(_flag(action) for action in actions)
            title = (group.title or "").replace("positional arguments", "arguments")
            yield f"**{title[0].upper()}{title[1:]}**\n\n| flag | meaning |\n|---|---|\n{rows}"
    lines = (verb.epilog or "").strip().removeprefix("examples:").splitlines()
    yield "\n".join(["```text", *(line.strip() for line in lines if line.strip()), "```"])


def _flag(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or "|".join(map(str, action.choices or (action.dest.upper(),))))
    names = ", ".join(action.option_strings)
    shown = f"{names} {value}" if names and value else names or value
    says = (action.help or "").replace("%%", "%")
    if action.choices and action.metavar:
        says += f". One of {', '.join(f'`{choice}`' for choice in action.choices)}"
    if detail_of(action):
        says += f". {detail_of(action)}"
    return f"| `{shown.replace('|', ' or ')}` | {says.replace('|', ' or ')} |"


def python() -> str:
    """The Python API's reference."""
    parts = [
        "# Python API\n\n" + _BY.format("docstrings"),
        "Times are integer nanoseconds and sizes integer bytes unless a name says otherwise.",
        "Errors are those of `pipeplan.errors`; each message names the place, the value, the need"
        " and the next step. Chains, clusters and plans are [documents](formats.md) with"
        " `from_json` and `to_json`.",
    ]
    shown: set[int] = set()
    for name, names in PUBLIC.items():
        module = importlib.import_module(name)
        parts += [f"## {name}", _prose(inspect.getdoc(module) or "")]
        for each in names or sorted(module.__all__):
            value = getattr(module, each)
            if id(value) not in shown:
                parts += _member(f"{name}.{each}", value)
            shown.add(id(value))
    return _clean(parts)


def _clean(parts: list[str]) -> str:
    """Paragraphs with one empty line between them."""
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(part for part in parts if part)) + "\n"


def _member(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"### {name}"
        if not dataclasses.is_dataclass(value) and _hand_written(value):
            yield _code("class", name, value)
        yield _prose(inspect.getdoc(value) or "")
        yield _fields(value)
        for method in vars(value):
            function = inspect.getattr_static(value, method)
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"#### {name.rpartition('.')[2]}.{method}"
                yield _code("def", method, function)
                yield _prose(inspect.getdoc(function) or "")
    elif inspect.isfunction(value):
        yield f"### {name}"
        yield _code("def", name, value)
        yield _prose(inspect.getdoc(value) or "")


def _hand_written(kind: type) -> bool:
    return inspect.isfunction(vars(kind).get("__init__"))


def _code(word: str, name: str, value: object) -> str:
    """The signature as the source has it, one argument a line where it is long."""
    source = vars(value).get("__init__", value) if isinstance(value, type) else value
    signature = str(inspect.signature(source))  # type: ignore[arg-type]
    signature = re.sub(r"<.* at 0x\w+>", "...", signature)
    signature = re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", signature)
    signature = re.sub(r"\(self(, )?", "(", signature).removesuffix(" -> None")
    line = f"{word} {name.rpartition('.')[2]}{signature}"
    return "```text\n" + "\n".join(textwrap.wrap(line, 96, subsequent_indent="    ")) + "\n```"


def _fields(kind: type) -> str:
    """Attributes with the string below each, as in the source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return ""
    assert isinstance(tree, ast.ClassDef)
    lines = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id.startswith("_"):
            continue
        said = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = ": " + " ".join(inspect.cleandoc(str(after.value.value)).split())
        default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
        lines.append(f"- `{node.target.id}: {ast.unparse(node.annotation)}{default}`{said}")
    return "\n".join(lines)


def _prose(text: str) -> str:
    """A Google docstring as Markdown."""
    lines: list[str] = []
    inside = ""
    for line in text.splitlines():
        found = _SECTION.match(line)
        if found:
            inside = found[1]
            lines += ["", f"*{inside}*", ""]
        elif inside and line.startswith("    ") and not line.startswith("     "):
            entry = re.match(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", line)
            lines.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"- {line.strip()}")
            if inside == "Returns":
                lines[-1] = line.strip()
        elif inside and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            inside = "" if line.strip() else inside
            lines.append(line)
    return "\n".join(lines).strip()


PAGES = {"cli.md": cli, "python.md": python}


def main() -> None:
    """Write both pages."""
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
