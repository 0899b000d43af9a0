"""Plans whose optimizers' states may be on the host: where nothing else fits, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.cluster import Host, uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import Case
from pipeplan.verifier import verify
from tests import handmade

HOST = Host(memory_bytes=2**40, bandwidth_bytes_per_s=10**9, update_bytes_per_s=10**9)
SIZES = {"weight_bytes": 10, "gradient_bytes": 10, "optimizer_bytes": 20, "saved_bytes": 2}


def planned(memory: int, host: Host | None = HOST, **options: Any) -> Plan:
    """Six equal layers on two GPUs, each of 50 bytes of states under 2bw; 20 of them can leave."""
    of = handmade.chain([(20, 40)] * 6, [{**SIZES, "optimizer_ns": 1}] * 6)
    limits = {"time_limit_s": 1.0, "workers": 1, "deterministic": True}
    return solve(of, uniform(2, memory, host=host), Config(**limits | options))


def away(plan: Plan) -> list[int]:
    """How many layers of each GPU have their states on the host."""
    return [
        sum(s.last + 1 - s.first for s in plan.hosted(gpu) if s.states == "host")
        for gpu in range(len(plan.cluster.gpus))
    ]


@pytest.mark.parametrize(("semantics", "states"), [("2bw", 50), ("flush", 40)])
@pytest.mark.parametrize("offload", ["states", "auto"])
def test_plans_where_states_alone_are_too_much(semantics: str, states: int, offload: str) -> None:
    """No plan without; with them one that every voice accepts, refused where they may not move."""
    memory = 3 * states - 1
    with pytest.raises(InfeasibleError, match="offload states may help"):
        planned(memory, semantics=semantics)
    plan = planned(memory, semantics=semantics, offload=offload)
    assert verify(plan) == ()
    assert all(away(plan))


@pytest.mark.parametrize("semantics", ["2bw", "flush"])
def test_no_more_than_must(semantics: str) -> None:
    """Where all fits nothing is on the host; one layer too many is one stage's states."""
    assert away(planned(400, semantics=semantics, offload="states")) == [0, 0]
    ample = planned(400, semantics=semantics, offload="states")
    plain = planned(400, semantics=semantics)
    assert ample.step_ns == plain.step_ns


def test_the_host_must_have_room() -> None:
    """A host that is too small for the states is named, with what is missing."""
    small = HOST.model_copy(update={"memory_bytes": 1})
    with pytest.raises(InfeasibleError, match="the host has 1: 1 bytes over"):
        planned(149, small, offload="states")


def test_states_that_must_stay_can_be_too_much() -> None:
    """Weights and gradients never leave."""
    with pytest.raises(InfeasibleError, match="states that cannot be on the host sum to 180"):
        planned(80, offload="states")


def test_the_host_must_tell_how_fast_it_updates() -> None:
    """It is named, never guessed; auto moves activations alone then."""
    silent = HOST.model_copy(update={"update_bytes_per_s": None})
    with pytest.raises(InputError, match=r"need host.update_bytes_per_s in the cluster file"):
        planned(149, silent, offload="states")
    with pytest.raises(InputError, match=r"config.offload: got states for a cluster without a h"):
        planned(149, None, offload="states")
    with pytest.raises(InfeasibleError, match="the states of all layers sum to 300"):
        planned(149, silent, offload="auto")
    with pytest.raises(InputError, match=r"config.offload: got states with config.memory_model p"):
        Config(offload="states", memory_model="paper")


def test_resumes_from_it() -> None:
    """Such a plan competes where it may, and is refused where it may not."""
    first = planned(149, offload="states")
    again = planned(149, offload="states", resume=first, time_limit_s=0.05)
    assert again.step_ns <= first.step_ns
    with pytest.raises(InputError, match="whose optimizers' states are on the host"):
        planned(400, resume=first)


def test_llama_whose_states_alone_are_too_much() -> None:
    """Llama of 24 blocks on 4 GPUs of 17.7 GiB, where its states alone are 19.0 each."""
    case = Case("llama24", 4, 0.3)
    host = Host(memory_bytes=2**40, bandwidth_bytes_per_s=12 * 10**9, update_bytes_per_s=4 * 10**9)
    cluster = case.cluster.model_copy(update={"host": host})
    limits = {"time_limit_s": 1.0, "workers": 1, "deterministic": True}
    config = Config(offload="states", recompute="auto", **limits)
    plan = solve(case.chain, cluster, config)
    assert verify(plan) == ()
    assert all(away(plan))
