"""The command line: help, usage errors, exit codes, files in and out."""

from __future__ import annotations

import argparse
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan import planner
from pipeplan.cli import entry, main, show
from pipeplan.cluster import uniform
from pipeplan.errors import (
    DeadlockError,
    InfeasibleError,
    InputError,
    InternalError,
    InvalidPlanError,
    TimeLimitError,
)
from tests.samples import two_stages


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Each verb's parser by its name."""
    (action,) = (
        each for each in entry.parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return dict(action.choices)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan that is well-formed and breaks rules: its memory table is made up."""
    file = tmp_path / "plan.json"
    file.write_text(two_stages().to_json())
    return file


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_examples_in_the_help_parse(verb: str) -> None:
    """Every example that a verb's help shows is a command line that it accepts."""
    epilog = verbs()[verb].epilog or ""
    lines = [line.strip() for line in epilog.splitlines()[1:]]
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert (program, words[0]) == ("pipeplan", verb)
        entry.parser().parse_args(words)


def test_help_imports_nothing_heavy() -> None:
    """`pipeplan --help` is instant: no pydantic, numpy, torch, ortools, numba or matplotlib."""
    code = (
        "import sys\n"
        "from pipeplan.cli.entry import parser\n"
        "parser().format_help()\n"
        "heavy = {'pydantic', 'numpy', 'torch', 'ortools', 'numba'}\n"
        "heavy |= {'matplotlib', 'networkx', 'rich'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("x"), 1),
        (InputError("x"), 2),
        (InfeasibleError("x"), 3),
        (InvalidPlanError("x"), 4),
        (DeadlockError("x"), 4),
        (TimeLimitError("x"), 5),
    ],
)
def test_expected_errors_are_one_message_and_a_code(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error that we raise on purpose prints its text, no traceback, and ends with its code."""
    monkeypatch.setattr(show, "run", raising(error))
    assert main(["show", "plan.json"]) == code
    assert capsys.readouterr().err == "pipeplan: x\n"


def raising(error: BaseException) -> object:
    """A verb that fails with `error`."""

    def run(_: argparse.Namespace) -> int:
        raise error

    return run


def test_a_bug_is_one_line_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected exception says that it is our bug; `--debug` lets it through."""
    monkeypatch.setattr(show, "run", raising(ZeroDivisionError("oops")))
    assert main(["show", "plan.json"]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "ZeroDivisionError: oops" in text
    assert "bug" in text
    with pytest.raises(ZeroDivisionError):
        main(["show", "plan.json", "--debug"])


@pytest.mark.parametrize(
    ("package", "extra"), [("ortools", "plan"), ("torch", "run"), ("matplotlib", "plan")]
)
def test_a_missing_package_names_its_extra(
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where an optional package is not installed, the message says what to install."""
    monkeypatch.setattr(show, "run", raising(ModuleNotFoundError("no", name=package)))
    assert main(["show", "plan.json"]) == 2
    assert f"pip install 'pipeplan[{extra}]'" in capsys.readouterr().err


def test_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends with 130, as shells expect."""
    monkeypatch.setattr(show, "run", raising(KeyboardInterrupt()))
    assert main(["show", "plan.json"]) == 130
    assert capsys.readouterr().err == "pipeplan: interrupted\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["launch"],
        ["show"],
        ["show", "plan.json", "--jso"],
        ["plan", "c.json", "--gpus", "0", "-o", "p.json"],
        ["plan", "c.json", "--gpus", "2.5", "-o", "p.json"],
        ["plan", "c.json", "--memory", "16 parsecs", "-o", "p.json"],
        ["plan", "c.json", "--bandwidth", "12", "-o", "p.json"],
        ["plan", "c.json", "--k", "many", "-o", "p.json"],
        ["plan", "c.json"],
    ],
)
def test_wrong_usage_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong flags end with 2 before anything is read, abbreviations included."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: pipeplan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "plan c.json --bandwith=1GB/s --gpus 2 -o p.json",
            "--bandwith=1GB/s, perhaps --bandwidth",
        ),
        ("plan c.json -o p.json --zzz", "--zzz"),
        ("verify p.json q.json", "q.json"),
    ],
)
def test_what_no_verb_knows_is_told_with_the_verbs_usage(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with the flag that is meant, if one is close."""
    with pytest.raises(SystemExit):
        main(words.split())
    usage, error = capsys.readouterr().err.rstrip().split("pipeplan ", 1)[1].rsplit(": error: ", 1)
    assert usage.startswith(words.split()[0])
    assert error == f"unrecognized argument: {told}"


def test_show_prints_grid_figures_and_memory(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results go to stdout, the next command to stderr."""
    assert main(["show", str(plan_file)]) == 0
    out, err = capsys.readouterr()
    assert "gpu0 |0F1---" in out
    assert "memory per GPU" in out
    assert "gradients are one step stale" in out
    assert err.endswith(f"next: pipeplan verify {plan_file}\n")


def test_show_says_which_gpus_are_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those without a layer; and two versions of the weights where nobody waits."""
    for gpus, told in (
        (3, "note: 1 of 3 GPUs hold no layer; each has a rank all the same"),
        (1, "note: one GPU waits for no other: --semantics flush needs one version"),
        (2, ""),
    ):
        config = planner.Config(time_limit_s=0.1)
        found = planner.solve(two_stages().chain, uniform(gpus, 2**40), config)
        (tmp_path / f"{gpus}.json").write_text(found.to_json())
        assert main(["show", str(tmp_path / f"{gpus}.json")]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if "note: " in line]
        assert len(notes) == bool(told)
        assert all(line.startswith(told) for line in notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--memory -1GiB",
            "--memory: size: got '-1GiB', which is below 0, need for example 16GiB",
        ),
        ("--gap 5", "--gap: fraction: got '5', need 5% or a number below 1 such as 0.01"),
    ],
)
def test_values_below_nothing_and_above_all(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What begins with a minus is the flag's value, not a flag."""
    with pytest.raises(SystemExit):
        main(f"plan chain.json -o plan.json {words}".split())
    assert said in capsys.readouterr().err


def test_show_says_that_a_plan_is_wrong(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it shows of it are the plan's own words."""
    sound, following = tmp_path / "sound.json", "next: pipeplan verify"
    found = planner.solve(two_stages().chain, uniform(2, 2**40), planner.Config(time_limit_s=0.1))
    sound.write_text(found.to_json())
    assert main(["show", str(sound)]) == 0
    assert capsys.readouterr().err == f"{following} {sound}\n"
    assert main(["show", str(plan_file)]) == 0
    warning = f"warning: {plan_file} breaks 9 rules: nothing of what is shown need hold\n"
    assert capsys.readouterr().err == f"{warning}{following} {plan_file}\n"


def test_flush_plan_has_no_staleness_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flush trains exactly as one process would, so nothing is said of stale gradients."""
    file = tmp_path / "plan.json"
    file.write_text(two_stages(semantics="flush").to_json())
    assert main(["show", str(file)]) == 0
    assert "stale" not in capsys.readouterr().out


def test_show_reads_stdin_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-` is stdin; `--json` is one JSON document on stdout."""
    text = io.TextIOWrapper(io.BytesIO(two_stages().to_json().encode()))
    monkeypatch.setattr(sys, "stdin", text)
    assert main(["show", "-", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["period_ns"] == 8
    assert figures["bound_ns"] is None
    assert [row["peak_bytes"] for row in figures["memory"]] == [32, 32]


def test_pictures_are_not_overwritten(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that exists is refused, unless `--force` is given."""
    picture = tmp_path / "plan.svg"
    command = ["show", str(plan_file), "--svg", str(picture)]
    assert main(command) == 0
    assert "<svg" in picture.read_text()
    picture.write_text("mine")
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert picture.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert "<svg" in picture.read_text()


def test_verify_prints_every_violation(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All broken rules are printed, and the code is 4."""
    assert main(["verify", str(plan_file)]) == 4
    out, err = capsys.readouterr()
    assert "memory, GPU 1, budget_bytes: got 20, need 1000" in out
    assert f"breaks {len(out.splitlines())} rules" in err
    assert main(["verify", str(plan_file), "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert answer["violations"] == out.splitlines()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "need JSON"),
        ("{}", "plan.json"),
        ('{"format": "pipeplan-chain/1"}', "plan.json"),
        ("[]", "plan.json"),
    ],
)
def test_a_wrong_file_is_code_2_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    """A file that is no plan gives one line that names it."""
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(["verify", str(file)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_closed_pipe_is_no_error(plan_file: Path) -> None:
    """`pipeplan show plan.json | head -1` neither fails nor complains."""
    show_it = subprocess.Popen(
        [sys.executable, "-m", "pipeplan", "show", str(plan_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert show_it.stdout is not None
    show_it.stdout.close()
    _, err = show_it.communicate()
    assert show_it.returncode == 0, err
    assert "rror" not in err


def test_a_picture_has_its_flags_format(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A png under another ending would be another format: it is refused before drawing."""
    file = tmp_path / "plan.jpg"
    assert main(["show", str(plan_file), "--png", str(file)]) == 2
    assert "need a name that ends with .png" in capsys.readouterr().err
    assert not file.exists()


def test_an_exit_of_the_users_code_is_not_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 says that no plan exists."""

    def run(_: object) -> int:
        raise SystemExit(3)

    monkeypatch.setattr(show, "run", run)
    assert main(["show", "any.json"]) == 2
    assert "the task's code has exited: SystemExit: 3" in capsys.readouterr().err
