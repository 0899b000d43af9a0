"""JSON Schemas of the file formats, made from the data types and shipped beside this file.

They say what can be said about one field at a time; rules between fields (distinct names, indices
that point somewhere) are checked on reading. `python -m pipeplan.schemas` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeplan.action_times import ActionTimes
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.devices import DeviceTable
from pipeplan.document import Document
from pipeplan.memory_terms import MemoryReport
from pipeplan.operator_graph import OperatorGraph
from pipeplan.plan import Plan
from pipeplan.remat.states.plan_file import StatePlanFile
from pipeplan.stage_profile import StageProfile

FORMATS: dict[str, type[Document]] = {
    "chain": Chain,
    "cluster": Cluster,
    "plan": Plan,
    "devices": DeviceTable,
    "stages": StageProfile,
    "graph": OperatorGraph,
    "memory": MemoryReport,
    "actions": ActionTimes,
    "states": StatePlanFile,
}
"""Each shipped schema's name and the document it describes."""

FOLDER = Path(__file__).parent
"""Where the schemas are shipped."""


def make(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the format `name`, made from its data type."""
    schema = FORMATS[name].model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def load(name: str) -> dict[str, Any]:
    """The shipped JSON Schema of the format `name`."""
    schema: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return schema


def write(folder: Path = FOLDER) -> list[Path]:
    """Writes all schemas into `folder`, by default over the shipped ones; returns their paths."""
    paths = []
    for name in FORMATS:
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(make(name), indent=1) + "\n", encoding="utf-8")
    return paths
