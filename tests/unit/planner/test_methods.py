"""The planner's other ways to search: the paper's ILP, and runs that repeat exactly."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from ortools.util.python.solve_interrupter import SolveInterrupter

from pipeplan import planner, simulator, verifier
from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock, SearchClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.paper import method as paper_ilp
from pipeplan.ilp.paper.method import PaperResult
from pipeplan.lowering import lower
from pipeplan.plan import Plan
from tests import handmade

CHAIN = handmade.chain(
    [(3, 3), (2, 2), (2, 2), (2, 2)], [{"saved_bytes": n} for n in (1, 2, 2, 4)]
)
PAPER: dict[str, Any] = {"method": "paper-ilp", "memory_model": "paper", "workers": 1}


def machines(gpus: int, memory: int) -> Cluster:
    """The paper's: equal, half duplex."""
    return uniform(gpus, memory, duplex="half")


def paper(cluster: Cluster, **more: Any) -> Plan:
    """The literal ILP's plan of Figure 4's chain."""
    return planner.solve(CHAIN, cluster, planner.Config(**PAPER | {"time_limit_s": 60} | more))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C works, even where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestPaperIlp:
    """`--method paper-ilp`."""

    def test_proves_figure_4(self) -> None:
        """Its plan is judged like any other; its proof is one for k = 1, and `auto` agrees."""
        plan = paper(machines(4, 4))
        assert verifier.verify(plan) == ()
        simulator.check(plan, lower(plan))
        assert (plan.period_ns, plan.solver.status, plan.solver.method) == (
            8, "optimal", "paper-ilp",
        )  # fmt: skip
        assert plan.solver.gap_bound == "k1"
        assert plan.solver.bounds.k1 == (8, 1)
        config = planner.Config(memory_model="paper", k=1, workers=1, time_limit_s=20)
        assert planner.solve(CHAIN, machines(4, 4), config).period_ns == 8

    @pytest.mark.parametrize(
        ("cluster", "options", "words"),
        [
            (machines(2, 9), {"memory_model": "exact"}, "memory model: got 'exact', need 'paper'"),
            (uniform(2, 9), {}, "links.duplex: got 'full', need 'half'"),
            (machines(2, 9), {"semantics": "flush"}, "semantics: got 'flush', need '2bw'"),
            (machines(2, 9), {"k": 2}, "k: got 2, need 1"),
            (
                Cluster(gpus=tuple(Gpu(name=str(n), memory_bytes=9 + n) for n in (0, 1))),
                {},
                r"gpus\[1\]: got 10 bytes",
            ),
        ],
    )
    def test_refuses_what_the_paper_cannot_say(
        self, cluster: Cluster, options: dict[str, Any], words: str
    ) -> None:
        """Each setting outside the paper's is an input error that names it."""
        with pytest.raises(InputError, match=f"method paper-ilp, .*{words}"):
            paper(cluster, **options)

    def test_no_solution_is_a_proof(self) -> None:
        """An infeasible ILP ends as infeasible, with the bytes that were there."""
        with pytest.raises(InfeasibleError, match="no solution on 2 GPUs of 4 bytes"):
            paper(machines(2, 4))

    @pytest.mark.usefixtures("interruptible")
    def test_ctrl_c_returns_the_best(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A signal stops the solver's thread; what it has found by then is verified and kept."""
        real = paper_ilp.solve

        def waiting(
            costs: CostModel, *, interrupter: SolveInterrupter, **more: Any
        ) -> PaperResult:
            result = real(costs, **more)
            until = time.monotonic() + 60
            while not interrupter.interrupted and time.monotonic() < until:
                time.sleep(0.01)
            assert interrupter.interrupted
            return PaperResult("feasible", result.schedule, Fraction(7), result.seconds)

        monkeypatch.setattr(paper_ilp, "solve", waiting)
        press = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        press.start()
        plan = paper(machines(4, 4))
        press.join()
        assert (plan.period_ns, plan.solver.status) == (8, "feasible")

    @pytest.mark.usefixtures("interruptible")
    def test_ctrl_c_ends_the_solver(self) -> None:
        """Eighteen layers are too many for it: a signal ends it, plan or not.

        Its limit is longer than that of the test.
        """
        chain = handmade.chain([(10 + n, 20 + n) for n in range(18)])
        press = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
        press.start()
        try:
            plan = planner.solve(chain, machines(4, 9), planner.Config(**PAPER, time_limit_s=3600))
        except KeyboardInterrupt:
            plan = None
        assert plan is None or plan.solver.status == "feasible"


def test_several_micro_batches_a_period_do_not_lengthen_a_step() -> None:
    """Under flush longer periods are tried from that of one micro-batch on, whatever k is."""
    draw, layers = random.Random(0), 12
    times = [(draw.randint(500, 1500), draw.randint(1000, 3000)) for _ in range(layers)]
    fields = [{"saved_bytes": draw.randint(1, 4), "output_bytes": 1} for _ in range(layers)]
    chain = handmade.chain(times, fields)
    steps = [
        planner.solve(
            chain,
            uniform(4, 10**6, latency_ns=50),
            planner.Config(
                semantics="flush", method="contiguous", k=k, microbatches=8, time_limit_s=0.3,
                workers=1, deterministic=True,
            ),
        ).step_ns
        for k in (1, 2)
    ]  # fmt: skip
    assert steps[1] <= steps[0]


def test_long_fractions_fit_into_a_plan() -> None:
    """A bound of more digits than a plan file holds is rounded down, and by next to nothing."""
    rng = random.Random(0)
    times = [(rng.randint(10**9, 2 * 10**9), rng.randint(10**9, 3 * 10**9)) for _ in range(6)]
    sizes = [
        {"saved_bytes": rng.randint(10**9, 3 * 10**9), "weight_bytes": rng.randint(10**8, 10**9)}
        for _ in range(6)
    ]
    chain = handmade.chain(times, sizes)
    memories = [8 * 10**9 + rng.randint(0, 10**9) for _ in range(3)]
    cluster = Cluster(
        gpus=tuple(Gpu(name=str(memory), memory_bytes=memory) for memory in memories)
    )
    true = closed_form_bound(CostModel(chain, cluster, "2bw", "exact"))
    assert true.numerator > 2**62
    config = planner.Config(method="contiguous", workers=1, time_limit_s=5)
    bound = planner.solve(chain, cluster, config).solver.bounds.any
    assert bound is not None
    assert true - Fraction(1, 1000) < Fraction(*bound) <= true


class TestDeterministic:
    """`--deterministic`."""

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_search_that_is_cut_off_repeats(self, workers: int) -> None:
        """Two runs that the limit ends give the same bytes, apart from the seconds."""
        size = [7, 3, 5, 2, 6, 4, 3, 5, 1]
        chain = handmade.chain(
            [(70 + 9 * n, 150 + 13 * n) for n in size],
            [{"saved_bytes": n, "output_bytes": n % 4} for n in size],
        )
        config = planner.Config(
            deterministic=True, time_limit_s=0.5, seed=3, workers=workers, memory_model="exact"
        )
        cluster = uniform(3, 40, bandwidth_bytes_per_s=10**8)
        texts = []
        for listener in (None, lambda *_: None):
            plan = planner.solve(chain, cluster, config, listener)
            assert plan.solver.status == "feasible"
            solver = plan.solver.model_copy(update={"seconds": 0.0})
            texts.append(plan.model_copy(update={"solver": solver}).to_json())
        assert texts[0] == texts[1]

    def test_work_is_what_counts(self) -> None:
        """Looks and the solver's work move one clock, the wall the other."""
        work, wall = DeterministicClock(), SearchClock()
        looks = [work.elapsed() for _ in range(3)]
        assert looks == sorted(set(looks))
        work.charge(5.0)
        wall.charge(5.0)
        assert work.elapsed() > 5.0 > wall.elapsed()
