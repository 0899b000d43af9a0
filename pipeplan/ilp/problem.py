"""What the solver is asked: the problem, and the limits of the search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.ilp.clock import DeterministicClock, SearchClock
from pipeplan.ilp.incumbent import SearchOptions
from pipeplan.plan import MemoryModel, Semantics, Stage

MOST_COPIES: Final = 1024
"""The largest k of a plan file."""

Method = Literal["auto", "contiguous", "paper-ilp", "full-recompute", "two-phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is planned, and which plans count.

    Attributes:
        chain: What is trained.
        cluster: GPUs and links.
        semantics: When weights are updated (docs/reference/model.md §1).
        memory_model: How bytes are counted: (M1)-(M8) or the paper's (P1)-(P5).
        microbatches: Per optimizer step.
        limit_versions: Whether `microbatches` restricts the schedules under 2bw, (R6).
        ks: Micro-batches per period that plans may have.
        method: "auto" searches all allocations, "contiguous" those with one stage per GPU;
            "paper-ilp" is the literal ILP of paper 002. "full-recompute" recomputes every one of
            the given `stages` as a whole; "two-phase" takes the cuts that are best without a
            memory limit, then the recomputation that gives these the shortest period.
        stages: For "full-recompute" alone: the stages.
        recompute: Whether stages may recompute layers, (V1)-(V4).
        offload: Whether what stages save may reside on the host, (H1)-(H7).
        states: Whether optimizers' states may, (U1)-(U7): in no plan, only where no plan is found
            without ("needed"), or in any plan.
        pins: (layer, GPU) of layers whose GPU is given, sorted.
    """

    chain: Chain
    cluster: Cluster
    semantics: Semantics = "2bw"
    memory_model: MemoryModel = "exact"
    microbatches: int = 8
    limit_versions: bool = False
    ks: tuple[int, ...] = (1,)
    method: Method = "auto"
    stages: tuple[Stage, ...] = ()
    recompute: bool = False
    offload: bool = False
    states: Literal["off", "needed", "on"] = "off"
    pins: tuple[tuple[int, int], ...] = ()

    @property
    def whole_step(self) -> bool:
        """Whether plans are step plans (T6): under flush, where nothing else is asked for."""
        choices = self.offload or not len(self.ks) > 1
        plain = self.method == "auto" and self.memory_model == "exact" and not choices
        return self.semantics == "flush" and plain and self.microbatches <= MOST_COPIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the search ends, and what it may use.

    Attributes:
        time_limit_s: Seconds; where the search is deterministic, seconds' worth of work.
        gap: The search ends when (period - bound) / bound is at most this.
        seed: Of every random number.
        workers: Threads of CP-SAT.
        deterministic: Whether limits count work instead of time, so that one seed gives one plan.
        groups: Groups of consecutive layers to search on (multilevel search); None for the layers
            themselves, "auto" for groups where the chain is very long.
        without: Strategies and provers that are left out, by name, for ablations.
    """

    time_limit_s: float = 60.0
    gap: float = 0.0
    seed: int = 0
    workers: int = 1
    deterministic: bool = False
    groups: int | Literal["auto"] | None = "auto"
    without: frozenset[str] = field(default_factory=frozenset)


def options_of(problem: Problem, limits: Limits) -> SearchOptions:
    """What the inside of the solver reads of both, with a clock that starts now."""
    return SearchOptions(
        microbatches=problem.microbatches,
        limit_versions=problem.limit_versions,
        ks=problem.ks,
        contiguous_only=problem.method == "contiguous",
        time_limit_s=limits.time_limit_s,
        gap=limits.gap,
        seed=limits.seed,
        workers=limits.workers,
        deterministic=limits.deterministic,
        offload=problem.offload,
        whole_step=problem.whole_step,
        without=limits.without,
        clock=DeterministicClock() if limits.deterministic else SearchClock(),
    )
