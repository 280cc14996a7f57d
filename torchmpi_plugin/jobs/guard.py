"""What mpirun starts for each rank: a guard, and a supervisor that runs the user's program.

The guard is the process that mpirun knows. It does nothing but wait and pass signals on. The supervisor has left
mpirun's process group, so it outlives the SIGKILL with which mpirun ends a job, and can still read and send what
the program has printed and how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from .. import settings
from ..host import node
from ..host.launchers import who_am_i
from ..host.reception import call
from .channel import ATTACHMENT, MESSAGE, Channel, ClosedError, Frame
from .signals import FORWARDED

VARIABLE = settings.JOB  # for the supervisors, from the launcher: where it listens
_CONNECT_SECONDS = 20.0
_ANSWER_SECONDS = 600.0  # the launcher answers when all ranks are there, and has a shorter limit for that


def _connect(addresses: list[str], port: int, secret: str) -> Channel:
    try:
        return Channel(call(addresses, port, secret, _CONNECT_SECONDS))
    except OSError as error:
        raise SystemExit(
            f"mpiplus run: host {socket.gethostname()} cannot connect to the launcher, port {port} ({error}). The "
            f"hosts must reach each other over TCP: look for a firewall, or a host that does not know its own address."
        ) from None


def _greet(job: Mapping[str, Any]) -> tuple[Channel, dict[str, Any], list[Frame]]:
    """Connect, say who this is, and wait for the others; what to run, and what came right after it."""
    me = who_am_i(os.environ)
    if me is None:
        raise SystemExit(
            "mpiplus run: the launcher told this process no rank (no OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, ...); "
            "under srun choose --mpi=pmix or --mpi=pmi2"
        )
    channel = _connect(job["addresses"], job["port"], job["secret"])
    channel.say(
        rank=me.rank,
        size=me.size,
        host=socket.gethostname(),
        node=node.identity(),
        process=os.getpid(),
        cores=node.cores(),
    )
    channel.socket.settimeout(_ANSWER_SECONDS)
    attachment, frames = _receive(channel)
    channel.socket.settimeout(None)
    if frames[0].kind != MESSAGE or "command" not in frames[0].message:
        raise ClosedError("no command")
    return channel, {**frames[0].message, "attachment": attachment}, frames[1:]


def _receive(channel: Channel) -> tuple[int | None, list[Frame]]:
    """What came ahead of the first message, as a file in memory; the message, and what came together with it."""
    attachment, frames = None, list[Frame]()
    while not frames:
        frames = channel.receive()
        while frames and frames[0].kind == ATTACHMENT:
            attachment = os.memfd_create("mpiplus") if attachment is None else attachment
            data = memoryview(frames.pop(0).data)
            while data:
                data = data[os.write(attachment, data) :]
    if attachment is not None:
        os.lseek(attachment, 0, os.SEEK_SET)
        os.set_inheritable(attachment, True)
    return attachment, frames


def attachment() -> bytes:
    """What :func:`.job.run_job` was given for rank 0, of which this is the program. It can be read once."""
    with open(int(os.environ.pop(settings.ATTACHMENT)), "rb") as file:
        return file.read()


def _guard(supervisor: int) -> int:
    """Pass signals on until the supervisor ends; its exit code."""
    for number in FORWARDED:
        signal.signal(number, lambda received, _: _pass_on(supervisor, received, signal.SIGCONT))
    _, status = os.waitpid(supervisor, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        node.kill_session(supervisor)  # somebody killed the supervisor; its program must not stay
    return code if code >= 0 else 128 - code


def _pass_on(process: int, *numbers: int) -> None:
    """The signals; SIGCONT among them has one that was stopped hear the others."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        for number in numbers:
            os.kill(process, number)


def _supervise(guard_gone: int) -> int:
    from .supervisor import Supervisor

    try:
        channel, job, early = _greet(json.loads(os.environ.pop(VARIABLE)))
    except (ClosedError, TimeoutError):
        return 1  # the launcher has ended, or given up, and said why
    return Supervisor(channel, job, guard_gone, early).run()


def main() -> None:
    """Be the guard, and its child the supervisor."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)  # a launcher may have been started with some of them ignored
    guard_gone, keep = os.pipe()
    supervisor = os.fork()
    if supervisor:
        os.close(guard_gone)
        sys.exit(_guard(supervisor))
    os.close(keep)
    os.setsid()
    sys.exit(_supervise(guard_gone))
