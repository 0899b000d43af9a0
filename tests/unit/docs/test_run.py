"""Every command and snippet of README and docs runs, and prints what its page says.

A page is run from top to bottom in an empty folder beside copies of `examples` and `launch`.
A block `sh` runs as a script; a block `python NAME` is saved as NAME, one without a name is run.
Each line of a block `text output` must be among what the block before it printed, in this order;
`...` stands for anything. Searches with a limit get a second: pages show no plan that needs more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import forked_commands

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "launch" / "README.md", *ROOT.glob("docs/**/*.md")])
_LIMIT = re.compile(r"(?<=-limit )\d+s")
_BLOCK = re.compile(r"^```(sh|python|text output)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = {
    "make": "`make test` runs this test; test_documents.py looks for the target",
    "pip": "it would change the environment that runs this test",
    "sbatch": "it needs a cluster under SLURM",
    "PYTHONPATH=.": "benchmarks take from minutes to hours; test_documents.py looks for the file",
}
"""What a documented command may begin with that is not run here, and why."""
_PROGRAMS = {
    "pipeplan": ["-m", "pipeplan"],
    "torchrun": [str(ROOT / "tests" / "forked_torchrun.py")],
    "python": [],
}


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    name: str
    text: str


def blocks(page: Path) -> list[Block]:
    """What of a page runs, or says what was printed."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        Block(kind, name, _run_of(text) if kind == "sh" else text) for kind, name, text in found
    ]


def _run_of(script: str) -> str:
    """The lines of a script that are run."""
    lines = _LIMIT.sub("1s", script.replace("\\\n", " ")).splitlines()
    return "\n".join(
        line for line in lines if line.split(maxsplit=1)[:1] and line.split()[0] not in NOT_RUN
    )


RUN = [
    page
    for page in PAGES
    if any(block.kind != "text output" and block.text.strip() for block in blocks(page))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the examples, and the project's programs on the path."""
    for name in ("examples", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    programs = tmp_path / ".programs"
    programs.mkdir()
    for name, words in _PROGRAMS.items():
        forked_commands.client().program(programs / name, words)
    return tmp_path


def ran(words: list[str], folder: Path) -> str:
    """What a command prints on stdout; it must succeed."""
    environment = forked_commands.environment() | {
        "PATH": f"{folder / '.programs'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, folder: Path) -> None:
    """Its blocks succeed one after the other, and print what it shows."""
    printed = ""
    for block in blocks(page):
        if block.kind == "text output":
            check_output(printed, block.text)
        elif block.kind == "sh":
            printed = ran(["bash", "-euo", "pipefail", "-c", block.text], folder)
        elif block.name:
            (folder / block.name).write_text(block.text, encoding="utf-8")
        else:
            printed = ran(forked_commands.client().command("-c", block.text), folder)


def check_output(printed: str, shown: str) -> None:
    """Every line of `shown` is printed, in order; `...` in a line stands for any characters."""
    rest = [line.rstrip() for line in printed.splitlines()]
    for line in filter(None, map(str.rstrip, shown.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        place = next((at for at, real in enumerate(rest) if pattern.fullmatch(real)), None)
        assert place is not None, f"{line!r} is not printed:\n{printed}"
        del rest[: place + 1]


def test_output_that_is_not_printed_is_noticed() -> None:
    """A page that shows another figure, or another order, fails."""
    check_output("a 1\nb 2 s\n", "a 1\nb ... s\n")
    for wrong in ("a 2\n", "b ... s\na 1\n"):
        with pytest.raises(AssertionError, match="is not printed"):
            check_output("a 1\nb 2 s\n", wrong)


def test_pages_for_tasks_run() -> None:
    """The tests above are not empty: only what cannot run here is left out."""
    left_out = {ROOT / "docs" / "how-to" / name for name in ("install.md", "slurm.md")}
    for part in ("tutorial", "how-to"):
        assert set(ROOT.glob(f"docs/{part}/*.md")) - set(RUN) <= left_out
