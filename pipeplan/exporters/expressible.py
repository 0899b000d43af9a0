"""What of a plan other tools can do; ranks instead of GPUs."""

from __future__ import annotations

from pipeplan import verifier
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage


def check(plan: Plan, tool: str) -> None:
    """Refuse a plan that is wrong, or that does what no tool's file can say.

    Args:
        plan: to write.
        tool: that will read it, for messages.

    Raises:
        InvalidPlanError: if the plan breaks a rule.
        InputError: if the plan is for 2bw, recomputes, or uses the host's memory.
    """
    verifier.check(plan)
    if plan.semantics == "2bw":
        raise InputError(
            f"export to {tool}: got a plan with semantics 2bw, need flush: {tool} updates all"
            " stages when a step has drained. Plan again with --semantics flush."
        )
    for stage in plan.stages:
        for what, got, flag in _beyond(stage):
            raise InputError(
                f"export to {tool}: stage {stage.id} (layers {stage.first} to {stage.last}): got"
                f" {what}{got}, need none: the file has no place for it. Plan again with {flag}"
                " off, or train with pipeplan.launch."
            )


def _beyond(stage: Stage) -> list[tuple[str, str, str]]:
    """What of `stage` no tool's file can say: what, where, the flag of `plan` that decides it."""
    remat = stage.remat
    found = []
    if remat is not None and remat.recompute:
        found.append(("layers that are recomputed: ", _shown(remat.recompute), "--recompute"))
    if remat is not None and remat.programs:
        layers = ", ".join(str(layer) for layer, _ in remat.programs)
        found.append(("layers that run device programs: ", layers, "--recompute"))
    if remat is not None and remat.offloads:
        sent = [*remat.offload, *[(stage.first, stage.first)] * remat.offload_input]
        found.append(("activations that are offloaded: ", _shown(tuple(sent)), "--offload"))
    if stage.states == "host":
        found.append(("optimizer states on the host", "", "--offload"))
    return found


def _shown(runs: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{first} to {last}" for first, last in runs)


def check_untied(plan: Plan, tool: str) -> None:
    """Refuse parameters that two stages share, or that pass between stages.

    Raises:
        InputError: if there is one: `tool` adds no gradients across stages, and passes none on.
    """
    if plan.chain.tied == "transmit" and len(plan.stages) > 1:
        raise InputError(
            f"export to {tool}: chain: got tied='transmit', whose layers pass a parameter on, need"
            f" none that several layers read: {tool} passes activations alone. Untie the"
            " parameter, or train with pipeplan.launch."
        )
    owner: dict[str, int] = {}
    for stage in plan.stages:
        for layer in plan.chain.layers[stage.first : stage.last + 1]:
            for name in layer.parameters:
                first = owner.setdefault(name, stage.id)
                if first != stage.id:
                    raise InputError(
                        f"export to {tool}: parameter {name!r}: got stages {first} and {stage.id}"
                        f" that share it, need one: {tool} adds no gradients across stages. Untie"
                        " the parameter, or train with pipeplan.launch."
                    )


def rank_gpus(plan: Plan) -> tuple[int, ...]:
    """The GPU of each rank: those with a stage, in the order of their first stages."""
    return tuple(dict.fromkeys(stage.gpu for stage in plan.stages))


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """The rank of each stage."""
    ranks = {gpu: rank for rank, gpu in enumerate(rank_gpus(plan))}
    return tuple(ranks[stage.gpu] for stage in plan.stages)


def is_looped(plan: Plan) -> bool:
    """Whether stage s is on rank s mod P and each of the P ranks has as many stages."""
    count = len(rank_gpus(plan))
    stages = len(plan.stages)
    return not stages % count and stage_ranks(plan) == tuple(s % count for s in range(stages))


def is_v_shaped(plan: Plan) -> bool:
    """Whether each of the P ranks r has the stages r and 2P - 1 - r."""
    forth = tuple(range(len(rank_gpus(plan))))
    return stage_ranks(plan) == (*forth, *reversed(forth))


def placement(plan: Plan) -> str:
    """`0 1 2 1`: the rank of each stage, for messages."""
    return " ".join(map(str, stage_ranks(plan)))
