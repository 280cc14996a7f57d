"""The launcher's side of a running job: one loop over mpirun, the supervisors, signals and the clock."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import settings
from ..host import node
from ..host.reception import Reception
from .channel import MESSAGE, STDERR, STDOUT, Channel, ClosedError, Frame, end_unanswered
from .formats import FIELDS
from .guard import VARIABLE
from .hosts import Layout
from .launcher_process import SECONDS as _LAUNCHER_SECONDS
from .launcher_process import LauncherProcess
from .outcome import Ending, RankRecord
from .output import Terminal
from .signals import FORWARDED, caught
from .writing import Writer

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OWN_ENDING_SECONDS = 1.0  # for supervisors to notice that mpirun has ended, and to end their programs
_ANSWER_SECONDS = 3.0  # for supervisors to say that their programs have ended, after SIGKILL
_READER_SECONDS = 1.0  # for the reader of the output to take the rest of it
_NEVER = float("inf")


class Orders(NamedTuple):
    """What every rank is told."""

    command: Sequence[str]
    cwd: str
    stdout: str | None
    stderr: str | None
    grace: float
    inherited: Mapping[str, str]
    own: Mapping[str, str]


class Member:
    """A rank's supervisor, once it has said which rank it is."""

    def __init__(self, record: RankRecord, channel: Channel, hello: Mapping[str, Any]) -> None:
        self.record = record
        self.channel = channel
        self.node = str(hello["node"])
        self.process = int(hello["process"])
        self.cores: list[int] = list(hello["cores"])
        self.dismissed = False

    def tell(self, **message: Any) -> None:
        """Send an order; a supervisor that is gone shows when its connection is read."""
        with contextlib.suppress(ClosedError):
            self.channel.say(**message)

    def attach(self, data: bytes) -> None:
        """Send what its program is to have; where that fails, nothing that came after it would be understood."""
        try:
            self.channel.attach(data)
        except ClosedError:
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def dismiss(self) -> None:
        """Let the supervisor end."""
        if not self.dismissed:
            self.dismissed = True
            self.tell(dismissed=True)

    def kill(self, secret: str) -> None:
        """What is left of a silent one, if it is on this host: a supervisor that was stopped, and its program."""
        if self.node != node.identity():
            return
        with contextlib.suppress(OSError):  # another container's processes have other numbers; be sure that it is ours
            if secret.encode() in Path(f"/proc/{self.process}/environ").read_bytes():
                node.kill_session(self.process)
                self.record.is_killed = True


class Watch:
    """Runs mpirun and watches the ranks. After ``run``, ``ended`` says how it ended."""

    def __init__(
        self,
        layout: Layout,
        orders: Orders,
        terminals: Sequence[Terminal],
        timeout: float | None,
        start_timeout: float,
        recovers: bool = False,
        attachment: bytes = b"",
    ) -> None:
        self._layout = layout
        self._orders = orders
        self._attachment = attachment
        self._terminals = dict(zip((STDOUT, STDERR), terminals, strict=True))
        self._selector = selectors.DefaultSelector()
        self._secret = secrets.token_hex(16)
        self._members: dict[int, Member] = {}
        self._ending = Ending([RankRecord(rank) for rank in range(layout.ranks)], recovers=recovers)
        self._started = self._closing = self._done = self._held = False
        now = time.monotonic()
        self._timeout_at = now + timeout if timeout else _NEVER
        self._start_by, self._start_timeout = now + start_timeout, start_timeout
        self._terminate_at = self._kill_at = self._silent_at = self._give_up_at = _NEVER
        self._ended_at = self._read_until = _NEVER

    def ended(self) -> Ending:
        """How it ended."""
        return self._ending

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start mpirun and return when it and all ranks have ended."""
        with self._reachable() as contact, caught(FORWARDED, self._selector, self._signalled):
            job = json.dumps({**contact, "secret": self._secret})
            self._process = LauncherProcess(argv, {**environment, VARIABLE: job})
            self._selector.register(self._process, selectors.EVENT_READ, self._noise)
            try:
                while not self._over():
                    for key, _ in self._selector.select(0.1):
                        key.data()
                    self._look_at_the_clock()
            finally:
                self._process.close()
                self._ending.noise = self._process.noise
                for writer in self._writers():
                    writer.close()

    # ---- the supervisors ----

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[dict[str, Any]]:
        here = self._layout.here
        address = "127.0.0.1" if here else ""
        self._reception = Reception(self._selector, self._secret, address, self._layout.ranks, self._welcome)
        try:
            addresses = [address] if here else node.addresses(of_all_interfaces=True)
            yield {"addresses": addresses, "port": self._reception.port}
        finally:
            self._reception.close()
            self._selector.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)
        end_unanswered(connection)
        channel = Channel(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._greeted(channel))

    def _greeted(self, channel: Channel) -> None:
        """A supervisor's first words."""
        try:
            frames = channel.receive()
            if not frames:
                return
            hello = frames[0].message
            rank, size = int(hello["rank"]), int(hello["size"])
        except (ClosedError, ValueError, KeyError, TypeError):
            self._drop(channel)
            return
        ranks = self._layout.ranks
        if rank in self._members or not 0 <= rank < ranks or (size and size != ranks):
            self._drop(channel)
            self._fail(f"a process on host {hello['host']} says it is rank {rank} of {size}, in a job of {ranks}")
            return
        record = self._ending.records[rank]
        record.host = str(hello["host"])
        member = self._members[rank] = Member(record, channel, hello)
        self._selector.modify(channel, selectors.EVENT_READ, lambda: self._told(member))
        if len(self._members) == ranks:
            self._start()

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()

    def _start(self) -> None:
        """All are there: say to each who it is and what to run."""
        self._started = True
        self._reception.close()
        members = [self._members[rank] for rank in range(self._layout.ranks)]
        nodes = [member.node for member in members]
        cores: dict[str, set[int]] = {}
        for member in members:
            cores.setdefault(member.node, set()).update(member.cores)
        orders = self._orders._asdict()
        members[0].attach(self._attachment)
        for rank, (member, place) in enumerate(zip(members, node.places(nodes), strict=True)):
            fields = {"rank": rank, "world_size": len(members), "local_rank": place.local_rank}
            fields |= {"node_rank": place.node_rank, "local_world_size": place.local_size}
            threads = max(1, len(cores[member.node]) // place.local_size)
            who = {name.upper(): str(fields[name]) for name in FIELDS}
            member.tell(
                **{**orders, "own": {**who, settings.RUN: "1", **self._orders.own}},
                fields=fields,
                defaults={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)},
            )

    def _told(self, member: Member) -> None:
        try:
            frames = member.channel.receive()
        except ClosedError:
            self._lost(member)
            return
        for frame in frames:
            self._heard(member, frame)

    def _heard(self, member: Member, frame: Frame) -> None:
        record = member.record
        if frame.kind in self._terminals:
            text = self._terminals[frame.kind].show(record.rank, frame.data)
            if frame.kind == STDERR:
                record.heard(text.splitlines(keepends=True), time.monotonic())
        elif frame.kind == MESSAGE and frame.message.get("event") == "ended":
            said = frame.message
            record.code, record.signal = said["code"], said["signal"]
            record.ended_by_mpi |= said["by_mpi"]
            if record.ended_by_mpi and not record.signal:
                record.ended_by_mpi = False  # it has ended by itself meanwhile, as who calls MPI_Abort does
            self._ending.order.append(record)
            if record.code:
                self._failed()
        elif frame.kind == MESSAGE and frame.message.get("event") == "told" and record.code == 0:
            member.dismiss()

    def _lost(self, member: Member) -> None:
        self._drop(member.channel)
        member.record.gone = True
        if member.record.code is None:
            self._ending.order.append(member.record)
            self._failed()

    def _failed(self) -> None:
        """One rank is dead, and so is the job, unless MPI was asked to let the others go on."""
        if not self._closing and not self._ending.recovers:
            self._end(signal.SIGTERM)

    # ---- the output ----

    def _writers(self) -> set[Writer]:
        return {terminal.writer for terminal in self._terminals.values()}

    def _look_at_the_reader(self) -> None:
        """Have the ranks wait for who reads their output, as in a pipe; not once the job is being ended."""
        writers = self._writers()
        for writer in writers:
            writer.check()
        held = not self._closing and any(writer.is_full(self._held) for writer in writers)
        if held != self._held:
            self._held = held
            for member in self._members.values():
                if not member.record.gone:
                    member.tell(hold=held)

    def _all_written(self, now: float) -> bool:
        """Nothing is left to write, or it is time not to wait for the reader any more."""
        if self._ended_at == _NEVER:
            self._ended_at = now
            for terminal in self._terminals.values():
                terminal.finish()
        self._ending.unread = sum(writer.unread + writer.waiting for writer in self._writers())
        is_patient = not self._closing or now < max(self._read_until, self._ended_at + _READER_SECONDS)
        return not any(writer.waiting for writer in self._writers()) or not is_patient

    # ---- ends ----

    def _running(self) -> list[Member]:
        """Those whose programs run, for all that is known."""
        records = ((member, member.record) for member in self._members.values())
        return [member for member, record in records if record.code is None and not (record.gone or record.silent)]

    def _send_signal(self, number: int) -> None:
        for member in self._running():
            member.tell(signal=number)

    def _end(self, number: int, grace: float | None = None) -> None:
        """End what still runs, with a signal now and SIGKILL after the grace."""
        self._close()
        if not self._started:
            self._hang_up()
            self._process.end_at(time.monotonic())
            return
        for member in self._running():
            member.record.ended_by_us = True
            member.tell(signal=number)
        limit = time.monotonic() + (self._orders.grace if grace is None else grace)
        self._kill_at = min(self._kill_at, limit)
        self._read_until = min(self._read_until, limit)

    def _close(self) -> None:
        """From now on the job ends, and nobody waits for a reader of its output longer than that takes."""
        self._closing = True
        self._read_until = min(self._read_until, time.monotonic() + self._orders.grace)
        for writer in self._writers():
            writer.is_patient = False

    def _hang_up(self) -> None:
        for member in self._running():
            member.channel.socket.shutdown(socket.SHUT_RDWR)

    def _fail(self, text: str) -> None:
        """End a job that has not started."""
        self._ending.trouble = self._ending.trouble or text
        self._end(signal.SIGTERM)

    def _over(self) -> bool:
        now = time.monotonic()
        quiet = self._process.code() is not None and self._process.is_quiet
        ended = quiet and all(member.record.gone or member.record.silent for member in self._members.values())
        return (ended or now > self._give_up_at) and self._all_written(now)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        ending = self._ending
        self._reception.look_at_the_clock()
        if not self._started and now > self._start_by and not self._closing:
            missing = [record.rank for record in ending.records if record.rank not in self._members]
            ending.missing = missing
            self._fail(f"not all ranks have come up within {self._start_timeout:g} s")
        if now > self._timeout_at and not self._closing:
            ending.timed_out = sorted(member.record.rank for member in self._running())
            ending.is_timeout = True
            self._end(signal.SIGTERM)
        if now > self._terminate_at:
            self._terminate_at = _NEVER
            self._end(signal.SIGTERM)
        if now > self._kill_at:
            self._kill_at = _NEVER
            self._send_signal(signal.SIGKILL)
            self._silent_at = min(self._silent_at, now + _ANSWER_SECONDS)
        if now > self._silent_at:
            self._silent_at = _NEVER
            self._give_up_the_silent(now)
        self._look_at_the_reader()
        code = self._process.code()
        if code is not None:
            self._mpirun_ended(code, now)
        if self._started and not self._running() and not self._done and not self._held:
            self._done = True
            for member in self._members.values():
                member.dismiss()
            self._process.end_at(now + _LAUNCHER_SECONDS)
        self._process.press(now)

    def _give_up_the_silent(self, now: float) -> None:
        """Do without those that have not ended: stopped supervisors, or hosts that cannot be reached."""
        for member in self._running():
            member.record.silent = True
            member.kill(self._secret)
            self._process.end_at(now)

    def _mpirun_ended(self, code: int, now: float) -> None:
        """Supervisors outlive it a little, to tell what they know."""
        if self._ending.launcher_code is not None:
            return
        self._ending.launcher_code = code
        self._give_up_at = now + self._orders.grace + 2 * _LAUNCHER_SECONDS
        if not self._started:
            self._ending.trouble = self._ending.trouble or "the ranks did not come up"
            self._close()
            self._hang_up()
        elif not self._closing and self._running():
            self._close()
            self._terminate_at = now + _OWN_ENDING_SECONDS
            for member in self._running():
                member.record.ended_by_mpi = True

    def _noise(self) -> None:
        self._process.read()
        if self._process.is_quiet:
            self._selector.unregister(self._process)

    # ---- signals ----

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _ENDING_SIGNALS:
                again = bool(self._ending.signalled)
                self._ending.signalled = self._ending.signalled or number
                self._end(number, 0.0 if again else None)
            elif number in FORWARDED:
                self._send_signal(number)
