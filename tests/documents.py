"""Documents for tests of the file formats: one golden example of each, and arbitrary ones.

The golden files are what earlier versions wrote: a change that no longer reads them, or writes
them differently, breaks the formats.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.document import Document
from pipeplan.plan import MAX_SHIFT, Plan
from pipeplan.program import Action, ActionKind, Pattern, PeriodicAction, Program
from pipeplan.units import MAX_INT

GOLDEN = Path(__file__).parent / "golden" / "formats"
DOCUMENTS: dict[str, type[Document]] = {"chain": Chain, "cluster": Cluster, "plan": Plan}
TEXTS: dict[str, type[Program] | type[Pattern]] = {"program": Program, "pattern": Pattern}


def golden(name: str) -> str:
    """The text of the golden file of the format `name`."""
    suffix = "json" if name in DOCUMENTS else "txt"
    return (GOLDEN / f"{name}.{suffix}").read_text(encoding="utf-8")


def data(name: str) -> Any:
    """The golden document `name` as parsed JSON, to be changed at will."""
    return json.loads(golden(name))


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.one_of(st.integers(0, 100), st.integers(0, MAX_INT))
positives = st.one_of(st.integers(1, 100), st.integers(1, MAX_INT))
numbers = st.floats(0, 1e12, allow_subnormal=False)
rationals = st.none() | st.tuples(counts, positives).map(list)
scalars = st.one_of(words, st.integers(), st.floats(allow_nan=False, allow_infinity=False)) | (
    st.none() | st.booleans()
)


@st.composite
def halves(draw: st.DrawFn, backward: int) -> dict[str, Any]:
    """What a layer may tell of a backward in two ops, by what it takes in one."""
    weight = draw(st.none() | st.integers(0, backward))
    if weight is None or draw(st.booleans()):
        return draw(st.sampled_from([{}, {"backward_weight_ns": weight}]))
    inputs = draw(st.integers(backward - weight, MAX_INT))
    return {"backward_weight_ns": weight, "backward_input_ns": inputs}


@st.composite
def chains(draw: st.DrawFn, *, most: int = 4) -> dict[str, Any]:
    """The data of any valid chain."""
    names = draw(st.lists(words.filter(bool), min_size=1, max_size=most, unique=True))
    size = before = draw(counts)
    layers = []
    for name in names:
        output, forward, backward = draw(counts), draw(counts), draw(counts)
        layer = {
            "name": name,
            "forward_ns": forward,
            "backward_ns": backward,
            "output_bytes": output,
            "saved_input_bytes": draw(st.integers(0, before)),
            "saved_output_bytes": draw(st.integers(0, output)),
            "parameters": draw(st.lists(words, max_size=2)),
        }
        optional = {
            "optimizer_ns": counts,
            "weight_bytes": counts,
            "gradient_bytes": counts,
            "waiting_gradient_bytes": counts,
            "optimizer_bytes": counts,
            "frozen_bytes": counts,
            "output_gradient_bytes": st.none() | counts,
            "saved_bytes": counts,
            "forward_workspace_bytes": counts,
            "forward_light_workspace_bytes": st.none() | counts,
            "backward_workspace_bytes": counts,
            "optimizer_workspace_bytes": counts,
            "forward_split_ns": st.none() | st.integers(forward, MAX_INT),
            "saved_for_weight_bytes": st.none() | counts,
        }
        layer |= draw(st.fixed_dictionaries({}, optional=optional))
        layers.append(layer | draw(halves(backward)))
        before = output
    return {
        "name": draw(words),
        "source": draw(words),
        "task": draw(st.none() | words),
        "task_digest": draw(st.none() | words),
        "mode": draw(st.sampled_from(["measured", "estimated", "imported"])),
        "microbatch_size": draw(positives),
        "input_bytes": size,
        "device": draw(st.dictionaries(words, scalars, max_size=3)),
        "layers": layers,
    }


@st.composite
def clusters(draw: st.DrawFn, *, most: int = 3) -> dict[str, Any]:
    """The data of any valid cluster."""
    speeds = st.floats(1e-6, 1e6)
    gpu = st.fixed_dictionaries(
        {"name": words, "memory_bytes": counts}, optional={"speed": speeds | st.just(2)}
    )
    gpus = draw(st.lists(gpu, min_size=1, max_size=most))
    ends = [[a, b] for a in range(len(gpus)) for b in range(a)]
    link = {"latency_ns": counts, "bandwidth_bytes_per_s": st.none() | positives}
    chosen = draw(st.lists(st.sampled_from(ends), unique_by=tuple)) if ends else []
    pairs = [
        {"from": a, "to": b} | draw(st.fixed_dictionaries({}, optional=link)) for a, b in chosen
    ]
    found: dict[str, Any] = {
        "gpus": gpus,
        "action_overhead_ns": draw(counts),
        "links": draw(st.fixed_dictionaries({}, optional=link))
        | {"duplex": draw(st.sampled_from(["full", "half"])), "pairs": pairs},
    }
    if draw(st.booleans()):
        found["host"] = {"memory_bytes": draw(counts), "bandwidth_bytes_per_s": draw(positives)}
        found["host"] |= draw(
            st.fixed_dictionaries({}, optional={"update_bytes_per_s": positives})
        )
    return found


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """The data of any well-formed plan; nearly all break rules that only the verifier judges."""
    chain, cluster = draw(chains()), draw(clusters())
    gpu = st.integers(0, len(cluster["gpus"]) - 1)
    layer = st.integers(0, len(chain["layers"]) - 1)
    k = draw(st.integers(1, 3))
    runs = st.lists(counts, min_size=2, max_size=2)
    stage = {
        "id": counts,
        "layers": st.lists(layer, min_size=2, max_size=2).map(sorted),
        "gpu": gpu,
        "states": st.sampled_from(["gpu", "host"]),
        "remat": st.none()
        | st.builds(
            lambda runs, enters: {"recompute": runs, "offload_input": enters},
            st.lists(runs, min_size=1),
            st.booleans(),
        ),
    }
    stages = draw(st.lists(st.fixed_dictionaries(stage), min_size=1, max_size=3))
    shared = {
        "stage": st.integers(0, len(stages) - 1),
        "copy": st.integers(0, k - 1),
        "start_ns": counts,
        "duration_ns": counts,
        "shift": st.integers(0, MAX_SHIFT),
    }
    compute = {"kind": st.sampled_from(["F", "B"]), "gpu": gpu} | shared
    send = {
        "kind": st.sampled_from(["SEND_F", "SEND_B"]),
        "link": st.tuples(gpu, gpu).map(list),
    } | shared
    row = {"gpu": gpu} | dict.fromkeys((f"{name}_bytes" for name in _MEMORY), counts)
    solver = {
        "status": st.sampled_from(["optimal", "feasible"]),
        "bounds": st.fixed_dictionaries(dict.fromkeys(("any", "k1", "contiguous"), rationals)),
        "gap": st.none() | numbers,
        "gap_bound": st.sampled_from(["any", "k1", "contiguous"]),
        "seconds": numbers,
        "seed": counts,
        "version": words,
        "method": words,
        "contiguous_period_ns": rationals,
        "notes": st.lists(words, max_size=2),
    }
    return {
        "chain": chain,
        "chain_digest": draw(words),
        "task_digest": draw(st.none() | words),
        "cluster": cluster,
        "semantics": draw(st.sampled_from(["2bw", "flush"])),
        "microbatches": draw(positives),
        "memory_model": draw(st.sampled_from(["exact", "paper"])),
        "k": k,
        "period_ns": draw(positives),
        "step_ns": draw(counts),
        "stages": stages,
        "ops": draw(
            st.lists(st.fixed_dictionaries(compute) | st.fixed_dictionaries(send), max_size=4)
        ),
        "memory": draw(st.lists(st.fixed_dictionaries(row), max_size=2)),
        "solver": draw(st.fixed_dictionaries(solver)),
    }


_MEMORY = ("states", "saved", "working", "direct", "message", "peak", "budget")

_messages = st.sampled_from([kind for kind in ActionKind if kind is not ActionKind.OPT])
_stages = st.integers(0, 10**6 - 1)
actions = st.builds(Action, _messages, _stages, st.integers(0, 10**12)) | st.builds(
    Action, st.just(ActionKind.OPT), _stages
)
programs = st.builds(
    Program, st.lists(st.lists(actions, max_size=5).map(tuple), max_size=4).map(tuple)
)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    """Any well-formed pattern."""
    k = draw(st.integers(1, 1024))
    cuts = draw(st.lists(st.integers(0, 6), max_size=3).map(sorted))
    bounds = [0, *cuts, 6]
    hosted = tuple(tuple(range(a, b)) for a, b in pairwise(bounds))
    ranks = []
    for stages in hosted:
        action = st.builds(
            PeriodicAction,
            st.sampled_from(ActionKind),
            st.sampled_from(stages or (0,)),
            st.integers(0, k - 1),
            st.integers(-MAX_SHIFT, MAX_SHIFT),
        )
        ranks.append(tuple(draw(st.lists(action, max_size=5 if stages else 0))))
    semantics = draw(st.sampled_from(["2bw", "flush"]))
    return Pattern(k, semantics, draw(positives), tuple(ranks), hosted)
