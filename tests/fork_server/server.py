"""Takes the clients' requests, and passes each on to a template with the same environment, which it starts if need be.

Usage: server.py DIRECTORY. Ends at the end of its stdin, and removes the directory. A template ends after its last
rank.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
#: What a launcher, MPI, torchrun or a test sets for one rank or one job, and nothing reads before MPI or the package
#: is used. What differs in any other variable gets another template: the loader, Python and torch read many.
OF_A_JOB = re.compile(
    r"(OMPI|OPAL|PMIX|PMI|PRTE|PRRTE|HYD|HYDI|HYDRA|MPI|MPIR|MPICH|UCX|FI|PSM2?|SLURM|TORCHELASTIC|GROUP|ROLE|PYTEST)_"
    r"|MPIPLUS_(?!TEST_COVERAGE|INTEGRATIONS|REPLACE)"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|PYTHON_EXEC)$"
    r"|(PATH|PWD|OLDPWD|SHLVL|_|TMPDIR)$"
)
#: Each has some 300 MB. One that is given up ends after its last rank.
MOST_TEMPLATES = 6
#: Room in the template's environment and command line, where its children write their own.
ROOM = "x" * 60_000
#: For templates, of which some may have ranks still.
SECONDS_TO_END = 5
Environment = tuple[tuple[str, str], ...]


def environment_of(process: int) -> Environment:
    """What another process was started with, without what is of one job."""
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(word).partition("=") for word in words if b"=" in word)
    return tuple(sorted((name, value) for name, _, value in pairs if not OF_A_JOB.match(name)))


class Template:
    """A process that has imported torch, and the socket on which it is sent the clients' connections."""

    def __init__(self, environment: Environment) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, str(FOLDER / "template.py"), str(its.fileno()), ROOM],
                env={**dict(environment), "MPIPLUS_TEST_ROOM": ROOM},
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )

    def send(self, connection: socket.socket) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))]
        self._socket.sendmsg([b"client"], rights)

    def end(self) -> None:
        self._socket.close()


class Templates:
    """Those that run, the one used last at the end."""

    def __init__(self) -> None:
        self._running: dict[Environment, Template] = {}
        self._given_up: list[Template] = []

    def take(self, connection: socket.socket) -> None:
        """Find the one for this client. A client whose connection is closed becomes a fresh process."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        environment = environment_of(struct.unpack("3i", credentials)[0])
        search = dict(environment).get("PYTHONPATH", "")
        if any(not entry.startswith("/") for entry in search.split(":") if search):
            return  # from the client's working directory, which is not a template's
        template = self._running.pop(environment, None)
        if template is None or template.process.poll() is not None:
            template = Template(environment)
        self._running[environment] = template
        template.send(connection)

    def end(self) -> None:
        """Those whose ranks have ended are waited for, so that what they cost is counted."""
        for template in (running := list(self._running.values())):
            template.end()
        until = time.monotonic() + SECONDS_TO_END
        for template in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                template.process.wait(max(0, until - time.monotonic()))

    def tidy(self) -> None:
        while len(self._running) > MOST_TEMPLATES:
            oldest = self._running.pop(next(iter(self._running)))
            oldest.end()
            self._given_up.append(oldest)
        self._given_up = [template for template in self._given_up if template.process.poll() is None]


def serve(listener: socket.socket, templates: Templates) -> None:
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(0, select.POLLHUP)
    while 0 not in (ready := dict(poller.poll())):
        if listener.fileno() in ready:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):  # a client that has been killed
                templates.take(connection)
            templates.tidy()


def main() -> None:
    folder = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        os.write(1, b"ready\n")
        templates = Templates()
        try:
            serve(listener, templates)
        finally:
            templates.end()
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
