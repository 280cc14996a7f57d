"""The properties that a build of mpiplus takes for granted of the builds on other nodes, as one number.

It stands for all that ranks tell each other: over MPI (tags, agreements between nodes, pieces of long operations), in
shared memory (counters, slots), and over the store. CONTRIBUTING.md says when to raise it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .names import describe_ranks

PROTOCOL = 16
#: Of a build that does not say, since it is older than the number.
UNKNOWN = 0


class Build(NamedTuple):
    """A rank's words about its mpiplus."""

    protocol: int
    version: str
    node: str

    def __str__(self) -> str:
        number = f"protocol {self.protocol}" if self.protocol != UNKNOWN else "a protocol without number"
        return f"mpiplus {self.version} ({number})"


@functools.cache  # the version is read from a file
def this(node: str) -> Build:
    """This rank's, which is on ``node``."""
    try:
        found = version("torchmpi-plugin")
    except PackageNotFoundError:  # run from a directory
        found = "of no known version"
    return Build(PROTOCOL, found, node)


def disagreement(builds: Sequence[Build]) -> str:
    """Return a warning about ranks with these builds, by rank; nothing if they understand each other."""
    if len({build.protocol for build in builds}) < 2:
        return ""
    kinds: dict[tuple[int, str], list[int]] = {}
    for rank, build in enumerate(builds):
        kinds.setdefault((build.protocol, build.version), []).append(rank)
    who = []
    for ranks in kinds.values():
        nodes = list(dict.fromkeys(builds[rank].node for rank in ranks))
        more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
        who.append(f"{builds[ranks[0]]} on {', '.join(nodes[:4])}{more} ({describe_ranks(ranks)})")
    return (
        f"the nodes have different builds of mpiplus, which do not understand each other: {'; '.join(who)}. Install "
        f"the same one on all nodes"
    )
