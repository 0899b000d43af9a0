"""The shipped JSON Schemas: up to date, and as strict as one field at a time can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeplan import schemas
from tests import documents


@pytest.mark.parametrize("name", schemas.FORMATS)
def test_schemas_are_up_to_date(name: str) -> None:
    """What is shipped is what the data types say; else run `python -m pipeplan.schemas`."""
    assert schemas.load(name) == schemas.make(name)
    jsonschema.Draft202012Validator.check_schema(schemas.load(name))


def test_writing_gives_the_shipped_files(tmp_path: Path) -> None:
    """Writing the schemas anew gives the shipped files byte for byte."""
    for path in schemas.write(tmp_path):
        assert path.read_bytes() == (schemas.FOLDER / path.name).read_bytes()


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_golden_files_fit(name: str) -> None:
    """Real documents validate against their schema."""
    jsonschema.validate(documents.data(name), schemas.load(name))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("chain", "format", "pipeplan-chain/2"),
        ("chain", "microbatch_size", 0),
        ("chain", "layers", []),
        ("chain", "unknown", 1),
        ("cluster", "gpus", None),
        ("cluster", "action_overhead_ns", -1),
        ("plan", "k", 1.5),
        ("plan", "semantics", "async"),
        ("plan", "period_ns", 2**63),
    ],
)
def test_schemas_refuse(name: str, field: str, value: Any) -> None:
    """What reading refuses field by field, the schema refuses too."""
    data = documents.data(name) | {field: value}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schemas.load(name))
