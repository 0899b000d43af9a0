"""Which tasks a file may name: marked functions where the user works, and nothing else runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.cli import entry, main
from pipeplan.errors import InputError
from pipeplan.launch import __main__ as launch
from pipeplan.task import load, load_named
from pipeplan.taskref import parsed
from tests import forked_commands, launch_task

BODY = """
import torch
from pathlib import Path
from pipeplan.task import Task, task_function

def made():
    return Task(model=[torch.nn.Linear(2, 1)], loss=max, optimizer=list, data=min)
"""
MARKED = BODY + "\n@task_function\ndef task(width=1):\n    return made()\n"
UNMARKED = BODY + "\nPath('{ran}').touch()\ndef task():\n    return made()\n"
PRETENDED = """
from pathlib import Path

def task_function(function):
    return function

@task_function
def task():
    Path('{ran}').touch()
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What exists once anything has run; we are in a folder with modules that a file may name."""
    mark = tmp_path / "ran"
    here = tmp_path / "here"
    (here / "pack").mkdir(parents=True)
    for name, text in {
        "here/marked_tasks.py": MARKED,
        "here/unmarked_tasks.py": UNMARKED,
        "here/pretended_tasks.py": PRETENDED,
        "here/pack/inner.py": MARKED,
        "here/pack/__init__.py": "",
        "outside.py": MARKED + "\nPath('{ran}').touch()\n",
    }.items():
        (tmp_path / name).write_text(text.replace("{ran}", str(mark)))
    (here / "linked.py").symlink_to(tmp_path / "outside.py")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    return mark


def named(reference: str) -> object:
    """What a file that names `reference` gets."""
    return load_named(reference, file="plan.json", repeated=lambda _: "the command")


@pytest.mark.parametrize(
    "reference",
    [
        "marked_tasks.py:task",
        "marked_tasks.py:task(width=3)",
        "marked_tasks:task",
        "pack.inner:task",
        "pack/inner.py:task",
        "pipeplan.tasks:siamese",
        "pipeplan.tasks.mixer:mixer",
    ],
)
def test_a_file_may_name_marked_functions(ran: Path, reference: str) -> None:
    """Files below the working directory, modules and packages, with arguments; ours."""
    assert named(reference)


@pytest.mark.parametrize(
    "reference",
    [
        "subprocess:getoutput(cmd='touch {ran}')",
        "os:system(command='touch {ran}')",
        "builtins:open(file='{ran}', mode='w')",
        "unmarked_tasks:task",
        "unmarked_tasks.py:task",
        "unmarked_tasks.py:made",
        "pretended_tasks:task",
        "pretended_tasks.py:task",
        "../outside.py:task",
        "{outside}:task",
        "linked.py:task",
        "marked_tasks.py:made",
        "pipeplan.tasks:absent",
        "pipeplan.tasks.mixer:Mixer",
        "pipeplan.task:load(reference='unmarked_tasks:task')",
        "no_such_module_here:task",
        "pack:inner",
        ".:task",
    ],
)
def test_a_file_may_name_nothing_else(ran: Path, reference: str) -> None:
    """One message with the way out; neither a function is called nor a module imported."""
    outside = ran.parent / "outside.py"
    reference = reference.replace("{ran}", str(ran)).replace("{outside}", str(outside))
    with pytest.raises(InputError, match=r"names the task .*name it yourself: the command$"):
        named(reference)
    assert not ran.exists()
    assert "unmarked_tasks" not in sys.modules


def test_a_file_that_is_not_here_is_told(ran: Path) -> None:
    """The command was started elsewhere: nothing is said of marks."""
    for reference, told in (
        ("elsewhere/train.py:task", "/path/to/elsewhere/train.py:task"),
        ("/none/train.py:task(a=1)", "/path/to/train.py:task(a=1)"),
    ):
        with pytest.raises(InputError, match=r"there is no file .*train\.py") as found:
            load_named(reference, file="plan.json", repeated=lambda task: f"launch {task}")
        assert str(found.value).endswith(f"in place of /path/to: launch {told}")


@pytest.mark.parametrize("reference", ["os:system('ls')", "a:\x1b[2Jb", "os", "os:(ls)"])
def test_a_file_may_name_no_reference_of_another_form(ran: Path, reference: str) -> None:
    """What no user could write is refused like the user's mistakes."""
    with pytest.raises(InputError, match=r"need package\.module:function"):
        named(reference)


@pytest.mark.parametrize("arguments", ["(**{'width': 2})", "(width=1, width=2)", "(2)"])
def test_each_argument_is_named_once(arguments: str) -> None:
    """None is left out in silence."""
    with pytest.raises(InputError, match="arguments are given as function"):
        parsed(f"here:task{arguments}")


def test_the_user_may_name_anything(ran: Path) -> None:
    """The mark is for files only."""
    assert load("unmarked_tasks.py:task")
    assert ran.exists()


def written(reference: str) -> None:
    """plan.json and chain.json that name `reference`, and are fine otherwise."""
    of = launch_task.chain().model_copy(update={"task": reference})
    plan = launch_task.plan_of(of, 1, "flush")
    Path("plan.json").write_text(plan.to_json())
    Path("chain.json").write_text(of.to_json())


MACHINES = "--gpus 1 --memory 1GiB --bandwidth inf"
COMMANDS = {
    "verify": ("verify plan.json",),
    "simulate": ("simulate plan.json",),
    "show": ("show plan.json", "show chain.json", "show plan.json --svg plan.svg"),
    "report": ("report .",),
    "export": tuple(
        f"export plan.json --format {each} -o {each}.txt" for each in ("torch-csv", "torchtitan")
    ),
    "plan": (
        f"plan chain.json {MACHINES} --time-limit 1s -o again.json",
        "plan chain.json --gpus 1,2 --memory 1GiB --bandwidth inf --time-limit 1s -o sweep",
    ),
    "compare": (f"compare chain.json {MACHINES} --time-limit 1s --out compared",),
    "remat": ("remat chain.json --budget 1GiB",),
    "import": ("import chain.json --format pipedream --microbatch-size 1 -o other.json",),
    "profile": (
        "profile --stages plan.json -o stages.json",
        "profile --stages plan.json --json -o -",
    ),
    "calibrate": ("calibrate --ranks 2 --memory 1GiB -o plan.json",),
}
"""How each verb meets the two files."""

HOSTILE = ("subprocess:getoutput(cmd='touch {ran}')", "unmarked_tasks.py:task")


@pytest.mark.parametrize("reference", HOSTILE)
@pytest.mark.parametrize("verb", [each.__name__.rpartition(".")[2] for each in entry._VERBS])
def test_no_verb_runs_what_a_file_names(ran: Path, verb: str, reference: str) -> None:
    """Whatever a verb does with the file, it calls and imports nothing that the file names."""
    written(reference.replace("{ran}", str(ran)))
    for words in COMMANDS[{"convert": "import"}.get(verb, verb)]:
        assert main(words.split()) in (0, 2)
        assert not ran.exists(), words


@pytest.mark.parametrize("reference", HOSTILE)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 2),
        ("--out run --steps 1", 2),
        ("--dry-run", 0),
        ("--dry-run --out run", 0),
        ("--resume gone", 2),
        ("--clock virtual --steps 2", 0),
        ("--clock sleep --steps 1 --dry-run", 0),
    ],
)
def test_launch_runs_nothing_that_a_file_names(
    ran: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, reference: str
) -> None:
    """A launch refuses with the command that names it anew; a dry run shows the table."""
    written(reference.replace("{ran}", str(ran)))
    assert launch.main(["--plan", "plan.json", *words.split()]) == code
    said = capfd.readouterr()
    assert not ran.exists()
    assert not Path("run").exists()
    assert "gone" in words or code == 0 or "-m pipeplan.launch --plan plan.json" in said.err
    assert ("loads none that only a file names" in said.out) == (
        "dry-run" in words and "clock" not in words
    )


def test_the_command_that_is_told_works(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Copied from the message, it runs the same task."""
    written("unmarked_tasks.py:task")
    assert launch.main(["--plan", "plan.json", "--steps", "1"]) == 2
    told = capfd.readouterr().err.partition("name it yourself: ")[2]
    command = told.replace("torchrun --nproc-per-node 1", sys.executable)
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=_environment(), check=False
    )
    assert ran.exists()
    assert "data(0) failed" in done.stderr, "the task was called, and its data asked for"


def _environment() -> dict[str, str]:
    return forked_commands.environment() | {"PYTHONPATH": str(launch_task.ROOT)}


def test_a_dry_run_loads_no_foreign_task(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even a marked one: who clones a plan with its code has not said that it may run."""
    marked = Path("marked_tasks.py")
    marked.write_text(marked.read_text() + f"\nPath('{ran}').touch()\n")
    written("marked_tasks.py:task")
    assert launch.main(["--plan", "plan.json", "--dry-run"]) == 0
    assert not ran.exists()
    assert "Add --task marked_tasks.py:task to check it, too." in capfd.readouterr().out
    assert launch.main(["--plan", "plan.json", "--dry-run", "--task", "marked_tasks.py:task"]) == 2
    assert ran.exists()


@pytest.mark.parametrize(
    ("raises", "where"),
    [
        ("task", "task() failed: KeyError: 'key' (users.py:5, in helper)"),
        ("data", "data(0) failed: KeyError: 'key' (users.py:5, in helper)"),
        ("import", "importing users.py failed: KeyError: 'key' (users.py:5, in helper)"),
    ],
)
@pytest.mark.usefixtures("ran")
def test_errors_of_the_users_code_name_its_line(raises: str, where: str) -> None:
    """The innermost one that is no library's: here json's decoder asks the user's function."""
    lines = [
        "import json, torch",
        "from pipeplan.task import Task",
        "RAISES = {raises!r}",
        "def helper(pairs):",
        "    return dict(pairs)['key']",
        "def fail(*_):",
        "    return json.loads('{}', object_pairs_hook=helper)",
        "def task():",
        "    if RAISES == 'task': fail()",
        "    layers = [torch.nn.Linear(2, 1)]",
        "    return Task(model=layers, loss=max, optimizer=list, data=fail)",
        "if RAISES == 'import': fail()",
    ]
    Path("users.py").write_text("\n".join(lines).replace("{raises!r}", repr(raises)))
    with pytest.raises(InputError) as caught:
        load("users.py:task").microbatch(0)
    assert where in str(caught.value)


@pytest.mark.usefixtures("ran")
def test_a_file_that_exits_is_told_of() -> None:
    """Its exit code would be taken for ours: 3 says that there is no plan."""
    Path("script.py").write_text("def main():\n    raise SystemExit(3)\n\nmain()\n")
    told = r"importing script\.py failed: SystemExit: 3 \(script\.py:2, in main\)"
    with pytest.raises(InputError, match=told):
        load("script.py:task")


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("unmarked_tasks.py:task", "may not name 'unmarked_tasks.py:task': "),
        ("os:system(command='ls')", "launch --task 'os:system(command='\"'\"'ls'\"'\"')'"),
        ("no\x1b[31m reference", "launch --task with the task that is meant"),
        ("marked_tasks.py:task", ""),
    ],
)
def test_a_replay_says_what_a_plan_may_not_name(
    capfd: pytest.CaptureFixture[str], reference: str, told: str
) -> None:
    """The next command is refused without it, and a stranger's task is no one's own word."""
    written(reference)
    assert main(["simulate", "plan.json"]) == 0
    said = capfd.readouterr().err
    assert told in said
    assert ("may not name" in said) == bool(told)
    assert said.rpartition("next: ")[2].endswith("--plan plan.json --out run\n")
    assert "\x1b" not in said
