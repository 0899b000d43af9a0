"""A part of a GPU's memory that no plan may use (M8): in files, in every voice, by a flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan import planner, simulator, verifier
from pipeplan.chain import Chain
from pipeplan.cli import main
from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.lowering import lower
from pipeplan.plan import Plan
from pipeplan.report import tables
from tests import handmade

SIZES = [{"saved_bytes": size, "optimizer_workspace_bytes": 1} for size in (3, 2, 2, 1)]


def chain() -> Chain:
    """Four layers of 2 + 2 ns that keep 3, 2, 2 and 1 bytes."""
    return handmade.chain([(2, 2)] * 4, SIZES)


def solved(cluster: Cluster, **options: object) -> Plan:
    """The planner's answer."""
    limits: dict[str, object] = {"time_limit_s": 0.5, "deterministic": True, "workers": 1}
    config = planner.Config(**limits | options)  # type: ignore[arg-type]
    return planner.solve(chain(), cluster, config)


@pytest.mark.parametrize("method", ["auto", "contiguous"])
def test_plans_are_those_for_the_memory_beside_it(method: str) -> None:
    """12 bytes with a reserve of 5 are planned as 7 bytes, and every voice agrees."""
    reserved = solved(uniform(2, 12, reserve_bytes=5), method=method)
    plain = solved(uniform(2, 7), method=method)
    assert reserved.period_ns == plain.period_ns > solved(uniform(2, 12), method=method).period_ns
    assert [row.budget_bytes for row in reserved.memory] == [7, 7]
    assert verifier.verify(reserved) == ()
    simulator.check(reserved, lower(reserved))


def test_no_plan_reaches_into_it() -> None:
    """What fits the memory but not beside the reserve is refused, by each voice on its own."""
    with pytest.raises(InfeasibleError):
        solved(uniform(2, 12, reserve_bytes=11))
    plan = solved(uniform(2, 12))
    peak = max(row.peak_bytes for row in plan.memory)
    gpus = tuple(gpu.model_copy(update={"reserve_bytes": 13 - peak}) for gpu in plan.cluster.gpus)
    rows = tuple(row.model_copy(update={"budget_bytes": peak - 1}) for row in plan.memory)
    cluster = plan.cluster.model_copy(update={"gpus": gpus})
    over = plan.model_copy(update={"cluster": cluster, "memory": rows})
    assert {violation.rule for violation in verifier.verify(over)} == {"budget"}
    found = simulator.simulate(over, lower(over))
    assert [row.budget_bytes for row in found.memory] == [peak - 1] * 2
    claimed = over.model_copy(update={"memory": plan.memory})
    assert {violation.rule for violation in verifier.verify(claimed)} == {"budget", "memory"}


def test_files_without_one_are_as_they_were() -> None:
    """A reserve of 0 is not written, so digests stay; another one survives the way to a file."""
    assert "reserve_bytes" not in uniform(2, 12).to_json()
    cluster = uniform(2, 12, reserve_bytes=5)
    assert Cluster.from_json(cluster.to_json(), "here") == cluster
    assert tables.machines_line(cluster).startswith("2 GPUs of 12 B less 5 B,")


def test_more_than_the_memory_is_refused() -> None:
    """In a file, by name and place."""
    good = uniform(1, 12, reserve_bytes=5).to_json()
    text = good.replace('"reserve_bytes": 5', '"reserve_bytes": 13')
    with pytest.raises(InputError, match=r"gpus\[0\].*reserve_bytes: got 13, need at most .* 12"):
        Cluster.from_json(text, "here")


def test_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--reserve` stands beside --memory, for plans and sweeps; not beside a cluster file."""
    file, out = tmp_path / "chain.json", tmp_path / "plan.json"
    file.write_text(chain().to_json())
    machines = ["--gpus", "2", "--memory", "12", "--reserve", "5", "--bandwidth", "inf"]
    assert main(["plan", str(file), *machines, "-o", str(out), "--time-limit", "1s"]) == 0
    assert Plan.read(out).cluster.gpus[0] == Gpu(name="gpu0", memory_bytes=12, reserve_bytes=5)
    machines[5] = "13"
    assert main(["plan", str(file), *machines, "-o", str(tmp_path / "other.json")]) == 2
    assert "--reserve 13 of --memory 12" in capsys.readouterr().err
    (tmp_path / "cluster.json").write_text(uniform(2, 12).to_json())
    given = ["--cluster", str(tmp_path / "cluster.json"), "--reserve", "5"]
    assert main(["plan", str(file), *given, "-o", str(tmp_path / "other.json")]) == 2
    assert "got --reserve beside --cluster" in capsys.readouterr().err


def test_baselines_leave_it_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` judges everyone by the memory beside the reserve, as with that memory alone."""
    file = tmp_path / "chain.json"
    file.write_text(chain().to_json())
    found = {}
    for name, flags in (("reserved", ["12", "--reserve", "5"]), ("plain", ["7"])):
        machines = ["--gpus", "2", "--bandwidth", "inf", "--memory", *flags]
        assert (
            main(
                ["compare", str(file), *machines, "--time-limit", "5s", "--workers", "1", "--json"]
            )
            == 0
        )
        (point,) = json.loads(capsys.readouterr().out)["points"]
        found[name] = [
            (row["name"], row.get("fits"), row.get("period_ns")) for row in point["rows"]
        ]
    assert found["reserved"] == found["plain"]
