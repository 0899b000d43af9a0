"""Task references: how they are written and found, and which of them a file may name.

A reference is `package.module:function` or `path/to/file.py:function`, with or without arguments
as in `pipeplan.tasks:gpt2(size='small', batch=4)`. What the user writes is called as it is. A plan
or chain names its task as well, and who writes that file is not the user: with any reference it
could run any code, by calling a function as by importing a module. So a file may only name a
function marked with `@task_function`. Its source is read to find the mark before anything of it is
imported, and it must be where the user works: a file below the working directory, or a module
that Python finds. The arguments are plain values and the file's.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError

from pipeplan.errors import InputError

_Function = TypeVar("_Function", bound=Callable[..., object])

_MARK = "__pipeplan_task__"
_OWN = "pipeplan.tasks"
"""Our own tasks, which are collected from several modules."""


def task_function(function: _Function) -> _Function:
    """Mark `function` as one that a plan or chain may name, with plain values as arguments."""
    vars(function)[_MARK] = True
    return function


@dataclass(frozen=True, slots=True)
class Reference:
    """A task reference in its parts."""

    text: str
    place: str
    """Module, or file that ends in .py."""
    name: str
    arguments: Mapping[str, object]

    @property
    def own(self) -> bool:
        """Whether it names one of `pipeplan.tasks`."""
        return self.place == _OWN


def parsed(text: str) -> Reference:
    """The parts of the reference `text`; arguments are Python literals.

    Raises:
        InputError: if it has another form.
    """
    found = re.fullmatch(r"(?P<place>.+?):(?P<name>[^\W\d]\w*)(?P<arguments>\(.*\))?", text)
    arguments = _literals(found["arguments"] or "()") if found else None
    if found is None or arguments is None or not text.isprintable():
        example = f", for example {text}:task" if text.endswith(".py") else ""
        raise InputError(
            f"task: got {text!r}, need package.module:function or path/to/file.py:function,"
            f" where arguments are given as function(name=value, ...) with plain values{example}"
        )
    return Reference(text, found["place"], found["name"], arguments)


def _literals(text: str) -> dict[str, object] | None:
    """What stands in `(name=value, ...)`, each name once; None if it is anything else."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        names = [word.arg for word in call.keywords]
        if None in names or len(set(names)) < len(names):
            return None
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def found(reference: Reference) -> Callable[..., object]:
    """The function that a `reference` of the user names.

    Raises:
        InputError: if there is none.
    """
    module = _module(reference)
    function: object = getattr(module, reference.name, None)
    if callable(function):
        return function
    where, name = f"task {reference.text!r}", reference.name
    if function is not None:
        raise InputError(
            f"{where}: got {name} of type {type(function).__name__}, need a function that returns"
            f" a Task: def {name}(): return .."
        )
    raise InputError(
        f"{where}: {reference.place} has no function {name!r}, {_functions_of(module)}"
    )


def _functions_of(module: object) -> str:
    """What to take instead: the functions that are defined in `module`."""
    name = getattr(module, "__name__", None)
    own = [
        each
        for each, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not each.startswith("_")
    ]
    return f"it has {', '.join(own)}" if own else "nor any other: it needs one that returns a Task"


def found_marked(reference: Reference) -> Callable[..., object] | None:
    """The function that a file's `reference` names; None where a file may not name it.

    Nothing is imported that holds no such function.

    Raises:
        InputError: if the function's own module cannot be imported.
    """
    if reference.place not in sys.modules and not is_marked(reference):
        return None
    function: object = vars(_module(reference)).get(reference.name)
    marked = getattr(function, "__dict__", {}).get(_MARK) is True
    return function if callable(function) and marked else None


def is_marked(reference: Reference) -> bool:
    """Whether the source marks the function of a `reference`; nothing is imported."""
    source = None if reference.own else _source(reference.place)
    return reference.own or (source is not None and _marks(source, reference.name))


def is_nameable(text: str) -> bool:
    """Whether a plan may name the task reference `text`; nothing is imported."""
    try:
        return is_marked(parsed(text))
    except InputError:  # a file may hold any text
        return False


def _source(place: str) -> Path | None:
    """The file that `place` would be imported from, found without importing anything."""
    if place.endswith(".py"):
        path = Path(place).resolve()
        return path if path.is_file() and path.is_relative_to(Path.cwd().resolve()) else None
    _look_here()
    folders: Any = None
    name = ""
    origin: str | None = None
    for part in place.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, folders)
            folders = list(spec.submodule_search_locations or ()) if spec else []
        except Exception:  # of an odd name, or a namespace inside one that is not imported yet
            return None
        origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _marks(source: Path, name: str) -> bool:
    """Whether the text of `source` marks its function `name`."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(
        isinstance(node, ast.FunctionDef) and node.name == name and any(map(_is_mark, decorators))
        for node in tree.body
        for decorators in [getattr(node, "decorator_list", ())]
    )


def _is_mark(decorator: ast.expr) -> bool:
    word = decorator.attr if isinstance(decorator, ast.Attribute) else None
    word = decorator.id if isinstance(decorator, ast.Name) else word
    return word == task_function.__name__


_FOLDERS: set[Path] = set()
"""Where task files of this process lie."""


def _module(reference: Reference) -> object:
    place, text = reference.place, reference.text
    try:
        if not place.endswith(".py"):
            _look_here()
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise InputError(f"task {text!r}: no file {place}. Check the path.")
        _look_beside(path.parent)
        spec = importlib.util.spec_from_file_location(_module_name(path), path)
        if spec is None or spec.loader is None:
            raise InputError(f"task {text!r}: {place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"task {text!r}: importing {place} failed: {error_line(error)}{_where(error, place)}"
        ) from error


def _module_name(path: Path) -> str:
    """By which `import` finds a task file, if it does, here and in what is started from here.

    Workers of a loader that are not forked import the classes of what they are given.
    """
    name, loaded = path.stem, getattr(sys.modules.get(path.stem), "__file__", path)
    found = PathFinder.find_spec(name) if name not in sys.builtin_module_names else None
    is_found = found is not None and found.origin == str(path)
    if is_found and loaded and Path(loaded).resolve() == path:
        return name
    return f"pipeplan_task_{name}"


def _where(error: BaseException, place: str) -> str:
    """Where the module itself was looked for, if that is what is missing."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in (place, *_packages(place)):
        return ""
    return (
        f". It is looked for in {Path.cwd()} and where Python finds modules; a file is given by"
        " its path: FILE.py:FUNCTION"
    )


def _packages(place: str) -> list[str]:
    """The packages that a module of this name lies in."""
    parts = place.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _look_here() -> None:
    """Let modules in the working directory be found."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _look_beside(folder: Path) -> None:
    """Let a task file find the modules beside it first, as `python file.py` does.

    A module of the same name that lies beside another task file is forgotten, or it would be taken
    for this one.
    """
    beside = {each.stem if each.suffix == ".py" else each.name for each in folder.iterdir()}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] not in beside or Path(file).is_relative_to(folder):
            continue
        if any(Path(file).is_relative_to(other) for other in _FOLDERS):
            del sys.modules[name]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    _FOLDERS.add(folder)


def error_line(error: BaseException) -> str:
    """`error` in one line, where it came up, and a next step where a download has failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split()) + users_line(error)
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    if not any(map(_is_download, chain)):
        return text
    return (
        f"{text.rstrip('.')}. It needs a download, which failed: fetch the files beforehand, or"
        " build the model from a configuration, with random weights."
    )


def users_line(error: BaseException) -> str:
    """` (own.py:12, in helper)`: the innermost line that is no library's; empty if all are."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_NOT_OWN)]
    own = [each for each in own if not _INSTALLED & set(Path(each.filename).parts)]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})"


_STDLIB = sysconfig.get_path("stdlib")
_NOT_OWN = ("<", *(f"{each}{os.sep}" for each in (Path(__file__).parent, _STDLIB)))
_INSTALLED = {"site-packages", "dist-packages"}


def _is_download(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | URLError) or library in _DOWNLOADERS


_DOWNLOADERS = {"huggingface_hub", "requests", "httpx", "urllib3", "aiohttp"}
"""Libraries whose errors come from downloads."""
