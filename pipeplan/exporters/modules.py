"""Which modules of the user's model each stage holds.

Other tools cut a model between modules: members of a row of blocks (`blocks.3`), and modules
outside of rows (`norm`). The chain tells them; where it does not, names of layers and of their
parameters do, but for a layer that is named after the first and the last of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeplan.chain import Layer
from pipeplan.errors import InputError
from pipeplan.plan import Plan

_AGAIN = re.compile(r"#\d+$")
"""What `capture` adds to a name that comes again."""
_MEMBER = re.compile(r"([^:]+):\w+")
"""A member of a sequential model, as `capture` names it: `3:Linear`."""


def stage_modules(plan: Plan, tool: str) -> list[list[str]]:
    """Names of the modules of each stage, in the order of the chain.

    Args:
        plan: its chain's layers are named after modules, as `profile` names them.
        tool: that will read the names, for messages.

    Raises:
        InputError: if a cut lies inside of a module, or the chain does not tell the modules.
    """
    owner: dict[str, int] = {}
    known: set[str] = set()
    for stage in plan.stages:
        for layer in plan.chain.layers[stage.first : stage.last + 1]:
            for module in _modules(layer, known, tool):
                first = owner.setdefault(module, stage.id)
                if first != stage.id:
                    raise InputError(
                        f"export to {tool}: module {module!r}: got a part of it in stage {first}"
                        f" and another, layer {layer.name!r}, in stage {stage.id}, need cuts"
                        " between modules. Plan again with the layers of each module on one GPU"
                        " (--pin) and --method contiguous, or profile the model as a row of its"
                        " modules (a list or an nn.Sequential)."
                    )
            known.update(layer.parameters)
    return [[name for name, where in owner.items() if where == stage.id] for stage in plan.stages]


def _modules(layer: Layer, known: set[str], tool: str) -> Iterator[str]:
    """The modules of `layer`; parameters that are `known` are those of layers before it."""
    yield from map(_outermost, layer.modules or _named(layer.name, tool))
    for parameter in layer.parameters:
        path, _, _ = parameter.rpartition(".")
        if path and parameter not in known:
            yield _outermost(path)


def _named(layer: str, tool: str) -> list[str]:
    """Paths of modules in a layer's name, such as `0:Linear+1:Tanh` or `norm`.

    Raises:
        InputError: if it is a range, such as `a.b.c..d`: what lies inside has no name.
    """
    members = [_MEMBER.fullmatch(part) for part in layer.split("+")]
    paths = [member[1] for member in members if member]
    if len(paths) == len(members):
        return paths
    if ".." in layer:
        raise InputError(
            f"export to {tool}: layer {layer!r}: got the first and the last of its modules, need"
            " all of them: one without parameters would be lost. Profile the task again (pipeplan"
            " profile writes `modules` of each layer) and plan again."
        )
    return [_AGAIN.sub("", layer)]


def _outermost(path: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up`: what lies inside of a row's member goes with it."""
    parts = path.split(".")
    ends = (end for end, part in enumerate(parts, 1) if part.isdigit())
    return ".".join(parts[: next(ends, len(parts))])
