"""Pictures as files: whole, or what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipeplan.errors import InputError
from pipeplan.report.picture import save


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
