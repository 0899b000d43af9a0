"""How pictures become files: the same everywhere, and the same bytes for the same picture."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan.errors import InputError
from pipeplan.units import printable
from pipeplan.whole_file import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(make: Callable[[], Figure], path: str | Path, *, dpi: int, font: int = 10) -> None:
    """Draw what `make` gives into `path`; its ending (.png, .svg, .pdf) chooses the format.

    Names are shown as they are written: a `$` in one begins no formula. What no font has a glyph
    for, such as control characters, is a `?`.

    Args:
        make: Draws the figure, without any global state.
        path: Where it goes.
        dpi: Dots per inch, of .png.
        font: Size of the text, in points.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    import matplotlib

    # Fixed ids and no date: the same figure gives the same file, byte for byte.
    with matplotlib.rc_context(
        {"svg.hashsalt": "pipeplan", "font.size": font, "text.parse_math": False}
    ):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        drawn = BytesIO()
        try:
            figure = make()
            _clean(figure)
            figure.savefig(drawn, dpi=dpi, metadata=metadata, format=Path(path).suffix[1:])
            # Only now: Ctrl-C while it is drawn leaves what was there.
            _put(Path(path), drawn.getvalue())
        except (OSError, ValueError) as error:
            raise InputError(f"picture {path}: cannot be written: {error}") from None


def _clean(figure: Figure) -> None:
    """Puts a `?` for what cannot be printed in titles, labels and legends; lines stay lines."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        written = text.get_text()
        shown = "\n".join(map(printable, written.split("\n")))
        if shown != written:
            text.set_text(shown)


def _put(path: Path, content: bytes) -> None:
    """All of it or nothing; pipes are written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace(path, content)
