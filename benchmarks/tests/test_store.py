"""What the command line of a benchmark takes."""

from __future__ import annotations

import pytest

from benchmarks.store import chosen_names


@pytest.mark.parametrize("names", [[], ["a row"], ["b", "a row"]])
def test_rows_by_name_or_none(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """No name is no error: it means every row."""
    monkeypatch.setattr("sys.argv", ["benchmark", *names])
    assert chosen_names(None, ("a row", "b")) == names


def test_an_unknown_row_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what there is."""
    monkeypatch.setattr("sys.argv", ["benchmark", "c"])
    with pytest.raises(SystemExit):
        chosen_names(None, ("a row", "b"))
    assert "there is no 'c'; known are a row, b" in capsys.readouterr().err
