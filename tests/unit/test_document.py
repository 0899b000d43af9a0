"""Documents: canonical text, stable digests, files that cannot be read, one line per error."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.chain import Chain
from pipeplan.document import digest, parse_json, read_text
from pipeplan.errors import InputError
from tests import documents

CHAIN_DIGEST = "627b9e85c208ef7ca2db703ea62e4c1e77cbb63dbeecacc8d2228ce63c5a6031"


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_golden_files_stay_readable(name: str) -> None:
    """A file that an earlier version wrote is read, and written again byte for byte."""
    text = documents.golden(name)
    assert documents.DOCUMENTS[name].from_json(text).to_json() == text


def test_digests_stay() -> None:
    """The digest of a given content never changes: plans and runs are compared by it."""
    chain = Chain.from_json(documents.golden("chain"))
    assert chain.digest() == CHAIN_DIGEST
    assert documents.data("plan")["chain_digest"] == CHAIN_DIGEST


def test_digest_is_of_sorted_compact_json() -> None:
    """The digest is SHA-256 of sorted keys without white space, whoever computes it."""
    chain = Chain.from_json(documents.golden("chain"))
    assert digest(json.loads(chain.to_json())) == chain.digest()
    text = b'{"a":[1.5,"\\u00e9"],"b":1}'
    assert digest({"b": 1, "a": [1.5, "é"]}) == hashlib.sha256(text).hexdigest()


def test_read_file(tmp_path: Path) -> None:
    """A document is read from its file."""
    path = tmp_path / "chain.json"
    path.write_text(documents.golden("chain"), encoding="utf-8")
    assert Chain.read(path) == Chain.read(str(path)) == Chain.from_json(documents.golden("chain"))


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a directory, a name no file can have: one line that says why."""
    for path, reason in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path, "directory"),
        ("a\0b", "null byte"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            read_text(path)
        assert str(caught.value).endswith("Check the path.")


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": 1', '{"a":', "[1, 2,\n"])
def test_a_file_that_is_cut_off_is_told(text: str) -> None:
    """Where it ends, and what to do."""
    with pytest.raises(
        InputError, match=r"plan\.json: line .* The file ends early: copy it again"
    ):
        parse_json(text, "plan.json")


@pytest.mark.parametrize("name", ["train.py:task", "train.py"])
def test_a_task_is_no_document(name: str, tmp_path: Path) -> None:
    """What is made of a task first is named, whether its function was or not."""
    (tmp_path / "train.py").write_text("import torch", encoding="utf-8")
    made = rf"pipeplan profile {tmp_path / 'train.py'}:task -o chain\.json$"
    with pytest.raises(InputError, match=made):
        Chain.read(tmp_path / name)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(tmp_path: Path) -> None:
    """A file without permission is an InputError too."""
    path = tmp_path / "chain.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        read_text(path)


def test_not_utf8(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are named with their place."""
    path = tmp_path / "chain.json"
    path.write_bytes(b'{"name": "caf\xe9"}')
    with pytest.raises(InputError, match="byte 13: got 0xe9, need UTF-8"):
        Chain.read(path)


def test_duplicate_keys_are_found_in_linear_time() -> None:
    """200 000 different keys are no trouble; one key twice among them is found and named."""
    keys = [f'"k{i}": 0' for i in range(200_000)]
    assert len(parse_json("{" + ", ".join(keys) + "}", "x")) == len(keys)
    with pytest.raises(InputError, match="'k7' twice"):
        parse_json("{" + ", ".join([*keys, '"k7": 1']) + "}", "x")


def test_data_of_python_values() -> None:
    """Data that never was JSON is refused like a bad file."""
    circle: list[object] = []
    circle.append(circle)
    for data in ({1, 2}, b"x", float("nan"), circle, {"name": object()}, {(1, 2): 3}):
        with pytest.raises(InputError):
            Chain.from_data(data)


def test_checks_survive_optimization(tmp_path: Path) -> None:
    """`python -O` refuses the same files with the same message: no check is an assert."""
    path = tmp_path / "chain.json"
    data = documents.data("chain")
    data["layers"][1]["saved_input_bytes"] = 10**6
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as caught:
        Chain.read(path)
    code = (
        "import sys; from pipeplan.chain import Chain\n"
        "try: Chain.read(sys.argv[1])\n"
        "except ValueError as error: print(error, end='')"
    )
    shown = subprocess.run(
        [sys.executable, "-O", "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert shown.stdout == str(caught.value)
    assert "layers[1].saved_input_bytes: got 1000000, need at most 20" in shown.stdout
