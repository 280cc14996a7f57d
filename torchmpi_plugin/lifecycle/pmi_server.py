"""A PMI-1 server: what MPICH's process manager does for ranks that it started, for ranks that somebody else did.

Run as a program by ``bootstrap.py`` on rank 0's node (neither torch nor MPI is imported). Every rank connects, proves
that it knows the job's secret, says its rank, and hands the connection to MPI as ``PMI_FD``. The protocol ("simple
PMI", version 1) is lines of ``cmd=name key=value ...``; MPI uses it to exchange addresses in MPI_Init and to meet in
MPI_Finalize.

The server listens until all ranks have come. It ends when the last one has gone, or when not all have come in time.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
from typing import Any

from ..node.listener import Listener


class Rank:
    """One connected rank."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.number = -1  # until it has said who it is
        self.in_barrier = False

    def send(self, line: str) -> None:
        """Answer; a rank that has gone is noticed when it is read."""
        self.writer.write(line.encode() + b"\n")


class Server:
    """Args: where to listen, the number of ranks, the secret, and PMI_process_mapping."""

    def __init__(self, address: str, size: int, secret: str, mapping: str) -> None:
        self.size = size
        # MPICH names its shared memory after this: two jobs on one node must not have the same.
        self.name = f"mpiplus-{secrets.token_hex(8)}"
        self.values = {"PMI_process_mapping": mapping}
        self.ranks: dict[int, Rank] = {}
        self.attending: set[asyncio.Task[None]] = set()
        self.listener = Listener(secret, address, size, self._welcome)
        self.started = False  # all ranks have been here
        self.over = asyncio.Event()  # the last rank has gone, or one has while the others wait for it in MPI_Init

    async def serve(self, seconds: float) -> None:
        """Until it is over, or not all have come in time."""
        deadline = asyncio.get_running_loop().call_later(seconds, self._too_late)
        await self.over.wait()
        deadline.cancel()
        self.listener.close()

    def _too_late(self) -> None:
        if not self.started:
            self.over.set()

    def _welcome(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._attend(connection))
        self.attending.add(task)
        task.add_done_callback(self.attending.discard)

    async def _attend(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        rank = Rank(writer)
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                text = line[:-1].decode(errors="replace")
                if rank.number >= 0:
                    self._answer(rank, dict(word.partition("=")[::2] for word in text.split()))
                elif not self._greet(rank, text):
                    break
        except (OSError, ValueError):
            pass  # it is no more, or what it says is no line
        finally:
            self._gone(rank)

    def _gone(self, rank: Rank) -> None:
        rank.writer.close()
        if self.ranks.pop(rank.number, None) is not None:
            # A barrier that can no longer be complete: closing the connections makes MPI_Init fail, not hang.
            failed = any(other.in_barrier for other in self.ranks.values()) or not self.started
            if failed or not self.ranks:
                self.over.set()

    def _greet(self, rank: Rank, number: str) -> bool:
        if not number.isdigit() or int(number) >= self.size or int(number) in self.ranks:
            return False
        rank.number = int(number)
        self.ranks[rank.number] = rank
        if len(self.ranks) == self.size:
            self.started = True
            self.listener.close()
        return True

    def _answer(self, rank: Rank, request: dict[str, str]) -> None:
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
            rank.send(f"cmd={fixed[command]}")
        elif command == "put":
            self.values[request.get("key", "")] = request.get("value", "")
            rank.send("cmd=put_result rc=0 msg=success")
        elif command == "get":
            value = self.values.get(request.get("key", ""))
            found = "rc=0 msg=success" if value is not None else "rc=-1 msg=key_not_found"
            rank.send(f"cmd=get_result {found} value={'unknown' if value is None else value}")
        elif command == "barrier_in":
            self._barrier(rank)
        elif command != "abort":  # after which the rank ends by itself
            rank.send(f"cmd={command}_result rc=-1 msg=not_supported")

    def _barrier(self, rank: Rank) -> None:
        rank.in_barrier = True
        if self.started and len(self.ranks) < self.size:
            self.over.set()  # somebody has gone already
        if sum(other.in_barrier for other in self.ranks.values()) == self.size:
            for other in self.ranks.values():
                other.in_barrier = False
                other.send("cmd=barrier_out rc=0")


async def _serve(seconds: float, **job: Any) -> None:
    server = Server(**job)
    print(server.listener.port, flush=True)
    sys.stdin.close()
    sys.stdout.close()
    await server.serve(seconds)


def main() -> None:
    """Read the job from stdin, listen, print the port, serve."""
    asyncio.run(_serve(**json.loads(sys.stdin.readline())))
