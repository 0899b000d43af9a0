"""The baselines by name, each in the few ways that it can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeplan.baselines import flush, interleaved, listed, splits, zerobubble
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.listed import Lists
from pipeplan.baselines.pipedream import noam, problem
from pipeplan.baselines.timed import Setting
from pipeplan.baselines.twobw import equal_blocks
from pipeplan.chain import Chain
from pipeplan.compare.rows import Row, bubble_of, row_of
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.self_timed import staircase

Split = Callable[[Chain, int], list[int]]

SPLITS: dict[str, Split] = {
    "equal times": splits.time_balanced,
    "equal layers": splits.uniform_split,
    "equal parameters": splits.parameter_balanced,
}
CHUNKS = (2, 3, 4)
"""Stages per GPU that the looped schedule tries."""

Ways = Callable[[Setting, str, int], Iterator[Row]]
"""(setting, name of the rows, micro-batches per flush step) -> every way of a baseline, judged."""


def pipedream(setting: Setting, name: str, target_bytes: int | None) -> Iterator[Row]:
    """PipeDream as published: its partition for a memory target, one micro-batch per stage."""
    stages = _depth(setting)
    found = problem(setting.chain, setting.cluster, stages).solve(target_bytes)
    if found is None:
        raise InputError("no partition keeps its memory rule")
    detail = f"its own estimate {found.period_ns / 1e6:.4g} ms, {found.memory_bytes} bytes"
    yield from _one_stage_each(setting, name, list(found.ends), noam(stages), detail)


def _one_stage_each(
    setting: Setting, name: str, ends: list[int], most: int, detail: str
) -> Iterator[Row]:
    """Eager 1F1B of one split, one stage per GPU."""
    stages = _trainable(setting, splits.to_stages(ends))
    outline = setting.outline(stages, "2bw", name)
    plan = eager_plan(outline, Policy(staircase(len(stages), most)))
    if plan is None:
        raise InputError("its execution shows no cycle within 500 micro-batches")
    yield row_of(name, plan, detail)


def _split_1f1b(kind: str) -> Ways:
    def ways(setting: Setting, name: str, _: int) -> Iterator[Row]:
        depth = _depth(setting)
        ends = SPLITS[kind](setting.chain, depth)
        yield from _one_stage_each(setting, name, ends, depth, "")

    return ways


def _two_bw(setting: Setting, name: str, _: int) -> Iterator[Row]:
    for plan in equal_blocks(setting):
        yield row_of(name, plan, f"depth {len(plan.stages)}")


def _flush(lists: Callable[[int, int], Lists]) -> Ways:
    """One stage per GPU, executed in the order of `lists(stages, microbatches)`."""

    def ways(setting: Setting, name: str, microbatches: int) -> Iterator[Row]:
        depth = _depth(setting)
        for kind, stages in _stages(setting, depth, list(range(depth))):
            outline = setting.outline(stages, "flush", name)
            yield _step_row(
                name, outline, kind, lambda m: _padded(setting, lists(depth, m)), microbatches
            )

    return ways


def _looped(setting: Setting, name: str, microbatches: int) -> Iterator[Row]:
    gpus = setting.gpus
    for chunks in CHUNKS:
        if gpus * chunks > len(setting.chain.layers):
            return
        for kind, stages in _stages(setting, gpus * chunks, interleaved.looped_gpus(gpus, chunks)):
            outline = setting.outline(stages, "flush", name)

            def lists(m: int, chunks: int = chunks) -> Lists:
                return interleaved.looped(gpus, chunks, m)

            detail = f"{kind}, {chunks} stages per GPU"
            yield _step_row(name, outline, detail, lists, microbatches)


def _v_shaped(setting: Setting, name: str, microbatches: int) -> Iterator[Row]:
    gpus = setting.gpus
    if 2 * gpus > len(setting.chain.layers):
        return
    for kind, stages in _stages(setting, 2 * gpus, interleaved.v_gpus(gpus)):
        outline = setting.outline(stages, "flush", name)
        for most in sorted({gpus, gpus + gpus // 2, 2 * gpus}):

            def lists(m: int, most: int = most) -> Lists:
                return interleaved.v_shaped(gpus, m, most)

            yield _step_row(name, outline, f"{kind}, {most} in flight", lists, microbatches)


def _zero_bubble(setting: Setting, name: str, microbatches: int) -> Iterator[Row]:
    if not zerobubble.has_split(setting.chain):
        raise InputError("a layer of the chain has no backward_weight_ns")
    depth = _depth(setting)
    for kind, stages in _stages(setting, depth, list(range(depth))):
        step = zerobubble.zb_h1(setting, stages, microbatches)
        more = zerobubble.zb_h1(setting, stages, 2 * microbatches)
        added = 2 * more.per_microbatch - step.per_microbatch
        yield Row(
            name=name,
            semantics="flush",
            period_ns=step.per_microbatch,
            bubble=bubble_of(step.works_ns, step.busiest_ns, step.per_microbatch, added),
            update_ns=step.update_ns,
            peak_bytes=step.peak_bytes,
            budget_bytes=tuple(gpu.budget_bytes for gpu in setting.cluster.gpus),
            detail=kind,
        )


def _step_row(
    name: str, outline: Plan, detail: str, lists: Callable[[int], Lists], microbatches: int
) -> Row:
    plan = listed.listed_plan(outline, lists(microbatches), microbatches)
    return row_of(name, plan, detail, lists(2 * microbatches))


def _stages(
    setting: Setting, parts: int, gpus: list[int]
) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """The different splits into `parts` that can be trained, by name."""
    seen: set[tuple[int, ...]] = set()
    for kind, split in SPLITS.items():
        ends = tuple(split(setting.chain, parts))
        stages = splits.to_stages(ends, gpus)
        if ends not in seen and splits.keeps_ties(setting.chain, stages):
            seen.add(ends)
            yield kind, stages


def _trainable(setting: Setting, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    if not splits.keeps_ties(setting.chain, stages):
        raise InputError("it puts layers that share a parameter on different GPUs")
    return stages


def _depth(setting: Setting) -> int:
    return min(setting.gpus, len(setting.chain.layers))


def _padded(setting: Setting, lists: Lists) -> Lists:
    """Lists for all GPUs; those without a stage do nothing."""
    return [*lists, *([] for _ in range(setting.gpus - len(lists)))]


FAMILIES: dict[str, Ways] = {
    "PipeDream-2BW, equal blocks": _two_bw,
    **{f"{kind}, 1F1B": _split_1f1b(kind) for kind in SPLITS},
    "GPipe": _flush(flush.gpipe),
    "1F1B with flush": _flush(flush.one_f_one_b),
    "interleaved 1F1B, looped": _looped,
    "interleaved 1F1B, V": _v_shaped,
    "ZB-H1": _zero_bubble,
}
