"""Pictures as files: whole, or what was there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipeplan.errors import InputError
from pipeplan.report.picture import save


def test_what_has_no_glyph_is_a_question_mark(tmp_path: Path) -> None:
    """In titles, labels and legends; lines stay lines. Matplotlib warned on stderr."""
    drawn = Figure()
    axes = drawn.subplots()
    axes.plot([1, 2], label="\x1b[2m$")
    axes.set_title("red \x1b[31m\nnext")
    axes.set_xlabel("\x07bell")
    axes.legend()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(lambda: drawn, tmp_path / "plan.png", dpi=20)
    assert axes.get_title() == "red ?[31m\nnext"
    assert axes.get_xlabel() == "?bell"
    assert axes.get_legend().get_texts()[0].get_text() == "?[2m$"


def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing beside it; where there is room the picture is replaced."""
    place = tmp_path / "plan.png"
    place.write_bytes(b"old")

    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match=r"plan\.png: cannot be written: .*No space left"):
            save(Figure, place, dpi=20)
    assert place.read_bytes() == b"old"
    save(Figure, place, dpi=20)
    assert place.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [place]
