"""Arguments and calls that make no sense are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeplan import rematerialize
from pipeplan.errors import InputError
from tests.lean_modules import LOSS, SAMPLE, by_layers, lean, row, source


def test_calls_that_cannot_be_run_are_refused() -> None:
    """On another device, without a tensor, with several, with one of inference mode."""
    module = lean(row())
    with pytest.raises(InputError, match="device of the input: got meta, need cpu"):
        module(source().to("meta"))
    for given in [(), (1,), (source(), source())]:
        with pytest.raises(InputError, match="need one tensor"):
            module(*given)
    with torch.inference_mode():
        made = source()
    with pytest.raises(InputError, match="inference mode"):
        module(made)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_measuring_without_gradients_is_refused(mode: Callable[[], Any]) -> None:
    """There would be no backward to measure."""
    module = row()
    with mode(), pytest.raises(InputError, match="gradients switched off"):
        rematerialize(module, SAMPLE, "1GiB", loss=LOSS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeats", 1.5),
        ("slots", 0),
        ("max_layers", 1.5),
        ("method", "fastest"),
        ("host_bandwidth", 3),
        ("time_limit_s", 0),
        ("time_limit_s", "20"),
    ],
)
def test_odd_arguments_are_refused(name: str, value: object) -> None:
    """The message names the argument."""
    options: dict[str, Any] = {"offload": True, "host_bandwidth": "1GB/s", name: value}
    with pytest.raises(InputError, match=f"{name}: got"):
        rematerialize(row(), SAMPLE, "1GiB", loss=LOSS, **options)


def test_a_single_rehearsal_has_no_spread() -> None:
    """Noise cannot be told from one call."""
    assert by_layers(row(), SAMPLE, "1GiB", repeats=1, loss=LOSS).rematerialization_spread is None
