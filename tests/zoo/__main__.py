"""Tries all architectures of the zoo, or those named, and keeps what became of each.

    python -m tests.zoo               those that benchmarks/results/zoo.json lacks
    python -m tests.zoo gpt2 lstm     these, again
    python -m tests.zoo --all         all, again

Each runs in a process of its own. `python -m benchmarks.pages` makes docs/results/zoo.md of the
file. Ends with 1 where an architecture differs in silence or fails without a refusal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pipeplan import whole_file
from tests.zoo.architecture import Architecture, Make
from tests.zoo.catalog import ARCHITECTURES, GROUP_OF
from tests.zoo.trial import Trial, tried

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo.json"
PATIENCE_S = 600


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="as in the table")
    parser.add_argument("--all", action="store_true", help="those that the file has, too")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="%(default)s")
    parser.add_argument("--here", action="store_true", help="in this process, for a debugger")
    args = parser.parse_args(words)
    if unknown := set(args.names) - set(ARCHITECTURES):
        known = ", ".join(f"'{name}'" for name in ARCHITECTURES)
        parser.error(f"NAME: got {sorted(unknown)}, need some of {known}")
    rows = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    known = {} if args.all else rows
    names = args.names or [name for name in ARCHITECTURES if name not in known]
    torch.set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")  # once, not in each process
    wrong = 0
    for place, name in enumerate(names, 1):
        begin = time.monotonic()
        rows[name] = row_of(ARCHITECTURES[name], here=args.here)
        _write(args.out, rows)
        last = rows[name].get("changed") or rows[name]["as it is"]
        wrong += last["verdict"] in ("differs", "failed")
        said = f"[{place}/{len(names)}] {name}: {last['verdict']}"
        said += f" {last['difference']:.1e}" if last.get("difference") else ""
        said += f" ({rows[name]['setting']})" if "changed" in rows[name] else ""
        if "transmitted" in rows[name]:
            said += f", transmitted: {rows[name]['transmitted']['verdict']}"
        print(f"{said}, {time.monotonic() - begin:.0f} s", flush=True)
        if "message" in last:
            print(f"    {last['message']}", flush=True)
    return min(wrong, 1)


def row_of(architecture: Architecture, *, here: bool = False) -> dict[str, Any]:
    """All forms of an architecture: the second one where the first does not work.

    Where layers share parameters, and the bits are others for that, there is a form that passes
    these parameters on.
    """
    form = _tried_here if here else _tried_apart
    first = form(architecture.make, architecture.draws)
    row: dict[str, Any] = {"group": GROUP_OF[architecture.name], "as it is": first.row()}
    if first.verdict in ("refused", "failed", "differs") and architecture.changed:
        second = form(architecture.changed, architecture.draws)
        row |= {"setting": architecture.setting, "changed": second.row()}
    if shares(row):
        make = architecture.changed if "changed" in row else architecture.make
        assert make is not None
        row["transmitted"] = form(transmitting(make), architecture.draws).row()
    if architecture.draws:
        row["draws"] = True
    if architecture.reason:
        row["reason"] = architecture.reason
    return row


def shares(row: dict[str, Any]) -> bool:
    """Whether an architecture rounds, and its layers share parameters."""
    last = row.get("changed") or row["as it is"]
    notes = last.get("notes", [])
    return last["verdict"] == "rounding" and any("share a parameter" in note for note in notes)


def transmitting(make: Make) -> Make:
    """The task whose layers pass on what they share."""
    return lambda: replace(make(), tied="transmit")


def _tried_here(make: Make, draws: bool) -> Trial:
    return tried(make, draws=draws)


def _tried_apart(make: Make, draws: bool) -> Trial:
    """In a forked process, whose end is no matter for the others."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, make, draws))
    process.start()
    theirs.close()
    try:
        if mine.poll(PATIENCE_S):
            found: Trial = mine.recv()
            return found
        return Trial("failed", message=f"no end after {PATIENCE_S} s")
    except EOFError:
        process.join()
        return Trial("failed", message=f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _answer(answer: Connection, make: Make, draws: bool) -> None:
    answer.send(tried(make, draws=draws))


def _write(path: Path, rows: dict[str, Any]) -> None:
    ordered = {name: rows[name] for name in ARCHITECTURES if name in rows}
    whole_file.replace(path, json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
