"""Megatron-LM's `--pipeline-model-parallel-layout`: `Et*3|t*4|t*3L`.

E is the embedding, t a transformer block, L head and loss; `|` ends a stage. Stages are numbered
over the ranks first and the virtual stages of a rank second. The final norm goes with the last
block (Megatron Core, "Custom Pipeline Model Parallel Layout"). The order of computes is
Megatron's own: 1F1B, or interleaved 1F1B.
"""

from __future__ import annotations

import re
from collections import Counter

from pipeplan.errors import InputError
from pipeplan.exporters.expressible import check, is_looped, placement
from pipeplan.exporters.modules import stage_modules
from pipeplan.plan import Plan

_MEMBER = re.compile(r"(.*?)\.?\d+")
"""A member of a row: `blocks.3`, `block3`."""
_STAGE = re.compile(r"(E*)(t*)(L*)")
"""Embeddings, blocks, and what comes behind them."""


def megatron(plan: Plan) -> str:
    """The layout of a model that is one row of blocks between an embedding and a head.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if Megatron-LM cannot cut or place the model as the plan does.
    """
    check(plan, "Megatron-LM")
    if not is_looped(plan):
        raise InputError(
            f"export to Megatron-LM: stages on ranks {placement(plan)}: need as many stages on"
            " each rank, in turn (0 1 0 1). Plan again with --method contiguous or --pin."
        )
    letters = _letters(stage_modules(plan, "Megatron-LM"))
    parts = [match.groups() for stage in letters if (match := _STAGE.fullmatch(stage))]
    behind = [stage for stage, (_, blocks, tail) in enumerate(parts) if tail and not blocks]
    before = [stage for stage, (head, _, _) in enumerate(parts) if head]
    last = len(parts) - 1
    if before != [0] or not parts[last][2] or behind not in ([], [last]):
        raise InputError(
            f"export to Megatron-LM: stages of {' | '.join(letters)} (t: a block, E: a module"
            " before the blocks, L: one behind them): need each E in the first stage, and each L"
            " in the last stage or that of the last block. Pin such layers to one GPU, or profile"
            " the model with its embedding and its head."
        )
    row = [_counted(blocks) for _, blocks, _ in parts]
    return "|".join(["E" + row[0], *row[1:]]) + "L\n"


def _letters(stages: list[list[str]]) -> list[str]:
    """A letter for each module of each stage; the blocks are those of the longest row.

    Raises:
        InputError: if there is no row of blocks, or a module that has no letter.
    """
    names = [name for stage in stages for name in stage]
    rows = {name: match[1] for name in names if (match := _MEMBER.fullmatch(name))}
    if not rows:
        raise InputError(
            f"export to Megatron-LM: modules {', '.join(names[:5])}, ..: need a row of blocks"
            " (layers.0, layers.1, ..): Megatron-LM trains transformers. Try another --format."
        )
    ((longest, _),) = Counter(rows.values()).most_common(1)
    members = [name for name in names if rows.get(name) == longest]
    others = [name for name in names if rows.get(name) != longest]
    first, last = names.index(members[0]), names.index(members[-1])
    kinds = dict.fromkeys(members, "t")
    for name in others:
        _check_other(name, first < names.index(name) < last, rows, members)
        kinds[name] = "E" if names.index(name) < first else "L"
    return ["".join(kinds[name] for name in stage) for stage in stages]


def _check_other(name: str, between: bool, rows: dict[str, str], blocks: list[str]) -> None:
    """Refuse a module that would be lost in E or L, or taken for one of `blocks`.

    Raises:
        InputError: if it lies `between` them, or is a block of another row.
    """
    row = rows.get(name)
    twins = [other for other in rows if rows[other] == row]
    if not between and len(twins) < 2:
        return
    got = f"one of the row {twins[0]} to {twins[-1]}" if len(twins) > 1 else "it"
    where = "between" if between else "beside"
    raise InputError(
        f"export to Megatron-LM: module {name!r}: got {got} {where} the blocks {blocks[0]} to"
        f" {blocks[-1]}, need one row of blocks and single modules before and behind it: a layout"
        " has no letter for another. Try another --format."
    )


def _counted(blocks: str) -> str:
    """`t*3` of `ttt`."""
    return blocks if len(blocks) < 2 else f"t*{len(blocks)}"
