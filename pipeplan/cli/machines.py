"""The machines of a command: a cluster file, or the flags that describe equal GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeplan import units
from pipeplan.cli import common, helptext
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster, Host

_RANGE = (
    "A comma separates values. a..b doubles from a up to b; where b is less than four times a, it"
    " takes five equal steps."
)
_NEEDED = ("gpus", "memory", "bandwidth")
_OPTIONAL = ("reserve", "latency", "duplex")
_HOST_NEEDED = ("host_bandwidth", "host_memory")
_HOST = (*_HOST_NEEDED, "host_duplex", "host_update")


def add_machines(verb: argparse.ArgumentParser, *, several: bool = False) -> None:
    """The machine flags. None has a default, so that one given beside --cluster is noticed.

    `several` takes lists and ranges of numbers and sizes, for `clusters`.
    """
    number, size = common.count(1, units.MAX_GPUS), common.size
    group = verb.add_argument_group("machines: equal GPUs by flags, or any by a cluster file")
    gpus = group.add_argument(
        "--gpus",
        type=common.ranges(number) if several else number,
        metavar="N,.." if several else "N",
        help="number of GPUs; several: 2,4,8 or 2..8" if several else "number of GPUs",
    )
    memory = group.add_argument(
        "--memory",
        type=common.ranges(size) if several else size,
        metavar="SIZE,.." if several else "SIZE",
        help="per GPU: 16GiB, or plain bytes" + ("; several: 8GiB..32GiB" if several else ""),
    )
    if several:
        helptext.detail(gpus, _RANGE)
        helptext.detail(memory, _RANGE)
    reserve = group.add_argument(
        "--reserve",
        type=size,
        metavar="SIZE",
        help="part of it that no plan may use (0)",
    )
    helptext.detail(reserve, "Room for the driver, libraries and the allocator's gaps: (M8).")
    group.add_argument(
        "--bandwidth", type=common.bandwidth, metavar="RATE", help="of each link: 12GB/s, or inf"
    )
    group.add_argument(
        "--latency", type=common.duration, metavar="TIME", help="of each transfer: 10us (0)"
    )
    group.add_argument(
        "--duplex", choices=("full", "half"), help="half: both directions share a link (full)"
    )
    group.add_argument(
        "--host-bandwidth",
        type=common.bandwidth,
        metavar="RATE",
        help="of the link between a GPU and the host: 12GB/s (no offloading)",
    )
    group.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="of the host, for what all GPUs offload: 128GiB",
    )
    group.add_argument(
        "--host-duplex",
        choices=("full", "half"),
        help="half: both directions share the host link (full)",
    )
    update = group.add_argument(
        "--host-update",
        type=common.bandwidth,
        metavar="RATE",
        help="weights that the host updates for a GPU: 4GB/s (no states there)",
    )
    helptext.detail(update, "Each GPU's share of the processor, while all others update, too.")
    group.add_argument(
        "--cluster", type=common.file, metavar="FILE", help="cluster.json, in place of these flags"
    )


def clusters(args: argparse.Namespace) -> Iterator[Cluster]:
    """One cluster per number of GPUs and memory in `args`, or the one in the file.

    Raises:
        InputError: if flags are missing or repeat what the cluster file says.
    """
    given = vars(args)
    for gpus in args.gpus or (None,):
        for memory in args.memory or (None,):
            yield machines(argparse.Namespace(**(given | {"gpus": gpus, "memory": memory})))


def machines(args: argparse.Namespace) -> Cluster:
    """The cluster that the flags in `args` name.

    Raises:
        InputError: if flags are missing or repeat what the cluster file says.
    """
    from pipeplan.cluster import Cluster, uniform

    given = {name: getattr(args, name) for name in (*_NEEDED, *_OPTIONAL, *_HOST)}
    if args.cluster:
        twice = [_flag(name) for name, value in given.items() if value is not None]
        if twice:
            raise InputError(
                f"machines: got {', '.join(twice)} beside --cluster, which says it already."
                " Give one of the two."
            )
        return common.read(Cluster, args.cluster)
    missing = [f"--{name}" for name in _NEEDED if given[name] is None]
    if missing:
        raise InputError(f"machines: need {', '.join(missing)} too, or --cluster FILE.")
    if (args.reserve or 0) > args.memory:
        raise InputError(
            f"machines: got --reserve {args.reserve} of --memory {args.memory} bytes, need at most"
            " that: it is a part of the memory."
        )
    return uniform(
        args.gpus,
        args.memory,
        reserve_bytes=args.reserve or 0,
        bandwidth_bytes_per_s=args.bandwidth.bytes_per_s,
        latency_ns=args.latency or 0,
        duplex=args.duplex or "full",
        host=_host(args),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _host(args: argparse.Namespace) -> Host | None:
    """What the flags say of the host; None if nothing.

    Raises:
        InputError: if they say a part of it, or an endless bandwidth.
    """
    from pipeplan.cluster import Host

    given = [name for name in _HOST if getattr(args, name) is not None]
    if not given:
        return None
    missing = [_flag(name) for name in _HOST_NEEDED if name not in given]
    if missing:
        raise InputError(
            f"machines: got {', '.join(map(_flag, given))} alone, need {', '.join(missing)} too."
        )
    bandwidth = args.host_bandwidth.bytes_per_s
    if bandwidth is None:
        raise InputError(
            "machines: got --host-bandwidth inf, need a rate such as 12GB/s: offloads take time."
        )
    return Host(
        memory_bytes=args.host_memory,
        bandwidth_bytes_per_s=bandwidth,
        duplex=args.host_duplex or "full",
        update_bytes_per_s=_update(args),
    )


def _update(args: argparse.Namespace) -> int | None:
    """The rate of updates on the host, if it is told.

    Raises:
        InputError: if it is endless.
    """
    if args.host_update is None:
        return None
    rate: int | None = args.host_update.bytes_per_s
    if rate is None:
        raise InputError(
            "machines: got --host-update inf, need a rate such as 4GB/s: updates take time."
        )
    return rate
