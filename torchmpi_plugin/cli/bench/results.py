"""Results of ``mpiplus bench``, as plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...operations import ROWS

#: The contestant that calls MPI through mpi4py, without torch.distributed.
RAW = "raw"
#: The same with MPI's nonblocking calls, each of them waited for at once.
NONBLOCKING = "raw nonblocking"
#: torch.distributed on a group that does nothing: what torch itself costs.
FRONT_END = "front end"
#: Up to this many bytes an operation's time is latency, and a difference tells more than a ratio.
SMALL = 4096
#: Bytes of the asynchronous all_reduce, and the seconds between its start and its ``wait()``.
OVERLAP_SIZE, OVERLAP_SLEEP = 16 * 1024**2, 0.5

_BUS: dict[str, Callable[[int], float]] = {
    "ping_pong": lambda _: 2.0,  # two messages, one after the other
    **{row.name: row.bus for row in ROWS if row.bus},
}

#: Sizes as people write them: ``8``, ``64K``, ``16MiB``.
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+) ?([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` names; a ValueError if it is no size, or zero."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size == 0:
        raise ValueError(f"{text!r} is not a size: write a number of bytes like 8, 64K or 16M")
    return size


def format_size(size: int) -> str:
    """Return ``size`` bytes in the largest unit that needs no fraction: ``8 B``, ``64 KiB``, ``16 MiB``."""
    for unit in "GMK":
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}iB"
    return f"{size} B"


def format_us(us: float | None) -> str:
    """Return microseconds to about three digits; a dash for None."""
    if us is None:
        return "-"
    digits = 2 if abs(us) < 10 else 1 if abs(us) < 100 else 0
    return f"{us:,.{digits}f}"


def fit_size(size: int, element: int, parts: int) -> int:
    """Return the number of bytes nearest above ``size`` that ``parts`` ranks share in whole elements."""
    share = element * parts
    return -(-size // share) * share


def bus_factor(operation: str, ranks: int) -> float | None:
    """Return by what nccl-tests multiply an operation's data to compare it with a link; None without data or link."""
    return _BUS[operation](ranks) if operation in _BUS and ranks > 1 else None


def backends_of(contestants: Sequence[str]) -> list[str]:
    """Return those contestants that communicate through torch.distributed."""
    return [name for name in contestants if name not in (RAW, NONBLOCKING, FRONT_END)]


def comparisons(contestants: Sequence[str]) -> list[tuple[str, str]]:
    """Return which contestants to compare: the first backend with raw MPI, every other one with the first."""
    first, *others = backends_of(contestants)
    return [(first, RAW)] * (RAW in contestants) + [(other, first) for other in others]


@dataclass(frozen=True)
class Row:
    """The times of one operation on one dtype and size."""

    operation: str  # the name of the operation
    dtype: str  # empty for an operation without data
    size: int  # bytes
    ranks: int  # how many there were
    us: Mapping[str, float]  # the time per call by contestant, in microseconds; those that refused are missing
    turns_us: Mapping[str, Sequence[float]]  # the time per call of each turn, in microseconds
    refusals: Mapping[str, str]  # by contestant, why it does not do this

    def ratios(self, contestants: Sequence[str]) -> dict[str, float | None]:
        """Return how many times as long the first of a pair takes as the second, by pair; None if one is missing."""
        pairs = comparisons(contestants)
        return {
            f"{one}/{two}": self.us[one] / self.us[two] if {one, two} <= set(self.us) else None for one, two in pairs
        }

    def bus_gb_per_s(self, contestant: str) -> float | None:
        """Return the bus bandwidth of ``contestant`` in 10^9 bytes per second, as nccl-tests count it."""
        factor = bus_factor(self.operation, self.ranks)
        if factor is None or contestant not in self.us or contestant == FRONT_END:
            return None
        return factor * self.size / self.us[contestant] / 1000

    def extra_us(self, contestant: str) -> float | None:
        """Return what ``contestant`` adds to raw MPI in microseconds, or None for large data."""
        known = self.size <= SMALL and {contestant, RAW} <= set(self.us)
        return self.us[contestant] - self.us[RAW] if known else None

    def to_json(self, contestants: Sequence[str]) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "dtype": self.dtype or None,
            "bytes": self.size,
            "us": self.us,
            "turns_us": self.turns_us,
            "bus_gb_per_s": {name: self.bus_gb_per_s(name) for name in self.us if name != FRONT_END},
            "ratio": self.ratios(contestants),
            "extra_us": {above: self.extra_us(above) for above, below in comparisons(contestants) if below == RAW},
        }


@dataclass(frozen=True)
class Overlap:
    """One contestant's asynchronous all_reduce while the caller does something else."""

    contestant: str  # raw MPI, or a backend
    sync_us: float  # the time of the synchronous operation, in microseconds
    wait_us: float  # the time that wait() takes when the caller slept between start and wait, in microseconds

    @property
    def percent(self) -> float:
        """The part of the operation that was left to ``wait()``, in percent."""
        return 100 * self.wait_us / self.sync_us

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "percent": self.percent}


@dataclass(frozen=True)
class Limit:
    """A limit of what operations can reach; times in microseconds."""

    latency_us: float  # of 8 bytes, in one direction
    size: int  # of what is large, in bytes
    exchange_us: float  # how long one of these takes in each direction, at once

    @property
    def gb_per_s(self) -> float:
        """The bandwidth each way, while data go both ways, in 10^9 bytes per second."""
        return self.size / self.exchange_us / 1000

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}

    def told(self, where: str, one_way: str = "") -> str:
        """Return it as one line."""
        return (
            f"{where}: {format_us(self.latency_us)} us for 8 B; {one_way}{self.gb_per_s:.2f} GB/s each way "
            f"at once ({format_size(self.size)})"
        )


@dataclass(frozen=True)
class Link(Limit):
    """Plain messages between two ranks; the latency is half the time there and back."""

    ranks: tuple[int, int]  # the two
    hosts: tuple[str, str]  # where each of them is; the same name twice if all ranks are on one node

    def in_words(self) -> str:
        ranks = " and ".join(f"rank {rank} on {node}" for rank, node in zip(self.ranks, self.hosts, strict=True))
        return self.told(f"plain messages of MPI, {ranks}")


@dataclass(frozen=True)
class Bus(Limit):
    """Copies between pinned memory and each rank's device, of all ranks at once."""

    to_device_us: float  # of the large copy
    from_device_us: float  # the same the other way

    def in_words(self) -> str:
        rates = [self.size / us / 1000 for us in (self.to_device_us, self.from_device_us)]
        one_way = "{:.2f} GB/s to the device, {:.2f} from it, ".format(*rates)
        return self.told("the bus, all ranks at once", one_way)


@dataclass(frozen=True)
class Report:
    """One run of ``mpiplus bench``."""

    facts: Mapping[str, str | int]  # what the numbers depend on, by name
    settings: Mapping[str, Any]  # how it was measured, by name
    contestants: Sequence[str]  # raw MPI if it was measured, then the groups
    rows: Sequence[Row]  # the times of the operations
    overlaps: Sequence[Overlap]  # the asynchronous operations; none on one rank
    link: Link | None = None  # plain messages between two nodes, or two ranks; None on one rank
    bus: Bus | None = None  # copies to each rank's device and back; None without devices

    def limits(self) -> dict[str, Link | Bus]:
        """Return what has been measured of those, by name."""
        found: dict[str, Link | Bus | None] = {"plain messages": self.link, "bus": self.bus}
        return {name: limit for name, limit in found.items() if limit}

    def notes(self) -> list[str]:
        """Return a line for each operation and dtype that a contestant refused."""
        lines = [
            f"{name} has no {row.operation} of {row.dtype or 'nothing'}: {reason}"
            for row in self.rows
            for name, reason in row.refusals.items()
        ]
        return list(dict.fromkeys(lines))

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "settings": self.settings,
            "contestants": self.contestants,
            "operations": [row.to_json(self.contestants) for row in self.rows],
            "point_to_point": self.link and self.link.to_json(),
            "bus": self.bus and self.bus.to_json(),
            "overlap": [overlap.to_json() for overlap in self.overlaps],
            "notes": self.notes(),
        }
