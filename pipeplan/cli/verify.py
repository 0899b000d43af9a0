"""`pipeplan verify`: every rule of docs/reference/model.md that a plan breaks."""

from __future__ import annotations

import argparse

from pipeplan.cli import common
from pipeplan.units import counted

_EXAMPLE = "pipeplan verify plan.json"


def add(verbs: common.Verbs) -> None:
    """The verb and its flags."""
    verb = common.add_verb(
        verbs, "verify", run, "check every rule of a plan and name all that it breaks", _EXAMPLE
    )
    verb.add_argument("plan", metavar="PLAN", help="plan.json; - is stdin")


def run(args: argparse.Namespace) -> int:
    """Print all violations of `args.plan`; 4 where there are any."""
    from pipeplan.errors import InvalidPlanError
    from pipeplan.plan import Plan
    from pipeplan.verifier import verify

    plan = common.read(Plan, args.plan)
    violations = verify(plan)
    if args.json:
        common.emit({"valid": not violations, "violations": [str(each) for each in violations]})
    for violation in () if args.json else violations:
        print(violation)
    if violations:
        rules = counted(len(violations), "rule")
        raise InvalidPlanError(f"{args.plan}: breaks {rules}. Plan again, or mend the file.")
    if not args.json:
        print(f"valid: {args.plan} keeps every rule")
    common.then("pipeplan simulate {}", args.plan)
    return 0
