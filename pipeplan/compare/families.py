"""The baselines by name, each in the few ways that it can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial

from pipeplan.baselines import building_blocks, flush, interleaved, splits, zerobubble
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.listed import ListedSchedule, Lists, listed_plan, replay_lists
from pipeplan.baselines.pipedream import noam, problem
from pipeplan.baselines.timed import Setting
from pipeplan.baselines.twobw import equal_blocks
from pipeplan.chain import Chain
from pipeplan.compare.rows import Row, row_of
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.self_timed import staircase

Split = Callable[[Chain, Sequence[float]], list[int]]
"""(chain, speed of each stage's GPU) -> the ends of the stages."""

SPLITS: dict[str, Split] = {
    "equal times": splits.time_balanced,
    "equal layers": lambda chain, speeds: splits.uniform_split(chain, len(speeds)),
    "equal parameters": lambda chain, speeds: splits.parameter_balanced(chain, len(speeds)),
}
CHUNKS = (2, 3, 4)
"""Stages per GPU that the looped schedule tries."""
ROUNDS = (1, 1.5, 2)
"""How many times P micro-batches the V has in flight."""

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
        ends = SPLITS[kind](setting.chain, _speeds(setting, range(depth)))
        yield from _one_stage_each(setting, name, ends, depth, "")

    return ways


def _two_bw(setting: Setting, name: str, _: int) -> Iterator[Row]:
    for plan in equal_blocks(setting):
        yield row_of(name, plan, f"depth {len(plan.stages)}")


def listed(*schedules: ListedSchedule) -> Ways:
    """Every schedule on every split that has as many stages as it needs."""

    def ways(setting: Setting, name: str, microbatches: int) -> Iterator[Row]:
        rows, refusal = 0, None
        for schedule in schedules:
            gpus = schedule.place(_depth(setting))
            if len(gpus) > len(setting.chain.layers):
                continue
            for kind, stages in _stages(setting, list(gpus)):
                outline = setting.outline(stages, "flush", name)
                detail = ", ".join(filter(None, (kind, schedule.detail)))
                try:
                    yield _step_row(name, outline, detail, schedule, microbatches)
                    rows += 1
                except InputError as error:
                    refusal = error
        if refusal and not rows:
            raise refusal

    return ways


def _step_row(
    name: str, outline: Plan, detail: str, schedule: ListedSchedule, microbatches: int
) -> Row:
    """The row of one step; a longer one shows what a micro-batch adds."""
    used = 1 + max(stage.gpu for stage in outline.stages)

    def lists(count: int) -> Lists:
        """For all GPUs: those without a stage do nothing."""
        return [*schedule.lists(used, count), *([] for _ in outline.cluster.gpus[used:])]

    plan = listed_plan(outline, lists(microbatches), microbatches)
    # A schedule that wants full rounds of the GPUs has them at one of these multiples.
    for times in range(2, used + 2):
        with suppress(InputError):
            longer = replay_lists(plan, lists(times * microbatches)).makespan_ns
            added = Fraction(longer - plan.period_ns, (times - 1) * microbatches)
            return row_of(name, plan, detail, added)
    return row_of(name, plan, detail)


def _speeds(setting: Setting, gpus: Iterable[int]) -> list[float]:
    return [setting.cluster.gpus[gpu].speed for gpu in gpus]


def _stages(setting: Setting, gpus: list[int]) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """The different splits into a stage for each of `gpus` that can be trained, by name."""
    seen: set[tuple[int, ...]] = set()
    for kind, split in SPLITS.items():
        ends = tuple(split(setting.chain, _speeds(setting, gpus)))
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


def _each(lists: Callable[[int, int], Lists]) -> ListedSchedule:
    """A schedule of one stage per GPU."""
    return ListedSchedule(lists, range)


def _in_v(lists: Callable[[int, int], Lists]) -> ListedSchedule:
    """A schedule of two stages per GPU, there and back."""
    return ListedSchedule(lists, interleaved.v_gpus)


def _looped(stages_per_gpu: int) -> ListedSchedule:
    return ListedSchedule(
        partial(interleaved.looped, chunks=stages_per_gpu),
        partial(interleaved.looped_gpus, chunks=stages_per_gpu),
        f"{stages_per_gpu} stages per GPU",
    )


def _v_shaped(rounds: float) -> ListedSchedule:
    lists = partial(interleaved.v_shaped, rounds=rounds)
    return ListedSchedule(lists, interleaved.v_gpus, f"{rounds:g} P in flight")


STEP_FAMILIES: dict[str, Ways] = {
    "GPipe": listed(_each(flush.gpipe)),
    "1F1B with flush": listed(_each(flush.one_f_one_b)),
    "interleaved 1F1B, looped": listed(*map(_looped, CHUNKS)),
    "interleaved 1F1B, V": listed(*map(_v_shaped, ROUNDS)),
    "ZB-H1": listed(_each(zerobubble.zb_h1)),
    "ZB-H2": listed(_each(zerobubble.zb_h2)),
    "ZB-V": listed(_in_v(building_blocks.zb_v)),
    "V-Half": listed(_in_v(building_blocks.v_half)),
    "V-Min": listed(_in_v(building_blocks.v_min)),
}
"""Schedules with a flush."""

FAMILIES: dict[str, Ways] = {
    "PipeDream-2BW, equal blocks": _two_bw,
    **{f"{kind}, 1F1B": _split_1f1b(kind) for kind in SPLITS},
    **STEP_FAMILIES,
}
