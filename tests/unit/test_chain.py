"""The chain: what its fields mean between layers, and the rules that tie fields together."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.chain import Chain, Layer, RidingTensor
from pipeplan.errors import InputError
from pipeplan.verifier import split, stage_bytes
from tests import documents, handmade


def chain(**changes: Any) -> Chain:
    """The golden chain with fields of its last layer changed."""
    data = documents.data("chain")
    data["layers"][1] |= changes
    return Chain.from_data(data)


def test_boundaries() -> None:
    """The boundary before a layer is the one behind the layer before; the first is the input."""
    assert [chain().input_of(layer) for layer in (0, 1)] == [8, 20]


def test_gradients() -> None:
    """A gradient has its boundary's size unless the file says otherwise; the input gets none."""
    data = documents.data("chain")
    assert [chain().gradient_of_input(layer) for layer in (0, 1)] == [0, 20]
    data["layers"][0]["output_gradient_bytes"] = 0
    changed = Chain.from_data(data)
    assert changed.gradient_of_input(1) == 0
    assert changed.layers[0].gradient_of_output_bytes == 0


def test_missing_fields_mean_zero() -> None:
    """Only name, times and output size of a layer are required."""
    layer = {"name": "a", "forward_ns": 1, "backward_ns": 2, "output_bytes": 3}
    read = Chain.from_data({"name": "c", "layers": [layer]})
    numbers = read.layers[0].model_dump(exclude=set(layer))
    assert not any(numbers.values())
    assert (read.microbatch_size, read.input_bytes, read.mode) == (1, 0, "imported")


@pytest.mark.parametrize(
    ("field", "most"),
    [("saved_input_bytes", 20), ("saved_output_bytes", 4), ("backward_weight_ns", 50)],
)
def test_parts_are_no_larger_than_the_whole(field: str, most: int) -> None:
    """Saved input, saved output and weight part of the backward end at what they are part of."""
    assert getattr(chain(**{field: most}).layers[1], field) == most
    with pytest.raises(InputError, match=rf"layers\[1\]\.{field}: got {most + 1}, need at most"):
        chain(**{field: most + 1})


def test_two_halves_and_their_forward_are_no_quicker_than_whole_ones() -> None:
    """Bounds on whole backwards hold for split ones, too; the weights' half may be long then."""
    split = {"backward_ns": 50, "backward_weight_ns": 60, "backward_input_ns": 0}
    assert chain(**split).layers[1].backward_weight_ns == 60
    for changes, wrong in (
        ({"backward_weight_ns": None}, "backward_input_ns: got 0 without backward_weight_ns"),
        ({"backward_weight_ns": 49}, "backward_input_ns: got 0, need at least 1: with"),
        ({"forward_ns": 9, "forward_split_ns": 8}, "forward_split_ns: got 8, need at least"),
    ):
        with pytest.raises(InputError, match=rf"layers\[1\]\.{wrong}"):
            chain(**split | changes)


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("forward_workspace_bytes", -4),
        ("backward_workspace_bytes", -24),
        ("input_backward_workspace_bytes", -24),
    ],
)
def test_an_operation_holds_what_it_keeps(field: str, least: int) -> None:
    """Below x 20 + y 4 - kept 20, or gy 4 + gx 20, it would hold less than it keeps (M3), (S4)."""
    edge = chain(**{field: least})
    assert getattr(edge.layers[1], field) == least
    for layers in ([(0, 1, 0)], [(0, 0, 0), (1, 1, 0)], [(0, 0, 0), (1, 1, 1)]):
        times = {f"{stage}{kind}0": 0 for stage in range(len(layers)) for kind in "FB"}
        plan = handmade.plan(edge, layers, 400, times, memory=(), step_ns=1)
        for index in range(len(layers)):
            bytes_ = stage_bytes.exact(plan, index)
            inputs = split.halves(plan, index).running
            assert min(bytes_.forward, bytes_.backward, inputs) >= bytes_.kept
    with pytest.raises(InputError, match=rf"layers\[1\]\.{field}: got {least - 1}, need at least"):
        chain(**{field: least - 1})


def test_frozen() -> None:
    """A chain cannot be changed after its digest was taken."""
    with pytest.raises(ValueError, match="frozen"):
        chain().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("field", ["forward_light_ns", "forward_light_workspace_bytes"])
def test_a_chain_without_light_forwards_has_the_digest_it_always_had(field: str) -> None:
    """A field that is younger than the format is in a file only where it says something."""
    plain = Layer(name="a", forward_ns=4, backward_ns=8, output_bytes=1)
    known = plain.model_copy(update={field: 3})
    assert field not in Chain(name="x", layers=(plain,)).to_json()
    assert field in Chain(name="x", layers=(known,)).to_json()


def test_a_forward_without_autograd_holds_its_input() -> None:
    """What it needs beside input and output is no less than minus the output of 4 bytes."""
    assert chain(forward_light_workspace_bytes=-4).layers[1].light_workspace_bytes == -4
    with pytest.raises(
        InputError, match=r"forward_light_workspace_bytes: got -5, need at least -4"
    ):
        chain(forward_light_workspace_bytes=-5)


def riding(*layers: list[dict[str, Any]]) -> Chain:
    """Three layers with these riding tensors."""
    rides = [tuple(RidingTensor(**tensor) for tensor in tensors) for tensors in layers]
    sizes: list[dict[str, Any]] = [{"output_bytes": 20, "riding": each} for each in rides]
    return handmade.chain([(1, 1)] * len(layers), sizes, input_bytes=20)


def test_what_rides_goes_on_in_the_next_layer() -> None:
    """A tensor that a layer passes on is the first of those that ride in the next one."""
    one, other = {"size_bytes": 8, "passed": True}, {"size_bytes": 9, "kept": True}
    chain = riding([one], [one, {**other, "passed": True}], [one | {"passed": False}, other])
    assert [len(layer.riding) for layer in chain.layers] == [1, 2, 2]
    assert Chain.from_json(chain.to_json()) == chain


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([[{"size_bytes": 8, "passed": True}], []], r"layers\[1\].riding: got .* \[\] .* \[8\]"),
        ([[], [{"size_bytes": 8, "passed": True}]], "need a layer behind"),
        ([[{"size_bytes": 8}, {"size_bytes": 13}], []], "more than 20 bytes"),
    ],
)
def test_refuses_what_cannot_ride(layers: list[list[dict[str, Any]]], message: str) -> None:
    """What is passed on arrives, from a boundary that is large enough, in another layer."""
    with pytest.raises(ValueError, match=message):
        riding(*layers)


@pytest.mark.parametrize("of_option", [False, True])
def test_what_passes_is_kept(*, of_option: bool) -> None:
    """A message is less by it, so bytes that nobody keeps would be in no term of memory."""
    fields = {"forward_ns": 1, "backward_ns": 1, "output_bytes": 9}
    kept = {"saved_input_bytes": 2, "saved_bytes": 3}
    for passing, fits in ((5, True), (6, False)):
        told = {**kept, "saved_passing_bytes": passing}
        option = {**told, "program": 0, "forward_ns": 1, "backward_ns": 1}
        layer = {**fields, "options": (option,)} if of_option else fields | told
        if fits:
            Layer.model_validate({"name": "x", **layer})
        else:
            with pytest.raises(
                ValueError, match=r"saved_passing_bytes: got 6, need at most .* = 5"
            ):
                Layer.model_validate({"name": "x", **layer})
