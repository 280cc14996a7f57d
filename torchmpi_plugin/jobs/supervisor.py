"""Runs one rank's program: passes its output and its ending to the launcher, and signals to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .. import settings
from ..launchers.table import DAEMONS, SLURM
from ..launchers.variables import who_am_i
from ..node import leaving, node, processes
from ..node.calling import call
from .channel import ATTACHMENT, MESSAGE, STDERR, STDOUT, Channel, Frame
from .formats import ERROR_VARIABLE, error_message, prepare_error_file
from .loop import Alarm, raise_into, run
from .output import Stream
from .signals import ENDING, FORWARDED, HARMFUL, pass_on

_CONNECT_SECONDS = 20.0
_ANSWER_SECONDS = 600.0  # the launcher answers when all ranks are there, and has a shorter limit for that
# How long a program gets to end by itself after mpirun has killed the guard. The one that called MPI_Abort does.
_ABORT_SECONDS = 0.3
_DRAIN_SECONDS = 1.0  # a grandchild may hold the pipes open for ever
_END_SECONDS = 2.0  # for a daemon
#: Between two looks at the others; where the daemon is gone: an MPI that ends a job ends it shortly before the ranks.
LOOK_SECONDS, SURE_SECONDS = 5.0, 2.0
_OF_SLURM = {SLURM.rank: "rank", SLURM.local_rank: "local_rank", SLURM.node_rank[0]: "node_rank"}
_QUIET_SECONDS = 0.3  # after that, what is no complete line is shown as well
_CANNOT_START = 127
_NO_JOB = 1  # the launcher has ended, or given up, and said why
_BY_LAUNCHER, _BY_CONNECTION = "by the launcher", "by the connection"


def supervise(contact: Mapping[str, Any], guard_gone: int, guard: int) -> int:
    """Connect to the launcher, and do what it says; the exit code of the program, as the shell has it."""
    me = who_am_i(os.environ)
    if me is None:
        raise SystemExit(
            "mpiplus run: the launcher told this process no rank (no OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, ...); "
            "under srun choose --mpi=pmix or --mpi=pmi2"
        )
    connection = connect(contact)
    here = contact["addresses"] == [node.LOOPBACK]
    introduction = {
        "rank": me.rank,
        "size": me.size,
        "hostname": socket.gethostname(),
        "node": node.identity(),
        "process": os.getpid(),
        "cores": node.cores(),
        # Where the ranks may meet for what is not MPI: rank 0's node, and a port there that is free now.
        "master": {"MASTER_ADDR": node.addresses(here)[0], "MASTER_PORT": str(node.free_port())} if not me.rank else {},
    }
    return run(Supervisor(guard_gone, Daemon(guard)).run(connection, introduction))


def connect(contact: Mapping[str, Any]) -> socket.socket:
    """A connection to the launcher, which has proved that it is the one."""
    try:
        return call(contact["addresses"], contact["port"], contact["secret"], _CONNECT_SECONDS)
    except OSError as error:
        raise SystemExit(
            f"mpiplus run: node {socket.gethostname()} cannot connect to the launcher, port {contact['port']} "
            f"({error}). The nodes must reach each other over TCP: look for a firewall, or a node that does not know "
            f"its own address."
        ) from None


class Daemon:
    """The MPI's that has started a guard: it may be killed, and it may outlive a job whose launcher is gone."""

    def __init__(self, guard: int) -> None:
        self._guard = guard
        self._process = _parent_of(guard)

    def has_died(self) -> bool:
        """Return whether the guard has lost its parent, though it lives."""
        now = _parent_of(self._guard)
        return bool(self._process and now and now != self._process)

    def end(self) -> None:
        """Its launcher is gone, and so is what it has started. It waits for a connection that has died too."""
        import psutil  # when it is needed: it takes as long as the rest of a supervisor

        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(self._process)
            if self._process == 1 or process.name() not in DAEMONS or self.has_died():
                return
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()


def _parent_of(process: int) -> int:
    return int((processes.stat(process) or ["", "0"])[1])


class Supervisor:
    """Runs the program of one rank, once the launcher says which."""

    def __init__(self, guard_gone: int, daemon: Daemon) -> None:
        self._guard_gone, self._daemon = guard_gone, daemon
        self._channel = Channel(self._heard, self._launcher_lost, lambda is_full: self._hold(_BY_CONNECTION, is_full))
        self._attachment: BinaryIO | None = None
        self._error_file: Path | None = None
        self._job: Mapping[str, Any] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._streams: list[Stream] = []
        self._code: int | None = None
        self._ended_by_mpi = False
        self._dismissed = self._is_cut_off = self._is_to_end = self._is_orphan = False
        self._look_around = Alarm(self._look_for_others)
        self._held: set[str] = set()
        self._drained, self._late = Alarm(self._give_up_the_streams), Alarm(self._kill)

    async def run(self, connection: socket.socket, introduction: Mapping[str, Any]) -> int:
        """Run the program to its end; its exit code as the shell has it."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()
        raise_into(self._over)
        self._closed = asyncio.Event()
        await self._channel.open(connection)
        self._channel.say(**introduction)
        self._unanswered = self._loop.call_later(_ANSWER_SECONDS, self._end, _NO_JOB)
        code = await self._over
        if self._is_cut_off:
            self._daemon.end()
        self._channel.close()
        await self._closed.wait()
        return code

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    def _look(self) -> None:
        """End once all is done."""
        if self._code is not None and self._dismissed and not self._streams:
            self._end(self._code)

    # ---- the program ----

    def _begin(self, frame: Frame) -> None:
        self._unanswered.cancel()
        if frame.kind != MESSAGE or "command" not in frame.message:
            self._end(_NO_JOB)
            return
        self._job = frame.message
        self._look_around.set(LOOK_SECONDS)
        for number in FORWARDED:
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_at_the_child)
        self._loop.add_reader(self._guard_gone, self._guard_ended)
        try:
            self._start(self._job)
        except OSError as error:
            self._complain(f"cannot start on node {socket.gethostname()}: {error.strerror}: {error.filename}")
            self._ended(_CANNOT_START)

    def _start(self, job: Mapping[str, Any]) -> None:
        os.chdir(job["cwd"])
        files = _open_files(job)
        self._error_file = prepare_error_file((job["error_file"] or "").format_map(job["fields"]))
        self._leaving, told = os.pipe()
        os.set_inheritable(told, True)
        told_of_it = {ERROR_VARIABLE: str(self._error_file), settings.LEAVING: leaving.name_of(told)}
        if self._attachment is not None:
            self._attachment.seek(0)
            os.set_inheritable(self._attachment.fileno(), True)
        self._child = subprocess.Popen(
            job["command"],
            env=_environment(job, self._attachment) | told_of_it,
            # mpirun's own goes to rank 0; that of the others gives neither data nor its end.
            stdin=None if job["fields"]["rank"] == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # PMI_FD, and what is attached
            preexec_fn=os.setpgrp,  # noqa: PLW1509 (one thread): signals go to all that the program starts
        )
        os.close(told)
        self._loop.add_reader(self._leaving, self._hear_of_leaving)
        if self._attachment is not None:
            self._attachment.close()
        for kind, pipe, file in zip((STDOUT, STDERR), (self._child.stdout, self._child.stderr), files, strict=True):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._streams.append(Stream(pipe, file, partial(self._channel.send, kind)))
        self._read_on()

    def _look_at_the_child(self) -> None:
        if self._code is None and self._child is not None and (status := self._child.poll()) is not None:
            self._ended(status)

    def _hear_of_leaving(self) -> None:
        """The program leaves with an error; the others may have failed because of that before it has ended."""
        self._loop.remove_reader(self._leaving)
        if (said := os.read(self._leaving, 1)) and self._code is None:
            self._channel.say(event="leaving", code=said[0])

    def _ended(self, status: int) -> None:
        """Tell it at once, as who was first counts; what is still in the pipes comes after it."""
        self._code = status if status >= 0 else 128 - status
        if not self._held:
            self._drained.set(_DRAIN_SECONDS)
        error = error_message(self._error_file) if self._code and self._error_file else ""
        ended = {"code": self._code, "signal": max(0, -status), "by_mpi": self._ended_by_mpi, "error": error}
        self._channel.say(event="ended", **ended)
        if self._code:
            self._signal(signal.SIGKILL)  # what the program has started
        self._tell_the_end()

    def _tell_the_end(self) -> None:
        if self._code is not None and not self._streams:
            self._channel.say(event="told")
            self._look()

    def _signal(self, number: int) -> None:
        if self._child is not None and number in HARMFUL:
            if not pass_on(self._child.pid, number):
                name = signal.Signals(number).name
                self._complain(f"{name} was not passed on to a program that it would end")
        elif self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, number)

    def _kill(self) -> None:
        if self._code is None:
            self._ended_by_mpi = True
            self._signal(signal.SIGKILL)

    # ---- output ----

    def _read(self, stream: Stream) -> None:
        try:
            data = os.read(stream.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        stream.quiet.cancel()
        if not data:
            self._close(stream)
            return
        if stream.file is not None:
            try:
                stream.file.write(data)
            except OSError as error:
                stream.file = None
                self._complain(f"no more output in the file: {error}")
        stream.feed(data)
        self._expect_more(stream)

    def _expect_more(self, stream: Stream) -> None:
        """A line that is cut by a hold is not one without an end."""
        if stream.unfinished and not self._held:
            stream.quiet.set(_QUIET_SECONDS)

    def _close(self, stream: Stream) -> None:
        self._loop.remove_reader(stream.pipe)
        stream.quiet.cancel()
        self._streams.remove(stream)
        stream.flush()
        self._tell_the_end()

    def _give_up_the_streams(self) -> None:
        for stream in list(self._streams):
            self._close(stream)

    def _complain(self, text: str) -> None:
        self._channel.send(STDERR, f"mpiplus run: {text}\n".encode())

    def _hold(self, who: str, held: bool) -> None:
        """Leave the program's output in its pipes, which stops it at its next print, or go on to read it."""
        was_held = bool(self._held)
        (self._held.add if held else self._held.discard)(who)
        if self._held and not was_held:
            self._drained.cancel()
            for stream in self._streams:
                stream.quiet.cancel()
                self._loop.remove_reader(stream.pipe)
        elif was_held and not self._held:
            self._read_on()

    def _read_on(self) -> None:
        for stream in self._streams:
            self._loop.add_reader(stream.pipe, self._read, stream)
            self._expect_more(stream)
        if self._code is not None:
            self._drained.set(_DRAIN_SECONDS)

    # ---- the launcher ----

    def _heard(self, frame: Frame) -> None:
        if self._job is not None:
            self._obey(frame)
        elif frame.kind == ATTACHMENT:
            self._keep(frame.data)
        else:
            self._begin(frame)

    def _keep(self, data: bytes) -> None:
        """In a file in memory, for the program."""
        if self._attachment is None:
            self._attachment = os.fdopen(os.memfd_create("mpiplus"), "wb")
        self._attachment.write(data)

    def _obey(self, frame: Frame) -> None:
        order = frame.message if frame.kind == MESSAGE else {}
        if "signal" in order and self._code is None:
            self._is_to_end |= order["signal"] in ENDING
            self._signal(order["signal"])
        elif "hold" in order:
            self._hold(_BY_LAUNCHER, order["hold"])
        elif "dismissed" in order:
            self._dismissed = True
            self._look()

    def _launcher_lost(self) -> None:
        """It was killed, or its node is cut off. Nobody will read any more; end the program."""
        self._closed.set()
        if self._job is None:
            self._end(_NO_JOB)
            return
        for who in (_BY_LAUNCHER, _BY_CONNECTION):
            self._hold(who, False)
        self._dismissed = True
        if self._code is None:
            self._signal(signal.SIGTERM)
            self._late.set(self._job["grace"])
        self._look()

    # ---- what mpirun does ----

    def _signalled(self, number: int) -> None:
        if self._code is None:
            self._ended_by_mpi |= number in (signal.SIGTERM, signal.SIGINT)
            self._signal(number)

    def _look_for_others(self) -> None:
        """For the launcher, and for the MPI's daemon; who is dead or cut off closes no connection."""
        was_orphan, self._is_orphan = self._is_orphan, self._code is None and self._daemon.has_died()
        self._look_around.set(SURE_SECONDS if self._is_orphan else LOOK_SECONDS)
        if self._channel.is_silent():
            self._look_around.cancel()
            self._is_cut_off = True
            self._channel.drop()
        elif self._is_orphan and was_orphan and not self._is_to_end:
            self._look_around.cancel()
            self._complain(f"the MPI's daemon on node {socket.gethostname()} has died, which had started this rank")
            self._kill()

    def _guard_ended(self) -> None:
        self._loop.remove_reader(self._guard_gone)
        self._late.set(_ABORT_SECONDS)


def _open_files(job: Mapping[str, Any]) -> list[BinaryIO | None]:
    opened: dict[str, BinaryIO] = {}
    for format_ in (job["stdout"], job["stderr"]):
        if format_ and format_ not in opened:
            path = Path(format_.format_map(job["fields"]))
            path.parent.mkdir(parents=True, exist_ok=True)
            # What an earlier attempt has written stays, unless the user keeps them apart by {attempt}.
            opened[format_] = path.open("ab" if job["attempt"] else "wb", buffering=0)
    return [opened.get(format_ or "") for format_ in (job["stdout"], job["stderr"])]


def _environment(job: Mapping[str, Any], attachment: BinaryIO | None) -> dict[str, str]:
    """The rank's own environment, what the launcher's has besides, and what the job says of this rank."""
    attached = {} if attachment is None else {settings.ATTACHMENT: str(attachment.fileno())}
    own = {**job["own"], **attached}
    for name, field in _OF_SLURM.items():
        if name in os.environ:  # in a batch script its own, which says rank 0 to all
            own[name] = str(job["fields"][field])
    return {**job["defaults"], **job["inherited"], **os.environ, **own}
