"""This node: its identity, its addresses, its cores, the processes of a session. Imports neither torch nor MPI."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class Place(NamedTuple):
    """The place of a rank."""

    local_rank: int
    local_size: int
    node_rank: int


def places(nodes: Sequence[str]) -> list[Place]:
    """The places of ranks whose nodes have these identities: nodes in the order of their first ranks."""
    sizes, seen = Counter(nodes), Counter[str]()
    numbers = {node: number for number, node in enumerate(sizes)}
    found = []
    for node in nodes:
        found.append(Place(seen[node], sizes[node], numbers[node]))
        seen[node] += 1
    return found


@functools.cache
def identity() -> str:
    """Equal on two processes exactly if they run on one node: its name, and this boot of its kernel.

    The name alone is not enough ("localhost" on every node), the boot alone neither (containers and test
    nodes that share a kernel but not their memory file systems have names of their own).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def addresses(one_node: bool = False, of_all_interfaces: bool = False) -> list[str]:
    """Return where a job's processes may find this node, the likeliest first; ``one_node``: all of them are on it."""
    if one_node:
        return [LOOPBACK]
    name = socket.gethostname()
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # documentation address: picks the interface, sends nothing
        found.append(probe.getsockname()[0])
    if of_all_interfaces:
        found += _interface_addresses()
    return [*(address for address in dict.fromkeys(found) if not address.startswith("127.")), name]


def _interface_addresses() -> list[str]:
    """Of all interfaces that are up: a node may have no default route and no entry for its own name."""
    import psutil  # when it is needed: it takes as long as the rest of a supervisor

    found = []
    with contextlib.suppress(OSError):
        up = {name for name, interface in psutil.net_if_stats().items() if interface.isup}
        for name, those in psutil.net_if_addrs().items():
            found += [it.address for it in those if name in up and it.family == socket.AF_INET]
    return found


def cores(cpus: Sequence[int] | None = None) -> list[int]:
    """The cores this process may run on, each by the lowest of its hardware threads."""
    # psutil counts those of the whole node, whatever this process may use.
    found = set()
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        found.add(int(siblings.replace("-", ",").split(",")[0]))
    return sorted(found)


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def is_local(name: str) -> bool:
    own = socket.gethostname()
    return name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}


def members_of(number: int, membership: Callable[[int], int]) -> list[int]:
    """The processes of a session or a process group, as ``os.getsid`` or ``os.getpgid`` tells."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile
            if membership(int(name)) == number:
                found.append(int(name))
    return found


def kill_session(session: int) -> None:
    """Kill all processes of a session; not those that have left it."""
    for process in members_of(session, os.getsid):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
