"""The planner from outside: answers, refusals, limits, interruption."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from pipeplan import planner, simulator, verifier
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.lowering import lower
from pipeplan.plan import Plan
from tests import grids, handmade


def solve(of: Chain, cluster: Cluster, **options: Any) -> Plan:
    """The planner's answer within seconds."""
    config = planner.Config(**{"time_limit_s": 20, "workers": 1} | options)
    return planner.solve(of, cluster, config)


def small(**fields: list[Any]) -> Chain:
    """Four layers of 2 + 2 ns."""
    layers = [{name: row[i] for name, row in fields.items()} for i in range(4)]
    return handmade.chain([(2, 2)] * 4, layers)


class TestAnswers:
    """What a plan carries."""

    def test_every_voice_agrees(self) -> None:
        """The plan keeps every rule and replays to its own numbers."""
        plan = solve(small(saved_bytes=[3, 2, 2, 1]), uniform(2, 9))
        assert verifier.verify(plan) == ()
        simulator.check(plan, lower(plan))
        assert plan.solver.method == "auto"
        assert plan.chain_digest == plan.chain.digest()

    def test_fewer_gpus_than_given(self) -> None:
        """One layer uses one GPU; the others stay empty with zeros in the table."""
        plan = solve(handmade.chain([(3, 4)]), uniform(3, 10))
        assert (plan.period_ns, plan.solver.status) == (7, "optimal")
        assert [row.peak_bytes for row in plan.memory] == [0, 0, 0]

    def test_fixed_k_is_kept(self) -> None:
        """A plan for k = 3 holds three micro-batches a period."""
        plan = solve(small(), uniform(2, 10), k=3)
        assert (plan.k, plan.period_per_microbatch) == (3, 8)

    def test_tied_layers_share_a_gpu(self) -> None:
        """First and last layer share a parameter: they meet on one GPU, apart from the middle."""
        plan = solve(small(parameters=[("w",), (), (), ("w",)]), uniform(2, 10))
        homes = {stage.gpu for stage in plan.stages if stage.first == 0 or stage.last == 3}
        assert len(homes) == 1
        assert plan.period_ns == 8

    def test_default_microbatches_allow_the_plan(self) -> None:
        """Twenty GPUs keep twenty micro-batches in flight: (R6) sets the default."""
        plan = solve(handmade.chain([(1, 1)] * 20), uniform(20, 10))
        assert plan.period_ns == 2
        assert plan.microbatches >= 19

    def test_given_microbatches_limit_the_copies(self) -> None:
        """With one micro-batch per step two may be in flight; the period grows."""
        plan = solve(handmade.chain([(1, 1)] * 4), uniform(4, 10), microbatches=1, k=1)
        assert plan.microbatches == 1
        assert plan.period_ns == 4

    def test_flush_minimizes_the_step(self) -> None:
        """One micro-batch per step runs best without a pipeline: no fill, no drain."""
        chain = handmade.chain([(2, 2)] * 4, [{"output_bytes": 4}] * 4)
        cluster = uniform(4, 1000, bandwidth_bytes_per_s=10**9)
        one = solve(chain, cluster, semantics="flush", microbatches=1)
        many = solve(chain, cluster, semantics="flush", microbatches=50, time_limit_s=0.5)
        assert one.step_ns == 16
        assert one.solver.status == "optimal"
        assert many.period_per_microbatch < 16

    def test_names_of_gpus_change_nothing(self) -> None:
        """Renaming equal GPUs leaves the schedule as it is."""
        chain = small(saved_bytes=[3, 2, 2, 1])
        cluster = uniform(2, 9)
        gpus = tuple(Gpu(name=name, memory_bytes=9) for name in ("b", "a"))
        renamed = cluster.model_copy(update={"gpus": gpus})
        assert solve(chain, cluster).ops == solve(chain, renamed).ops

    def test_deterministic_runs_repeat(self) -> None:
        """The same seed gives the same ops."""
        chain = small(saved_bytes=[3, 2, 2, 1], output_bytes=[1, 2, 1, 0])
        plans = [solve(chain, uniform(2, 14), deterministic=True, seed=5) for _ in range(2)]
        assert plans[0].ops == plans[1].ops

    def test_progress_is_reported(self) -> None:
        """Elapsed time never falls, the bound never falls, the last phase is `done`."""
        seen: list[tuple[float, Fraction | None, Fraction, float | None, str]] = []
        config = planner.Config(workers=1, time_limit_s=20)
        planner.solve(small(), uniform(2, 10), config, lambda *row: seen.append(row))
        assert [row[0] for row in seen] == sorted(row[0] for row in seen)
        bounds = [row[2] for row in seen]
        assert bounds == sorted(bounds)
        assert seen[-1][4] == "done"
        assert seen[-1][1] == 8

    def test_gap_stops_the_search(self) -> None:
        """A plan within the gap asked for ends the search before the free allocations."""
        chain = handmade.chain([(1, 1), (2, 2), (1, 1)])
        plan = solve(chain, uniform(2, 10), gap=0.5, k=1)
        assert (plan.period_ns, plan.solver.status) == (6, "feasible")


class TestRefusals:
    """Proofs that there is no plan, and what is not a proof."""

    def test_layer_too_large(self) -> None:
        """The layer, its bytes and how many are over are named."""
        chain = small(weight_bytes=[1, 9, 1, 1])
        with pytest.raises(
            InfeasibleError, match=r"layer 1 \('layer1'\) needs 18 .*: 8 bytes over"
        ):
            solve(chain, uniform(4, 10))

    def test_total_too_large(self) -> None:
        """The sum of states and one micro-batch, the sum of memories, the difference."""
        chain = small(weight_bytes=[2, 2, 2, 2], saved_bytes=[1, 1, 1, 1])
        with pytest.raises(InfeasibleError, match="sum to 20 bytes, the 2 GPUs have 18: 2 bytes"):
            solve(chain, uniform(2, 9))

    def test_no_spread(self) -> None:
        """Three layers of six bytes on two GPUs of nine: totals fit, no spread does."""
        chain = handmade.chain([(1, 1)] * 3, [{"weight_bytes": 3}] * 3)
        with pytest.raises(InfeasibleError, match="by at least 3 bytes"):
            solve(chain, uniform(2, 9))

    def test_one_byte_decides(self) -> None:
        """The missing bytes are exactly what makes a plan exist."""
        chain = handmade.chain([(1, 1)] * 3, [{"weight_bytes": 3}] * 3)
        assert max(row.peak_bytes for row in solve(chain, uniform(2, 12)).memory) == 12
        with pytest.raises(InfeasibleError, match="by at least 1 bytes"):
            solve(chain, uniform(2, 11))

    def test_who_finds_nothing_says_why(self) -> None:
        """A search that ends by itself asks for no more time; one that the limit ends does."""
        chain = handmade.chain([(1, 1)] * 9, [{"weight_bytes": 3}] * 9)
        asked = planner.Config(recompute="auto", time_limit_s=60, workers=1, deterministic=True)
        with pytest.raises(TimeLimitError, match=r"by itself after .* of 60 s. More memory"):
            planner.solve(chain, uniform(2, 29), asked)
        short = replace(asked, time_limit_s=0.01)
        with pytest.raises(
            TimeLimitError, match=r"no plan within 0.01 s.* More time, more memory"
        ):
            planner.solve(chain, uniform(2, 29), short)

    def test_exit_codes(self) -> None:
        """Infeasible is 3, without a plan or a proof it is 5."""
        assert (InfeasibleError.exit_code, TimeLimitError.exit_code) == (3, 5)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("microbatches", 0),
            ("k", 0),
            ("k", 17),
            ("time_limit_s", 0.0),
            ("time_limit_s", math.inf),
            ("gap", -0.1),
            ("gap", math.inf),
            ("gap", math.nan),
            ("coarsen", 0),
            ("coarsen", "some"),
            ("semantics", "async"),
            ("memory_model", "rough"),
            ("method", "best"),
            ("seed", -1),
            ("workers", 0),
        ],
    )
    def test_config_out_of_range(self, field: str, value: Any) -> None:
        """Each field refuses what no search can honour, by name."""
        with pytest.raises(InputError, match=f"config.{field}: got {value}, need"):
            planner.Config(**{field: value})

    def test_sums_beyond_64_bits(self) -> None:
        """Sizes that only together leave the range give one clear error."""
        chain = small(weight_bytes=[2**61] * 4)
        with pytest.raises(InputError, match="bytes sum to"):
            solve(chain, uniform(2, 2**62))


class TestInterruption:
    """Ctrl-C."""

    def test_returns_the_best_plan(self) -> None:
        """Ctrl-C after a plan was found gives that plan, verified."""
        chain = handmade.chain([(1, 1), (2, 2), (1, 1)])

        def interrupt(
            _elapsed: float,
            best: Fraction | None,
            _bound: Fraction,
            _gap: float | None,
            phase: str,
        ) -> None:
            if best is not None and phase not in ("interrupted", "done"):
                raise KeyboardInterrupt

        plan = planner.solve(chain, uniform(2, 10), planner.Config(workers=1), interrupt)
        assert plan.period_ns == 6
        assert verifier.verify(plan) == ()

    def test_without_a_plan_it_stays_an_interrupt(self) -> None:
        """Ctrl-C before any plan is passed on."""

        def interrupt(*_row: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            planner.solve(small(), uniform(2, 10), planner.Config(workers=1), interrupt)


@grids.first(2, seed=[5, 8, 12])
def test_two_micro_batches_a_period_are_no_worse_than_one(seed: int) -> None:
    """Every plan of k = 1 is one of k = 2, though the models for k = 2 find it much later."""
    random, layers = Random(seed), 4
    times = [(random.randint(1, 6), random.randint(1, 8)) for _ in range(layers)]
    fields = [
        {
            "output_bytes": random.randint(0, 4),
            "saved_bytes": random.randint(1, 9),
            "weight_bytes": random.randint(0, 3),
        }
        for _ in range(layers)
    ]
    memory, duplex = random.randint(25, 60), random.choice(["half", "full"])
    cluster = uniform(2, memory, bandwidth_bytes_per_s=10**9, duplex=duplex)
    of = handmade.chain(times, fields)
    one, two = (
        solve(of, cluster, k=k, time_limit_s=0.5, deterministic=True, workers=1) for k in (1, 2)
    )
    assert two.k == 2
    assert two.period_per_microbatch <= one.period_per_microbatch
