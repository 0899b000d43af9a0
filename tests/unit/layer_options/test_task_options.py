"""Options of a task's layers: where layers are alike, one graph stands for them all."""

from __future__ import annotations

import sys

import pytest

from pipeplan.capture import estimate
from pipeplan.capture.estimation import layer_signature
from pipeplan.devices import find_device
from pipeplan.layer_options import add_options, layer_search

TASK = "pipeplan.tasks:gpt2(batch=8)"


def test_layers_alike_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate tells them apart before their graphs; the chain is that of all graphs."""
    captures: list[str] = []
    real = layer_search.capture_layer
    monkeypatch.setattr(
        layer_search, "capture_layer", lambda *given: captures.append("one") or real(*given)
    )
    device = find_device("a100")
    chain = estimate(TASK, device)
    found = add_options(chain, TASK, device=device, seconds=2)
    few, distinct = len(captures), iter(range(100))
    assert any(layer.options for layer in found.layers)
    captures.clear()
    monkeypatch.setattr(
        sys.modules[add_options.__module__],
        "layer_signature",
        lambda run: ((next(distinct),), layer_signature.layer_signature(run)[1]),
    )
    assert add_options(chain, TASK, device=device, seconds=2) == found
    assert few < len(captures) == len(chain.layers)
