"""A fork server: ranks of tests as forks of a process that has imported torch, which takes 0.02 s in place of 1.5.

`python()` names a small program (``client.c``), which stands in a command line where Python would, and takes Python's
arguments. It asks the server (``server.py``) for a process. The server keeps a *template* (``template.py``) for each
environment: a Python that has imported torch and this package, but not MPI, and has one thread. The template forks, and
the child takes on what the client was given (``adoption.py``): arguments, environment, descriptors, working directory,
umask, limits, affinity, signals, namespaces. The client passes on the signals that it gets, and ends as the child ends.
What no template can do becomes a fresh process: without a server, options of Python's, a script from stdin.

A rank made this way differs from a fresh process in this:

- Its parent is the template. It leads a session and a process group of its own; a signal to the client goes on to that
  group if the client leads one, as the launchers have it, else to the rank alone. No SIGSTOP goes on, and no SIGTSTP,
  as the session has no terminal. That the rank is stopped is not to be seen at the client. A client that is killed
  takes the rank's group with it.
- torch and parts of the package are in ``sys.modules``; what they would have printed at their import is in the server's
  log. Objects made by then are no garbage (``gc.freeze``). The outermost frame is one of ``template.py``.
- At its end what it has from the template is left to the kernel (``ending.py``): torch's modules are not emptied, nor
  destructors of shared libraries run.
- Ranks of one template have the same hash seed and the same addresses in memory.
- When the template ends, its ranks are killed.

Tests of what is listed here are marked ``fresh``, with the reason, and start Python itself; with
``MPIPLUS_TEST_FRESH=1`` all do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent
#: Asks for fresh processes.
FRESH = "MPIPLUS_TEST_FRESH"
#: The directory of the server that runs, for the processes that share the tests.
RUNNING = "MPIPLUS_TEST_FORK_SERVER"
CLIENT, INTERPRETER, SOCKET, LOG = "python", "interpreter", "socket", "log"
SECONDS_TO_END = 20


def python() -> str:
    """What to write into a command line for Python: the client where there is a server, else Python itself."""
    if os.environ.get(FRESH) == "1":
        return sys.executable
    start()
    folder = os.environ[RUNNING]
    return str(Path(folder, CLIENT)) if folder else sys.executable


def start() -> None:
    """Start the server, unless this process or one above it has. It ends with the process that has started it."""
    if RUNNING in os.environ or os.environ.get(FRESH) == "1":
        return
    try:
        server = Server()
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        warnings.warn(f"no fork server, so that the tests take longer: {error}", stacklevel=2)
        os.environ[RUNNING] = ""  # nobody tries again
        return
    os.environ[RUNNING] = str(server.folder)
    atexit.register(server.stop)


class Server:
    """A server with a directory of its own. Its stdin is a pipe from this process, at whose end it ends."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpp-fork-"))  # which nobody else may enter
        try:
            self._build_client()
            self._start()
        except BaseException:
            shutil.rmtree(self.folder)
            raise

    @property
    def python(self) -> str:
        return str(self.folder / CLIENT)

    def _build_client(self) -> None:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("there is no C compiler")
        (self.folder / INTERPRETER).symlink_to(sys.executable)
        flags = "-std=gnu11 -O1 -Wall -Wextra -o"
        command = [*compiler.split(), *flags.split(), self.python, str(FOLDER / "client.c")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def _start(self) -> None:
        with (self.folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(FOLDER / "server.py"), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        assert self.process.stdout is not None
        with self.process.stdout as ready:
            if ready.readline() != b"ready\n":
                self.stop()
                raise RuntimeError((self.folder / LOG).read_text().strip()[-500:])

    def stop(self) -> None:
        """It removes its directory."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
