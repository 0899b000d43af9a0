"""Units on the way in and out: bytes, nanoseconds, bytes per second.

Inside the package every size is an integer number of bytes and every time an integer number of
nanoseconds; only this module knows the suffixes people write.
"""

from __future__ import annotations

import re
from fractions import Fraction

from pipeplan.errors import InputError

MAX_INT = 2**62
"""Largest size or time any file may hold: sums of thousands of them stay well-formed."""
MAX_GPUS = 4096
"""Most GPUs of a cluster."""

SHORTEST_WAIT_NS = 1_000_000
"""Of a wait for another process: torch counts milliseconds, and knows no wait of none."""

_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9}
_NUMBER = r"[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,2})?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ]*)\s*")
_BELOW = re.compile(r"\s*-[0-9]")
_BITS = re.compile(r"[A-Z]i?b\s*$")
"""How links are sold: Gb/s."""
_SHARE = re.compile(rf"\s*({_NUMBER})\s*(%?)\s*")
_RATIO = re.compile(rf"\s*({_NUMBER})(?:/({_NUMBER}))?\s*")


def _parse(text: str, units: dict[str, int], what: str, example: str) -> Fraction:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    folded = {name.lower(): size for name, size in units.items()}
    if isinstance(text, str) and _BELOW.match(text):
        raise InputError(
            f"{what}: got {shown(text)}, which is below 0, need for example {example}"
        )
    if match is None or match[2].lower() not in folded:
        known = ", ".join(name for name in units if name)
        raise InputError(
            f"{what}: got {shown(text)}, need a number with one of {known}, for example {example}"
        )
    value = Fraction(match[1]) * folded[match[2].lower()]
    if value > MAX_INT:
        raise InputError(f"{what}: got {shown(text)}, need at most {MAX_INT}")
    return value


def shown(value: object) -> str:
    """`value` as Python writes it, for a message: one line, 60 characters of it at most."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """`text` on one line, a `?` for each character that cannot be printed."""
    return "".join(each if each.isprintable() else "?" for each in text)


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes in `text` such as `16GiB`, `12.5MB` or a plain number; rounded down.

    Raises:
        InputError: if it is no size.
    """
    return int(_parse(text, _BYTES, what, "16GiB"))


def parse_bandwidth(text: str, what: str = "bandwidth") -> int | None:
    """Bytes per second in `text` such as `12GB/s`; None for `inf`. Rounded down.

    Raises:
        InputError: if it is no bandwidth, or zero.
    """
    if text.strip().lower() == "inf":
        return None
    amount, slash, per = text.rpartition("/")
    if not slash or per.strip().lower() != "s":
        raise InputError(
            f"{what}: got {shown(text)}, need bytes per second such as 12GB/s, or inf"
        )
    if _BITS.search(amount):
        meant = int(_parse(amount, _BYTES, what, "12GB/s") / 8)
        rate = format_rate(max(1, meant)).replace(" ", "")
        raise InputError(f"{what}: got {shown(text)}, which reads as bits, need bytes: {rate}")
    value = int(_parse(amount, _BYTES, what, "12GB/s"))
    if value < 1:
        raise InputError(f"{what}: got {shown(text)}, need at least 1B/s")
    return value


def parse_time_ns(text: str, what: str = "time") -> int:
    """Nanoseconds in `text` such as `10us`, `1.5ms` or `60s`; rounded up.

    Raises:
        InputError: if it is no time, or has no unit.
    """
    return -int(-_parse(text, _TIMES, what, "10us") // 1)


def parse_limit_ns(text: str, what: str = "time limit") -> int:
    """Nanoseconds that a search may take in `text` such as `20s`.

    Raises:
        InputError: if it is no time, or none in which anything could be found.
    """
    time = parse_time_ns(text, what)
    if not time:
        raise InputError(f"{what}: got {shown(text)}, need more than 0")
    return time


def parse_wait_ns(text: str, what: str = "timeout") -> int:
    """Nanoseconds of the longest wait for another process in `text` such as `600s`.

    Raises:
        InputError: if it is no time, or shorter than torch can wait.
    """
    time = parse_time_ns(text, what)
    if time < SHORTEST_WAIT_NS:
        raise InputError(f"{what}: got {shown(text)}, need at least 1ms")
    return time


def parse_fraction(text: str, what: str = "fraction") -> float:
    """A share in `text` such as `1%` or `0.01`.

    Raises:
        InputError: if it is neither.
    """
    match = _SHARE.fullmatch(text)
    if match is None:
        raise InputError(f"{what}: got {shown(text)}, need a share such as 1% or 0.01")
    value = Fraction(match[1])
    if value >= 1 and not match[2]:
        raise InputError(
            f"{what}: got {shown(text)}, need {text.strip()}% or a number below 1 such as 0.01"
        )
    return float(value / (100 if match[2] else 1))


def parse_factor(text: str, what: str = "factor") -> Fraction:
    """What times are multiplied by: a number such as `20` or `1/3`, above 0 and at most 1e9.

    Raises:
        InputError: if it is none.
    """
    match = _RATIO.fullmatch(text)
    above, below = (Fraction(each) for each in match.groups("1")) if match else (0, 1)
    factor = Fraction(above, below) if below else Fraction(0)
    if not 0 < factor <= 10**9:
        raise InputError(f"{what}: got {shown(text)}, need a number above 0, at most 1e9")
    return factor


def counted(count: int, name: str) -> str:
    """`1 layer`, `2 layers`, `2 micro-batches`."""
    several = f"{name}es" if name.endswith(("s", "ch")) else f"{name}s"
    return f"{count} {name if count == 1 else several}"


def format_bytes(value: int) -> str:
    """`value` for people: `1.50 GiB`, exact below 1 KiB."""
    size, unit = byte_unit(value)
    return f"{value / size:.2f} {unit}" if size > 1 else f"{value} B"


def byte_unit(value: int) -> tuple[int, str]:
    """The unit that suits `value` bytes, for people: its bytes and its name."""
    for power, prefix in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if abs(value) >= 1024**power:
            return 1024**power, f"{prefix}B"
    return 1, "B"


def exact_bytes(value: int) -> str:
    """The shortest text that `parse_bytes` reads as `value`: `24MiB`, `16GB`, `1001B`.

    For names of files, of which no two sizes may share one.
    """
    units = sorted(_BYTES.items(), key=lambda unit: -unit[1])
    texts = [f"{value // size}{name}" for name, size in units if name and value % size == 0]
    return min(texts, key=len)


def format_ns(value: int | Fraction | float) -> str:
    """`value` nanoseconds for people: `12.3 ms`, exact below 1 us."""
    size, unit = time_unit(value)
    return f"{float(value) / size:.4g} {unit}"


def time_unit(value: int | Fraction | float) -> tuple[int, str]:
    """The unit that suits `value` nanoseconds, for people: its nanoseconds and its name."""
    for size, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if abs(float(value)) >= size:
            return size, unit
    return 1, "ns"


def format_rate(value: int) -> str:
    """`value` bytes per second for people: `12.00 GB/s`, exact below 1 kB/s."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if value >= 1000**power:
            return f"{value / 1000**power:.2f} {prefix}B/s"
    return f"{value} B/s"


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator` rounded up, in integers."""
    return -(-numerator // denominator)
