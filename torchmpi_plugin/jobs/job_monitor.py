"""The launcher's side of a running job: one loop over mpirun, the supervisors, signals and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .. import settings
from ..launchers.mpirun import asks_for_recovery, tells_of_deaths
from ..node import node
from ..node.listener import Listener
from .channel import MESSAGE, STDERR, STDOUT, Channel, Frame, end_unanswered
from .formats import torch_variables
from .launcher_process import SECONDS as _LAUNCHER_SECONDS
from .launcher_process import LauncherProcess
from .loop import Alarm, raise_into
from .outcome import Ending, RankRecord
from .output import Terminal, without_torchs_prefix
from .signals import ENDING, caught
from .spec import JobSpec
from .stderr import Tracebacks

_OWN_ENDING_SECONDS = 1.0  # for supervisors to notice that mpirun has ended, and to end their programs
_ANSWER_SECONDS = 3.0  # for supervisors to say that their programs have ended, after SIGKILL
_READER_SECONDS = 1.0  # for the reader of the output to take the rest of it
_NOISE_SECONDS = 1.0  # for a launch agent (ssh) to let go of mpirun's output once all else has ended
_LEAVING_SECONDS = 1.0  # for a program that was leaving already to do so with its own exit code
_OTHERS_SECONDS = 0.5  # for ranks to write the traceback that another one has written
_WRITING_SECONDS = 0.1  # between two looks at what the reader has taken
_NEVER = float("inf")


class Member:
    """A rank's supervisor, once it has said which rank it is."""

    def __init__(self, record: RankRecord, channel: Channel, hello: Mapping[str, Any]) -> None:
        self.record = record
        self.channel = channel
        self.identity = str(hello["node"])
        self.process = int(hello["process"])
        self.cores: list[int] = list(hello["cores"])
        self.master: dict[str, str] = dict(hello["master"])
        self.dismissed = False

    def dismiss(self) -> None:
        """Let the supervisor end."""
        if not self.dismissed:
            self.dismissed = True
            self.channel.say(dismissed=True)

    def kill(self, secret: str) -> None:
        """Describe what is left of a silent one on this node: a supervisor that was stopped, and its program."""
        if self.identity != node.identity():
            return
        import psutil

        # Another container's processes have other numbers: be sure that it is ours.
        with contextlib.suppress(OSError, psutil.Error):
            if secret in psutil.Process(self.process).environ().get(settings.JOB, ""):
                node.kill_session(self.process)
                self.record.is_killed = True


class JobMonitor:
    """Runs mpirun and watches the ranks; ``ending`` says how it ended."""

    def __init__(self, spec: JobSpec, terminals: Sequence[Terminal]) -> None:
        self._spec, self._layout = spec, spec.layout
        self._tells_of_deaths = tells_of_deaths(spec.mpi_args)
        self._terminals = dict(zip((STDOUT, STDERR), terminals, strict=True))
        self._writers = {terminal.writer for terminal in terminals}
        self._secret = secrets.token_hex(16)
        self._channels: set[Channel] = set()
        self._members: dict[int, Member] = {}
        records = [RankRecord(rank) for rank in range(spec.layout.ranks)]
        self.ending = Ending(records, recovers=asks_for_recovery(spec.mpi_args))
        self._started = self._closing = self._done = self._held = self._given_up = False
        self._ended_at = self._read_until = _NEVER
        self._kill, self._silence = Alarm(self._send_sigkill), Alarm(self._give_up_the_silent)
        self._unheard = Alarm(self._give_up)
        self._tracebacks, self._name_others = Tracebacks(terminals[1].has_prefix), Alarm(self._say_who_else)
        self._look_again = Alarm(self._look)  # set(0): once, however much happens at a time

    async def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start mpirun and return when it and all ranks have ended."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        raise_into(self._over)
        here = self._layout.here
        self._listener = Listener(self._secret, node.LOOPBACK if here else "", self._layout.ranks, self._welcome)
        addresses = node.addresses(here, of_all_interfaces=True)
        contact = {"addresses": addresses, "port": self._listener.port, "secret": self._secret}
        contact["tells_of_deaths"] = self._tells_of_deaths
        try:
            with caught(self._loop, self._signalled):
                await self._watch(argv, {**environment, settings.JOB: json.dumps(contact)})
        finally:
            self._listener.close()
            for channel in self._channels:
                channel.drop()

    async def _watch(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = LauncherProcess(self._mpirun_changed)
        await self._process.start(argv, environment)
        self._loop.call_later(self._spec.start_timeout, self._not_all_came)
        if self._spec.timeout:
            self._loop.call_later(self._spec.timeout, self._timed_out)
        try:
            await self._over
        finally:
            await self._process.close()
            self.ending.noise = self._process.noise
            for writer in self._writers:
                writer.close()

    def _look(self) -> None:
        if self._over.done():
            return
        self._look_at_the_reader()
        if self._started and not self._running() and not self._done and not self._held:
            self._done = True
            for member in self._members.values():
                member.dismiss()
            self._process.end_in(_LAUNCHER_SECONDS)
        all_gone = all(member.record.gone or member.record.silent for member in self._members.values())
        if self._process.code is not None and all_gone:
            self._unheard.set(_NOISE_SECONDS)
        has_ended = self._given_up or (self._process.is_quiet and all_gone)
        if has_ended and self._all_written():
            self._over.set_result(None)
        elif has_ended or self._held or any(writer.waiting for writer in self._writers):
            self._look_again.set(_WRITING_SECONDS)

    # ---- the supervisors ----

    async def _welcome(self, connection: socket.socket) -> None:
        end_unanswered(connection)
        channel = Channel(lambda frame: self._greeted(channel, frame), lambda: self._channels.discard(channel))
        self._channels.add(channel)
        await channel.open(connection)

    def _greeted(self, channel: Channel, frame: Frame) -> None:
        try:
            hello = frame.message
            rank, size = int(hello["rank"]), int(hello["size"])
            name = str(hello["hostname"])
            ranks = self._layout.ranks
            if rank in self._members or not 0 <= rank < ranks or (size and size != ranks):
                channel.drop()
                self._fail(f"a process on node {name} says it is rank {rank} of {size}, in a job of {ranks}")
                return
            member = Member(self.ending.records[rank], channel, hello)
        except (ValueError, KeyError, TypeError):
            channel.drop()
            return
        member.record.node = name
        self._members[rank] = member
        channel.heard, channel.lost = partial(self._heard, member), partial(self._lost, member)
        if len(self._members) == ranks:
            self._start()

    def _start(self) -> None:
        """All are there: say to each who it is and what to run."""
        self._started = True
        self._listener.close()
        members = [self._members[rank] for rank in range(self._layout.ranks)]
        nodes = [member.identity for member in members]
        cores: dict[str, set[int]] = {}
        for member in members:
            cores.setdefault(member.identity, set()).update(member.cores)
        told, environment = self._spec.for_supervisors(), self._spec.environment()
        wanted = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        restarts = {
            "TORCHELASTIC_RESTART_COUNT": str(self._spec.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.max_restarts),
        }
        members[0].channel.attach(self._spec.attachment)
        for rank, (member, place) in enumerate(zip(members, node.places(nodes), strict=True)):
            fields = {"rank": rank, "world_size": len(members), "local_rank": place.local_rank}
            fields |= {"node_rank": place.node_rank, "local_world_size": place.local_size}
            fields["attempt"] = self._spec.attempt
            member.record.hidden = place.local_rank not in (self._spec.shown_local_ranks or [place.local_rank])
            threads = max(1, len(cores[member.identity]) // place.local_size)
            who = torch_variables(fields, len(set(nodes)))
            who |= {name: members[0].master[name] for name in wanted}
            member.channel.say(
                **told,
                own={**who, settings.RUN: ",".join(who), **restarts, **self._spec.env},
                fields=fields,
                defaults={"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": str(threads)},
            )

    def _heard(self, member: Member, frame: Frame) -> None:
        record, said = member.record, frame.message if frame.kind == MESSAGE else {}
        if frame.kind == STDOUT:
            self._show(STDOUT, record, frame.data)
        elif frame.kind == STDERR:
            self._heard_stderr(record, frame.data)
        elif said.get("event") == "leaving":
            if not record.ended_by_us and not record.ended_by_mpi:
                record.leaves, record.left_with = True, said["code"]
                self.ending.order.append(record)
        elif said.get("event") == "ended":
            record.code, record.signal, record.error = said["code"], said["signal"], said["error"]
            record.ended_by_mpi |= said["by_mpi"]
            if record.ended_by_mpi and not record.signal:
                record.ended_by_mpi = False  # it has ended by itself meanwhile, as who calls MPI_Abort does
            self._ended(record)
        elif said.get("event") == "told" and (record.code == 0 or self._tells_of_deaths):
            # MPI takes a rank for alive as long as its supervisor is, also where it would tell others of its death.
            member.dismiss()
        self._look_again.set(0)

    def _lost(self, member: Member) -> None:
        self._channels.discard(member.channel)
        if self._over.done():
            return
        member.record.gone = True
        if member.record.code is None:
            self._ended(member.record)
        self._look_again.set(0)

    def _ended(self, record: RankRecord) -> None:
        """If it has failed or is dead, so is the job, unless MPI was asked to let the others go on."""
        if record not in self.ending.order:
            self.ending.order.append(record)
        if record.code != 0 and not self._closing and not self.ending.recovers:
            self._end(signal.SIGTERM)

    # ---- the output ----

    def _heard_stderr(self, record: RankRecord, data: bytes) -> None:
        """Show it without torch's prefix, which says the same as ours, and what Ctrl-C has interrupted not at all.

        After Ctrl-C nothing counts as a rank's last words: it did not fail by itself.
        """
        has_prefix, interrupted = self._terminals[STDERR].has_prefix, self._tracebacks.interrupted
        bare = without_torchs_prefix(record.rank, data)
        if not interrupted:
            record.heard(bare.decode(errors="replace").splitlines(keepends=True), self._loop.time())
        shown = bare if has_prefix else data
        if (has_prefix or interrupted) and not record.hidden:
            shown = self._tracebacks.shown(record.rank, shown)
            self._name_others.set(_OTHERS_SECONDS)
        self._show(STDERR, record, shown)

    def _show(self, kind: bytes, record: RankRecord, data: bytes) -> None:
        if not record.hidden:
            self._terminals[kind].show(record.rank, data)

    def _say_who_else(self, at_once: bool = False) -> None:
        """And show what was held of tracebacks for too long."""
        for rank, held in self._tracebacks.released(at_once).items():
            self._terminals[STDERR].show(rank, held)
        self._terminals[STDERR].say(self._tracebacks.others())
        if self._tracebacks.holding:
            self._name_others.set(_OTHERS_SECONDS)

    def _look_at_the_reader(self) -> None:
        """Have the ranks wait for who reads their output, as in a pipe; not once the job is being ended."""
        for writer in self._writers:
            writer.check()
        held = not self._closing and any(writer.is_full(self._held) for writer in self._writers)
        if held != self._held:
            self._held = held
            for member in self._members.values():
                member.channel.say(hold=held)

    def _all_written(self) -> bool:
        """Nothing is left to write, or it is time not to wait for the reader any more."""
        now = self._loop.time()
        if self._ended_at == _NEVER:
            self._ended_at = now
            self._say_who_else(at_once=True)
            for terminal in self._terminals.values():
                terminal.finish()
        self.ending.unread = sum(writer.unread + writer.waiting for writer in self._writers)
        is_patient = not self._closing or now < max(self._read_until, self._ended_at + _READER_SECONDS)
        return not is_patient or not any(writer.waiting for writer in self._writers)

    # ---- ends ----

    def _running(self) -> list[Member]:
        """Those whose programs run, for all that is known."""
        records = ((member, member.record) for member in self._members.values())
        return [member for member, record in records if record.code is None and not (record.gone or record.silent)]

    def _send_signal(self, number: int) -> None:
        for member in self._running():
            member.channel.say(signal=number)

    def _end(self, number: int, grace: float | None = None) -> None:
        """End what still runs, with a signal now and SIGKILL after the grace."""
        self._close()
        if not self._started:
            for member in self._running():
                member.channel.drop()
            self._process.end_in(0)
            return
        for member in self._running():
            if member.record.leaves and grace is None:
                self._loop.call_later(_LEAVING_SECONDS, self._end_rank, member, number)
            else:
                self._end_rank(member, number)
        seconds = self._spec.grace if grace is None else grace
        self._kill.set(seconds)
        self._read_until = min(self._read_until, self._loop.time() + seconds)

    def _end_rank(self, member: Member, number: int) -> None:
        if member in self._running():
            member.record.ended_by_us = True
            member.channel.say(signal=number)

    def _close(self) -> None:
        """From now on the job ends, and nobody waits for a reader of its output longer than that takes."""
        self._closing = True
        self._read_until = min(self._read_until, self._loop.time() + self._spec.grace)
        for writer in self._writers:
            writer.is_patient = False

    def _fail(self, text: str) -> None:
        self.ending.trouble = self.ending.trouble or text
        self._end(signal.SIGTERM)

    def _not_all_came(self) -> None:
        if not self._started and not self._closing:
            self.ending.missing = [record.rank for record in self.ending.records if record.rank not in self._members]
            self._fail(f"not all ranks have come up within {self._spec.start_timeout:g} s")

    def _timed_out(self) -> None:
        if not self._closing:
            self.ending.timed_out = sorted(member.record.rank for member in self._running())
            self.ending.is_timeout = True
            self._end(signal.SIGTERM)

    def _send_sigkill(self) -> None:
        self._send_signal(signal.SIGKILL)
        self._silence.set(_ANSWER_SECONDS)

    def _give_up_the_silent(self) -> None:
        """Do without those that have not ended: stopped supervisors, or nodes that cannot be reached."""
        for member in self._running():
            member.record.silent = True
            member.kill(self._secret)
            self._process.end_in(0)
        self._look_again.set(0)

    def _give_up(self) -> None:
        self._given_up = True
        self._look_again.set(0)

    def _mpirun_changed(self) -> None:
        """Supervisors outlive it a little, to tell what they know."""
        if self.ending.launcher_code is None:
            # On a busy node it may take longer to end than it was given; what its ranks say is how the job ended.
            in_vain = self._process.is_late and all(record.code == 0 for record in self.ending.records)
            self.ending.launcher_code = 0 if in_vain else self._process.code
            self._loop.call_later(self._spec.grace + 2 * _LAUNCHER_SECONDS, self._give_up)
            if not self._started:
                self._fail("the ranks did not come up")
            elif not self._closing and self._running():
                self._close()
                self._loop.call_later(_OWN_ENDING_SECONDS, self._end, signal.SIGTERM)
                for member in self._running():
                    member.record.ended_by_mpi = True
        self._look_again.set(0)

    # ---- signals ----

    def _signalled(self, number: int) -> None:
        if number in ENDING:
            again = bool(self.ending.signalled)
            self.ending.signalled = self.ending.signalled or number
            self._tracebacks.interrupted = self.ending.signalled == signal.SIGINT
            self._end(number, 0.0 if again else None)
        else:
            self._send_signal(number)
