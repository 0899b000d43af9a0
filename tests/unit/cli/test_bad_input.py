"""Malformed files of every format: each gives exactly one line that says what to mend.

Each case is a golden document with one thing wrong, and a part of the message it must give.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.document import Document
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from tests import documents

CLASSES: dict[str, type[Document]] = {"chain": Chain, "cluster": Cluster, "plan": Plan}
ABSENT = object()
L0, G0 = ("layers", 0), ("gpus", 0)
BIG = 2**62

FIELDS: list[tuple[str, tuple[int | str, ...], object, str]] = [
    # wrong types, and values that only look right
    ("chain", (*L0, "forward_ns"), "30", "layers[0].forward_ns: got '30', need an integer"),
    ("chain", (*L0, "forward_ns"), True, "layers[0].forward_ns: got true, need an integer"),
    ("chain", (*L0, "forward_ns"), 30.0, "layers[0].forward_ns: got 30.0, need an integer"),
    ("chain", (*L0, "forward_ns"), 30.5, "layers[0].forward_ns: got 30.5, need an integer"),
    ("chain", (*L0, "forward_ns"), None, "layers[0].forward_ns: got null, need an integer"),
    ("chain", (*L0, "forward_ns"), [1], "layers[0].forward_ns: got a list of 1, need an integer"),
    ("chain", (*L0, "forward_ns"), {}, "layers[0].forward_ns: got an object, need an integer"),
    ("chain", (*L0, "forward_ns"), "1.5ms", "need an integer of ns: 1500000"),
    ("cluster", (*G0, "memory_bytes"), "16GiB", "need an integer of bytes: 17179869184"),
    ("cluster", (*G0, "memory_bytes"), "16 gigs", "got '16 gigs', need an integer of bytes"),
    ("cluster", (*G0, "memory_bytes"), 1.6e10, "without point or exponent: 16000000000"),
    (
        "cluster",
        ("links", "bandwidth_bytes_per_s"),
        "12GB/s",
        "got '12GB/s', need an integer of bytes per second: 12000000000",
    ),
    ("cluster", ("links", "bandwidth_bytes_per_s"), "inf", "integer of bytes per second: null"),
    ("chain", (*L0, "name"), 5, "layers[0].name: got 5, need text"),
    ("chain", (*L0, "name"), "", "layers[0].name: got '', need a non-empty name"),
    ("chain", (*L0, "parameters"), "w", "layers[0].parameters: got 'w', need a list"),
    ("chain", (*L0, "parameters"), [1], "layers[0].parameters[0]: got 1, need text"),
    ("chain", ("layers",), {"0": {}}, "layers: got an object, need a list"),
    ("chain", ("layers", 0), [], "layers[0]: got an empty list, need an object"),
    ("chain", ("layers", 0), None, "layers[0]: got null, need an object"),
    ("chain", ("device",), [], "device: got an empty list, need an object"),
    ("chain", ("device", "x"), [], "device.x: got an empty list, need text, an integer, a number"),
    ("chain", ("mode",), "guess", "mode: got 'guess', need 'measured', 'estimated' or 'imported'"),
    ("cluster", ("links", "duplex"), "both", "links.duplex: got 'both', need 'full' or 'half'"),
    ("cluster", (*G0, "speed"), "2", "gpus[0].speed: got '2', need a number"),
    ("cluster", (*G0, "speed"), True, "gpus[0].speed: got true, need a number"),
    ("cluster", ("links",), None, "links: got null, need an object"),
    ("plan", ("semantics",), "sync", "semantics: got 'sync', need '2bw' or 'flush'"),
    (
        "plan",
        ("ops", 0, "kind"),
        "f",
        "ops[0].kind: got 'f', need 'F', 'B', 'I', 'W', 'SEND_F', 'SEND_B', 'OFFLOAD'"
        " or 'PREFETCH'",
    ),
    ("plan", ("stages", 0, "remat"), [], "stages[0].remat: got an empty list, need an object"),
    ("plan", ("stages", 0, "layers"), [0], "stages[0].layers[1]: got nothing, need this item"),
    ("plan", ("stages", 0, "layers"), [0, 0, 0], "stages[0].layers: got a list of 3, need 2"),
    ("plan", ("ops", 1, "link"), "01", "ops[1].link: got '01', need a list"),
    ("plan", ("solver", "gap"), "0%", "solver.gap: got '0%', need a number"),
    # out of range
    ("chain", (*L0, "output_bytes"), -1, "layers[0].output_bytes: got -1, need at least 0"),
    ("chain", (*L0, "output_bytes"), BIG + 1, f"got {BIG + 1}, need at most {BIG}"),
    ("chain", (*L0, "output_bytes"), 10**3000, "(3001 digits), need at most"),
    ("chain", ("microbatch_size",), 0, "microbatch_size: got 0, need at least 1"),
    (
        "chain",
        (*L0, "saved_output_bytes"),
        21,
        "layers[0].saved_output_bytes: got 21, need at most",
    ),
    ("chain", (*L0, "saved_input_bytes"), 9, "layers[0].saved_input_bytes: got 9, need at most 8"),
    (
        "chain",
        (*L0, "backward_weight_ns"),
        61,
        "layers[0].backward_weight_ns: got 61, need at most",
    ),
    ("cluster", (*G0, "memory_bytes"), -1, "gpus[0].memory_bytes: got -1, need at least 0"),
    ("cluster", (*G0, "speed"), 0, "gpus[0].speed: got 0, need at least 1e-06"),
    ("cluster", (*G0, "speed"), 1e300, "gpus[0].speed: got 1e+300, need at most"),
    ("cluster", ("links", "bandwidth_bytes_per_s"), 0, "links.bandwidth_bytes_per_s: got 0, need"),
    ("cluster", ("links", "pairs"), [{"from": 0, "to": 2}], "links.pairs[0].to: got 2, need an"),
    ("cluster", ("links", "pairs"), [{"from": 1, "to": 1}], "got a link from GPU 1 to itself"),
    ("cluster", ("links", "pairs"), [{"from": 0, "to": 1}] * 2, "links.pairs[1]: got the link of"),
    ("plan", ("period_ns",), 0, "period_ns: got 0, need at least 1"),
    ("plan", ("k",), 1025, "k: got 1025, need at most 1024"),
    ("plan", ("ops", 0, "shift"), BIG, "ops[0].shift: got 4611686018427387904, need at most"),
    ("plan", ("ops", 0, "stage"), 2, "ops[0].stage: got 2, need an index below 2"),
    ("plan", ("stages", 0, "gpu"), BIG, "stages[0].gpu: got 4611686018427387904, need an index"),
    ("plan", ("stages", 0, "layers"), [1, 0], "stages[0].layers: got [1, 0], need first <= last"),
    ("plan", ("solver", "bounds", "any"), [90, 0], "solver.bounds.any[1]: got 0, need at least 1"),
    ("plan", ("solver", "seconds"), -0.5, "solver.seconds: got -0.5, need at least 0"),
    # missing, duplicate, unknown, empty
    ("chain", (*L0, "forward_ns"), ABSENT, "layers[0].forward_ns: got nothing, need this field"),
    ("chain", ("layers",), ABSENT, "layers: got nothing, need this field"),
    ("chain", ("layers",), [], "layers: got an empty list, need 1 items or more"),
    ("chain", (*L0, "name"), "head", "layers[1].name: got 'head', which layers[0] has already"),
    ("chain", (*L0, "forwad_ns"), 1, "unknown field 'forwad_ns', need a known one, perhaps 'forw"),
    ("chain", ("zzz",), 1, "document: got the unknown field 'zzz', need one of format, name"),
    ("cluster", ("gpus",), [], "gpus: got an empty list, need 1 items or more"),
    ("cluster", ("link",), {}, "got the unknown field 'link', need a known one, perhaps 'links'"),
    (
        "cluster",
        ("links", "pairs"),
        [{"source": 0, "to": 1}],
        "unknown field 'source', need one of",
    ),
    ("cluster", ("host",), {"memory_bytes": 1}, "host.bandwidth_bytes_per_s: got nothing, need"),
    ("cluster", ("links", "pairs"), [{"to": 1}], "links.pairs[0].from: got nothing, need this"),
    ("plan", ("ops", 0, "copy"), ABSENT, "ops[0].copy: got nothing, need this field"),
    ("plan", ("stages",), [], "stages: got an empty list, need 1 items or more"),
    ("plan", ("chain",), ABSENT, "chain: got nothing, need this field"),
    ("plan", ("ops", 0, "copy_"), 0, "ops[0]: got the unknown field 'copy_', need a known one"),
    ("plan", ("chain", *L0, "bytes\n"), 0, "chain.layers[0]: got the unknown field 'bytes\\n'"),
    # versions and kinds of file
    ("chain", ("format",), "pipeplan-chain/2", "got 'pipeplan-chain/2', need 'pipeplan-chain/1'."),
    ("chain", ("format",), "pipeplan-plan/1", "need 'pipeplan-chain/1'. Another kind of file"),
    ("cluster", ("format",), 1, "format: got 1, need 'pipeplan-cluster/1'."),
    ("plan", ("format",), "", "format: got '', need 'pipeplan-plan/1'."),
    ("plan", ("format",), "pipeplan-chain/1", "kind of file: `pipeplan plan` makes plans."),
    ("plan", ("format",), "pipeplan-plan/9", "Another version wrote it: make it again."),
    ("plan", ("chain", "format"), "x", "chain.format: got 'x', need 'pipeplan-chain/1'."),
]


def one_line(read: Callable[[], object]) -> str:
    """The only line of the InputError that `read` raises."""
    with pytest.raises(InputError) as caught:
        read()
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    assert len(message) < 500
    assert "Traceback" not in message
    assert "pydantic" not in message
    return message


@pytest.mark.parametrize(("name", "place", "value", "expected"), FIELDS)
def test_bad_field(name: str, place: tuple[int | str, ...], value: object, expected: str) -> None:
    """One wrong field: the line names the file, the field, what it got and what it needs."""
    data = parent = documents.data(name)
    for part in place[:-1]:
        parent = parent[part]
    if value is ABSENT:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    message = one_line(lambda: CLASSES[name].from_json(json.dumps(data), "file.json"))
    assert message.startswith("file.json: ")
    assert expected in message


CHAIN = documents.golden("chain")
TEXTS: list[tuple[str, str, str]] = [
    ("empty", "", "line 1, column 1: got the end, need JSON"),
    ("blank", " \n ", "got the end, need JSON"),
    ("truncated", CHAIN[: len(CHAIN) // 2], "need JSON"),
    ("truncated string", '{"name": "ab', "need JSON: Unterminated string"),
    ("two documents", CHAIN + CHAIN, "need JSON: Extra data"),
    ("trailing comma", '{"layers": [],}', "need JSON"),
    ("no quotes", "{name: 1}", "line 1, column 2: got 'name: 1}', need JSON"),
    ("not JSON", "layers:\n - a\n", "line 1, column 1: got"),
    ("byte order mark", "\ufeff" + CHAIN, "need JSON: Unexpected UTF-8 BOM"),
    ("null", "null", "document: got null, need an object"),
    ("list", "[]", "document: got an empty list, need an object"),
    ("number", "1", "document: got 1, need an object"),
    ("NaN", '{"microbatch_size": NaN}', "got NaN, need a finite number"),
    ("Infinity", '{"microbatch_size": Infinity}', "got Infinity, need a finite number"),
    ("-Infinity", '{"microbatch_size": -Infinity}', "got -Infinity, need a finite number"),
    ("1e400", '{"device": {"x": 1e400}}', "got '1e400', need a finite number"),
    ("-1e400", '{"device": {"x": -1e400}}', "got '-1e400', need a finite number"),
    ("5000 digits", '{"microbatch_size": ' + "9" * 5000 + "}", "integer of more than"),
    ("duplicate", '{"name": "a", "name": "b"}', "got the field 'name' twice in one object"),
    ("inner duplicate", '{"layers": [{"a": 1, "a": 1}]}', "got the field 'a' twice"),
    ("deep lists", "[" * 100_000, "nested too deeply"),
    ("deep objects", '{"a":' * 100_000, "nested too deeply"),
    ("deep device", '{"device":' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
    ("half a character", '{"name": "\\ud800"}', "got half a character, '\\ud800'"),
    ("half a key", '{"\\udc00": 1}', "got half a character"),
    ("control character", '{"name": "a\x00"}', "need JSON: Invalid control character"),
]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("text", "expected"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS]
)
def test_bad_text(name: str, text: str, expected: str) -> None:
    """What is no proper JSON object is refused alike by every format, with the place."""
    message = one_line(lambda: CLASSES[name].from_json(text, "file.json"))
    assert message.startswith("file.json: ")
    assert expected in message


FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "No such file or directory. Check the path."),
    "empty": (b"", "got the end, need JSON"),
    "binary": (bytes(range(256)), "got 0x80, need UTF-8 text"),
    "latin-1": (b'{"name": "caf\xe9"}', "byte 13: got 0xe9, need UTF-8 text"),
    "utf-16": (CHAIN.encode("utf-16"), "need UTF-8 text"),
    "zeros": (b"\0" * 100, "need JSON"),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("case", FILES)
def test_bad_file(name: str, case: str, tmp_path: Path) -> None:
    """What is no text file is refused with its path and the reason."""
    content, expected = FILES[case]
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    message = one_line(lambda: CLASSES[name].read(path))
    assert message.startswith(str(path))
    assert expected in message


@pytest.mark.parametrize("name", CLASSES)
def test_directory(name: str, tmp_path: Path) -> None:
    """A directory is no document."""
    assert "directory" in one_line(lambda: CLASSES[name].read(tmp_path))
    (tmp_path / "run.json").touch()
    message = one_line(lambda: CLASSES[name].read(tmp_path))
    assert message.endswith(f"The folder of a run is for pipeplan report {tmp_path}")


def test_wrong_kind_of_file() -> None:
    """Each golden file given as another kind is refused for its format, first of all."""
    for name, cls in CLASSES.items():
        for other in CLASSES.keys() - {name}:
            text = documents.golden(other)
            message = one_line(lambda text=text, cls=cls: cls.from_json(text, "x"))  # type: ignore[misc]
            assert f"format: got 'pipeplan-{other}/1', need 'pipeplan-{name}/1'" in message


def test_many_faults() -> None:
    """The first fault is shown and the others are counted."""
    data = documents.data("chain")
    for layer in data["layers"]:
        layer["forward_ns"] = layer["backward_ns"] = -1
    message = one_line(lambda: Chain.from_data(data))
    assert message.endswith(
        "layers[0].forward_ns: got -1, need at least 0 (3 more after this one)"
    )
