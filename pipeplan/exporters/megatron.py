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
    """A letter for each module of each stage; the blocks are those of the longest row."""
    names = [name for stage in stages for name in stage]
    rows = {name: match[1] for name in names if (match := _MEMBER.fullmatch(name))}
    if not rows:
        raise InputError(
            f"export to Megatron-LM: modules {', '.join(names[:5])}, ..: need a row of blocks"
            " (layers.0, layers.1, ..): Megatron-LM trains transformers. Try another --format."
        )
    ((longest, _),) = Counter(rows.values()).most_common(1)
    blocks = [index for index, name in enumerate(names) if rows.get(name) == longest]
    kinds = {
        name: "E" if index < blocks[0] else "L" if index > blocks[-1] else "t"
        for index, name in enumerate(names)
    }
    return ["".join(kinds[name] for name in stage) for stage in stages]


def _counted(blocks: str) -> str:
    """`t*3` of `ttt`."""
    return blocks if len(blocks) < 2 else f"t*{len(blocks)}"
