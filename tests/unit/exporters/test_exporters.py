"""Plans as files of other tools: torch's own orders come back, each refusal says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeplan import exporters
from pipeplan.cli import export, main
from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.plan import Plan, Remat
from pipeplan.torch_schedules import torch_lists
from tests import baselines, handmade

LLAMA = ("tokens..drop", "blocks.0.norm_1..mlp", "blocks.1", "blocks.2.norm_1..norm", "head")
MODULES = {
    "tokens..drop": ("tokens", "drop"),
    "blocks.0.norm_1..mlp": ("blocks.0.norm_1", "blocks.0.mlp"),
    "blocks.2.norm_1..norm": ("blocks.2.norm_1", "blocks.2.mlp", "norm"),
}
"""What `profile` writes beside such names."""


def plan(
    names: Sequence[str] = LLAMA,
    gpus: Sequence[int] = (0, 1, 2, 3),
    ends: Sequence[int] = (1, 2, 4, 5),
    parameters: Mapping[int, Sequence[str]] | None = None,
    **fields: Any,
) -> Plan:
    """A flush plan of layers `names` whose stages end before layers `ends`."""
    own = parameters or {}
    layers = [
        {
            "name": name,
            "parameters": tuple(own.get(index, ())),
            "modules": MODULES.get(name, ()),
        }
        for index, name in enumerate(names)
    ]
    chain = handmade.chain([(0, 2)] * len(names), layers, tied="synchronize")
    stages = [
        (first, end - 1, gpu) for first, end, gpu in zip((0, *ends), ends, gpus, strict=False)
    ]
    given = {"semantics": "flush", "microbatches": 4} | fields
    return handmade.packed(chain, stages, 3 * len(names), **given)


@pytest.mark.parametrize("name", ["torch-csv", "torchtitan"])
def test_parameters_that_pass_are_refused(name: str) -> None:
    """Other tools pass activations alone; within one stage nothing passes."""
    with pytest.raises(InputError, match="'transmit', whose layers pass a parameter on"):
        exporters.FORMATS[name](transmitting(plan()))
    assert exporters.FORMATS[name](transmitting(plan(gpus=(0,), ends=(5,))))


def transmitting(plan: Plan) -> Plan:
    """The plan of a chain whose layers pass a parameter on."""
    chain = plan.chain.model_copy(update={"tied": "transmit"})
    return plan.model_copy(update={"chain": chain, "chain_digest": chain.digest()})


def test_orders_of_torch_come_back() -> None:
    """A schedule of torch as a plan, as a file: op by op what torch's class lists."""
    lists = torch_lists(2, 4, "ZBVZeroBubble", 2)
    of = baselines.setting(
        baselines.chain([(2, 4)] * 4, weight_ns=2, saved_for_weight=0), 2, memory=10**6
    )
    step = baselines.judged_step(of, lists, 4, (0, 1, 1, 0))
    rows = exporters.torch_csv(step).splitlines()
    whole = [[(str(kind), stage, number) for kind, stage, number in each] for each in lists]
    # The first stage cannot be split: its backward is whole, where W was.
    kept = [[op for op in each if op[:2] != ("I", 0)] for each in whole]
    text = [[f"{s}{'B' if (k, s) == ('W', 0) else k}{m}" for k, s, m in each] for each in kept]
    assert [row.split(",") for row in rows] == text


def test_ranks_are_gpus_in_the_order_of_their_first_stages() -> None:
    """A GPU without stages is no rank."""
    moved = plan(gpus=(4, 1, 0, 2))
    assert exporters.rank_gpus(moved) == (4, 1, 0, 2)
    assert exporters.torch_csv(moved) == exporters.torch_csv(plan())
    assert exporters.torch_csv(moved).splitlines()[3].startswith("3F0,3B0,")


def test_cuts_in_the_words_of_each_tool() -> None:
    """The final norm goes with Megatron's last block, and is a layer of DeepSpeed's own.

    So is a dropout behind the embedding, which has no parameters.
    """
    own = {0: ["tokens.weight"], 1: ["blocks.0.norm_1.bias"], 3: ["norm.weight", "blocks.2.w"]}
    given = plan(parameters=own | {4: ["head.weight"]})
    assert exporters.megatron(given) == "E|t|t*2|L\n"
    assert exporters.deepspeed(given) == "[0, 2, 3, 6, 7]\n"
    assert exporters.torchtitan(given) == (
        '[\n  ["tokens", "drop"],\n  ["blocks.0"],\n'
        '  ["blocks.1", "blocks.2", "norm"],\n  ["head"]\n]\n'
    )
    row = ["0:Linear+1:Tanh", "2:Linear", "3:Linear"]
    assert exporters.deepspeed(plan(row, ends=(1, 3))) == "[0, 2, 4]\n"
    looped = plan(["embed", "block0", "block1", "head"], (0, 1, 0, 1), (1, 2, 3, 4))
    assert exporters.megatron(looped) == "E|t|t|L\n"


def with_remat(remat: Remat) -> Plan:
    """The plan whose stage 2 has `remat`: its forwards take no time, again no more."""
    given = plan()
    stages = list(given.stages)
    stages[2] = stages[2].model_copy(update={"remat": remat})
    return handmade.filled(given.model_copy(update={"stages": tuple(stages)}))


ALL, CUTS = tuple(exporters.FORMATS), ("torchtitan", "megatron", "deepspeed")
SPLIT_BLOCK = ("tokens", "blocks.0.one", "blocks.0.two", "head")
REFUSED = [
    (ALL, plan(semantics="2bw"), "semantics 2bw, need flush: .* --semantics flush"),
    (
        ALL,
        with_remat(Remat(recompute=((2, 3),))),
        r"stage 2 \(layers 2 to 3\): got layers that are recomputed: 2 to 3, .* --recompute off",
    ),
    (
        ("torch-csv", "torchtitan"),
        plan(parameters={0: ["tokens.weight"], 4: ["tokens.weight"]}),
        "parameter 'tokens.weight': got stages 0 and 3 that share it",
    ),
    (CUTS, plan(SPLIT_BLOCK, ends=(1, 2, 3, 4)), "'blocks.0': .* stage 1 .* in stage 2, need cut"),
    (("deepspeed",), plan(gpus=(0, 1, 0, 1)), "ranks 0 1 0 1: need one stage on each rank"),
    (("megatron",), plan(gpus=(0, 1, 1, 0)), "ranks 0 1 1 0: need .* --method contiguous"),
    (("torchtitan",), plan(gpus=(0, 1, 1, 1)), "ranks 0 1 1 1: need as many stages on each rank"),
    (CUTS, plan(("layers.0..1", *LLAMA[1:])), "'layers.0..1': got the first and the last .* need"),
    (("torchtitan",), plan(("model.embed", *LLAMA[1:])), "'model.embed': got one inside of"),
    (("megatron",), plan(("one", "two", "three", "four", "five")), "need a row of blocks"),
    (("megatron",), plan(("a", "b", *LLAMA[1:3], "head")), "stages of E | E | tt | L .*: need"),
    (("megatron",), plan(("in", "up.0", "norm", "up.1", "out")), "'norm': got it between"),
    (("megatron",), plan(("up.0", "up.1", "up.2", "down.0", "down.1")), "'down.0': got one of"),
]


@pytest.mark.parametrize(("formats", "given", "message"), REFUSED)
def test_what_a_tool_cannot_do_is_refused(
    formats: Sequence[str], given: Plan, message: str
) -> None:
    """By name, with the place and the next step; by those tools only."""
    for name, write in exporters.FORMATS.items():
        if name in formats:
            with pytest.raises(InputError, match=f"export to .*{message}"):
                write(given)
        elif name == "torch-csv":
            assert write(given)


def test_wrong_plans_are_refused() -> None:
    """As everywhere: by the verifier."""
    with pytest.raises(InvalidPlanError):
        exporters.torch_csv(handmade.moved(plan(), "0B0", 0))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is the library's text; ranks that are other GPUs are named."""
    assert set(export.FORMATS) == set(exporters.FORMATS)
    file, out = tmp_path / "plan.json", tmp_path / "schedule.csv"
    file.write_text(plan(gpus=(1, 0, 2, 3)).to_json())
    words = ["export", str(file), "--format", "torch-csv", "-o"]
    assert main([*words, str(out)]) == 0
    told = capsys.readouterr()
    assert "rank 0 is GPU 1, rank 1 is GPU 0" in told.err
    assert told.out == f"{out}: 4 ranks, 4 stages, 4 micro-batches per step\n"
    assert main([*words, "-"]) == 0
    assert capsys.readouterr().out == out.read_text() == exporters.torch_csv(plan())
    assert main([*words, str(out)]) == 2
