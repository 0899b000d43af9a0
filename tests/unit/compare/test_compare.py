"""`pipeplan compare`: rows, idle time by cause, points, files and the verb."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from pipeplan import verifier
from pipeplan.baselines import splits
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.chain import Chain
from pipeplan.cli import main
from pipeplan.cluster import Cluster, Gpu
from pipeplan.compare import Absent, Comparison, ComparisonPoint, Request, Row, compare, ours
from pipeplan.compare.field import EXHAUSTIVE, Field
from pipeplan.compare.ours import CONTIGUOUS, OURS, Found
from pipeplan.compare.rows import best, check, non_dominated, row_of
from pipeplan.compare.table import loss, point_table
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.planner import Config
from tests.baselines import chain, setting
from tests.compared import GBYTES, eager_row, machines

QUICK = Config(time_limit_s=2.0, gap=0.05, workers=1)
SIX = chain([(1, 2), (2, 3), (1, 1), (2, 2), (3, 4), (1, 1)], sizes=[2, 1, 3, 1, 2, 0], saved=5)


@pytest.fixture(scope="module")
def small() -> Comparison:
    """Two memories: scarce and ample."""
    return compare(Request(SIX, (machines(60), machines(1000)), QUICK))


def test_idle_time_is_told_apart_by_cause() -> None:
    """One in flight: T = 5 + 6 + 6 = 17, w = 5.5, W = R = 6. Many: T = W = R."""
    one, many = eager_row("one", (1, 1), 1000), eager_row("many", (6, 6), 1000)
    assert one.period_ns == 17
    assert one.bubble.imbalance == pytest.approx(0.5 / 17)
    assert one.bubble.communication == 0
    assert one.bubble.waiting == pytest.approx(11 / 17)
    assert one.bubble.total == pytest.approx(1 - 11 / 34)
    assert many.period_ns == 6
    assert many.bubble.waiting == many.bubble.fill_drain == 0
    assert many.bubble.total == pytest.approx(1 / 12)


def test_a_link_that_is_busiest_makes_communication_idle_time() -> None:
    """A cut of 10 ns each way: the link works 20 per micro-batch, the GPUs 5 and 6."""
    of = setting(chain([(2, 3), (2, 4)], sizes=[10, 0]), 2, bandwidth=GBYTES)
    plan = eager_plan(of.outline(splits.to_stages((1, 2)), "2bw", "test"), Policy((9, 9)))
    assert plan is not None
    row = row_of("test", plan)
    assert row.period_ns == 20
    assert row.bubble.communication == pytest.approx(14 / 20)
    assert row.bubble.waiting == 0


def test_an_unused_gpu_is_imbalance() -> None:
    """One stage on two GPUs: half of all time is idle, for no other reason."""
    of = setting(chain([(2, 4)]), 2)
    plan = eager_plan(of.outline(splits.to_stages((1,)), "2bw", "test"), Policy((1,)))
    assert plan is not None
    bubble = row_of("test", plan).bubble
    assert bubble.imbalance == bubble.total == 0.5


def test_updates_count_in_samples_but_not_in_the_period() -> None:
    """10 ns per micro-batch and 40 ns of update every 4: 20 ns per micro-batch of 2 samples."""
    row = replace(eager_row("one", (1, 1), 1000), period_ns=Fraction(10), update_ns=40)
    assert row.samples_per_second(2, 4) == pytest.approx(2e9 / 20)


def test_steps_are_those_of_one_training_at_every_point() -> None:
    """Two GPUs beside four: 16 micro-batches a step, by which samples per second are counted."""
    four = machines(1000, 4)
    config = replace(QUICK, semantics="flush", time_limit_s=0.2)
    found = compare(Request(SIX, (machines(1000), four), config, search_s=0.2))
    assert found.microbatches == 16
    for point in found.points:
        steps = {
            row.plan.microbatches
            for row in point.rows
            if isinstance(row, Row) and row.semantics == "flush"
        }
        assert steps == {16}


def test_the_best_row_is_the_fastest_that_fits_else_the_nearest() -> None:
    """With room the faster one; without for both the one that is over by less."""
    slow, fast = eager_row("slow", (1, 1), 1000), eager_row("fast", (3, 3), 1000)
    assert max(slow.peak_bytes) < max(fast.peak_bytes)
    assert best([slow, fast]).name == "fast"
    tight = machines(max(slow.peak_bytes))
    assert best([row.on(tight) for row in (fast, slow)]).name == "slow"
    none = machines(1)
    nearest = best([row.on(none) for row in (fast, slow)])
    assert nearest.name == "slow"
    assert not nearest.fits
    assert nearest.over_bytes == max(slow.peak_bytes) - 1


def test_rows_that_are_best_nowhere_are_left_out() -> None:
    """As slow or slower with as much or more on each GPU: whatever the memory, another is best."""
    base = eager_row("base", (1, 1), 1000)
    rows = [
        replace(base, name=name, period_ns=Fraction(period), peak_bytes=peaks)
        for name, period, peaks in (
            ("slower", 12, (10, 20)),
            ("fast", 10, (10, 20)),
            ("faster", 9, (11, 20)),
            ("lean", 14, (20, 5)),
            ("fat", 10, (10, 21)),
            ("twin", 10, (10, 20)),
        )
    ]
    kept = non_dominated(rows)
    assert [row.name for row in kept] == ["faster", "fast", "lean"]
    for budgets in ((10, 20), (11, 20), (20, 5), (30, 30), (5, 5), (9, 21)):
        fit = [replace(row, budget_bytes=budgets) for row in rows]
        left = [replace(row, budget_bytes=budgets) for row in kept]
        one, other = best(fit), best(left)
        assert (one.period_ns, one.peak_bytes) == (other.period_ns, other.peak_bytes)


def test_a_row_moves_to_other_memory_as_a_sound_plan() -> None:
    """Cluster and budgets change together; the voices accept it as long as it fits."""
    row = eager_row("one", (2, 1), 1000).on(machines(500))
    assert row.budget_bytes == (500, 500)
    assert verifier.verify(row.plan) == ()
    check(row.on(machines(1)))


def test_every_point_has_every_row_and_ours_is_never_slower(small: Comparison) -> None:
    """Ours, contiguous, all baselines or a reason; nobody of our semantics beats us."""
    names = {
        OURS,
        CONTIGUOUS,
        EXHAUSTIVE,
        "PipeDream, no memory rule",
        "PipeDream, its memory rule",
        "PipeDream-2BW, equal blocks",
        "equal times, 1F1B",
        "equal layers, 1F1B",
        "equal parameters, 1F1B",
        "GPipe",
        "1F1B with flush",
        "interleaved 1F1B, looped",
        "interleaved 1F1B, V",
        "ZB-H1",
        "ZB-H2",
        "ZB-V",
        "V-Half",
        "V-Min",
    }
    for point in small.points:
        assert {row.name for row in point.rows} == names
        assert point.lost is None
        assert loss(point) is None
        mine = point.row(OURS)
        assert mine is not None
        assert mine.fits
        assert point.bound_ns is not None
        for row in point.rows:
            if isinstance(row, Row):
                assert row.period_ns >= point.bound_ns or not row.fits or row.semantics == "flush"
                assert row.bubble.total == pytest.approx(1 - _work(row), abs=1e-9)
    assert [point.cluster.gpus[0].memory_bytes for point in small.points] == [60, 1000]
    absent = {row.name: row.reason for row in small.points[0].rows if isinstance(row, Absent)}
    assert "backward_weight_ns" in absent["ZB-H1"]


def _work(row: Row) -> float:
    """The share of all GPUs' time that is work, from the chain alone."""
    total = sum(layer.forward_ns + layer.backward_ns for layer in SIX.layers)
    return float(total / (len(row.peak_bytes) * row.period_ns))


def test_layers_that_take_no_time_have_rows() -> None:
    """A step of no time idles for nothing, and its samples are counted in a nanosecond."""
    request = Request(chain([(0, 0)] * 2), (machines(1000),), replace(QUICK, time_limit_s=0.2))
    rows = [row for row in compare(request).points[0].rows if isinstance(row, Row)]
    instant = next(row for row in rows if row.name == "GPipe")
    assert (instant.period_ns, instant.bubble.total) == (0, 0)
    assert instant.samples_per_second(1, 8) == 8e9


def test_a_loss_is_shouted() -> None:
    """A faster row of our semantics that fits is a loss, of another or without room it is none."""
    mine, theirs = eager_row(OURS, (1, 1), 1000), eager_row("them", (3, 3), 1000)
    lost = ComparisonPoint(machines(1000), None, (mine, theirs))
    assert lost.lost is theirs
    shout = loss(lost)
    assert shout is not None
    assert "LOST: them" in shout
    assert (
        ComparisonPoint(machines(1000), None, (mine, replace(theirs, semantics="flush"))).lost
        is None
    )
    assert ComparisonPoint(machines(1), None, (mine, theirs.on(machines(1)))).lost is None
    assert ComparisonPoint(machines(9), None, (Absent(OURS, "time"), theirs)).lost is theirs


def test_who_needs_more_microbatches_than_asked_for_has_beaten_nobody() -> None:
    """With one micro-batch per step no 2bw plan overlaps any: those that do say what they need."""
    of = replace(setting(SIX, 3), microbatches=1, most_microbatches=1)
    field = Field(of, 1)
    field.execute()
    found = [row for row in field.rows(of.cluster) if isinstance(row, Row)]
    more = [row for row in found if row.needed_microbatches is not None]
    assert more
    for row in more:
        assert row.plan.microbatches == row.needed_microbatches > 1
        assert (row.fits, row.over_bytes <= 0, row.semantics) == (False, True, "2bw")
    ours = replace(eager_row(OURS, (1, 1), 1000), period_ns=Fraction(10**6))
    rows = (ours, *more)
    assert ComparisonPoint(of.cluster, None, rows).lost is None
    asked = Comparison(SIX, 1, (), ())
    text = point_table(asked, ComparisonPoint(of.cluster, None, rows)).columns[-1]
    assert str([*text.cells][1]) == f"needs M = {more[0].needed_microbatches}"


def test_clusters_of_one_size_differ_in_memory_only() -> None:
    """Another speed at the same number of GPUs is refused."""
    faster = Cluster(gpus=tuple(Gpu(name=f"gpu{i}", memory_bytes=9, speed=2.0) for i in range(2)))
    with pytest.raises(InputError, match="more than memory"):
        compare(Request(SIX, (machines(9), faster), QUICK))


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    """The six layers as a file."""
    file = tmp_path / "chain.json"
    file.write_text(SIX.to_json())
    return file


def verb(chain_file: Path, *more: str) -> int:
    """`pipeplan compare` with the flags that every test needs."""
    flags = ("--bandwidth", "1GB/s", "--duplex", "half", "--time-limit", "2s", "--jobs", "1")
    return main(["compare", str(chain_file), *flags, *more])


def test_the_verb_shows_saves_and_draws(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sizes: tables on stdout, progress on stderr; pictures, JSON and sound plans in DIR."""
    out = tmp_path / "out"
    assert verb(chain_file, "--gpus", "1,2", "--memory", "1000", "--out", str(out)) == 0
    shown, progress = capsys.readouterr()
    for words in ("1 GPU of 1000 B", "2 GPUs of 1000 B", "pipeplan", "GPipe", "imbal", "ZB-H1: "):
        assert words in shown
    assert "peaks, B " in shown, "in the unit of the largest"
    assert "100%" in progress
    assert "LOST" not in progress
    for gpus in (1, 2):
        for ending in ("png", "svg"):
            assert (out / f"small-{gpus}gpus.{ending}").stat().st_size > 1000
    plans = sorted(out.glob("*.plan.json"))
    assert len(plans) > 10
    assert all(verifier.verify(Plan.read(plan)) == () for plan in plans)
    assert (
        Chain.read(chain_file).digest()
        == json.loads((out / "comparison.json").read_text(encoding="utf-8"))["chain_digest"]
    )
    again = ("--gpus", "1", "--memory", "1000", "--out", str(out))
    assert verb(chain_file, *again) == 2
    assert "not empty" in capsys.readouterr().err
    kept = (out / "comparison.json").read_text()
    assert verb(chain_file, *again, "--force", "--data", str(out / "comparison.json")) == 2
    assert "comparison.json: got the same file twice" in capsys.readouterr().err
    assert (out / "comparison.json").read_text() == kept


def test_ctrl_c_shows_and_saves_what_is_done(
    chain_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are there are shown and saved, what is not is named; nothing counts as lost."""
    found, out = ours.find_ours, tmp_path / "out"

    def find(chain: Chain, cluster: Cluster, config: Config) -> Found:
        if cluster.gpus[0].memory_bytes == 1000:
            raise KeyboardInterrupt
        return found(chain, cluster, config)

    monkeypatch.setattr(ours, "find_ours", find)
    assert verb(chain_file, "--gpus", "2", "--memory", "900,1000", "--out", str(out)) == 0
    shown, told = capsys.readouterr()
    assert "2 GPUs of 900 B" in shown
    assert shown.endswith("fill (filling and draining at a flush)\n")
    assert "interrupted, left out: 2 GPUs of 1000 B: pipeplan\n" in told
    assert "LOST" not in told
    whole, part = json.loads((out / "comparison.json").read_text())["points"]
    names = [row["name"] for row in whole["rows"]]
    assert names[0] == OURS
    assert [row["name"] for row in part["rows"]] == names[2:]
    assert part["lost_to"] is None
    assert (out / "pipeplan-2gpus-900B.plan.json").exists()


def test_the_verb_speaks_json(chain_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row has its figures; an impossible memory gives reasons, not an error."""
    assert verb(chain_file, "--gpus", "2", "--memory", "1,1000", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    impossible, ample = data["points"]
    reasons = {row["name"]: row.get("absent", "") for row in impossible["rows"]}
    assert "no plan exists" in reasons[OURS]
    assert "none of its plans fits" in reasons[EXHAUSTIVE]
    mine = next(row for row in ample["rows"] if row["name"] == OURS)
    assert mine["fits"]
    assert len(mine["peak_bytes"]) == 2
    assert ample["lost_to"] is None
    assert data["clouds"][0]["points"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus", "2,x", "--memory", "9"), "integer"),
        (("--gpus", "2", "--memory", "9,"), "size"),
        (("--gpus", "2"), "--memory"),
    ],
)
def test_bad_lists_are_usage_errors(
    chain_file: Path, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the flag's own words."""
    try:
        code = verb(chain_file, *flags)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert words in capsys.readouterr().err
