"""Messages of the library, told to who typed a command."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pipeplan.cli import flags
from pipeplan.cli.entry import main
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planner import Config
from tests import handmade


def test_every_field_of_config_has_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """What a field becomes is a flag of `plan`; files that are called like one stay."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {flags.of_config(f"config.{field.name}") for field in fields(Config)} <= known
    assert flags.of_config("Plan without config.coarsen.") == "Plan without --coarsen."
    for other in ("my/config.seed: got", "config.seed.json: got", "config.json: got"):
        assert flags.of_config(other) == other


def test_the_kind_of_an_error_stays() -> None:
    """Only its words change, and with them what the command prints; its exit code does not."""
    said = "^Give --budget 7, or a smaller micro-batch$"
    with pytest.raises(InfeasibleError, match=said), flags.errors_as_flags(flags.of_remat):
        raise InfeasibleError("Give budget=7, or a smaller micro-batch")


def test_a_refused_choice_is_told_as_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Python it is the field, on the command line the flag."""
    with pytest.raises(InputError, match=r"^config.pins: .* without config.recompute auto"):
        Config(pins={0: 1}, recompute="auto")
    file = tmp_path / "chain.json"
    file.write_text(handmade.chain([(1, 1)] * 2, [{}] * 2).to_json())
    for verb, asked, said in (
        ("plan", ["--pin", "0=1", "--recompute", "auto"], "--pin: got pins with --rec"),
        ("plan", ["--offload", "auto"], "--offload: got auto for a cluster without a host"),
        ("compare", ["--offload", "auto"], "--offload: got auto for a cluster without a host"),
    ):
        words = [verb, str(file), "--gpus", "2", "--memory", "1MB", "--bandwidth", "inf", *asked]
        assert main([*words, *(["-o", str(tmp_path / "p")] if verb == "plan" else [])]) == 2
        assert f"pipeplan: {said}" in capsys.readouterr().err


def test_a_duplex_without_a_bandwidth_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`remat --host-duplex` alone would offload nothing, in silence."""
    file = tmp_path / "chain.json"
    file.write_text(handmade.chain([(1, 1)] * 2, [{}] * 2).to_json())
    assert main(["remat", str(file), "--budget", "100", "--host-duplex", "full"]) == 2
    assert "--host-duplex: got no --host-bandwidth" in capsys.readouterr().err
