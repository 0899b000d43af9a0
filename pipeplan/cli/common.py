"""What the verbs share: flag types, files in and out, where results and hints go."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeplan import units
from pipeplan.cli import helptext, output
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeplan.chain import Chain
    from pipeplan.document import Document

    _Document = TypeVar("_Document", bound=Document)
    _One = TypeVar("_One", bound=Document)
    _Other = TypeVar("_Other", bound=Document)

_Value = TypeVar("_Value")
Verbs = Any
"""What `ArgumentParser.add_subparsers` returns; argparse keeps its type private."""


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    example: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """A verb's parser with what every verb has: examples, `--json`, `--debug`.

    `usage` names what is always given, where a list of all flags would fill the screen.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in example.splitlines()),
        formatter_class=helptext.Formatter,
        usage=usage,
        allow_abbrev=False,
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb.add_argument("--debug", action="store_true", help="show the traceback of a bug")
    verb.set_defaults(run=run)
    return verb


def add_output(
    verb: argparse.ArgumentParser, name: str, text: str = "file to write; - is stdout"
) -> None:
    """`-o FILE` and `--force`."""
    verb.add_argument("-o", "--output", type=file, required=True, metavar=name, help=text)
    verb.add_argument("--force", action="store_true", help="replace the file if it exists")


def flag(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """`parse` as an argparse type: its InputError becomes a usage error with the same words."""

    def convert(text: str) -> _Value:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


size = flag(units.parse_bytes)
bandwidth = flag(lambda text: Bandwidth(units.parse_bandwidth(text)))
duration = flag(units.parse_time_ns)
limit = flag(units.parse_limit_ns)
share = flag(units.parse_fraction)


def file(text: str) -> str:
    """An argparse type for the name of a file; an empty one is a variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("got '', need the name of a file. Leave the flag out.")
    return text


class Bandwidth:
    """A parsed `--bandwidth`: `inf` (None) stays apart from a flag that was not given."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self.bytes_per_s = bytes_per_s


def count(least: int = 1, most: int = 10**6) -> Callable[[str], int]:
    """An argparse type for an integer from `least` to `most`."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, need an integer from {least} to {most}"
            )
        return int(text)

    return convert


def several(parse: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """An argparse type for a comma list of what `parse` takes, without repetitions."""

    def convert(text: str) -> list[_Value]:
        return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))

    return convert


def ranges(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argparse type for a comma list of integers and ranges a..b, without repetitions.

    A range doubles from a up to b, which is always its last value; where b is less than four times
    a, it takes five equal steps.
    """

    def convert(text: str) -> list[int]:
        found: list[int] = []
        for part in text.split(","):
            low, dots, high = part.partition("..")
            found += _range(parse(low.strip()), parse(high.strip())) if dots else [parse(low)]
        return list(dict.fromkeys(found))

    return convert


def _range(low: int, high: int) -> list[int]:
    if not 0 < low <= high:
        raise argparse.ArgumentTypeError(f"got {low}..{high}, need a range from less to more")
    if high < 4 * low:
        return [low + (high - low) * step // 4 for step in range(5)]
    doubled = [low * 2**power for power in range((high // low).bit_length())]
    return [*doubled, high]


def named(path: str) -> str:
    """A file as messages name it; `-` is stdin."""
    return "stdin" if path == "-" else path


def read_either(path: str, one: type[_One], other: type[_Other]) -> _One | _Other:
    """What is in `path`, `-` for stdin: `one` where its format says so, else `other`.

    Raises:
        InputError: if it is neither.
    """
    from pipeplan.document import parse_json

    where = named(path)
    data = parse_json(read_text(path), where)
    kind = data.get("format") if isinstance(data, dict) else None
    name, _, _ = str(one.model_fields["format"].default).partition("/")
    is_one = isinstance(kind, str) and kind.startswith(f"{name}/")
    return one.from_data(data, where) if is_one else other.from_data(data, where)


def read_text(path: str) -> str:
    """The text of `path`; `-` is stdin.

    Raises:
        InputError: if it cannot be read.
    """
    from pipeplan import document

    if path != "-":
        return document.read_text(path)
    if sys.stdin is None:
        raise InputError("stdin: cannot be read: it is closed. Give the name of a file.")
    try:
        return document.decoded(sys.stdin.buffer.read(), "stdin")
    except OSError as error:
        raise InputError(f"stdin: cannot be read: {error.strerror}.") from None


def read(kind: type[_Document], path: str) -> _Document:
    """The document in `path`; `-` is stdin.

    Raises:
        InputError: if it cannot be read or breaks a rule of its format.
    """
    return kind.from_json(read_text(path), named(path))


def screen(to_stderr: bool = False) -> Console:
    """A console of 120 columns where output goes to a file: tables never fold there."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            """Leave a closed pipe to `main`, which is silent about it; rich would exit with 1."""
            raise BrokenPipeError

    stream = sys.stderr if to_stderr else sys.stdout
    console = Quiet(file=stream, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    return console


def emit(value: object) -> None:
    """`value` as JSON on stdout."""
    print(json.dumps(value, indent=1))


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(text, file=sys.stderr)


def then(command: str, *files: str | Path) -> None:
    """The next sensible command, on stderr; each `{}` is one of `files`, as a shell reads it."""
    quoted = (shlex.quote(str(each)) for each in files)
    say(f"next: {command.format(*quoted) if files else command}")


def save_chain(args: argparse.Namespace, chain: Chain) -> None:
    """Write `chain` to `args.output`, say what is in it and what to do with it."""
    output.write(args.output, chain.to_json(), args.force)
    layers = chain.layers
    figures = {
        "layers": len(layers),
        "forward_ns": sum(layer.forward_ns for layer in layers),
        "backward_ns": sum(layer.backward_ns for layer in layers),
        "weight_bytes": sum(layer.weight_bytes for layer in layers),
    }
    light = [layer.forward_light_ns for layer in layers if layer.forward_light_ns is not None]
    if len(light) == len(layers):
        figures["forward_light_ns"] = sum(light)
    if args.output == "-":
        return
    if args.json:
        emit({"chain": args.output, "name": chain.name, **figures})
    else:
        print(
            f"{args.output}: {chain.name}, {units.counted(len(layers), 'layer')},"
            f" forward {units.format_ns(figures['forward_ns'])}{_light(figures)},"
            f" backward {units.format_ns(figures['backward_ns'])},"
            f" weights {units.format_bytes(figures['weight_bytes'])}"
        )
    say(f"layers: pipeplan show {shlex.quote(args.output)}")
    tell_unmarked(chain)
    given = "--gpus 2 --memory 16GiB --bandwidth 12GB/s -o plan.json"
    then(f"pipeplan plan {{}} {given}", args.output)


def tell_unmarked(chain: Chain) -> None:
    """Say so where `launch` will not take the task from a plan of `chain`: it may be anyone's."""
    from pipeplan import taskref

    task = chain.task
    if task and not taskref.is_nameable(task):
        given = shlex.quote(task) if task.isprintable() else "with the task that is meant"
        say(
            f"a plan may not name {units.shown(task)}: mark the function with"
            f" @pipeplan.task_function, below this directory, or give launch --task {given}"
        )


def _light(figures: Mapping[str, int]) -> str:
    """The forward without autograd, in brackets, where it is known."""
    known = figures.get("forward_light_ns")
    return "" if known is None else f" ({units.format_ns(known)} without autograd)"
