"""What the planner is asked: the user's choices, checked, and the search's limits from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, get_args

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.ilp import Limits, Problem
from pipeplan.plan import MemoryModel, Plan, Semantics
from pipeplan.planner.pins import Pins

Method = Literal["auto", "contiguous", "paper-ilp"]

_WORDS: Final = {
    "semantics": get_args(Semantics),
    "memory_model": get_args(MemoryModel),
    "method": get_args(Method),
    "recompute": ("off", "auto"),
    "offload": ("off", "auto", "states"),
}
"""Choices by name, and what may be chosen."""
AUTO_K = (1, 2, 3, 4, 5, 6, 7, 8)
MIN_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to plan for and how long to search.

    microbatches: per optimizer step; None takes two per GPU (2bw; more where more are in
        flight) or four (flush), at least eight. The loss depends on it.
    k: micro-batches per period, or "auto" to try several where memory binds.
    method: "contiguous" keeps one stage per GPU; "paper-ilp" is the source's literal ILP (k = 1).
    gap: stop when (period - bound) / bound is at most this.
    workers: search threads; None uses one per core.
    deterministic: the same seed gives the same plan: limits count work instead of time.
    coarsen: search on this many groups of layers; "auto" does so for chains of very many layers.
    recompute: "auto" also decides which layers each stage computes again in its backward.
    offload: "auto" also decides what each stage sends to the host between forward and backward,
        and whose optimizer states are there, where no plan is found without; "states" decides only
        the latter, for the shortest step.
    pins: GPU of some layers, by index, by name, or "a..b" for all from a to b.
    resume: a plan of the same chain to start from, or several; proofs are kept where all else is
        equal.
    """

    semantics: Semantics = "2bw"
    microbatches: int | None = None
    memory_model: MemoryModel = "exact"
    k: int | Literal["auto"] = "auto"
    method: Method = "auto"
    time_limit_s: float = 60.0
    gap: float = 0.0
    seed: int = 0
    workers: int | None = None
    deterministic: bool = False
    resume: Plan | Sequence[Plan] | None = None
    coarsen: int | Literal["auto", "off"] = "auto"
    recompute: Literal["off", "auto"] = "off"
    offload: Literal["off", "auto", "states"] = "off"
    pins: Mapping[int | str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no search can honour."""
        _need(
            "microbatches", self.microbatches, self.microbatches is None or self.microbatches >= 1
        )
        _need("k", self.k, self.k == "auto" or 1 <= self.k <= 16)
        _need("time_limit_s", self.time_limit_s, 0 < self.time_limit_s < inf)
        _need("gap", self.gap, 0 <= self.gap < inf)
        _need("seed", self.seed, 0 <= self.seed < 2**31)
        given = isinstance(self.coarsen, int) and self.coarsen >= 1
        _need("coarsen", self.coarsen, given or self.coarsen in ("auto", "off"))
        for name, allowed in _WORDS.items():
            value = getattr(self, name)
            _need(name, value, value in allowed)
        for name, what in (("recompute", "recomputation"), ("offload", "offloading")):
            if getattr(self, name) != "off":
                self._check_paper(name, what)
        self._check_pins()
        _need("workers", self.workers, self.workers is None or 1 <= self.workers <= 256)

    @property
    def starts(self) -> tuple[Plan, ...]:
        """The plans to start from."""
        if self.resume is None:
            return ()
        return (self.resume,) if isinstance(self.resume, Plan) else tuple(self.resume)

    def _check_pins(self) -> None:
        """Recomputed segments are searched as contracted layers; the paper's ILP has no pins."""
        if not self.pins:
            return
        for name, value, refused in (
            ("recompute", self.recompute, "auto"),
            ("method", self.method, "paper-ilp"),
        ):
            if value == refused:
                raise InputError(
                    f"config.pins: got pins with config.{name} {value}, need none with it."
                    f" Plan without config.pins, or without config.{name} {value}."
                )

    def _check_paper(self, name: str, what: str) -> None:
        """The paper's formulas know neither recomputation nor offloading."""
        if self.memory_model != "exact":
            raise InputError(
                f"config.{name}: got {getattr(self, name)} with config.memory_model"
                f" {self.memory_model}, need exact: the paper's model has no {what}."
            )
        if self.method == "paper-ilp":
            raise InputError(
                f"config.{name}: got {getattr(self, name)} with config.method paper-ilp, need auto"
                f" or contiguous:"
                f" the paper's ILP has no {what}."
            )


def _need(name: str, value: object, good: bool) -> None:
    words = {name: f"{', '.join(few[:-1])} or {few[-1]}" for name, few in _WORDS.items()}
    ranges = words | {
        "microbatches": "at least 1",
        "k": "auto or 1..16",
        "time_limit_s": "more than 0, and an end",
        "gap": "at least 0, and finite",
        "seed": "0..2**31-1",
        "coarsen": "auto, off or at least 1",
        "workers": "1..256",
    }
    if not good:
        raise InputError(f"config.{name}: got {value}, need {ranges[name]}")


def _ks(config: Config) -> tuple[int, ...]:
    if config.k != "auto":
        return (config.k,)
    return (1,) if config.method == "paper-ilp" else AUTO_K


def default_microbatches(semantics: Semantics, gpus: int) -> int:
    """Micro-batches per optimizer step where none are asked for."""
    return max(MIN_MICROBATCHES, (4 if semantics == "flush" else 2) * gpus)


def problem(chain: Chain, cluster: Cluster, config: Config, pins: Pins = ()) -> Problem:
    """What the solver is asked."""
    default = default_microbatches(config.semantics, len(cluster.gpus))
    return Problem(
        chain=chain,
        cluster=cluster,
        semantics=config.semantics,
        memory_model=config.memory_model,
        microbatches=config.microbatches or default,
        limit_versions=config.semantics == "2bw" and config.microbatches is not None,
        ks=_ks(config),
        method=config.method,
        recompute=config.recompute == "auto",
        offload=config.offload == "auto",
        states=_states(cluster, config),
        pins=pins,
    )


def _states(cluster: Cluster, config: Config) -> Literal["off", "needed", "on"]:
    """Whether optimizers' states may be on the host; it must tell how fast it updates."""
    if config.offload == "states":
        return "on"
    host = cluster.host
    known = host is not None and host.update_bytes_per_s is not None
    return "needed" if config.offload == "auto" and known else "off"


def limits(config: Config) -> Limits:
    """When the search ends."""
    return Limits(
        time_limit_s=config.time_limit_s,
        gap=config.gap,
        seed=config.seed,
        workers=config.workers or min(16, os.cpu_count() or 1),
        deterministic=config.deterministic,
        groups=None if config.coarsen == "off" else config.coarsen,
    )
