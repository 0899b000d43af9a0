"""ZB-H1: 1F1B with a flush whose weight gradients fill the drain.

The backward of a stage is split: B gives the gradient of its input, on which the stage before
waits, and W the gradient of its weights, on which nobody waits before the update. Stage s starts
W s micro-batches late, so that no GPU holds more than the first one does under 1F1B. With equal
f, b and w per stage and no communication a step takes m * (f + b + w) + (P - 1) * (f + b - w).

A plan has no W. The simulator replays it as it replays an update: a rank does it at its place and
nothing waits for it, so the chain's copy carries the length of W where an update's length stands.
The bytes that W needs are kept from B to W and added to the ledger's.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor

from pipeplan.baselines import flush, listed
from pipeplan.baselines.timed import Setting, busiest, in_order, timed
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.program import Action, ActionKind, Program
from pipeplan.simulator import Simulation, costs, replay, simulate
from pipeplan.simulator.tape import Ops, number


@dataclass(frozen=True, slots=True)
class ZeroBubble:
    """One step of ZB-H1."""

    stages: tuple[Stage, ...]
    microbatches: int
    length_ns: int
    """From the first forward to the end of the last compute."""
    update_ns: int
    """The slowest GPU's update, which follows."""
    works_ns: tuple[int, ...]
    """Per GPU, its work for one micro-batch."""
    busiest_ns: int
    """Of the busiest GPU or link, for one micro-batch."""
    peak_bytes: tuple[int, ...]

    @property
    def per_microbatch(self) -> Fraction:
        """Ns of the step without its update that one micro-batch takes."""
        return Fraction(self.length_ns, self.microbatches)


def has_split(chain: Chain) -> bool:
    """Whether every layer says how long its weight gradient takes."""
    return all(layer.backward_weight_ns is not None for layer in chain.layers)


def zb_h1(setting: Setting, stages: tuple[Stage, ...], microbatches: int) -> ZeroBubble:
    """One step of `microbatches` micro-batches, stage s on GPU s.

    Where a layer does not say what its weight gradient needs (`saved_for_weight_bytes`), it keeps
    all that it saves.

    Raises:
        InputError: if a layer does not say how long its weight gradient takes.
    """
    listed.check_count(microbatches)
    outline = setting.outline(stages, "flush", "zb-h1")
    split = outline.model_copy(
        update={"chain": _split(setting, stages), "microbatches": microbatches}
    )
    program = _program(split, microbatches)
    simulation = replay(split, program, updates=True)
    plan = _computes(split, simulation, microbatches)
    judged = simulate(plan, lower(plan), microbatches=microbatches)
    weights = [_weights(program, simulation, stage.gpu) for stage in stages]
    unused = (0,) * (setting.gpus - len(stages))
    works = tuple(_work(split, stage.id) for stage in stages)
    return ZeroBubble(
        stages=stages,
        microbatches=microbatches,
        length_ns=simulation.makespan_ns,
        update_ns=max(costs.update_ns(outline, stage.id) for stage in stages),
        works_ns=works + unused,
        busiest_ns=max(*works, busiest(split, Ops.of(split))),
        peak_bytes=tuple(
            _peak(outline, judged, stage.gpu, times)
            for stage, times in zip(stages, weights, strict=True)
        )
        + unused,
    )


def weights_behind(stage: int, microbatch: int, microbatches: int) -> int:
    """How many W follow the B of a micro-batch: one from the stage's own number on, then all."""
    last = microbatch + 1 == microbatches
    done = max(0, microbatch - stage)
    return microbatches - done if last else int(microbatch >= stage)


def _split(setting: Setting, stages: tuple[Stage, ...]) -> Chain:
    """The chain whose backward is B alone and whose update is W."""
    layers = []
    firsts = {stage.first: stage.gpu for stage in stages}
    for index, layer in enumerate(setting.chain.layers):
        weight = layer.backward_weight_ns
        if weight is None:
            raise InputError(
                f"ZB-H1: chain {setting.chain.name!r}, layer {layer.name!r}: got no"
                " backward_weight_ns, need the length of its weight gradient"
            )
        if index in firsts:
            speed = Fraction(repr(setting.cluster.gpus[firsts[index]].speed))
            overhead = floor(setting.cluster.action_overhead_ns * speed)
        else:
            overhead = 0
        layers.append(
            layer.model_copy(
                update={
                    "backward_ns": layer.backward_ns - weight,
                    "optimizer_ns": weight + overhead,
                    "optimizer_workspace_bytes": layer.backward_workspace_bytes,
                    "backward_weight_ns": 0,
                }
            )
        )
    return setting.chain.model_copy(update={"layers": tuple(layers)})


def _program(split: Plan, microbatches: int) -> Program:
    """1F1B with W, as OPT, behind the backwards."""

    def weights(step: listed.ListedOp) -> list[Action]:
        kind, stage, microbatch = step
        if kind is OpKind.F:
            return []
        count = weights_behind(stage, microbatch, microbatches)
        return [Action(ActionKind.OPT, stage)] * count

    return listed.program(split, flush.one_f_one_b(len(split.stages), microbatches), weights)


def _computes(split: Plan, simulation: Simulation, microbatches: int) -> Plan:
    """The F and B of a step as a plan of its own, so that messages are held as long as needed."""
    ops = Ops.of(split)
    times = {op: listed.known_times(simulation.times.start[op]) for op in in_order(ops)}
    return timed(split, ops, times, microbatches, max(1, simulation.makespan_ns))


def _work(split: Plan, stage: int) -> int:
    """Ns that a stage works for one micro-batch: F, B and W."""
    passes = (costs.compute_ns(split, kind, stage) for kind in (OpKind.F, OpKind.B))
    return sum(passes) + costs.update_ns(split, stage)


def _weights(program: Program, simulation: Simulation, gpu: int) -> list[int]:
    """When each W of a GPU starts."""
    entries = zip(program.ranks[gpu], simulation.times.when[gpu], strict=True)
    return [time for action, time in entries if action.kind is ActionKind.OPT]


def _peak(outline: Plan, judged: Simulation, gpu: int, weights: list[int]) -> int:
    """The most bytes of a GPU: the ledger's, and what each W needs from the end of its B on."""
    stage = outline.stages[gpu]
    layers = outline.chain.layers[stage.first : stage.last + 1]
    given = [layer.saved_for_weight_bytes for layer in layers]
    whole = costs.live_stage_bytes(outline, stage.id).kept
    kept = whole if None in given else sum(each or 0 for each in given)
    workspace = max(layer.backward_workspace_bytes for layer in layers)
    length = judged.times.ops.update[stage.id]
    changes = [
        (time, kept) for time in listed.known_times(judged.times.end[number(OpKind.B, stage.id)])
    ]
    changes += [(time, workspace) for time in weights]
    changes += [(time + length, -kept - workspace) for time in weights]
    update = max(layer.optimizer_workspace_bytes for layer in layers)
    beside = costs.states_bytes(outline, gpu) + update
    return max(_highest(list(judged.levels(gpu)), sorted(changes)), beside)


def _highest(levels: list[tuple[int, int]], changes: list[tuple[int, int]]) -> int:
    """The largest sum of a curve of levels and the running sum of changes.

    At one instant what a W held leaves first, then the ledger acts (a backward gives back what it
    saved), then what the next W needs is counted.
    """
    highest = level = extra = 0
    events = [(time, 0 if size < 0 else 2, size) for time, size in changes]
    events += [(time, 1, size) for time, size in levels]
    for _, kind, size in sorted(events, key=lambda event: event[:2]):
        if kind == 1:
            level = size
        else:
            extra += size
        highest = max(highest, level + extra)
    return highest
