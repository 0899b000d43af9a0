"""What the documents tell people to type works, and what they point at exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.cli import entry
from pipeplan.launch.options import parse

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launch/**/*.md")])
_BLOCK = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands() -> list[tuple[str, str]]:
    """(document, command line) of every line in a shell block, continued lines joined."""
    found = []
    for document in DOCUMENTS:
        for block in _BLOCK.findall(document.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
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
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), line
    elif words[0] == "torchrun" and "pipeplan.launch" in words:
        parse(words[words.index("pipeplan.launch") + 1 :])
    else:
        assert words[0] in ("pip", "git", "cd", "torchrun"), (
            f"{document}: {line}: check it here too"
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links and pictures point at files of the repository."""
    for target in _LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_readme_has_commands() -> None:
    """The tests above are not empty: the README shows both main commands."""
    shown = [line for document, line in commands() if document == "README.md"]
    assert "make demo" in shown
    assert "make test" in shown


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


def test_python_example_of_the_runtime(tmp_path: Path) -> None:
    """The script of docs/explanation/runtime.md profiles, plans and trains as its comments say."""
    text = (ROOT / "docs" / "explanation" / "runtime.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    block = next(found for found in _BLOCK.findall(text) if "train.py" in found)
    runs = {"pipeplan": ["-m", "pipeplan"], "torchrun": ["-m", "torch.distributed.run"]}
    for line in block.splitlines():
        name, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, *runs[name], *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d.*, evaluated \d.* after 11 steps\n", done.stdout)


def test_python_example_of_rematerialization(capsys: pytest.CaptureFixture[str]) -> None:
    """The script in docs/reference/remat-rules.md keeps its budget by running layers again."""
    text = (ROOT / "docs" / "reference" / "remat-rules.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "remat-rules.md", "exec"), {})
    told = re.fullmatch(r"\w+: (\d+) bytes, (\d+) forwards run again\n", capsys.readouterr().out)
    assert told is not None
    assert int(told[1]) <= 2.5 * 2**20
    assert int(told[2]) > 0
