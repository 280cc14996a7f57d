"""The launcher's side of a running job: one loop over mpirun, the supervisors, signals and the clock."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import node
from .formats import FIELDS
from .hosts import Layout
from .outcome import Ending, RankRecord
from .output import Terminal
from .rank import FORWARDED, VARIABLE
from .wire import MESSAGE, STDERR, STDOUT, Channel, ClosedError, Frame

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAUNCHER_SECONDS = 5.0  # for mpirun to end once its ranks have, and again once it is told to
_OWN_ENDING_SECONDS = 1.0  # for supervisors to notice that mpirun has ended, and to end their programs
_NOISE_BYTES = 1 << 16
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
        self.cores: list[int] = list(hello["cores"])
        self.dismissed = False

    def tell(self, **message: Any) -> None:
        """Send an order; a supervisor that is gone shows when its connection is read."""
        with contextlib.suppress(ClosedError):
            self.channel.say(**message)

    def dismiss(self) -> None:
        """Let the supervisor end."""
        if not self.dismissed:
            self.dismissed = True
            self.tell(dismissed=True)


class Watch:
    """Runs mpirun and watches the ranks. After ``run``, ``ended`` says how it ended."""

    def __init__(
        self,
        layout: Layout,
        orders: Orders,
        terminals: Sequence[Terminal],
        timeout: float | None,
        start_timeout: float,
    ) -> None:
        self._layout = layout
        self._orders = orders
        self._terminals = dict(zip((STDOUT, STDERR), terminals, strict=True))
        self._selector = selectors.DefaultSelector()
        self._secret = secrets.token_hex(16)
        self._members: dict[int, Member] = {}
        self._ending = Ending([RankRecord(rank) for rank in range(layout.ranks)])
        self._started = self._closing = False
        now = time.monotonic()
        self._timeout_at = now + timeout if timeout else _NEVER
        self._start_by, self._start_timeout = now + start_timeout, start_timeout
        self._terminate_at = self._kill_at = self._give_up_at = _NEVER
        self._terminate_mpirun_at = self._kill_mpirun_at = _NEVER

    def ended(self) -> Ending:
        """How it ended."""
        return self._ending

    def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start mpirun and return when it and all ranks have ended."""
        with self._listener() as contact, self._signals():
            self._process = subprocess.Popen(
                argv,
                env={**environment, VARIABLE: json.dumps({**contact, "secret": self._secret})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us to pass on
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            self._selector.register(self._process.stdout, selectors.EVENT_READ, self._noise)
            try:
                while not self._over():
                    for key, _ in self._selector.select(0.1):
                        key.data()
                    self._look_at_the_clock()
            finally:
                self._leave_nothing()

    # ---- the supervisors ----

    @contextlib.contextmanager
    def _listener(self) -> Iterator[dict[str, Any]]:
        here = self._layout.here
        self._listening = socket.create_server(("127.0.0.1" if here else "", 0), backlog=1024)
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        try:
            port = self._listening.getsockname()[1]
            yield {"addresses": ["127.0.0.1"] if here else node.addresses(of_all_interfaces=True), "port": port}
        finally:
            self._listening.close()
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.settimeout(5.0)
            channel = Channel(connection)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._greeted(channel))

    def _greeted(self, channel: Channel) -> None:
        """The first words on a connection: from a supervisor, or from a stranger."""
        try:
            frames = channel.receive()
            if not frames:
                return
            hello = frames[0].message if frames[0].kind == MESSAGE else {}
            if not hmac.compare_digest(str(hello.get("secret")), self._secret):
                raise ValueError("a stranger")
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
        self._selector.unregister(self._listening)
        members = [self._members[rank] for rank in range(self._layout.ranks)]
        nodes = [member.node for member in members]
        cores: dict[str, set[int]] = {}
        for member in members:
            cores.setdefault(member.node, set()).update(member.cores)
        orders = self._orders._asdict()
        for rank, (member, place) in enumerate(zip(members, node.places(nodes), strict=True)):
            fields = {"rank": rank, "world_size": len(members), **place._asdict()}
            threads = max(1, len(cores[member.node]) // place.local_world_size)
            who = {name.upper(): str(fields[name]) for name in FIELDS}
            member.tell(
                **{**orders, "own": {**who, "MPIPLUS_RUN": "1", **self._orders.own}},
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
            if record.code and not self._closing:
                self._end(signal.SIGTERM)
        elif frame.kind == MESSAGE and frame.message.get("event") == "told" and record.code == 0:
            member.dismiss()

    def _lost(self, member: Member) -> None:
        self._drop(member.channel)
        member.record.gone = True
        if member.record.code is None:
            self._ending.order.append(member.record)
            if not self._closing:
                self._end(signal.SIGTERM)

    # ---- ends ----

    def _running(self) -> list[Member]:
        return [member for member in self._members.values() if member.record.code is None and not member.record.gone]

    def _send_signal(self, number: int) -> None:
        for member in self._running():
            member.tell(signal=number)

    def _end(self, number: int, grace: float | None = None) -> None:
        """End what still runs, with a signal now and SIGKILL after the grace."""
        self._closing = True
        if not self._started:
            for member in self._running():
                member.channel.socket.shutdown(socket.SHUT_RDWR)
            self._terminate_mpirun_at = time.monotonic()
            return
        for member in self._running():
            member.record.ended_by_us = True
            member.tell(signal=number)
        self._kill_at = min(self._kill_at, time.monotonic() + (self._orders.grace if grace is None else grace))

    def _fail(self, text: str) -> None:
        """End a job that has not started."""
        self._ending.trouble = self._ending.trouble or text
        self._end(signal.SIGTERM)

    def _over(self) -> bool:
        quiet = self._process.poll() is not None and self._process.stdout not in self._open()
        return (quiet and all(member.record.gone for member in self._members.values())) or (
            time.monotonic() > self._give_up_at
        )

    def _open(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        ending = self._ending
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
        if self._process.poll() is not None:
            self._mpirun_ended(self._process.returncode, now)
        if self._started and not self._running() and self._terminate_mpirun_at == _NEVER:
            for member in self._members.values():
                member.dismiss()
            self._terminate_mpirun_at = now + _LAUNCHER_SECONDS
        self._press_mpirun(now)

    def _mpirun_ended(self, code: int, now: float) -> None:
        """Supervisors outlive it a little, to tell what they know."""
        if self._ending.launcher_code is not None:
            return
        self._ending.launcher_code = code if code >= 0 else 128 - code
        self._give_up_at = now + self._orders.grace + 2 * _LAUNCHER_SECONDS
        if not self._started:
            self._ending.trouble = self._ending.trouble or "the ranks did not come up"
            self._closing = True
            for member in self._running():
                member.channel.socket.shutdown(socket.SHUT_RDWR)
        elif not self._closing and self._running():
            self._closing = True
            self._terminate_at = now + _OWN_ENDING_SECONDS
            for member in self._running():
                member.record.ended_by_mpi = True

    def _press_mpirun(self, now: float) -> None:
        """See that mpirun ends too."""
        if now > self._terminate_mpirun_at and self._kill_mpirun_at == _NEVER:
            self._kill_mpirun_at = now + _LAUNCHER_SECONDS
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        if now > self._kill_mpirun_at:
            self._kill_mpirun_at = now + _LAUNCHER_SECONDS
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _noise(self) -> None:
        """What mpirun itself says, or a supervisor that cannot connect."""
        pipe = self._process.stdout
        assert pipe is not None
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
        elif len(self._ending.noise) < _NOISE_BYTES:
            self._ending.noise += data.decode(errors="replace")

    # ---- signals ----

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receive, send = socket.socketpair()
        for end in (receive, send):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in FORWARDED}
        wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        self._selector.register(receive, selectors.EVENT_READ, lambda: self._signalled(receive.recv(4096)))
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            receive.close()
            send.close()

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _ENDING_SIGNALS:
                again = bool(self._ending.signalled)
                self._ending.signalled = self._ending.signalled or number
                self._end(number, 0.0 if again else None)
            elif number in FORWARDED:
                self._send_signal(number)
