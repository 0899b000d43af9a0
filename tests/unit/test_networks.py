"""The chains of known networks as a command: what is wrong is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.chain import Chain
from pipeplan.testing.networks import main


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["foo"], "networks: network: got 'foo', need resnet18"),
        (["gpt2", "--batch", "0"], "got 0 samples per micro-batch, need at least 1"),
        (["gpt2", "--batch", "-3"], "got -3 samples per micro-batch, need at least 1"),
        (["resnet18", "--image", "0"], "got 0 pixels a side, need at least 1"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    """Each ends the command before anything is written."""
    out = tmp_path / "chain.json"
    assert main([*words, "-o", str(out)]) == 2
    assert expected in capsys.readouterr().err
    assert not out.exists()


def test_a_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second command says so and leaves what the first one wrote."""
    out = tmp_path / "chain.json"
    assert main(["gpt2", "--batch", "3", "-o", str(out)]) == 0
    assert main(["gpt2", "-o", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Chain.read(out).microbatch_size == 3
