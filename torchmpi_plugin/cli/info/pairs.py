"""A test of each pair of ranks with deadlines only: no collective, which one bad link would hang."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

_BYTES = 1 << 16  # more than any MPI sends unasked, so that the way for long messages is tried as well
_NOTHING_CAME, _NOT_TAKEN = "nothing came from it", "it did not take a message"
_PAIR, _REPORT, _VERDICT = 1, 2, 3  # tags


class Talk:
    """Point-to-point messages of one rank, none of which is waited for longer than a deadline."""

    def __init__(self, module: Any, seconds: float) -> None:
        self._mpi = module
        self._comm = module.COMM_WORLD  # a duplicate would be a collective
        self._seconds = seconds
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._kept: list[Any] = []  # buffers that MPI may still use

    def try_all(self) -> dict[int, str]:
        """Exchange a message with every other rank; those with whom that failed, and how."""
        ready, peers = bytearray(_BYTES), [peer for peer in range(self.size) if peer != self.rank]
        buffers = {peer: bytearray(_BYTES) for peer in peers}
        self._kept += [ready, buffers]
        failed: dict[int, str] = {}
        left: dict[tuple[int, str], Any] = {}
        for call, what in ((self._comm.Irecv, _NOTHING_CAME), (self._comm.Isend, _NOT_TAKEN)):
            for peer in peers:
                buffer = buffers[peer] if what == _NOTHING_CAME else ready
                try:
                    left[peer, what] = call([buffer, self._mpi.BYTE], peer, _PAIR)
                except self._mpi.Exception as error:
                    failed.setdefault(peer, str(error))
        self._wait(left, failed)
        self._kept += left.values()
        for peer, what in left:
            failed.setdefault(peer, f"{what} within {self._seconds:g} s")
        return failed

    def _wait(self, left: dict[tuple[int, str], Any], failed: dict[int, str]) -> None:
        """Test requests to the end, or to the deadline; what is in ``left`` afterwards is not complete."""
        until = time.monotonic() + self._seconds
        while left and time.monotonic() < until:
            for (peer, what), request in list(left.items()):
                try:
                    if request.Test():
                        del left[peer, what]
                except self._mpi.Exception as error:
                    failed.setdefault(peer, str(error))
                    del left[peer, what]
            time.sleep(0.001 if left else 0)

    def gather(self, report: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """On rank 0 the reports of all ranks that it hears of; elsewhere nothing."""
        if self.rank:
            self._post(0, json.dumps(report).encode(), _REPORT)
            return {}
        found: dict[int, dict[str, Any]] = {0: dict(report)}
        until = time.monotonic() + self._seconds + 2.0  # ranks with a failed pair come that much later
        while len(found) < self.size and (heard := self._hear(self._mpi.ANY_SOURCE, _REPORT, until)):
            found[heard[0]] = json.loads(heard[1])
        return found

    def agree(self, good: bool) -> bool:
        """Rank 0's result, on every rank; False where it does not come."""
        if self.rank == 0:
            for peer in range(1, self.size) if good else ():
                self._post(peer, b"g", _VERDICT)
            return good
        return self._hear(0, _VERDICT, time.monotonic() + 2 * self._seconds + 4.0) is not None

    def _hear(self, source: int, tag: int, until: float) -> tuple[int, bytearray] | None:
        """A message, and whose it is; None: none comes."""
        status = self._mpi.Status()
        while time.monotonic() < until:
            if self._comm.Iprobe(source, tag, status):
                data = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv([data, self._mpi.BYTE], status.Get_source(), tag)
                return status.Get_source(), data
            time.sleep(0.001)
        return None

    def _post(self, peer: int, data: bytes, tag: int) -> None:
        self._kept.append(data)
        request = self._comm.Isend([data, self._mpi.BYTE], peer, tag)
        self._kept.append(request)
        self._wait({(peer, ""): request}, {})


def failed_pairs(reports: Mapping[int, Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """The pairs that cannot talk, by what both sides say."""
    pairs: dict[tuple[int, int], str] = {}
    for rank, report in sorted(reports.items()):
        for peer, why in report["failed"].items():
            pair = (min(rank, int(peer)), max(rank, int(peer)))
            pairs.setdefault(pair, f"rank {rank}: {why}")
    for rank in range(size):
        if rank not in reports:
            pairs.setdefault((0, rank), "rank 0: no report came from it")
    names = {rank: report["host"] for rank, report in reports.items()}
    return [
        {"ranks": list(pair), "hosts": [names.get(rank, "unknown") for rank in pair], "why": why}
        for pair, why in sorted(pairs.items())
    ]
