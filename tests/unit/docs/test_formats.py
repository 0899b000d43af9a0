"""docs/reference/formats.md describes every field of the data types; its examples can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from pipeplan import (
    action_times,
    devices,
    importers,
    memory_terms,
    operator_graph,
    plan,
    stage_profile,
)
from pipeplan import cluster as clusters
from pipeplan.chain import Agreement, Chain, Layer
from pipeplan.cluster import Cluster
from pipeplan.plan import Plan
from pipeplan.program import ActionKind, Pattern, Program
from pipeplan.verifier import verify

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "reference" / "formats.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
EXAMPLES = dict(re.findall(r"^```\w+ (\w+)\n(.*?)^```", TEXT, re.M | re.S))
FIELDS: list[tuple[str, str, type[BaseModel]]] = [
    ("chain.json", "", Chain),
    ("chain.json", "agreement.", Agreement),
    ("chain.json", "", Layer),
    ("Cluster file", "", Cluster),
    ("Cluster file", "gpus[].", clusters.Gpu),
    ("Cluster file", "links.", clusters.Links),
    ("Cluster file", "links.pairs[].", clusters.Pair),
    ("Cluster file", "host.", clusters.Host),
    ("plan.json", "", Plan),
    ("plan.json", "stages[].", plan.Stage),
    ("plan.json", "stages[].remat.", plan.Remat),
    ("plan.json", "ops[].", plan.Op),
    ("plan.json", "memory[].", plan.MemoryRow),
    ("plan.json", "solver.", plan.Solver),
    ("plan.json", "solver.bounds.", plan.Bounds),
    ("plan.json", "solver.history[].", plan.Improvement),
    ("Device table", "", devices.DeviceTable),
    ("Device table", "devices[].", devices.Device),
    ("stages.json", "", stage_profile.StageProfile),
    ("stages.json", "stages[].", stage_profile.StageMeasure),
    ("graph.json", "", operator_graph.OperatorGraph),
    ("graph.json", "storages[].", operator_graph.Storage),
    ("graph.json", "operations[].", operator_graph.Operation),
    ("memory.json", "", memory_terms.MemoryReport),
    ("memory.json", "gpus[].", memory_terms.Room),
    ("memory.json", "stages[].", memory_terms.StagePlace),
    ("memory.json", "predicted[].", memory_terms.GpuTerms),
    ("memory.json", "predicted[].instants[].", memory_terms.Instant),
    ("memory.json", "predicted[].instants[].terms[].", memory_terms.Term),
    ("memory.json", "predicted[].curve.", memory_terms.Curve),
    ("actions.json", "", action_times.ActionTimes),
    ("actions.json", "ranks[][].", action_times.TimedAction),
]


@pytest.mark.parametrize(("section", "prefix", "model"), FIELDS)
def test_every_field_is_documented(section: str, prefix: str, model: type[BaseModel]) -> None:
    """Each field has a row in its section, marked required exactly where reading requires it."""
    rows = re.findall(r"^\|([^|]*)\|.*\|([^|]*)\|$", SECTIONS[section], re.M)
    for key, field in model.model_fields.items():
        name = f"`{prefix}{field.alias or key}`"
        marks = {last.strip() == "required" for first, last in rows if name in first}
        assert field.is_required() in marks, name


def test_no_other_fields_are_documented() -> None:
    """Each name in a table of fields is a field."""
    for section in dict.fromkeys(where for where, _, _ in FIELDS):
        known = {
            f"{prefix}{field.alias or key}"
            for where, prefix, model in FIELDS
            if where == section
            for key, field in model.model_fields.items()
        }
        first = "".join(re.findall(r"^\|([^|]*)\|", SECTIONS[section], re.M))
        assert set(re.findall(r"`([^`]+)`", first)) == known


def test_every_action_is_documented() -> None:
    """Each kind of action has its row."""
    first = "".join(re.findall(r"^\|([^|]*)\|", SECTIONS["Program"], re.M))
    assert set(re.findall(r"`([^`]+)`", first)) == set(ActionKind)


def test_examples_are_true() -> None:
    """The examples are read as they stand; plan and pattern keep what the text says of them."""
    assert len(Chain.from_json(EXAMPLES["chain"]).layers) == 2
    assert Cluster.from_json(EXAMPLES["cluster"]).links.between(1, 0) == (20, 500_000_000)
    assert not verify(Plan.from_json(EXAMPLES["plan"]))
    pattern = Pattern.parse(EXAMPLES["pattern"])
    assert str(pattern) == EXAMPLES["pattern"]
    assert pattern.unroll(pattern.microbatches) == Program.parse(EXAMPLES["program"])
    table = importers.csv_layers(EXAMPLES["table"], "table", 512)
    assert [layer.forward_ns for layer in table.layers] == [1_500_000, 2_000_000]
