"""A PMI-1 server: what MPICH's process manager does for ranks that it started, for ranks that somebody else did.

Run as a program by ``bootstrap.py`` on rank 0's node (neither torch nor MPI is imported). Every rank connects, proves
that it knows the job's secret, says its rank, and hands the connection to MPI as ``PMI_FD``. The protocol ("simple
PMI", version 1) is lines of ``cmd=name key=value ...``; MPI uses it to exchange addresses in MPI_Init and to meet in
MPI_Finalize.

The server listens until all ranks have come. It ends when the last one has gone, or when not all have come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
from typing import Any

from ..node.listener import Listener


class Server:
    """Args: where to listen, the number of ranks, the secret, and PMI_process_mapping."""

    def __init__(self, address: str, size: int, secret: str, mapping: str) -> None:
        self.size = size
        # MPICH names its shared memory after this: two jobs on one node must not have the same.
        self.name = f"mpiplus-{secrets.token_hex(8)}"
        self.values = {"PMI_process_mapping": mapping}
        self.ranks: dict[int, asyncio.StreamWriter] = {}  # one that has gone is noticed when it is read
        self.in_barrier: set[int] = set()
        self.listener = Listener(secret, address, size, self._welcome)
        self.started = False  # all ranks have been here
        self.over = asyncio.Event()  # the last rank has gone, or one has while the others wait for it in MPI_Init

    async def serve(self, seconds: float) -> None:
        """Until it is over, or not all have come in time."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        if self.started:
            await self.over.wait()
        self.listener.close()

    async def _welcome(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            line = await reader.readline()
            number = line[:-1].decode(errors="replace") if line.endswith(b"\n") else ""
            if number.isdigit() and int(number) < self.size and int(number) not in self.ranks:
                await self._serve_rank(int(number), reader, writer)
        except (OSError, ValueError):
            pass  # it is no more, or what it says is no line
        finally:
            writer.close()

    async def _serve_rank(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ranks[rank] = writer
        if len(self.ranks) == self.size:
            self.started = True
            self.listener.close()
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                words = line.decode(errors="replace").split()
                if answer := self._answer(rank, dict(word.partition("=")[::2] for word in words)):
                    writer.write(f"{answer}\n".encode())
        finally:
            del self.ranks[rank]
            self.in_barrier.discard(rank)
            # A barrier that can no longer be complete: closing the connections makes MPI_Init fail, not hang.
            if self.in_barrier or not self.started or not self.ranks:
                self.over.set()

    def _answer(self, rank: int, request: dict[str, str]) -> str:
        command = request.get("cmd", "")
        fixed = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
            "get_appnum": "appnum appnum=0 rc=0",
            "get_my_kvsname": f"my_kvsname kvsname={self.name} rc=0",
            "get_universe_size": f"universe_size size={self.size} rc=0",
            "finalize": "finalize_ack rc=0",
        }
        if command in fixed:
            return f"cmd={fixed[command]}"
        if command == "put":
            self.values[request.get("key", "")] = request.get("value", "")
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            value = self.values.get(request.get("key", ""))
            found = "rc=0 msg=success" if value is not None else "rc=-1 msg=key_not_found"
            return f"cmd=get_result {found} value={'unknown' if value is None else value}"
        if command == "barrier_in":
            self._enter_barrier(rank)
        # After an abort the rank ends by itself.
        return "" if command in ("barrier_in", "abort") else f"cmd={command}_result rc=-1 msg=not_supported"

    def _enter_barrier(self, rank: int) -> None:
        self.in_barrier.add(rank)
        if self.started and len(self.ranks) < self.size:
            self.over.set()  # somebody has gone already
        if len(self.in_barrier) == self.size:
            self.in_barrier.clear()
            for writer in self.ranks.values():
                writer.write(b"cmd=barrier_out rc=0\n")


async def _serve(seconds: float, **job: Any) -> None:
    server = Server(**job)
    print(server.listener.port, flush=True)
    sys.stdin.close()
    sys.stdout.close()
    await server.serve(seconds)


def main() -> None:
    """Read the job from stdin, listen, print the port, serve."""
    asyncio.run(_serve(**json.loads(sys.stdin.readline())))
