"""A small operator graph whose bytes can be counted by hand."""

from __future__ import annotations

from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind

_KIND = StorageKind
X, W, BUFFER, H, MASK, NEW, Y, TY, GH, GW, GX, BIAS = range(12)
STORAGES = (
    Storage(name="x", bytes=10, kind=_KIND.INPUT),
    Storage(name="w", bytes=100, kind=_KIND.PARAMETER),
    Storage(name="buffer", bytes=4, kind=_KIND.BUFFER),
    Storage(name="h", bytes=20, kind=_KIND.ACTIVATION),
    Storage(name="mask", bytes=5, kind=_KIND.ACTIVATION),
    Storage(name="new", bytes=4, kind=_KIND.NEW_BUFFER, targets=("buffer",)),
    Storage(name="y", bytes=8, kind=_KIND.ACTIVATION),
    Storage(name="ty", bytes=8, kind=_KIND.TANGENT, targets=("bias",)),
    Storage(name="gh", bytes=20, kind=_KIND.GRADIENT),
    Storage(name="gw", bytes=100, kind=_KIND.WEIGHT_GRADIENT, targets=("w",)),
    Storage(name="gx", bytes=10, kind=_KIND.GRADIENT),
    Storage(name="bias", bytes=8, kind=_KIND.PARAMETER),
)
F, INPUTS, WEIGHTS = Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT
OPERATIONS = (
    Operation(
        name="f0",
        phase=F,
        reads=(X, W),
        writes=(H, MASK),
        time_ns=3,
        workspace_bytes=7,
        random=True,
    ),
    Operation(name="f1", phase=F, reads=(H, BUFFER, BIAS), writes=(NEW, Y), time_ns=5),
    Operation(name="b1", phase=INPUTS, reads=(TY, H), writes=(GH,), time_ns=4, workspace_bytes=1),
    Operation(name="b0 i", phase=INPUTS, reads=(GH, W, MASK), writes=(GX,), time_ns=2),
    Operation(name="b0 w", phase=WEIGHTS, reads=(GH, X), writes=(GW,), time_ns=6),
)
STATIC = 100 + 4 + 8 + 108


def hand(**changes: object) -> OperatorGraph:
    """Two operations forwards, three backwards; the tangent is also the gradient of the bias."""
    graph = OperatorGraph(
        name="hand",
        storages=STORAGES,
        operations=OPERATIONS,
        outputs=(Y,),
        input_gradients=(GX,),
        gradient_bytes=108,
    )
    return graph.model_copy(update=changes)


def program(lines: list[str]) -> DeviceProgram:
    """The program of instructions as text."""
    return DeviceProgram.from_text("\n".join(["pipeplan-device-program/1", *lines]))


KEEP_ALL = [
    *("run 0", "run 1", "update 5", "free 5", "end F", "accumulate 7", "free 6"),
    *("run 2", "free 3", "free 7", "run 3", "free 4", "end I"),
    *("run 4", "free 8", "accumulate 9", "free 9"),
]
