"""The main job, end to end: profile, calibrate, plan, verify, simulate, train, compare.

`make demo` runs this. Every step prints the command it runs, so that each can be repeated by hand.
It ends with 1 if the loss did not fall or a prediction was too far from what was measured; a
mispredicted period gets a second chance, for other work on the machine spoils it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeplan.baselines.flush import one_f_one_b
from pipeplan.baselines.listed import listed_plan
from pipeplan.baselines.splits import to_stages
from pipeplan.baselines.timed import Setting
from pipeplan.plan import Plan
from pipeplan.report.page import replayed_rows
from pipeplan.report.run import TrainingRun, comparisons, read
from pipeplan.report.tables import PredictedMeasured, comparison_table
from pipeplan.units import format_bytes, format_ns

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("demo-out")
MARK = OUT / ".made-by-pipeplan-demo"
TASK = "examples/gpt2_stdlib.py:task"
MODES = ("flush", "2bw")
RIVAL = "1f1b"
"""What names the files of 1F1B's step, which is trained beside the flush plan."""
MICROBATCHES_PER_RANK = 4
"""Per optimizer step; the same in both modes, so that their steps compare."""
REPEATS = 60
"""Micro-batches timed by the profile."""
STEPS = 60
COUNTED_STEPS = 3
SHARE_OF_PEAK = 0.9
"""The memory limit as a share of what the plan without a limit needs: it binds."""
MOST_PERIOD_ERROR = 0.25
MOST_PEAK_ERROR = 0.03
LEAST_LOSS_DROP = 0.5
"""In nats per byte; the loss begins near log(256) = 5.5."""
MOST_RANKS = 8
"""By default; the model has eighteen layers."""


def main() -> int:
    """Run all steps; 0 if the loss fell and the predictions held."""
    os.chdir(ROOT)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--ranks", type=int, default=min(max(cores, 2), MOST_RANKS))
    ranks: int = flags.parse_args().ranks
    if ranks < 1:
        flags.error(f"--ranks: got {ranks}, need at least 1")
    timed = ranks <= cores
    print(f"pipeplan demo: a GPT-2 with 8 blocks on {ranks} ranks, {cores} cores")
    if not timed:
        print("More ranks than cores: they take turns, so times are not comparable.")
    late, wrong = attempt(ranks, cores, timed)
    if late and not wrong:
        print("\n".join(late))
        print(
            "Something else kept this machine busy at the wrong moment. Once more from the start."
        )
        late, wrong = attempt(ranks, cores, timed)
    for problem in (*late, *wrong):
        print(f"FAILED: {problem}")
    return 1 if late or wrong else 0


def attempt(ranks: int, cores: int, timed: bool) -> tuple[list[str], list[str]]:
    """All eight steps; (times that were mispredicted, everything else that went wrong)."""
    fresh_folder()
    started = time.monotonic()
    machine = measure(ranks, min(ranks, cores) - 1)
    for mode in MODES:
        make_plan(mode, machine, ranks)
    for mode in MODES:
        train(mode, ranks)
    late, wrong = judge(timed)
    print(f"\nThat took {time.monotonic() - started:.0f} s. Everything is in {OUT}/.")
    return late, wrong


def measure(ranks: int, companions: int) -> dict[str, Any]:
    """Steps 1 and 2: the chain of the model, the cluster of this machine without a limit."""
    step(1, "Profile the model, layer by layer: time, weights, what autograd keeps")
    chain, cluster = OUT / "chain.json", OUT / "cluster.json"
    quiet = ["--companions", str(companions), "--repeats", str(REPEATS)]
    pipeplan("profile", TASK, *quiet, "-o", str(chain))
    step(2, "Calibrate: what a message and an action cost between processes of this machine")
    pipeplan("calibrate", "--ranks", str(ranks), "--memory", "1TiB", "-o", str(cluster))
    machine: dict[str, Any] = json.loads(cluster.read_text())
    return machine


def make_plan(mode: str, machine: dict[str, Any], ranks: int) -> None:
    """Steps 3 and 4 (flush), 5 (2bw): find a limit that binds, plan for it, check the plan."""
    if mode == "flush":
        step(3, "Plan one run of layers per rank, without a limit, to learn what that needs")
    else:
        step(5, "The same in 2BW mode: two weight versions, no drain between steps")
    free = OUT / f"free-{mode}.json"
    batches = ["--microbatches", str(MICROBATCHES_PER_RANK * ranks)]
    unlimited = [*batches, "--method", "contiguous", "--json"]
    figures = plan(mode, OUT / "cluster.json", free, *unlimited)
    peak = max(row["peak_bytes"] for row in figures["memory"])
    limit = int(peak * SHARE_OF_PEAK)
    print(
        f"Without a limit: period {format_ns(figures['period_per_microbatch_ns'])} per"
        f" micro-batch, largest peak {format_bytes(peak)}."
    )
    if mode == "flush":
        step(4, f"Plan with {format_bytes(limit)} per rank, {SHARE_OF_PEAK:.0%} of that; check it")
    for gpu in machine["gpus"]:
        gpu["memory_bytes"] = limit
    cluster = OUT / f"cluster-{mode}.json"
    cluster.write_text(json.dumps(machine, indent=1))
    file = OUT / f"plan-{mode}.json"
    plan(mode, cluster, file, *batches)
    pipeplan("verify", str(file))
    pipeplan("simulate", str(file))
    if mode == "flush":
        plan_1f1b(Plan.read(free))


def plan_1f1b(free: Plan) -> None:
    """1F1B's step on the cuts of the plan without a limit, and without one, too."""
    setting = Setting(free.chain, free.cluster, microbatches=free.microbatches)
    stages = to_stages([stage.last + 1 for stage in free.stages])
    order = one_f_one_b(len(stages), free.microbatches)
    rival = listed_plan(setting.outline(stages, "flush", RIVAL), order, free.microbatches)
    (OUT / f"plan-{RIVAL}.json").write_text(rival.to_json(), encoding="utf-8")
    print(f"1F1B on the cuts of the plan without a limit: step {format_ns(rival.step_ns)}.")


def plan(mode: str, cluster: Path, out: Path, *more: str) -> dict[str, Any]:
    """Plan the chain in `mode`; its figures with `--json`, otherwise it is shown."""
    quiet = "--json" in more
    words = ["plan", str(OUT / "chain.json"), "--cluster", str(cluster), "--semantics", mode]
    text = pipeplan(*words, *more, "--time-limit", "10s", "-o", str(out), capture=quiet)
    figures: dict[str, Any] = json.loads(text) if quiet else {}
    return figures


def train(mode: str, ranks: int) -> None:
    """Steps 6 and 7: a timed run, then a short one that counts every byte."""
    step(6 + MODES.index(mode), f"Train in {mode} mode: {STEPS} timed steps, then count bytes")
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m", "pipeplan.launch"]
    launch = [*start, "--plan", str(OUT / f"plan-{mode}.json")]
    command([*launch, "--steps", str(STEPS), "--out", str(OUT / f"run-{mode}")])
    counted = ["--steps", str(COUNTED_STEPS), "--instrument", "--out", str(OUT / f"bytes-{mode}")]
    command([*launch, *counted])
    if mode == "flush":
        print("The same steps in 1F1B's order, to compare:")
        rival = ["--plan", str(OUT / f"plan-{RIVAL}.json"), "--out", str(OUT / f"run-{RIVAL}")]
        command([*start, *rival, "--steps", str(STEPS)])


def judge(timed: bool) -> tuple[list[str], list[str]]:
    """Step 8: the final table, what the modes mean; mispredicted times, and what else is wrong."""
    step(8, "Compare what was predicted with what was measured")
    runs = {mode: read(OUT / f"run-{mode}") for mode in MODES}
    counted = [read(OUT / f"bytes-{mode}") for mode in MODES]
    rival = [
        replace(row, name=f"{row.name}, 1F1B without a memory limit") for row in compared(RIVAL)
    ]
    rows = [*compared("flush"), *rival, *compared("2bw"), *comparisons(counted)]
    Console(highlight=False).print(comparison_table(rows, "predicted and measured"))
    explain(runs["flush"], runs["2bw"])
    late, wrong = list[str](), list[str]()
    if losses("flush") != losses(RIVAL):
        wrong.append("flush: losses are not those of 1F1B, to the last bit")
    for mode, run in runs.items():
        first, last = (sum(values) / 5 for values in (losses(mode)[:5], losses(mode)[-5:]))
        print(f"{mode}: loss {first:.2f} -> {last:.2f} in {run.steps} steps")
        if not last < first - LEAST_LOSS_DROP:
            wrong.append(f"{mode}: the loss fell from {first:.2f} to {last:.2f} only")
    for row in rows:
        bytes_counted = row.unit == "bytes"
        most = MOST_PEAK_ERROR if bytes_counted else MOST_PERIOD_ERROR
        judged = bytes_counted or (timed and "period" in row.name)
        # Something measured where nothing was predicted has no relative error and is never good.
        error = math.inf if row.error is None else row.error
        if judged and abs(error) > most:
            text = f"{row.name}: error {error:+.1%}, at most {most:.0%} is good"
            (wrong if bytes_counted else late).append(text)
    return late, wrong


def compared(mode: str) -> list[PredictedMeasured]:
    """Of a timed run: its times beside the plan's, and a step beside its replay.

    The replay tells the plan's order from this machine's speed, which changes between runs.
    """
    folder = OUT / f"run-{mode}"
    run = read(folder)
    return [*comparisons([run]), *replayed_rows(run, str(folder))]


def losses(mode: str) -> list[float]:
    """Of all steps."""
    lines = (OUT / f"run-{mode}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def explain(flush: TrainingRun, delayed: TrainingRun) -> None:
    """Two sentences on the two modes, with this run's figures."""
    slow, fast = flush.measured.step_ns, delayed.measured.step_ns
    if slow is None or fast is None:
        return
    print(
        f"Flush drains the pipeline before each update, so it trains exactly as one process would;"
        f" its best step took {format_ns(slow)}.\n"
        f"2BW never drains and keeps two weight versions instead: its best step took"
        f" {format_ns(fast)} ({slow / fast - 1:+.0%} throughput), with gradients one step stale."
    )


def step(number: int, title: str) -> None:
    """A numbered heading."""
    print(f"\n=== {number}/8 {title}", flush=True)


def pipeplan(*words: str, capture: bool = False) -> str:
    """Run a verb of the command line with this Python."""
    return command(["pipeplan", *words], capture=capture)


def command(words: list[str], *, capture: bool = False) -> str:
    """Print and run a command; its stdout if captured. Stops the demo if it fails."""
    print(f"$ {shlex.join(words)}", flush=True)
    program = Path(sys.executable).with_name(words[0])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(program), *words[1:]],
        env=environment,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def fresh_folder() -> None:
    """An empty output folder; only one that an earlier demo made is replaced."""
    if OUT.exists() and not MARK.exists():
        sys.exit(f"{OUT}/ exists and no demo made it: move it away first")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    MARK.touch()


if __name__ == "__main__":
    sys.exit(main())
