"""No parser raises anything but InputError, whatever it is given; what it accepts, it keeps.

Valid texts are broken in many small ways: bytes flipped, cut and doubled, values replaced by nasty
ones, fields lost, renamed and swapped. The short test runs a fixed number of them, the long one
as many as fit into a minute, with other seeds.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan import importers, units
from pipeplan.errors import InputError
from tests import documents

GRAPH = """\
node1 -- Input -- forward_compute_time=1.000, backward_compute_time=0.000, \
activation_size=64.0, parameter_size=0.000
node2 -- Linear(in_features=4, out_features=4) -- forward_compute_time=2.500, \
backward_compute_time=5.000, activation_size=[64.0; 8.0], parameter_size=80.000 -- stage_id=0
node3 -- ReLU(inplace) -- forward_compute_time=0.125, backward_compute_time=0.125, \
activation_size=64.0, parameter_size=0.000
node4 -- Add -- forward_compute_time=0.0, backward_compute_time=0.0, \
activation_size=64.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode2 -- node4
"""
TABLE = """\
name,forward_ms,backward_us,output_bytes,saved_input_bytes,parameters
embed,1.5,3000,64,8,"embed.weight embed.bias"
head,2,2500,4,64,
"""


def _keeps_document(name: str) -> Callable[[str], object]:
    def read(text: str) -> None:
        document = documents.DOCUMENTS[name].from_json(text)
        assert documents.DOCUMENTS[name].from_json(document.to_json()) == document

    return read


def _keeps_text(name: str) -> Callable[[str], object]:
    def read(text: str) -> None:
        value = documents.TEXTS[name].parse(text)
        assert documents.TEXTS[name].parse(str(value)) == value

    return read


PARSERS: dict[str, tuple[str, Callable[[str], object]]] = {
    **{name: (documents.golden(name), _keeps_document(name)) for name in documents.DOCUMENTS},
    **{name: (documents.golden(name), _keeps_text(name)) for name in documents.TEXTS},
    "graph": (GRAPH, lambda text: importers.pipedream(text, name="fuzz")),
    "table": (TABLE, lambda text: importers.csv_layers(text, "fuzz", 8)),
    "bytes": ("16.5 GiB", units.parse_bytes),
    "bandwidth": ("12e1GB/s", units.parse_bandwidth),
    "time": ("1.5ms", units.parse_time_ns),
    "share": ("2.5%", units.parse_fraction),
}
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**62, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308),
    *("", "0", "nan", "\x00", "\n", "\u2028", "é", "😀", "pipeplan-chain/1", "F", "a" * 300),
    *([], [[]], {}, {"": {}}, [0, 0], [0] * 300, {"from": 0, "to": 1}),
]
TOKENS = [b"NaN", b"1e400", b"-Infinity", b"null", b"\\ud800", b"\xff", b"\x00", b"[" * 2000]
TOKENS += [b"9" * 5000, b"{}", b",", b'"', b" -- ", b":", b"+", b"-", b"\n", b"\t", "٣".encode()]


def broken_bytes(rng: random.Random, text: bytes) -> bytes:
    """`text` with one to four random changes of bytes."""
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randint(0, len(text)), rng.randint(0, len(text))
        low, high = min(at, other), min(max(at, other), min(at, other) + 40)
        text = rng.choice(
            [
                text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :],
                text[:at] + rng.choice(TOKENS) + text[at:],
                text[:low] + rng.choice(TOKENS) + text[high:],
                text[:low] + text[high:],
                text[:at] + text[low:high] + text[at:],
                text[:at] if rng.random() < 0.2 else text,
            ]
        )
    return text


def broken_structure(rng: random.Random, data: Any) -> Any:
    """JSON `data` with one to three random changes of values, fields and items."""
    for _ in range(rng.randint(1, 3)):
        places = list(_places(data))
        if not places:
            break
        (parent, key), (other, other_key) = rng.choice(places), rng.choice(places)
        match rng.randrange(5):
            case 0 | 1:
                parent[key] = copy.deepcopy(rng.choice(NASTY))
            case 2:
                del parent[key]
            case 3:
                parent[key] = copy.deepcopy(other[other_key])
            case 4 if isinstance(parent, dict):
                parent[rng.choice(["x", "", f"{key}s", "format", "\n"])] = parent.pop(key)
            case _:
                parent[key] = [parent[key]]
    return data


def _places(data: Any) -> Any:
    items = list(data.items() if isinstance(data, dict) else enumerate(data))
    for key, value in items:
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


def refusal(read: Callable[[Any], object], given: Any) -> str | None:
    """The message with which `read` refuses `given`; None where it accepts it."""
    try:
        read(given)
    except InputError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {str(given)[:2000]!r}") from error
    return None


def attack(seed: int) -> bool:
    """One broken text for one parser; whether it was refused."""
    rng = random.Random(seed)
    text, read = PARSERS[rng.choice(list(PARSERS))]
    if text.startswith("{") and rng.random() < 0.6:
        broken = json.dumps(broken_structure(rng, json.loads(text)))
    else:
        broken = broken_bytes(rng, text.encode()).decode(errors="surrogateescape")
    message = refusal(read, broken)
    assert message is None or message.isprintable(), (seed, broken)
    return message is not None


def test_broken_texts() -> None:
    """8000 broken texts: most are refused, some are still valid, none does anything else."""
    refused = sum(map(attack, range(8000)))
    assert 4000 < refused < 7800


@pytest.mark.long
def test_broken_texts_for_a_minute() -> None:
    """A minute of broken texts finds no exception but InputError."""
    end, seed = time.monotonic() + 60, 10**9
    while time.monotonic() < end:
        attack(seed)
        seed += 1
    print(f"{seed - 10**9} broken texts")
    assert seed - 10**9 > 10_000


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["format", "name", "gpus", "layers", "chain", "ops"]), inner
        )
    ),
    max_leaves=8,
)
EXAMPLES = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@EXAMPLES
@given(st.sampled_from(list(documents.DOCUMENTS)), anything)
def test_any_json(name: str, data: object) -> None:
    """Any JSON value is a document or an InputError."""
    assert (refusal(documents.DOCUMENTS[name].from_data, data) or "").isprintable()


@EXAMPLES
@given(st.sampled_from(list(PARSERS)), st.text(max_size=40))
def test_any_text(name: str, text: str) -> None:
    """Any text is read or an InputError, for every parser."""
    assert (refusal(PARSERS[name][1], text) or "").isprintable()
