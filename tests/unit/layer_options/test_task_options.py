"""Options of a task's layers: where layers are alike, one graph stands for them all."""

from __future__ import annotations

import pytest

from pipeplan.capture import estimate
from pipeplan.capture.estimation.layer_signature import LayerSignature
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.devices import find_device
from pipeplan.layer_options import add_options
from pipeplan.layer_options.layer_search import LayerSearch


@pytest.mark.parametrize(
    "model",
    [
        "tests.short_networks:gpt2(batch=8)",
        pytest.param("pipeplan.tasks:t5(batch=8)", marks=pytest.mark.long),
        pytest.param("pipeplan.tasks:resnet(width=8,batch=8)", marks=pytest.mark.long),
    ],
)
def test_layers_alike_have_one_graph(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an estimate knows of them before they are captured tells their graphs apart."""
    graphs: dict[LayerSignature | None, set[object]] = {}

    def look_at(
        search: LayerSearch, index: int, run: LayerRun, alike: LayerSignature | None = None
    ) -> None:
        graphs.setdefault(alike, set()).add(search._graph(index, run))

    monkeypatch.setattr(LayerSearch, "look_at", look_at)
    monkeypatch.setattr(LayerSearch, "_found", lambda *_: None)
    device = find_device("a100")
    chain = estimate(model, device)
    add_options(chain, model, device=device)
    assert None not in graphs
    assert all(len(found) == 1 for found in graphs.values())
    assert 1 < len(graphs) < len(chain.layers)
