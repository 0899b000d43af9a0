"""The planners by name: comparators, refusals, speed and the command line."""

from __future__ import annotations

import importlib
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.chain import Chain, Layer
from pipeplan.cli import main
from pipeplan.cli import remat as verb
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.remat import (
    METHODS,
    Costs,
    DeviceSchedule,
    HostLink,
    Rematerialization,
    from_chain,
    judge,
    rematerialize_chain,
)
from pipeplan.remat.checkpointing.periodic import keep_all, periodic, periodic_within
from pipeplan.remat.checkpointing.revolve import opt_0, revolve, revolve_within
from pipeplan.remat.checkpointing.rotor import rotor
from pipeplan.report.budget import curves_of
from pipeplan.testing.refusals import least_bytes
from tests import grids
from tests.remat_brute import random_costs

HOST = HostLink(10**9)


def equal_layers(layers: int) -> Costs:
    """The model of Opt_0: unit tensors, a tape of the input alone, no working space."""
    one = (1,) * layers
    none = (0,) * layers
    return Costs(
        names=tuple(map(str, range(layers))),
        forward=one,
        light=one,
        backward=one,
        boundary=(1,) * layers + (0,),
        gradient=one,
        saved_input=one,
        saved=none,
        saved_output=none,
        forward_work=none,
        light_work=none,
        backward_work=none,
    )


def test_opt_0_has_its_known_values() -> None:
    """Three slots give l(l+1)/2 forwards; enough slots give l; one slot fewer never helps."""
    table = opt_0(12, 16, 1, 0)
    for length in range(1, 13):
        assert table[length, 3] == length * (length + 1) / 2
        assert table[length, length + 2] == length
        assert (table[length, 3:-1] >= table[length, 4:]).all()
    # The binomial bound of checkpointing: t = 2 repetitions reach C(s + t, t) steps with s slots.
    assert [table[length, 5] for length in (1, 2, 3, 4, 5, 6)] == [1, 2, 3, 5, 7, 9]


@pytest.mark.parametrize("layers", range(2, 14))
def test_revolve_runs_as_often_as_opt_0_says(layers: int) -> None:
    """The schedule's time is Opt_0 with a backward that runs its own forward first."""
    costs = equal_layers(layers)
    for slots in range(3, layers + 3):
        outcome = judge(costs, revolve(costs, slots))
        assert outcome.violations == ()
        assert outcome.makespan_ns == opt_0(layers - 1, slots, 1, 2)[layers - 1, slots]


@pytest.mark.parametrize("layers", range(2, 12))
def test_rotor_is_never_slower_than_revolve_on_equal_layers(layers: int) -> None:
    """Revolve's own peak given to Rotor yields its time or less, as Rotor also keeps tapes."""
    costs = equal_layers(layers)
    for slots in range(3, layers + 3):
        outcome = judge(costs, revolve(costs, slots))
        schedule = rotor(costs, outcome.peak_bytes, outcome.peak_bytes)
        assert schedule is not None
        assert judge(costs, schedule).makespan_ns <= outcome.makespan_ns


def test_periodic_runs_all_but_the_last_segment_twice() -> None:
    """With one segment nothing is run twice; with k segments all layers before the last one."""
    costs = random_costs(random.Random(3), 10)
    assert judge(costs, keep_all(costs)).makespan_ns == costs.compute
    for segments in range(1, 11):
        outcome = judge(costs, periodic(costs, segments))
        again = (segments - 1) * (10 // segments)
        assert outcome.violations == ()
        assert outcome.makespan_ns == costs.compute + sum(costs.light[:again])


@pytest.mark.parametrize("seed", range(40))
def test_no_comparator_beats_rotor(seed: int) -> None:
    """At one byte per slot, Revolve and periodic checkpointing are never faster."""
    rng = random.Random(seed)
    costs = random_costs(rng, rng.randint(2, 12))
    for schedule in (revolve_within(costs, 60), periodic_within(costs, 60), revolve(costs, 4)):
        outcome = judge(costs, schedule)
        assert outcome.violations == ()
        budget = outcome.peak_bytes
        best = rematerialize_chain(costs, budget, "rotor", slots=max(2, budget))
        assert best.outcome.makespan_ns <= outcome.makespan_ns
        auto = rematerialize_chain(costs, budget, slots=max(2, budget))
        assert auto.outcome.makespan_ns == best.outcome.makespan_ns


@pytest.mark.parametrize("method", ["auto", *(name for name in METHODS if name != "tflms")])
@grids.first(1, seed=range(10))
def test_refusals_name_the_smallest_budget(method: str, seed: int) -> None:
    """The budget that a refusal names is enough, one byte less is not, and a layer is named."""
    costs = replace(random_costs(random.Random(seed), 7), names=tuple("abcdefg"))
    with pytest.raises(
        InfeasibleError, match=r"layer [0-6] \('[a-g]'\) holds [0-9]+ bytes"
    ) as error:
        rematerialize_chain(costs, 1, method, channel=HOST)
    least = least_bytes(error.value)
    assert rematerialize_chain(costs, least, method, channel=HOST).outcome.peak_bytes == least
    with pytest.raises(InfeasibleError):
        rematerialize_chain(costs, least - 1, method, channel=HOST)


def test_what_never_waits_says_so() -> None:
    """TFLMS finds nothing where a forward would have to wait, and names no least budget."""
    with pytest.raises(InfeasibleError, match=r"nothing waits for; [0-9]+ keep all"):
        rematerialize_chain(random_costs(random.Random(0), 7), 1, "tflms", channel=HOST)


def test_offloading_needs_a_way_to_the_host() -> None:
    """A method that offloads is refused without a channel; auto then only recomputes."""
    costs = random_costs(random.Random(0), 5)
    with pytest.raises(InputError, match=r"Give channel=HostLink\(...\)"):
        rematerialize_chain(costs, 1000, "greedy")
    assert rematerialize_chain(costs, 1000).method == "rotor"


def test_chains_too_long_for_the_tables_are_refused() -> None:
    """Layers or slots that would fill the memory are a usage error, at once."""
    for layers, slots in ((501, 10), (400, 10_000)):
        costs = random_costs(random.Random(0), layers)
        with pytest.raises(InputError, match="Give fewer slots"):
            rematerialize_chain(costs, 10**6, slots=slots)


@pytest.mark.long
def test_rotor_is_fast_enough() -> None:
    """50 layers in 500 slots take at most 1 s of CPU, as accepted."""
    costs = random_costs(random.Random(0), 50, most=10**6)
    budget = rematerialize_chain(costs, 10**9, "periodic").outcome.peak_bytes // 2
    start = time.process_time()
    rotor(costs, budget)
    assert time.process_time() - start < 1


def chain(layers: int = 6) -> Chain:
    """Equal layers with weights."""
    return Chain(
        name="equal",
        input_bytes=1000,
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_ns=100,
                backward_ns=200,
                weight_bytes=50,
                gradient_bytes=50,
                output_bytes=1000,
                saved_input_bytes=1000,
                saved_bytes=500,
            )
            for index in range(layers)
        ),
    )


def test_the_verb_plans_writes_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schedule within the budget is written and reported; too small a budget ends with 3."""
    file, out = tmp_path / "chain.json", tmp_path / "schedule.txt"
    file.write_text(chain().to_json())
    words = ["remat", str(file), "--budget", "8KB"]
    assert main([*words, "--json", "-o", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    outcome = judge(from_chain(chain()), DeviceSchedule.from_text(out.read_text()), 8000)
    assert outcome.violations == ()
    assert figures["peak_bytes"] == outcome.peak_bytes <= 8000
    assert figures["makespan_ns"] == outcome.makespan_ns > figures["compute_ns"] == 1800
    assert main([*words, "--method", "periodic"]) == 0
    assert "over running every layer once" in capsys.readouterr().out
    assert main([*words, "--json", "-o", "-"]) == 0
    assert DeviceSchedule.from_text(capsys.readouterr().out).layers == 6
    assert main([*words[:-1], "1KB"]) == 3
    assert "need at least" in capsys.readouterr().err


def test_the_verb_offloads_draws_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a way to the host the figures count it; pictures and curve are written, never over."""
    file, picture, lines = (tmp_path / name for name in ("chain.json", "memory.png", "curve.png"))
    file.write_text(chain().to_json())
    words = ["remat", str(file), "--budget", "9KB", "--host-bandwidth", "12GB/s", "--json"]
    words += ["--picture", str(picture), "--curve", "3", "--curve-picture", str(lines)]
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_bytes"] <= 9000
    assert figures["host_peak_bytes"] > 0
    assert figures["makespan_ns"] == figures["compute_ns"] + figures["idle_ns"]
    assert picture.read_bytes()[:4] == lines.read_bytes()[:4] == b"\x89PNG"
    budgets = [point["budget_bytes"] for point in figures["curve"]]
    assert budgets == sorted(budgets)
    for point in figures["curve"]:
        assert point["pofo"] is not None
        assert point["rotor"] is None or point["pofo"] <= point["rotor"]
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    for method, budget, code, said in (
        ("greedy", "9KB", 2, "Give --host-bandwidth."),
        ("rotor", "1KB", 3, "Give --budget "),
    ):
        assert main(["remat", str(file), "--budget", budget, "--method", method]) == code
        assert said in capsys.readouterr().err
    assert main([*words[:6], "--force"]) == 0
    told = "next: in Python: pipeplan.rematerialize(module, sample, budget=9000, offload=True)"
    assert told in capsys.readouterr().err


def test_ctrl_c_in_the_curve_keeps_the_plan_and_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is printed before the curve begins; as JSON both are one document."""
    file, picture = tmp_path / "chain.json", tmp_path / "curve.svg"
    file.write_text(chain().to_json())
    before = "nothing"

    def pressed(costs: Costs, limit: int, method: str, *more: Any) -> Rematerialization:
        nonlocal before
        if method == "periodic":
            before = capsys.readouterr().out
            raise KeyboardInterrupt
        return rematerialize_chain(costs, limit, method, *more)

    module = importlib.import_module("pipeplan.remat.curve")  # not the function of that name
    monkeypatch.setattr(module, "rematerialize_chain", pressed)
    words = ["remat", str(file), "--budget", "9KB", "--curve", "2"]
    assert main([*words, "--curve-picture", str(picture)]) == 0
    assert "a micro-batch" in before
    printed = capsys.readouterr()
    assert [line.count("rotor") for line in printed.out.splitlines()] == [1, 1]
    assert "interrupted: the curve lacks periodic" in printed.err
    assert "rotor" in picture.read_text()
    assert main([*words, "--json"]) == 0
    assert before == ""
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["curve"][0]) == ["budget_bytes", "rotor", "revolve"]

    def at_once(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "least_memory", at_once)
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert "curve" not in json.loads(printed.out)
    assert "interrupted: the curve lacks rotor, revolve, periodic" in printed.err


def test_ctrl_c_in_the_search_keeps_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits hears what is tried; where nothing is within the budget yet, it ends there."""

    def pressed(_: object) -> tuple[DeviceSchedule, ...]:
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "revolve", pressed)
    file = tmp_path / "chain.json"
    file.write_text(chain().to_json())
    assert main(["remat", str(file), "--budget", "9KB"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("rotor: ")
    assert re.search(r"planning 6 layers\n +0\.\d s  trying rotor\n", printed.err)
    assert "trying revolve" in printed.err
    assert "interrupted: the best so far" in printed.err
    assert main(["remat", str(file), "--budget", "1KB"]) == 130
    with pytest.raises(KeyboardInterrupt):
        rematerialize_chain(from_chain(chain()), 9000)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--picture", "@a.gif"), "a.gif: need a name that ends with .png or .svg or .pdf"),
        (("--curve-picture", "-"), "picture -: need a name that ends with"),
        (("--picture", "@a.png", "--curve-picture", "@a.png"), "got the same file twice"),
        (("-o", "-", "--curve", "2"), "--curve: got -o -, need stdout"),
        (("-o", "@"), "need a file in an existing folder"),
    ],
)
def test_results_that_would_be_lost_are_refused_first(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the work: a picture of no format, two results in one file or on one stdout."""
    file = tmp_path / "chain.json"
    file.write_text(chain().to_json())
    words = [word.replace("@", f"{tmp_path}/") for word in more]
    assert main(["remat", str(file), "--budget", "9KB", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("size", "time", "x", "y"),
    [
        (999, 10, "budget, B", "time of a micro-batch, ns"),
        (9000, 10**4, "budget, KiB", "time of a micro-batch, us"),
        (3 * 2**20, 10**7, "budget, MiB", "time of a micro-batch, ms"),
        (3 * 2**30, 10**10, "budget, GiB", "time of a micro-batch, s"),
    ],
)
def test_the_curve_has_the_units_of_its_values(size: int, time: int, x: str, y: str) -> None:
    """The largest value of an axis is at least 1 there, and what has no schedule stays empty."""
    points: list[dict[str, int | None]] = [
        {"budget_bytes": size // 2, "rotor": None, "swap": time},
        {"budget_bytes": size, "rotor": time // 2, "swap": None},
    ]
    curves = curves_of("chain", points)
    assert (curves.x, curves.y) == (x, y)
    assert curves.lines["rotor"][0][1] is None
    assert 1 <= curves.lines["rotor"][1][0] < 1024
    assert 1 <= (curves.lines["swap"][0][1] or 0) < 1000


def test_the_verb_offers_every_method() -> None:
    """The list in the help is the library's."""
    assert ("auto", *METHODS) == verb.METHODS
