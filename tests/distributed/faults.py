"""Ranks with a fault in one of them: forked, so that a case costs seconds.

`python faults.py SPECS` runs `pipeplan.launch` on forked ranks that find each other as torchrun's
ranks do, over a store that outlives them, but with no agent that would end a rank for them: what
ends them is theirs. SPECS is a JSON list of runs, made one after the other: `ranks`, `words` (of
launch), `own` (rank -> words instead of these), `fault` (or null), `attempt`, `folder`, and if
given `long_s`, from which length on a step counts as long. Prints JSON: per run and rank the exit
code, what it said and printed, how long it took, how long after the faulty rank's end (or hang) it
ended, and what it used each second: resident bytes, open files, threads.

Faults: {"rank", "does", "at": "0F3" or "save 2"}, and if given "mark", a file that gets a ! then.
It does `kill`, `hang`, the name of a signal, or `full`: the checkpoint's file may not grow beyond
1 KiB, as on a full disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  what every rank would import for itself, slowly

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pipeplan import capture  # noqa: F401
from pipeplan.launch import train  # noqa: F401
from pipeplan.launch.__main__ import main as launch
from pipeplan.launch.rank_store import RankStore
from pipeplan.program import Action
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from tests import launch_task  # noqa: F401


def strike(fault: dict[str, Any], moment: Any) -> None:
    """The fault itself."""
    moment.value = time.monotonic()
    if "mark" in fault:
        with open(fault["mark"], "a") as file:
            file.write("!")
    if fault["does"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["does"] == "hang":
        time.sleep(3600)
    else:
        os.kill(os.getpid(), getattr(signal, fault["does"]))


def install(fault: dict[str, Any], moment: Any) -> None:
    """Lets the fault happen at its place in this process."""
    word, _, number = fault["at"].partition(" ")
    if word == "save":
        _in_save(fault, int(number), moment)
        return
    begin = FlightRecorder.begin

    def begin_or_strike(self: FlightRecorder, action: Action) -> int:
        if str(action) == fault["at"]:
            strike(fault, moment)
        return begin(self, action)

    FlightRecorder.begin = begin_or_strike  # type: ignore[method-assign]


def _in_save(fault: dict[str, Any], number: int, moment: Any) -> None:
    """In the middle of writing this rank's file of the `number`-th checkpoint, from 1."""
    seen = 0
    write = FileSystemWriter.write_data

    def write_or_strike(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen != number:
            return write(self, plan, planner)
        if fault["does"] == "kill":
            (Path(self.path) / f"__{fault['rank']}_0.distcp").write_bytes(b"torn")
        if fault["does"] != "full":
            strike(fault, moment)
            return write(self, plan, planner)
        moment.value = time.monotonic()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            return write(self, plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    FileSystemWriter.write_data = write_or_strike


def rank_main(rank: int, spec: dict[str, Any], store: RankStore, moment: Any, folder: str) -> None:
    """One rank."""
    for stream, name in ((1, "printed"), (2, "said")):
        with open(f"{folder}/{name}{rank}", "w") as file:
            os.dup2(file.fileno(), stream)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(spec.get("attempt", 0)),
    }
    fault = spec["fault"]
    if fault and fault["rank"] == rank:
        install(fault, moment)
    if "long_s" in spec:
        BoardConsensus.__init__.__kwdefaults__["long_s"] = spec["long_s"]  # type: ignore[index]
    sys.argv = ["pipeplan.launch", *spec.get("own", {}).get(str(rank), spec["words"])]
    os._exit(launch())  # as in a process of its own, which may say how the C library has memory


def _sample(pid: int | None, used: list[tuple[int, int, int]]) -> None:
    """Adds resident bytes, open files and threads of a process, if it still runs."""
    place = Path(f"/proc/{pid}")
    try:
        pages = int((place / "statm").read_text().split()[1])
        files, threads = (len(os.listdir(place / name)) for name in ("fd", "task"))
    except (OSError, IndexError):
        return
    used.append((pages * resource.getpagesize(), files, threads))


def run(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One launch."""
    folder = spec["folder"]
    context = multiprocessing.get_context("fork")
    moment = context.Value("d", 0.0)
    store = RankStore(context)
    ranks = [
        context.Process(target=rank_main, args=(rank, spec, store, moment, folder))
        for rank in range(spec["ranks"])
    ]
    begin = time.monotonic()
    store.start(ranks)
    ended: dict[int, float] = {}
    hung = spec["fault"]["rank"] if spec["fault"] and spec["fault"]["does"] == "hang" else None
    used: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
    sampled = 0.0
    while len(ended) < len(ranks) - (hung is not None):
        if time.monotonic() > sampled + 1:
            sampled = time.monotonic()
            for rank, process in enumerate(ranks):
                _sample(process.pid, used[rank])
        for rank, process in enumerate(ranks):
            if rank != hung and rank not in ended and not process.is_alive():
                ended[rank] = time.monotonic()
        time.sleep(0.01)
    if hung is not None:
        ranks[hung].kill()
    for process in ranks:
        process.join()
    return [
        {
            "code": process.exitcode,
            "took_s": ended.get(rank, 0.0) - begin,
            "after_s": ended.get(rank, 0.0) - moment.value if moment.value else None,
            "said": Path(f"{folder}/said{rank}").read_text(),
            "printed": Path(f"{folder}/printed{rank}").read_text(),
            "used": used[rank],
        }
        for rank, process in enumerate(ranks)
    ]


if __name__ == "__main__":
    print(json.dumps([run(spec) for spec in json.loads(sys.argv[1])]))
