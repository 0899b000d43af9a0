"""Names of layers that come from a graph: the modules that they are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeplan.capture.graph.data_flow import DataFlow, ModuleCall, Node


def layer_names(flow: DataFlow, groups: Sequence[Sequence[Node]]) -> list[str]:
    """One name per group of steps, such as `blocks.0.norm_1..attention`; all are distinct.

    A group is named after the modules that lie in it as a whole, first and last; heavy steps
    decide, where it has any. A name that comes again gets a number.
    """
    sizes = Counter(call for step in flow.steps for call in flow.module_path(step))
    found: list[str] = []
    taken: Counter[str] = Counter()
    for group in groups:
        name = _name(flow, group, sizes)
        taken[name] += 1
        found.append(f"{name}#{taken[name]}" if taken[name] > 1 else name)
    return found


def _name(flow: DataFlow, group: Sequence[Node], sizes: Counter[ModuleCall]) -> str:
    inside = Counter(call for step in group for call in flow.module_path(step))
    paths = []
    for step in group:
        calls = [call for call in flow.module_path(step) if call.path]
        whole = [call for call in calls if inside[call] == sizes[call]]
        if calls and (whole or step in flow.heavy):
            paths.append((whole or calls[-1:])[0].path)
    if not paths:
        return "forward"
    return _span(paths[0], paths[-1])


def _span(first: str, last: str) -> str:
    """`a.b.c..d` for a.b.c and a.b.d: what both names begin with is said once."""
    if first == last:
        return first
    one, two = first.split("."), last.split(".")
    shared = 0
    while shared < min(len(one), len(two)) - 1 and one[shared] == two[shared]:
        shared += 1
    return f"{first}..{'.'.join(two[shared:])}"
