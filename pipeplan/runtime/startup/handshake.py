"""The first thing that ranks do together: find out whether they are about to do the same.

Each rank tells what it has: plan, task, seed, versions, fingerprints of data and weights. Rank 0
compares and tells all of them the outcome, so that they end at once, with one message, where they
would have waited for each other or trained on what does not belong together. It needs nothing but
the store in which ranks meet: no process group is made before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any

from torch.distributed.distributed_c10d import Store

from pipeplan.errors import DisagreementError, RankError
from pipeplan.units import format_ns

_GRACE_S = 1.0
"""How long rank 0 waits for further ranks once some differ: to name all that do."""
_HEARD_S = 5.0
"""How long rank 0, which may host the store, waits until all have read a bad outcome."""
_LOOK_S = 0.01
_OUTCOME, _HEARD = "outcome", "heard"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that all ranks must have alike."""

    value: str
    way_out: str
    """What to do where ranks differ in it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank comes with."""

    alike: Mapping[str, Fact] = field(default_factory=dict)
    """By name, causes before what follows from them: the first difference is told."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints by name, of those that this rank has; others may have more, or fewer."""


_Told = Mapping[str, Any]
"""As stored: `alike` (name -> value, way out) and `weights`, or why it was `refused`."""

_WEIGHTS_WAY_OUT = (
    "Let them follow from the seed: seed torch, numpy and random with the same number on every"
    " rank before the model is made, or load the same file into it."
)


def agree(store: Store, rank: int, size: int, facts: Facts, timeout: timedelta) -> None:
    """Return once all ranks have come, with the same facts.

    Args:
        store: shared by all ranks, used by nothing else.
        rank: this rank.
        size: number of ranks.
        facts: what this rank has.
        timeout: longest wait for the others.

    Raises:
        DisagreementError: if ranks differ, or one was refused before; the same on every rank.
        RankError: if not all come in time.
    """
    told = {name: [fact.value, fact.way_out] for name, fact in facts.alike.items()}
    store.set(_of(rank), json.dumps({"alike": told, "weights": dict(facts.weights)}))
    if rank:
        said, missing = _outcome(store, rank, timeout)
    else:
        said, missing = _judged(store, size, timeout)
        _tell(store, size, said, missing)
    if missing:
        raise RankError(f"rank {rank}: {said}", missing)
    if said:
        raise DisagreementError(said)


def send_refusal(store: Store, rank: int, size: int, text: str, patience: timedelta) -> bool:
    """Tell the others that this rank was refused before it could agree with them.

    Returns:
        Whether rank 0 knows, and so says it.
    """
    if rank == 0:
        _tell(store, size, text, ())
        return True
    store.set(_of(rank), json.dumps({"refused": text}))
    try:
        _outcome(store, rank, patience)
    except RankError:
        return False
    return True


def _of(rank: int) -> str:
    return f"facts{rank}"


def _tell(store: Store, size: int, said: str, missing: Sequence[int]) -> None:
    """Set the outcome; wait a while until it is read where the ranks end with it."""
    store.set(_OUTCOME, json.dumps([said, missing]))
    deadline = time.monotonic() + (_HEARD_S if said else 0)
    while store.add(_HEARD, 0) < size - 1 - len(missing) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _outcome(store: Store, rank: int, timeout: timedelta) -> tuple[str, tuple[int, ...]]:
    deadline = time.monotonic() + timeout.total_seconds() + 2 * _GRACE_S
    while not store.check([_OUTCOME]):  # a wait that ends in vain would also tell of itself
        if time.monotonic() > deadline:
            raise RankError(f"rank {rank}: got no word of rank 0 within {_shown(timeout)}", (0,))
        time.sleep(_LOOK_S)
    said, missing = json.loads(store.get(_OUTCOME))
    store.add(_HEARD, 1)
    return said, tuple(missing)


def _judged(store: Store, size: int, timeout: timedelta) -> tuple[str, tuple[int, ...]]:
    """What rank 0 has to say against the ranks, and those that did not come."""
    told: dict[int, _Told] = {}
    waiting = set(range(size))
    said, deadline = "", time.monotonic() + timeout.total_seconds()
    while waiting and time.monotonic() < deadline:
        come = {rank for rank in waiting if store.check([_of(rank)])}
        told |= {rank: json.loads(store.get(_of(rank))) for rank in come}
        waiting -= come
        if come and (found := _difference(dict(sorted(told.items())))):
            said, deadline = found, min(deadline, time.monotonic() + _GRACE_S)
        if waiting:
            time.sleep(_LOOK_S)
    if said or not waiting:
        return said, ()
    missing = tuple(sorted(waiting))
    came = f"got {len(told)} of {size} ranks, need all within {_shown(timeout)}"
    return f"{came}: no word of {_ranks(missing)}", missing


def _shown(timeout: timedelta) -> str:
    return format_ns(round(timeout.total_seconds() * 10**9))


def _difference(told: Mapping[int, _Told]) -> str:
    """The first difference between ranks in words; empty if there is none."""
    for rank, each in told.items():
        if "refused" in each:
            return f"rank {rank}: {each['refused']}"
    names = dict.fromkeys(name for each in told.values() for name in each["alike"])
    for name in names:
        values = {rank: each["alike"].get(name, ["nothing", ""]) for rank, each in told.items()}
        if parted := _parted({rank: value for rank, (value, _) in values.items()}):
            way_out = next(text for _, text in values.values() if text)
            return f"join: {name}: got {parted}, need the same on all ranks. {way_out}"
    return _differing_weights({rank: each["weights"] for rank, each in told.items()})


def _differing_weights(weights: Mapping[int, Mapping[str, str]]) -> str:
    names = dict.fromkeys(name for each in weights.values() for name in each)
    found = [
        (name, parted)
        for name in names
        if (parted := _parted({r: each[name] for r, each in weights.items() if name in each}))
    ]
    if not found:
        return ""
    (name, parted), more = found[0], len(found) - 1
    others = f" (and {more} more)" if more else ""
    return (
        f"join: initial weights: {name!r}{others}: got {parted}, need the same wherever they are"
        f" held. {_WEIGHTS_WAY_OUT}"
    )


def _parted(values: Mapping[int, str]) -> str:
    """Which ranks have which value, where there are several: `a on rank 0, b on ranks 1, 2`."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return ""
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
