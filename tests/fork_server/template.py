"""Imports torch, then forks a process for each client that the server passes on.

Usage: template.py SOCKET ROOM, by server.py. A child leaves `serve`, and runs its program from the last lines of this
file: so it has but one frame of ours beneath it.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

SELF = str(Path(__file__).parent)
if SELF in sys.path:
    sys.path.remove(SELF)
#: Kinds of words to a client, as in client.c.
FRESH, STARTED, EXITED, KILLED = range(4)
WORD = struct.Struct("=ii")
MOST_DESCRIPTORS = 250
HANDED_OVER = struct.Struct(f"=QQi{MOST_DESCRIPTORS}i")
#: What a rank imports of the package at init_process_group.
OF_THE_PACKAGE = ("lifecycle.creation", "lifecycle.rendezvous", "dist")


class Request(NamedTuple):
    """What a client has sent, and who it is."""

    connection: socket.socket
    process: int
    blocked: int
    ignored: int
    #: The client's number of each descriptor that came, and ours.
    descriptors: dict[int, int]

    def say(self, kind: int, value: int = 0) -> None:
        with contextlib.suppress(OSError):  # it may have been killed
            self.connection.send(WORD.pack(kind, value))

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()


def receive(connection: socket.socket) -> Request | None:
    """None: the client is gone."""
    space = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
    data, rights, _, _ = connection.recvmsg(HANDED_OVER.size, space, socket.MSG_CMSG_CLOEXEC)
    ours = array.array("i")
    for _, _, content in rights:
        ours.frombytes(content)
    if len(data) != HANDED_OVER.size:
        return None
    blocked, ignored, count, *numbers = HANDED_OVER.unpack(data)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process = struct.unpack("3i", credentials)[0]
    return Request(connection, process, blocked, ignored, dict(zip(numbers[:count], ours, strict=True)))


class Rank:
    """A child, and the client for which it runs."""

    def __init__(self, process: int, request: Request) -> None:
        self.process, self._request = process, request
        self.descriptor = os.pidfd_open(process)
        self.connection = request.connection

    def _leads_a_group(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(self._request.process) == self._request.process
        return True

    def send(self, number: int, to_group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-self.process if to_group else self.process, number)

    def hear(self) -> bool:
        """A signal that the client has got; or its end, which is the rank's: False."""
        with contextlib.suppress(OSError):
            if len(data := self.connection.recv(4)) == 4:
                self.send(struct.unpack("=i", data)[0], self._leads_a_group())
                return True
        for to_group in (True, False):  # it may not have made its group yet
            self.send(signal.SIGKILL, to_group)
        return False

    def ended(self) -> None:
        """Let the client end in the same way."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self._request.say(KILLED if code < 0 else EXITED, abs(code))
        os.close(self.descriptor)
        self.connection.close()


def prepare() -> str:
    """Import what ranks need; why no process can be forked from here, or nothing."""
    import torch

    if torch._is_device_backend_autoload_enabled():
        for name in OF_THE_PACKAGE:
            importlib.import_module(f"torchmpi_plugin.{name}")
    if "measured_process" in sys.modules:  # .ci/measured_process.py
        sys.modules["measured_process"].stop()
    ending.note_modules()
    gc.collect()
    gc.freeze()  # or each child would copy all of it
    if len(os.listdir("/proc/self/task")) > 1:
        return "an import has started a thread"
    return "an import has loaded MPI" if "mpi4py.MPI" in sys.modules else ""


class Template:
    def __init__(self, server: socket.socket) -> None:
        self._server, self._descriptor = server, server.fileno()
        self._poller = select.poll()
        self._poller.register(server, select.POLLIN)
        self._listening: dict[int, Rank] = {}
        self._running: dict[int, Rank] = {}

    def serve(self, refusal: str) -> Request:
        """Returns in a child; the template itself ends here, once the server and all ranks have ended."""
        while self._server.fileno() >= 0 or self._running:
            for descriptor, _ in self._poller.poll():
                if rank := self._running.get(descriptor):
                    self._forget(rank)
                elif rank := self._listening.get(descriptor):
                    if not rank.hear():
                        self._poller.unregister(descriptor)
                        del self._listening[descriptor]
                elif descriptor == self._descriptor and (request := self._accept(refusal)):
                    return request
        os._exit(0)

    def _accept(self, refusal: str) -> Request | None:
        """What a child is to do; None in the template."""
        data, rights, _, _ = self._server.recvmsg(16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:  # the server wants no more
            self._poller.unregister(self._server)
            self._server.close()
            return None
        connection = socket.socket(fileno=array.array("i", rights[0][2])[0])
        request = receive(connection)
        if request is None or refusal:
            if request:
                request.close()  # a launcher waits until nobody has its pipes
            connection.close()  # which makes of a client a fresh process
            return None
        process = os.fork()
        if process == 0:
            self._close_all()
            return request
        request.close()
        rank = Rank(process, request)
        self._running[rank.descriptor] = self._listening[connection.fileno()] = rank
        for descriptor in (rank.descriptor, connection.fileno()):
            self._poller.register(descriptor, select.POLLIN)
        return None

    def _forget(self, rank: Rank) -> None:
        del self._running[rank.descriptor]
        self._poller.unregister(rank.descriptor)
        if self._listening.pop(rank.connection.fileno(), None):
            self._poller.unregister(rank.connection)
        rank.ended()

    def _close_all(self) -> None:
        """In a child: what is of others."""
        for rank in self._running.values():
            os.close(rank.descriptor)
            rank.connection.close()
        self._server.close()


sys.path.insert(0, SELF)
adoption, ending = (importlib.import_module(name) for name in ("adoption", "ending"))
del sys.path[0], sys.modules["adoption"], sys.modules["ending"]
ending.register()

server = socket.socket(fileno=int(sys.argv[1]))
server.set_inheritable(False)
template = os.getpid()
program = adoption.take_on(Template(server).serve(prepare()), template)
ending.leave_libraries()
try:
    program()
except SystemExit:
    raise
except BaseException as error:
    # As a fresh process tells it: without the frame of this file.
    rest, show = error.__traceback__.tb_next, sys.excepthook
    sys.excepthook = lambda kind, error, _: show(kind, error.with_traceback(rest), rest)
    raise
