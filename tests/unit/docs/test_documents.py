"""What the documents tell people to type works, and what they point at exists."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.cli import entry
from pipeplan.launch.options import parse

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launch/**/*.md")])
_BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r" <<'END'\n.*?^END$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
_TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(document, command line) of every line in a shell block, continued lines joined."""
    found = []
    for document in DOCUMENTS:
        for block in _BLOCK.findall(document.read_text()):
            for line in _HERE.sub("", block.replace("\\\n", " ")).splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    found.append((document.name, shlex.join(words)))
    return found


@pytest.mark.parametrize(("document", "line"), commands())
def test_commands_in_the_documents_parse(document: str, line: str) -> None:
    """Each documented command names flags and targets that exist."""
    words = shlex.split(line)
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "pipeplan":
        entry.parser().parse_args(words[1:])
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
    elif words[:3] == ["python", "-m", "pipeplan.launch"]:
        parse(words[3:])
    elif words[0] == "python":
        script = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
        assert (ROOT / script).is_file(), line
    elif words[0] == "sbatch":
        assert (ROOT / next(word for word in words if word.endswith(".sh"))).is_file(), line
    elif words[0] == "torchrun" and "pipeplan.launch" in words:
        parse(words[words.index("pipeplan.launch") + 1 :])
    else:
        assert words[0] in ("pip", "git", "cd", "cp", "cat", "ls", "torchrun"), (
            f"{document}: {line}: check it here too"
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links and pictures point at files of the repository."""
    for target in _LINK.findall(_CODE.sub("", document.read_text())):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_to_headings_lead_to_one(document: Path) -> None:
    """The part of a link behind `#` is a heading of its page, as GitHub writes it."""
    for target, anchor in _ANCHOR.findall(_CODE.sub("", document.read_text())):
        if "://" not in target:
            page = document.parent / target if target else document
            assert anchor in {slug(title) for title in _TITLE.findall(page.read_text())}, anchor


def slug(title: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_readme_has_commands() -> None:
    """The tests above are not empty: the README shows both main commands."""
    shown = [line for document, line in commands() if document == "README.md"]
    assert "make demo" in shown
    assert "make test" in shown


@pytest.mark.parametrize("file", ["demo.py", "mlp.py"])
def test_examples_find_what_they_import(file: str) -> None:
    """`make demo` takes minutes, so no test runs it; what it takes from the package is there."""
    runpy.run_path(str(ROOT / "examples" / file), run_name="imported")


def test_quickstart_is_short_and_runs_without_torch() -> None:
    """The first example people read fits a screen, plans and replays with torch blocked."""
    script = ROOT / "examples" / "quickstart.py"
    assert len(script.read_text().splitlines()) < 40
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "broken rules: []" in done.stdout
    assert "replayed: True" in done.stdout
