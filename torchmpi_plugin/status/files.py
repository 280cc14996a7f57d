"""Sockets on which this user's ranks answer ``mpiplus status``, in a directory for this user alone.

Not below TMPDIR, which batch systems set for each job: who asks could not find it. Imports neither torch nor MPI.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import settings
from ..node import processes

_ROOT = Path("/tmp")
#: The kernel's limit for the path of a socket: sizeof sun_path, less the zero at the end.
_LONGEST = 107


class RankSocket(NamedTuple):
    """A rank's socket: ``JOB.RANK.PID.sock``."""

    job: str
    rank: int
    pid: int
    path: Path


def directory() -> Path:
    return Path(os.environ.get(settings.STATUS_DIRECTORY) or _ROOT / f"mpiplus-{os.geteuid()}")


def make_directory() -> Path:
    """The directory, made if need be; an OSError: it cannot be made, or others could have put something there."""
    path = directory()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check(path)
    return path


def check(path: Path) -> None:
    """A PermissionError where others could have put something there, a FileNotFoundError without a directory."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is no directory of this user's alone (mode 0700)")


def state_of(process: int) -> str:
    """The letter for it in the kernel's table of processes; empty: there is none."""
    return (processes.stat(process) or [""])[0]


def all_sockets() -> list[RankSocket]:
    """Of all ranks, by job and rank; those that nobody listens to are removed. A PermissionError: see :func:`check`."""
    path = directory()
    try:
        check(path)
    except FileNotFoundError:
        return []
    found = []
    for file in path.glob("*.sock"):
        job, rank, pid = [*file.name.split("."), "", "", ""][:3]
        if not (rank.isdigit() and pid.isdigit()):
            continue
        if state_of(int(pid)) not in ("", "Z", "X") or _is_listened_to(file):
            found.append(RankSocket(job, int(rank), int(pid), file))
        else:
            file.unlink(missing_ok=True)
    return sorted(found)


def _is_listened_to(path: Path) -> bool:
    """By a process that cannot be seen from here: a container's, which shares the directory."""
    with socket.socket(socket.AF_UNIX) as connection, address_of(path) as address:
        connection.setblocking(False)
        try:
            connection.connect(address)
        except OSError as error:
            return isinstance(error, BlockingIOError)  # too many stand in line
    return True


def socket_of(job: str, rank: int) -> Path:
    """The path for this process, where nothing is; an OSError: the directory cannot be made, or is not safe."""
    path = make_directory() / f"{job}.{rank}.{os.getpid()}.sock"
    path.unlink(missing_ok=True)
    return path


def listen_at(path: Path) -> socket.socket:
    """A socket with this path; OSError: there can be none."""
    listening = socket.socket(socket.AF_UNIX)
    listening.setblocking(True)  # whatever the program's default is
    with address_of(path) as address:
        listening.bind(address)
    listening.listen(16)
    return listening


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Return what to bind or connect to for a socket with this path, which the kernel may find too long.

    A long one is named through a descriptor of its directory, which is open only inside the context. The directory is
    not entered: other threads may rely on the working directory.

    Raises:
        OSError: there is no such directory, or no descriptor is left.
    """
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
