"""The command line and the files that it writes: whole or not at all, nothing lost on the way."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.cli import main, output
from pipeplan.errors import InputError
from tests import grids
from tests.samples import two_stages

CSV = "name,forward_ns,backward_ns,output_bytes\na,1,2,3\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV that `pipeplan import` takes, alone in a folder."""
    file = tmp_path / "in" / "layers.csv"
    file.parent.mkdir()
    file.write_text(CSV)
    return file


def convert(table: Path, to: Path | str, *more: str) -> int:
    """`pipeplan import`, the quickest verb that writes a file."""
    return main(["import", str(table), "--format", "csv", "-o", str(to), *more])


def test_a_file_of_the_name_used_while_writing_is_kept(table: Path, tmp_path: Path) -> None:
    """What the user calls FILE.partial stays, and nothing else is left behind."""
    mine = tmp_path / "chain.json.partial"
    mine.write_text("mine")
    assert convert(table, tmp_path / "chain.json") == 0
    assert mine.read_text() == "mine"
    assert {each.name for each in tmp_path.iterdir()} == {"in", "chain.json", mine.name}


def test_a_link_is_followed(table: Path, tmp_path: Path) -> None:
    """--force replaces what a link stands for, not the link; without it both stay."""
    real, link = tmp_path / "in" / "real.json", tmp_path / "chain.json"
    real.write_text("old")
    link.symlink_to(real)
    assert convert(table, link) == 2
    assert real.read_text() == "old"
    assert convert(table, link, "--force") == 0
    assert link.is_symlink()
    assert '"pipeplan-chain/1"' in real.read_text()


def test_a_pipe_is_written_to(table: Path, tmp_path: Path) -> None:
    """`-o >(gzip)` and devices get the text; they are never replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        assert convert(table, pipe) == 0
        text, _ = reader.communicate(timeout=30)
    assert '"pipeplan-chain/1"' in text
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_that_takes_no_file_is_refused_before_the_work() -> None:
    """It is found out before a search, not when its plan is to be saved."""
    for path in ("/proc/plan.json", "/proc/sweep"):
        with pytest.raises(InputError, match=path):
            output.check_output(path, force=False)
        with pytest.raises(InputError, match=path):
            output.output_folder(path, force=False)


@pytest.mark.parametrize(
    "verb",
    [
        ["plan", "FILE", "--gpus", "2", "--memory", "1GiB", "--bandwidth", "1GB/s"],
        ["import", "FILE", "--format", "csv"],
        ["export", "FILE", "--format", "megatron"],
        ["remat", "FILE", "--budget", "1GiB"],
        ["profile", "FILE:task"],
        ["profile", "--stages", "FILE"],
        ["simulate", "FILE", "--trace"],
        ["show", "FILE", "--csv"],
        ["show", "FILE", "--data"],
        ["compare", "FILE", "--gpus", "2", "--memory", "1GiB", "--bandwidth", "1GB/s", "--data"],
    ],
    ids=lambda verb: verb[0],
)
def test_what_a_command_reads_is_not_written_over(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even with --force, nor by a link."""
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    text = two_stages().chain.to_json()  # compare reads it first
    file.write_text(text)
    link.symlink_to(file)
    given = [word.replace("FILE", str(file)) for word in verb]
    flag = [] if given[-1] in ("--trace", "--csv", "--data") else ["-o"]
    for path in (file, link):
        assert main([*given, *flag, str(path), "--force"]) == 2
        assert f"output {path}: is what the command reads" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_file_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    """What another program wrote during the search stays; so does what was found."""
    file = tmp_path / "plan.json"
    output.check_output(str(file), force=False)
    file.write_text("theirs")
    with pytest.raises(InputError, match="came to exist meanwhile") as caught:
        output.write(str(file), "ours")
    assert file.read_text() == "theirs"
    (kept,) = set(tmp_path.iterdir()) - {file}
    assert kept.read_text() == "ours"
    assert str(kept) in str(caught.value)
    output.write(str(file), "ours", force=True)
    assert file.read_text() == "ours"


def run(script: str) -> subprocess.CompletedProcess[str]:
    """`script` in a shell where `$PIPEPLAN` is the command line."""
    given = {"PIPEPLAN": f"{sys.executable} -m pipeplan", "COLUMNS": "80"}
    return subprocess.run(
        ["bash", "-c", script], env=os.environ | given, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_and_closed_stdout_are_no_bugs(tmp_path: Path) -> None:
    """A full disk is told in one line; a closed stdout is like /dev/null."""
    plan = tmp_path / "plan.json"
    plan.write_text(two_stages().to_json())
    full = run(f"$PIPEPLAN show {plan} >/dev/full")
    assert (full.returncode, "bug" in full.stderr) == (2, False)
    assert "stdout: cannot be written: No space left on device" in full.stderr
    closed = run(f"$PIPEPLAN show {plan} >&-")
    assert (closed.returncode, "bug" in closed.stderr) == (0, False)


@grids.each_value(
    case=[
        (None, "stdin: cannot be read: it is closed. Give the name of a file."),
        (b"", "stdin: line 1: got no column name, need"),
        (b"name,caf\xe9\n", "stdin: byte 8: got 0xe9, need UTF-8 text"),
        (CSV.replace("a", "\udcff").encode("utf-8", "surrogatepass"), "need UTF-8 text"),
    ],
    locale=["C", "C.UTF-8", "POSIX"],
)
def test_stdin_is_read_as_files_are(case: tuple[bytes | None, str], locale: str) -> None:
    """Closed, empty, or no UTF-8: one line and 2, in every locale."""
    content, said = case
    closed = " <&-" if content is None else ""
    done = subprocess.run(
        f"{sys.executable} -m pipeplan import - --format csv -o -{closed}",
        shell=True,
        input=content or b"",
        capture_output=True,
        check=False,
        env=os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    told = done.stderr.decode()
    assert (done.returncode, done.stdout, told.count("\n")) == (2, b"", 1), told
    assert said in told


def test_line_ends_of_other_systems_are_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file and from stdin alike; a chain from stdin is not named `-`."""
    data = (CSV + "b,1,2,3\n").replace("\n", "\r\n").encode()
    (tmp_path / "stdin").write_bytes(data)
    assert main(["import", str(tmp_path / "stdin"), "--format", "csv", "-o", "-"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["import", "-", "--format", "csv", "-o", "-"]) == 0
    assert capsys.readouterr().out == expected
    assert '"name": "stdin"' in expected


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """Where the new file does not fit, the old one stays and no part of the new one."""
    table, chain = tmp_path / "layers.csv", tmp_path / "chain.json"
    rows = "".join(f"layer{index},1,2,3\n" for index in range(20))
    table.write_text(CSV + rows)
    chain.write_text("old")
    done = run(f"ulimit -f 1; $PIPEPLAN import {table} --format csv -o {chain} --force")
    assert done.returncode == 2
    assert f"output {chain}: cannot be written" in done.stderr
    assert chain.read_text() == "old"
    assert set(tmp_path.iterdir()) == {table, chain}


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "chain.json", "-o", "plan.json", "--resume", ""],
        ["plan", "chain.json", "-o", "plan.json", "--refine", ""],
        ["plan", "chain.json", "-o", "plan.json", "--pin", ""],
        ["plan", "chain.json", "-o", "plan.json", "--cluster", ""],
        ["plan", "chain.json", "-o", ""],
        ["show", "plan.json", "--png", ""],
        ["simulate", "plan.json", "--trace", ""],
        ["compare", "chain.json", "--cluster", "c.json", "--out", ""],
    ],
)
def test_an_empty_flag_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--resume "$PLAN"` with PLAN never set is no plan without --resume."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "got ''" in capsys.readouterr().err


def test_more_gpus_than_a_cluster_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The limit of cluster files holds for --gpus too, as a usage error."""
    machines = ["--gpus", "4097", "--memory", "1GiB", "--bandwidth", "inf"]
    with pytest.raises(SystemExit) as caught:
        main(["plan", "chain.json", *machines, "-o", "plan.json"])
    assert caught.value.code == 2
    assert "from 1 to 4096" in capsys.readouterr().err
