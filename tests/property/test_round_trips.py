"""Writing and reading again gives the same value, the same text and the same digest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan import schemas
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.document import Document, Record, parse_json
from pipeplan.plan import Plan
from pipeplan.program import Action, Pattern, Program
from tests import documents

EXAMPLES = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
YOUNGER: dict[str, Any] = {
    "tied": "colocate",
    "forward_light_ns": None,
    "forward_light_workspace_bytes": None,
    "forward_split_ns": None,
    "backward_input_ns": None,
    "waiting_gradient_bytes": 0,
    "saved_passing_bytes": 0,
    "riding": [],
    "kept": False,
    "passed": False,
    "buffer_bytes": 0,
    "saved_input_for_weight_bytes": 0,
    "input_backward_workspace_bytes": 0,
    "weight_backward_workspace_bytes": 0,
    "split_backward": False,
    "agreement": None,
    "tolerance": None,
    "repeats": True,
    "reserve_bytes": 0,
    "duplex": "full",
    "offload": [],
    "offload_input": False,
    "frozen_bytes": 0,
    "modules": [],
    "update_bytes_per_s": None,
    "states": "gpu",
    "host_bytes": 0,
    "most_microbatches": None,
    "pins": [],
    "history": [],
    "options": [],
    "programs": [],
}
"""Fields that are left out where they are the default, and the default."""
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schemas.load(name)) for name in documents.DOCUMENTS
}


def round_trip(cls: type[Document], data: Any, schema: str) -> None:
    """`data` survives reading and writing exactly, in every order of its keys."""
    first = cls.from_data(data)
    text = first.to_json()
    again = cls.from_json(text)
    assert again == first
    assert again.to_json() == text
    assert again.digest() == first.digest()
    written = parse_json(text, "text")
    _holds(data, written)
    backwards = cls.from_data(_reversed(data))
    assert backwards.digest() == first.digest()
    VALIDATORS[schema].validate(data)
    VALIDATORS[schema].validate(written)


def _holds(part: Any, whole: Any) -> None:
    """Everything in `part` is in `whole`, with the same type; only defaults come and go."""
    if isinstance(part, dict):
        for key in part:
            _holds(part[key], whole[key] if key in whole else YOUNGER[key])
    elif isinstance(part, list):
        assert len(part) == len(whole)
        for one, other in zip(part, whole, strict=True):
            _holds(one, other)
    else:
        assert part == whole
        assert isinstance(part, bool) == isinstance(whole, bool)


def _reversed(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _reversed(data[key]) for key in reversed(data)}
    return [_reversed(item) for item in data] if isinstance(data, list) else data


def test_the_docs_name_the_fields_that_are_left_out() -> None:
    """Who computes a digest elsewhere knows which defaults are not in it."""
    records: list[type[Record]] = list(Record.__subclasses__())
    for each in records:
        records += each.__subclasses__()
    left_out = {
        name
        for record in records
        for name, field in record.model_fields.items()
        if field.exclude_if is not None and record.__module__.startswith("pipeplan.")
    }
    text = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()
    sentence = text.split("Fields younger than their format")[1].split("- A *digest*")[0]
    named = {name.split(".")[-1] for name in re.findall("`([a-z_.]+)`", sentence)}
    assert named == left_out == set(YOUNGER)


@EXAMPLES
@given(documents.chains())
def test_chain_round_trip(data: dict[str, Any]) -> None:
    """Any valid chain survives its file exactly and fits the schema."""
    round_trip(Chain, data, "chain")


@EXAMPLES
@given(documents.clusters())
def test_cluster_round_trip(data: dict[str, Any]) -> None:
    """Any valid cluster survives its file exactly and fits the schema."""
    round_trip(Cluster, data, "cluster")


@EXAMPLES
@given(documents.plans())
def test_plan_round_trip(data: dict[str, Any]) -> None:
    """Any well-formed plan survives its file exactly and fits the schema."""
    round_trip(Plan, data, "plan")


def test_device_keeps_number_types() -> None:
    """1, 1.0 and true stay three different values: digests would differ otherwise."""
    data = documents.data("chain")
    data["device"] = {"integer": 1, "real": 1.0, "flag": True, "nothing": None}
    written = json.loads(Chain.from_data(data).to_json())["device"]
    assert [repr(value) for value in written.values()] == ["1", "1.0", "True", "None"]


@EXAMPLES
@given(documents.actions)
def test_action_round_trip(action: Action) -> None:
    """Any action is read back from its text."""
    assert Action.parse(str(action)) == action


@EXAMPLES
@given(documents.programs)
def test_program_round_trip(program: Program) -> None:
    """Any program, idle ranks and no ranks included, is read back from its text."""
    assert Program.parse(str(program)) == program


@EXAMPLES
@given(documents.patterns())
def test_pattern_round_trip(pattern: Pattern) -> None:
    """Any well-formed pattern is read back from its text."""
    assert Pattern.parse(str(pattern)) == pattern


@pytest.mark.parametrize("name", documents.DOCUMENTS)
@EXAMPLES
@given(seed=st.randoms(use_true_random=False))
def test_digest_sees_every_leaf(name: str, seed: Any) -> None:
    """Changing any integer leaf of a golden file changes the digest, or makes it invalid."""
    data = documents.data(name)
    before = documents.DOCUMENTS[name].from_data(data).digest()
    parent, key = seed.choice(list(_integers(data)))
    parent[key] += 1
    try:
        after = documents.DOCUMENTS[name].from_data(data).digest()
    except ValueError:
        return
    assert after != before


def _integers(data: Any) -> Any:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield data, key
