"""`pipeplan compare --launch`: which plans run, what is told of them, real ranks that sleep."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Self

import pytest

from pipeplan.action_times import ActionTimes
from pipeplan.baselines import flush, splits
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.listed import listed_plan
from pipeplan.cli import main
from pipeplan.compare import (
    ComparisonPoint,
    LaunchedPoint,
    LaunchRequest,
    Row,
    launch_point,
    launched,
)
from pipeplan.compare.action_probe import NAME
from pipeplan.compare.launched import OrderedPairs, contenders
from pipeplan.compare.launched_table import data, launched_table, remarks
from pipeplan.compare.local_launches import Launched
from pipeplan.compare.predicted import predicted_ns
from pipeplan.compare.rows import row_of
from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan
from pipeplan.report.run import RunMeasurements
from tests.baselines import chain, setting
from tests.compared import eager_row, machines
from tests.unit.report.test_run_page import MS, STALE, as_planned

SLOW, FAST = eager_row("slow", (1, 1), 1000), eager_row("fast", (3, 3), 1000)
"""17 and 6 ns per micro-batch."""
SLEEP = LaunchRequest("sleep", rounds=2, time_scale=Fraction(10**6))
"""ns become ms."""


def point(*rows: Row) -> ComparisonPoint:
    """The rows on two GPUs of 1000 bytes."""
    return ComparisonPoint(machines(1000), None, rows)


def refused(row: Row) -> Row:
    """The row with a plan that no launch accepts, for what it says of memory."""
    memory = tuple(each.model_copy(update={"peak_bytes": 1}) for each in row.plan.memory)
    plan = row.plan.model_copy(update={"memory": memory, "ops": row.plan.ops[::-1]})
    return replace(row, name="refused", plan=plan)


def crossing() -> Row:
    """10 ns each way between loads of 5 and 6: the half-duplex link is busy for 20."""
    of = setting(chain([(2, 3), (2, 4)], sizes=[10, 0]), 2, bandwidth=10**9, memory=1000)
    plan = eager_plan(of.outline(splits.to_stages((1, 2)), "2bw", "crossing"), Policy((9, 9)))
    assert plan is not None
    return row_of("crossing", plan)


def test_ranks_sleep_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan runs twice on real processes; one that `launch` refuses keeps the reason.

    It does not run again, and no file of any run stays. Nobody is faster than the links: both
    directions take turns, or periods would be as short as one of them, 10 ns.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told: list[str] = []
    rows = (refused(SLOW), crossing())
    found = launch_point(point(*rows), "2bw", SLEEP, lambda _, what: told.append(what))
    wrong, linked = found.plans
    assert len(linked.measured) == 2, linked.failure
    # What ranks take beside their sleeps hides behind the link.
    assert found.action_ns > 0
    assert linked.predicted_ns == 20
    assert (linked.measured_ns or 0) > 15
    assert wrong.measured == []
    assert wrong.failure.endswith("plan.json: breaks memory, need every rule kept:")
    names = ("refused", "crossing")
    assert told == [NAME, *(f"round {n}: {name}" for n in (1, 2) for name in names)]
    assert linked.peak_bytes is None
    assert list(tmp_path.iterdir()) == []


class Scripted:
    """In place of processes: each launch measures the next answer, in ns of the plan's time."""

    answers: Sequence[float | BaseException] = ()
    times: ActionTimes | None = None
    """Of the actions of a run that trains."""
    late = 0.0
    """What each op of the probe takes beside its sleep, ns."""

    def __init__(self) -> None:
        self._left = list(self.answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""

    def run(self, plan: Plan, words: Sequence[str], *, fresh: bool = False) -> Launched:
        """The next answer; a run that trains counts 7 bytes on the first of two ranks.

        What is timed while it trains has new processes, and nothing else.
        """
        assert fresh == ("--no-sample" in words)
        probe = plan.chain.name == NAME
        answer = plan.period_ns + 2 * self.late if probe else self._left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        sleeps = "--time-scale" in words
        scale = Fraction(words[words.index("--time-scale") + 1]) if sleeps else Fraction(1)
        measured = RunMeasurements(
            period_ns=None,
            median_period_ns=float(answer * plan.k * scale),
            step_ns=float(answer * plan.microbatches * scale),
            peak_bytes=(7, None),
            first_loss=None,
            last_loss=None,
        )
        return Launched(measured, None if sleeps else self.times)


def scripted(
    monkeypatch: pytest.MonkeyPatch, request: LaunchRequest, *answers: float | BaseException
) -> LaunchedPoint:
    """The two plans, launched with these answers."""
    monkeypatch.setattr(Scripted, "answers", answers)
    monkeypatch.setattr(launched, "LocalLaunches", Scripted)
    return launch_point(point(SLOW, FAST), "2bw", request)


def test_figures_are_medians_and_order_counts_beyond_their_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """17 and 6 predicted: in order, the other way round, and nearer than rounds differ."""
    three = replace(SLEEP, rounds=3)
    found = scripted(monkeypatch, three, 17.5, 6.25, 18, 6.5, 17, 7.25)
    slow, fast = found.plans
    assert (slow.predicted_ns, fast.predicted_ns) == (17, 6)
    assert (slow.measured_ns, fast.measured_ns) == pytest.approx((17.5, 6.5))
    assert fast.spread == pytest.approx(1 / 6.5)
    assert found.order() == OrderedPairs(1, 0, 0)
    assert scripted(monkeypatch, three, 6, 17, 6, 17, 6, 17).order() == OrderedPairs(0, 1, 0)
    far_apart = scripted(monkeypatch, three, 6, 17, 40, 17, 60, 17)
    assert far_apart.order() == OrderedPairs(0, 0, 1)
    assert list(remarks(far_apart)) == [
        "0 of 0 pairs of plans are measured in the predicted order;"
        " 1 more are predicted nearer than rounds differ"
    ]
    (told,) = data([found])
    assert [each["difference"] for each in told["plans"]] == pytest.approx([0.5 / 17, 0.5 / 6])
    assert told["pairs_in_order"] == 1


def test_predictions_count_what_an_op_takes_beside_its_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is what two ops of the probe take longer, on the plan's time scale.

    In the slow plan one micro-batch goes through four ops before the next one begins.
    """
    monkeypatch.setattr(Scripted, "late", 3 * 10**6)
    found = scripted(monkeypatch, SLEEP, 29, 12, 29, 12)
    slow, fast = found.plans
    assert found.action_ns == 3 * 10**6
    assert (slow.predicted_ns, fast.predicted_ns) == (17 + 4 * 3, 6 + 2 * 3)
    (told,) = data([found])
    assert told["action_overhead_ns"] == 3 * 10**6
    assert [each["difference"] for each in told["plans"]] == pytest.approx([0, 0])


def test_what_ctrl_c_leaves_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs before it are kept; a plan that has none has no figures, and the table has both."""
    found = scripted(monkeypatch, SLEEP, 17, KeyboardInterrupt())
    assert found.interrupted
    assert [each.measured for each in found.plans] == [[17], []]
    cells = [list(column.cells) for column in launched_table(found).columns]
    assert [row[1] for row in cells] == ["fast", "6 ns", *["-"] * 5]


def test_training_counts_bytes_first_and_a_failure_ends_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of each that counts, then rounds; the plan that failed is not launched again."""
    real = LaunchRequest("real", rounds=2)
    found = scripted(monkeypatch, real, 1, RankError("rank 0: lost"), 17, 18)
    slow, fast = found.plans
    assert slow.peak_bytes == (7, None)
    assert slow.measured == [17, 18]
    assert (fast.failure, fast.measured, fast.measured_ns) == ("rank 0: lost", [], None)
    assert next(remarks(found)) == "fast: rank 0: lost"


def test_a_training_is_told_beside_the_times_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step as long as its replay, though all ops take what they were not planned to take."""
    monkeypatch.setattr(Scripted, "times", as_planned(STALE))
    monkeypatch.setattr(Scripted, "answers", [1, 10 * MS, 10 * MS])
    monkeypatch.setattr(launched, "LocalLaunches", Scripted)
    row = row_of("stale", STALE)
    found = launch_point(point(row), "2bw", LaunchRequest("real", rounds=2))
    (plan,) = found.plans
    assert plan.rests == [0, 0]
    (told,) = data([found])
    assert told["plans"][0]["difference"] == pytest.approx(2 / 8)
    assert told["plans"][0]["beside_ops"] == [0, 0]
    cells = [next(iter(column.cells)) for column in launched_table(found).columns]
    assert cells[1:5] == ["8 ms", "10 ms", "+25.0%", "+0.0%"]


def test_plans_that_run_are_different_fit_and_are_of_one_semantics() -> None:
    """Rows with the same plan share its runs."""
    twin, tight = replace(SLOW, name="twin"), replace(FAST, budget_bytes=(0, 0))
    other = replace(FAST, semantics="flush")
    assert [each.names for each in contenders(point(SLOW, tight, other, twin), "2bw")] == [
        ("slow", "twin")
    ]
    assert contenders(point(tight), "2bw") == ()


def test_steps_are_predicted_as_they_follow_each_other() -> None:
    """F0 0-2, F1 2-4, B1 4-8, B0 8-11, and the second GPU's update, 8-13: a step takes 16 ns.

    The first GPU begins the next step at 11, which the second one needs at 13.
    """
    short = chain([(2, 3), (2, 4)])
    first, second = short.layers
    layers = (first, second.model_copy(update={"optimizer_ns": 5}))
    of = setting(short.model_copy(update={"layers": layers}), 2)
    outline = of.outline(splits.to_stages((1, 2)), "flush", "test")
    plan = listed_plan(outline, flush.gpipe(2, 1), 1)
    assert plan.step_ns == 16
    assert predicted_ns(plan) == 11


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (LaunchRequest("real", time_scale=Fraction(2)), "need one that sleeps"),
        (LaunchRequest("real"), "names no task"),
    ],
)
def test_what_cannot_run_is_refused(request_: LaunchRequest, words: str) -> None:
    """A training in scaled time, and one of a chain without a task."""
    with pytest.raises(InputError, match=words):
        request_.check(chain([(1, 2)]), [machines(9)])


def test_a_training_needs_a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one core are refused, and may sleep."""
    monkeypatch.setattr(launched, "_cores", lambda: 1)
    trained = chain([(1, 2)]).model_copy(update={"task": "pipeplan.tasks:gpt2()"})
    with pytest.raises(InputError, match="2 ranks that train on 1 cores"):
        LaunchRequest("real").check(trained, [machines(9)])
    SLEEP.check(trained, [machines(9)])


def test_the_verb_launches_shows_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--launch sleep`: a table behind the others, `launched` in the file, and pictures."""
    monkeypatch.setattr(Scripted, "answers", [6.0] * 40)
    monkeypatch.setattr(launched, "LocalLaunches", Scripted)
    file, out = tmp_path / "chain.json", tmp_path / "out"
    file.write_text(chain([(2, 3), (2, 4)], sizes=[3, 0], saved=10).to_json())
    asked = ["compare", str(file), "--gpus", "2", "--memory", "1000", "--bandwidth", "1GB/s"]
    asked += ["--time-limit", "1s", "--jobs", "1", "--out", str(out)]
    assert main([*asked, "--launch-rounds", "2"]) == 2
    assert "--launch-rounds without --launch" in capsys.readouterr().err
    assert main([*asked, "--launch", "sleep", "--launch-rounds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "launched: 2 GPUs of 1000 B, asleep for planned times x" in shown
    (told,) = json.loads((out / "comparison.json").read_text())["launched"]
    assert told["plans"][0]["names"][0] == "pipeplan"
    assert told["plans"][0]["rounds_ns"] == pytest.approx([6, 6])
    for ending in ("png", "svg"):
        assert (out / f"small-2gpus-1KB-launched.{ending}").stat().st_size > 1000
