"""Models of which some parameters have memory: those are, bit for bit, what they always were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from random import Random

import pytest
import torch
from torch import nn

from pipeplan.capture.boundary_trace import fake_mode
from pipeplan.capture.fake_tensors.ghosts import Ghosts
from pipeplan.empty import has_empty, hollow, is_empty
from tests.initialised import MODELS, WIDTH

Make = Callable[[], nn.Module]


def built(make: Make, keep: Collection[int], *, draws: bool) -> tuple[nn.Module, Ghosts]:
    """The model with memory for `keep` and for what its code needs."""
    for attempt in range(8):
        ghosts = Ghosts(frozenset(keep), draws=draws or attempt > 0)
        torch.manual_seed(7)
        failed = False
        try:
            with ghosts.building():
                model = make()
            state = torch.get_rng_state()
            ghosts.want_what_outlives()
        except RuntimeError:
            failed = True
        if not ghosts.wanted:
            assert not failed
            torch.set_rng_state(state)
            return model, ghosts
        keep = ghosts.keep | ghosts.wanted
    raise AssertionError("something more is wanted every time")


def numbers(model: nn.Module, ghosts: Ghosts) -> dict[str, int]:
    """Names of the model's parameters -> in which order they were made."""
    known = {id(parameter): number for number, parameter in enumerate(ghosts.parameters)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: known[id(parameter)] for name, parameter in named}


@pytest.mark.parametrize("name", MODELS)
def test_kept_parameters_and_the_generator_are_those_of_the_plain_model(name: str) -> None:
    """Whatever is kept, and whatever the code does: equal by torch.equal, buffers too."""
    make = MODELS[name]
    torch.manual_seed(7)
    plain = make()
    state = torch.get_rng_state()
    values = dict(plain.named_parameters(remove_duplicate=False))
    buffers = dict(plain.named_buffers())
    draft, first = built(make, (), draws=False)
    known = numbers(draft, first)
    assert known.keys() == values.keys()
    for seed in range(4):
        hosted = Random(seed).sample(sorted(known), max(1, len(known) // 3))
        model, ghosts = built(make, {known[each] for each in hosted}, draws=True)
        assert torch.equal(torch.get_rng_state(), state)
        found = dict(model.named_parameters(remove_duplicate=False))
        for each in hosted:
            assert not is_empty(found[each]), each
            assert found[each].dtype == values[each].dtype
            assert torch.equal(found[each], values[each]), each
        for each, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[each]), each
        assert numbers(model, ghosts) == known
        assert has_empty([model]) or len(ghosts.keep) == len(ghosts.parameters)


@pytest.mark.parametrize("name", ["drawn", "given", "copies", "weight_norm"])
def test_drafts_of_usual_models_keep_nothing(name: str) -> None:
    """Without values, nothing of the model has memory but its buffers."""
    draft, ghosts = built(MODELS[name], (), draws=False)
    assert not ghosts.keep
    assert all(map(is_empty, draft.parameters()))
    assert not any(map(is_empty, draft.buffers()))


def test_drift_is_known() -> None:
    """A random buffer behind a draw that was left out is not the plain model's; one before is."""

    def before() -> nn.Module:
        model = nn.Module()
        model.noise = nn.Buffer(torch.randn(3))
        model.layer = nn.Linear(4, 4)
        return model

    def behind() -> nn.Module:
        model = nn.Module()
        model.layer = nn.Linear(4, 4)
        model.noise = nn.Buffer(torch.randn(3))
        return model

    assert not built(before, (), draws=False)[1].drifted
    assert built(behind, (), draws=False)[1].drifted
    assert not built(behind, (), draws=True)[1].drifted


def test_ghosts_take_no_more_than_the_largest_parameter_at_once() -> None:
    """However many are drawn one after the other; when the build is over, nothing."""
    ghosts = Ghosts(draws=True)
    held = []
    with ghosts.building():
        for _ in range(16):
            nn.init.normal_(nn.Parameter(torch.empty(WIDTH, WIDTH)))
            held.append(sum(p.untyped_storage().nbytes() for p in ghosts.parameters))
    assert held == [4 * WIDTH * WIDTH] * 16
    assert sum(p.untyped_storage().nbytes() for p in ghosts.parameters) == 0


def test_other_threads_make_parameters_as_ever() -> None:
    """Only the thread that builds has ghosts."""
    ghosts = Ghosts(draws=False)
    made: list[nn.Module] = []
    other = threading.Thread(target=lambda: made.append(nn.Linear(4, 4)))
    with ghosts.building():
        other.start()
        other.join()
    assert not has_empty(made)
    assert not ghosts.parameters


def test_what_reads_a_lost_value_says_so() -> None:
    """An error names what needs the value, and the parameter is wanted next time."""
    ghosts = Ghosts(draws=False)
    with (
        pytest.raises(RuntimeError, match=r"tolist needs values of a parameter"),
        ghosts.building(),
    ):
        nn.Linear(2, 2).bias.tolist()
    assert ghosts.wanted == {1}


def test_a_parameter_without_memory_and_a_number() -> None:
    """Fake tensors compute such a pair for real, which would end the process."""
    ghosts = Ghosts(draws=False)
    with ghosts.building():
        layer = nn.Linear(2, 3)
    assert is_empty(layer.weight)
    with fake_mode([layer]):
        assert (1 + layer.weight).shape == (3, 2)


def test_hollow_parameters_are_not_a_number() -> None:
    """Who computes with one nobody filled sees it; it holds one element."""
    ghosts = Ghosts(draws=False)
    with ghosts.building():
        layer = nn.Linear(8, 8)
    for parameter in layer.parameters():
        hollow(parameter)
    assert layer(torch.ones(1, 8)).isnan().all()
    assert layer.weight.untyped_storage().nbytes() == 4
    assert layer.weight.shape == (8, 8)
