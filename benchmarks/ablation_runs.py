"""What the ablation plans: instances, and which strategies and provers each may leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.ilp.coarsening import coarsen
from pipeplan.testing.instances import Case, chain_of, contiguous_peak, machines

FINDERS = (
    "annealing", "balancing", "interleaved starts", "kfkb",
)  # fmt: skip
FEW = ("joint", "enumeration")
"""Of chains of few layers: allocation and schedule as one model, and each allocation."""
PROVERS = ("packing bound", "counting bound")
JOINT = ("recompute balancing", "recompute annealing", "trim")
FEW_JOINT = ("recompute enumeration",)
"""Every set of recomputed layers, of fewer layers still."""
CUT: dict[Mode, tuple[str, ...]] = {
    "contiguous": ("kfkb", "window bound"),
    "contiguous, recompute": ("recompute bound",),
}
"""By mode of one stage per GPU: who has a say in its plan, or bounds it."""
NONE = "no finder"
"""The contiguous optimum of one micro-batch per period, and bounds alone."""
STEP: dict[Mode, str] = {"step": "step search", "step, recompute": "recompute step search"}
"""By mode of whole steps: its strategy; without it, the contiguous plan cut off after the step."""
OTHERS = (
    *PROVERS, *FEW, *JOINT, *FEW_JOINT, "window bound", "recompute bound", *STEP.values(),
)  # fmt: skip
EVERY = (*FINDERS, *OTHERS)
SHORT_LAYERS = 14
"""Layers of chains that have the strategies of few layers."""
Mode = Literal[
    "none",
    "recompute",
    "k=1",
    "k=1, recompute",
    "contiguous",
    "contiguous, recompute",
    "step",
    "step, recompute",
]
ONE: dict[Mode, tuple[str, ...]] = {"k=1": FEW, "k=1, recompute": FEW_JOINT}
"""By mode of one micro-batch per period, as the papers' models have it: who proves its plans."""

KEEPING = (
    ("resnet18", 4, 1.2), ("resnet18", 8, 1.2), ("resnet18", 4, 0.6), ("resnet18", 8, 0.5),
    ("resnet34", 4, 1.2), ("resnet34", 8, 0.6), ("resnet34", 4, 0.5), ("resnet50", 4, 0.6),
    ("resnet50", 8, 0.6), ("resnet50", 8, 0.5), ("resnet101", 8, 0.6), ("resnet101", 4, 0.5),
    ("resnet152", 8, 0.5), ("densenet121", 4, 0.6), ("densenet121", 8, 0.5), ("gpt24", 8, 0.6),
    ("gpt24", 16, 0.5), ("gpt48", 16, 0.6), ("gpt48", 32, 0.6), ("llama24", 8, 0.6),
    ("llama24", 16, 0.5), ("llama32", 16, 0.6), ("llama80", 16, 0.6), ("gpt96", 16, 0.6),
    ("gpt96split", 32, 1.2), ("gpt96", 32, 0.8),
)  # fmt: skip
AGAIN = (
    ("resnet18", 4, 0.4), ("resnet34", 8, 0.5), ("resnet50", 4, 0.4), ("resnet50", 8, 0.4),
    ("gpt24", 8, 0.5), ("gpt24", 8, 0.4), ("llama24", 8, 0.5), ("llama24", 16, 0.4),
    ("gpt48", 16, 0.5), ("resnet101", 8, 0.4),
)  # fmt: skip
SCARCE = (
    ("resnet18", 4, 0.25), ("resnet50", 4, 0.2), ("densenet121", 4, 0.25), ("resnet101", 8, 0.3),
)  # fmt: skip
"""Memory that plans without recomputation are far from."""
SHORT = (
    ("gpt5", 3, 0.6), ("gpt6", 3, 0.6), ("gpt8", 4, 0.5), ("gpt10", 4, 0.6), ("gpt12", 4, 0.8),
    ("llama6", 3, 0.6), ("llama8", 4, 0.6), ("llama10", 5, 0.6), ("llama12", 4, 0.6),
    ("gpt12", 8, 0.6),
)  # fmt: skip
SHORT_AGAIN = (
    ("gpt3", 2, 0.4), ("gpt4", 2, 0.5), ("gpt5", 3, 0.4), ("gpt6", 3, 0.4), ("llama4", 2, 0.4),
    ("llama5", 3, 0.5),
)  # fmt: skip
GROUPED = ("resnet18", "resnet50", "resnet101", "densenet121", "gpt24", "llama24")
"""Networks of which a few groups of layers are planned."""
FEW_KEEPING = ((5, 2, 0.7), (7, 2, 0.5), (7, 3, 0.8), (9, 3, 0.7))
"""Groups, GPUs, memory."""
FEW_AGAIN = ((4, 2, 0.5), (5, 2, 0.4), (5, 3, 0.5), (6, 2, 0.6))
FEW_CUTS = ((6, 3, 0.6), (8, 3, 0.7), (8, 4, 0.6), (12, 3, 0.8))
TIED = (
    ("gpt24", 4, 0.5), ("gpt24", 4, 0.4), ("gpt24", 8, 0.5), ("gpt24", 8, 0.4),
    ("llama24", 8, 0.5), ("llama24", 8, 0.4), ("gpt48", 16, 0.5), ("resnet50", 4, 0.5),
)  # fmt: skip
CUTS = (
    ("resnet18", 4, 0.6), ("resnet34", 8, 0.6), ("resnet50", 8, 0.5), ("gpt24", 8, 0.6),
    ("llama24", 8, 0.6), ("densenet121", 8, 0.5), ("gpt48", 16, 0.6),
)  # fmt: skip
STEPS = (
    ("resnet18", 4, 0.6), ("resnet34", 4, 0.5), ("resnet50", 8, 0.6), ("resnet101", 4, 0.5),
    ("densenet121", 4, 0.6), ("gpt24", 4, 0.6), ("gpt24", 8, 0.5), ("llama24", 8, 0.6),
    ("gpt48", 16, 0.6),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grouped(Case):
    """A network whose layers are merged until there are `layers`."""

    layers: int = 1

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} in {self.layers} {self.gpus} {self.fraction:g} {self.memory_model}"

    @property
    def chain(self) -> Chain:
        """The merged layers."""
        return coarsen(chain_of(self.name), self.layers).chain

    @property
    def cluster(self) -> Cluster:
        """Of a share of what the merged layers want."""
        peak = contiguous_peak(self.chain, self.gpus, self.memory_model)
        return machines(self.gpus, int(self.fraction * peak))


@dataclass(frozen=True, slots=True)
class Tied(Case):
    """A network whose first and last layer share a weight, so that one GPU has both."""

    @property
    def key(self) -> str:
        """What identifies the row."""
        return f"{self.name} tied {self.gpus} {self.fraction:g} {self.memory_model}"

    @property
    def chain(self) -> Chain:
        """Without another change."""
        free = chain_of(self.name)
        first, *others, last = free.layers
        names = {"parameters": ("shared",)}
        layers = (first.model_copy(update=names), *others, last.model_copy(update=names))
        return free.model_copy(update={"layers": layers})


def grouped(each: tuple[int, int, float]) -> list[Case]:
    """So many groups of each of the networks."""
    layers, gpus, fraction = each
    return [Grouped(name, gpus, fraction, layers=layers) for name in GROUPED]


@dataclass(frozen=True, slots=True)
class Run:
    """One instance planned without some arms."""

    case: Case
    mode: Mode
    name: str
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What identifies the instance."""
        return f"{self.case.key} {self.mode}"


def arms(case: Case, mode: Mode) -> tuple[str, ...]:
    """The strategies and provers that an instance may leave out."""
    few = len(case.chain.layers) <= SHORT_LAYERS
    if mode in STEP:
        return (STEP[mode],)
    if mode in CUT:
        return CUT[mode]
    if mode in ONE:
        return ONE[mode]
    both = (*FINDERS, *PROVERS, *(FEW if few else ()))
    return both if mode == "none" else (*both, *JOINT, *(FEW_JOINT if few else ()))


def runs(chosen: Sequence[str], *, only_one: bool) -> Iterator[Run]:
    """Everything first, then each arm left out; then no finder at all, and each alone."""
    keeping: list[tuple[Case, Mode]] = [(Case(*each), "none") for each in (*KEEPING, *SHORT)]
    cases: list[tuple[Case, Mode]] = [*keeping]
    cases += [(Case(*each), "recompute") for each in (*AGAIN, *SCARCE, *SHORT_AGAIN)]
    cases += [(Tied(*each), "recompute") for each in TIED]
    cases += [(each, "k=1") for few in FEW_KEEPING for each in grouped(few)]
    cases += [(each, "k=1, recompute") for few in FEW_AGAIN for each in grouped(few)]
    cases += [(Case(*each), mode) for mode in CUT for each in CUTS]
    cases += [(each, "contiguous") for few in FEW_CUTS for each in grouped(few)]
    cases += [(Case(*each), mode) for mode in STEP for each in STEPS]
    for case, mode in cases:
        yield Run(case, mode, "everything")
    for arm in chosen:
        for case, mode in cases:
            if arm in arms(case, mode):
                yield Run(case, mode, f"without {arm}", (arm,))
    for arm in (NONE, *FINDERS) if only_one else ():
        others = tuple(each for each in FINDERS if each != arm)
        for case, mode in keeping:
            yield Run(case, mode, arm if arm == NONE else f"only {arm}", others)
