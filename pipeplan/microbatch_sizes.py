"""The micro-batch size as a choice: one model profiled with several, planned with each.

A larger micro-batch pays the fixed costs of layers, transfers and updates less often, and a drain
of the pipeline has fewer of them to share it; a smaller one takes fewer bytes. The plan with the
most samples per second wins (compare section 4.5.3 of paper 004, where the batch is a variable).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.plan import Plan
from pipeplan.planner import Config, Progress, default_microbatches, in_turn, solve


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """One micro-batch size and its plan, or the error that says why there is none."""

    chain: Chain
    plan: Plan | None
    error: InfeasibleError | TimeLimitError | None = None

    @property
    def samples_per_ns(self) -> Fraction:
        """Samples of a step / ns of a step; 0 without a plan."""
        if self.plan is None:
            return Fraction(0)
        samples = self.plan.microbatches * self.chain.microbatch_size
        return Fraction(samples, max(1, self.plan.step_ns))


def plan_sizes(
    chains: Sequence[Chain],
    cluster: Cluster,
    config: Config,
    batch: int | None = None,
    progress: Progress | None = None,
) -> tuple[SizedPlan, ...]:
    """A plan for each micro-batch size, the most samples per second first.

    Args:
        chains: one model, profiled with micro-batches of different sizes.
        cluster: GPUs and links.
        config: for each size; the time limit is one size's.
        batch: samples per optimizer step: each size has the micro-batches that make it. None: all
            sizes have the same number of micro-batches, so that larger ones make larger steps.
        progress: as for `solve`; where there are several sizes, phases begin with theirs.

    Returns:
        One for each chain; those whose size does not divide `batch` have no plan. Ctrl-C ends the
        search with the sizes that have one.

    Raises:
        InputError: if the chains are of different models, or two have one size; if both `batch`
            and micro-batches are given, or no size divides `batch`.
    """
    _check_sizes(chains, config, batch)
    if batch is None and config.microbatches is None and len(chains) > 1:
        count = default_microbatches(config.semantics, len(cluster.gpus))
        config = replace(config, microbatches=count)
    ordered = sorted(chains, key=lambda each: each.microbatch_size)
    several = len(chains) > 1
    named = (
        (f"micro-batches of {each.microbatch_size}: " if several else "", each) for each in ordered
    )

    def planned(chain: Chain, heard: Progress) -> SizedPlan:
        return _planned(chain, cluster, config, batch, heard)

    found = in_turn(named, planned, progress)
    return tuple(sorted(found, key=lambda each: each.samples_per_ns, reverse=True))


def _check_sizes(chains: Sequence[Chain], config: Config, batch: int | None) -> None:
    """Raise InputError where these sizes cannot be compared, as `plan_sizes` says."""
    first, by_size = chains[0], dict[int, Chain]()
    for number, chain in enumerate(chains):
        names = [layer.name for layer in chain.layers]
        if names != [layer.name for layer in first.layers]:
            raise InputError(
                f"chain {number} ({chain.name}): got other layers than chain 0 ({first.name}),"
                " need one model profiled with micro-batches of several sizes"
            )
        if chain.microbatch_size in by_size:
            raise InputError(
                f"chain {number} ({chain.name}): got micro-batches of {chain.microbatch_size}, as"
                " another chain has, need one chain for each size. Leave one of the two out."
            )
        by_size[chain.microbatch_size] = chain
    if batch is None:
        return
    if config.microbatches is not None:
        raise InputError(
            f"batch: got {batch} samples and {config.microbatches} micro-batches per step, need"
            " one of the two: the batch and a size give the number of micro-batches"
        )
    if all(batch % size for size in by_size):
        sizes = ", ".join(map(str, sorted(by_size)))
        near = sorted({max(1, batch // size + more) * size for size in by_size for more in (0, 1)})
        raise InputError(
            f"batch: got {batch} samples per step, need a multiple of a micro-batch size"
            f" ({sizes}), such as {' or '.join(map(str, near[:2]))}"
        )


def _planned(
    chain: Chain, cluster: Cluster, config: Config, batch: int | None, heard: Progress
) -> SizedPlan:
    if batch is not None:
        if batch % chain.microbatch_size:
            why = f"got {batch} samples per step, need a multiple of {chain.microbatch_size}"
            return SizedPlan(chain, None, InfeasibleError(why))
        config = replace(config, microbatches=batch // chain.microbatch_size)
    try:
        return SizedPlan(chain, solve(chain, cluster, config, heard))
    except (InfeasibleError, TimeLimitError) as error:
        return SizedPlan(chain, None, error)
