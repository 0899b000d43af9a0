"""Forty plans that the solver finds with one worker, counting work instead of time.

A pure rename or move inside the solver leaves every digest as it is; a change of what the search
does changes some, and then the file is written anew in the same commit:

    python -m tests.golden.plans

Digests hold for the release of OR-tools and numpy that they were made with, which the file names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import Case

FILE: Final = Path(__file__).parent / "plans.json"
LIBRARIES: Final = ("ortools", "numpy")
SMALL: Final = Config(time_limit_s=0.5, workers=1, deterministic=True)
LONGER: Final = replace(SMALL, time_limit_s=1.0)
JOINT: Final = replace(LONGER, recompute="auto")

Question = tuple[Chain, Cluster, Config]


def cases() -> Iterator[tuple[str, Callable[[], Question]]]:
    """Every kind of question: few and many layers, ample and scarce, each way to answer."""

    def case(
        name: str, gpus: int, fraction: float, config: Config, *, host: bool = False
    ) -> Callable[[], Question]:
        made = Case(name, gpus, fraction, config.memory_model)
        return lambda: (made.chain, made.hosted if host else made.cluster, config)

    for name, gpus in (("gpt3", 2), ("gpt3", 3), ("llama4", 2), ("llama4", 3), ("gpt5", 3)):
        yield f"{name} {gpus} few layers", case(name, gpus, 0.8, SMALL)
    for name, gpus in (("resnet18", 2), ("resnet18", 4), ("resnet34", 4), ("resnet50", 8)):
        for fraction in (1.2, 0.6):
            yield f"{name} {gpus} {fraction}", case(name, gpus, fraction, LONGER)
    for name, gpus, fraction in (
        ("gpt24", 8, 1.2), ("gpt24", 8, 0.5), ("llama24", 8, 0.6), ("gpt48", 16, 0.6),
        ("densenet121", 4, 0.6), ("resnet152", 8, 0.8),
    ):  # fmt: skip
        yield f"{name} {gpus} {fraction}", case(name, gpus, fraction, LONGER)
    for name, gpus, fraction in (
        ("gpt3", 2, 0.7), ("resnet18", 4, 0.4), ("resnet34", 4, 0.5), ("resnet50", 4, 0.3),
        ("gpt24", 8, 0.4), ("llama24", 8, 0.5),
    ):  # fmt: skip
        yield f"{name} {gpus} {fraction} recompute", case(name, gpus, fraction, JOINT)
    away = replace(JOINT, offload="auto")
    for name, gpus, fraction in (("resnet18", 4, 0.4), ("gpt24", 8, 0.4), ("resnet50", 4, 0.3)):
        yield f"{name} {gpus} {fraction} offload", case(name, gpus, fraction, away, host=True)
    kinds = {
        "flush": replace(LONGER, semantics="flush"),
        "contiguous flush": replace(LONGER, semantics="flush", method="contiguous"),
        "contiguous": replace(LONGER, method="contiguous"),
        "k=1": replace(LONGER, k=1),
        "k=4": replace(LONGER, k=4),
        "paper": replace(LONGER, memory_model="paper"),
        "pins": replace(LONGER, pins={0: 1, 5: 0}),
        "versions": replace(LONGER, microbatches=4),
        "seed": replace(LONGER, seed=7),
        "groups": replace(LONGER, coarsen=10),
        "flush recompute": replace(JOINT, semantics="flush"),
    }
    for kind, config in kinds.items():
        yield f"resnet18 3 0.6 {kind}", case("resnet18", 3, 0.6, config)
    yield (
        "gpt3 2 0.8 literal",
        case("gpt3", 2, 0.8, replace(LONGER, method="paper-ilp", memory_model="paper")),
    )


def digest(plan: Plan) -> str:
    """What was decided and proven; neither how long it took nor who found it when."""
    solver = plan.solver.model_copy(
        update={"seconds": 0.0, "version": "", "notes": (), "history": ()}
    )
    content = plan.model_copy(update={"solver": solver}).to_json()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def made(make: Callable[[], Question]) -> str:
    """The digest of a case's plan, or the proof or limit that ended the search without one."""
    chain, cluster, config = make()
    try:
        return digest(solve(chain, cluster, config))
    except (InfeasibleError, TimeLimitError) as error:
        return type(error).__name__


def libraries() -> dict[str, str]:
    """The releases that digests hold for."""
    return {name: version(name) for name in LIBRARIES}


def main() -> None:
    """Write the file anew and name what changed."""
    known = json.loads(FILE.read_text())["plans"] if FILE.exists() else {}
    plans: dict[str, str] = {}
    for name, make in cases():
        plans[name] = made(make)
        if known.get(name) != plans[name]:
            print(f"{name}: {known.get(name, 'new')} -> {plans[name]}", flush=True)
    FILE.write_text(json.dumps({"made_with": libraries(), "plans": plans}, indent=1) + "\n")


if __name__ == "__main__":
    main()
