"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.whole_file import beside, replace, replacing


def test_content_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    """Text as UTF-8 and bytes as they are; nothing else is left in the folder."""
    for content, kept in (("µ\n", "µ\n".encode()), (b"\x00", b"\x00")):
        replace(tmp_path / "a.json", content)
        assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
        assert (tmp_path / "a.json").read_bytes() == kept


def test_after_an_error_what_was_there_stays(tmp_path: Path) -> None:
    """Half a file is gone, whoever stopped it."""
    place = tmp_path / "a.json"
    place.write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        stopped_halfway(place)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert place.read_text() == "mine"


def stopped_halfway(place: Path) -> None:
    """As by Ctrl-C."""
    with replacing(place) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt


def test_a_link_stays_and_its_end_is_replaced(tmp_path: Path) -> None:
    """The file is written in the folder of the end, where moving is one step."""
    (tmp_path / "there").mkdir()
    end, link = tmp_path / "there" / "a.json", tmp_path / "link.json"
    link.symlink_to(end)
    with replacing(link) as partial:
        partial.write_text("new")
        assert partial.parent == end.parent
    assert link.is_symlink()
    assert end.read_text() == "new"


def test_names_beside_a_place_are_never_taken(tmp_path: Path) -> None:
    """Two at once are two files."""
    assert beside(tmp_path / "a") != beside(tmp_path / "a")
