#!/usr/bin/env python3
"""Find, and with `end` also remove, what a CI run has left behind: processes and files in /dev/shm.

A run's processes are known by the variable MPIPLUS_CI_RUN in their environment, its files by their age. Of RUN/STAGE
only the processes can be told from those of stages beside it: check-processes and end-processes.
Files that an MPI library leaves because a test killed its ranks are removed on a CI machine, once no process
uses them; files and processes of ours make the check fail.

Usage: leftovers.py check|end|check-processes|end-processes RUN START_FILE
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

GRACE_SECONDS = 10.0
SHARED = Path("/dev/shm")


def ancestors() -> set[int]:
    """This process and all above it."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def processes(run: str) -> dict[int, str]:
    """The processes of this run, except those that lead to this one: number and command line."""
    marks, own, found = (f"MPIPLUS_CI_RUN={run}".encode(), f"MPIPLUS_CI_RUN={run}/".encode()), ancestors(), {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            variables = (directory / "environ").read_bytes().split(b"\0")
            if int(directory.name) not in own and any(v == marks[0] or v.startswith(marks[1]) for v in variables):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                found[int(directory.name)] = b" ".join(words).decode(errors="replace").strip()
    return found


def in_use(file: Path) -> bool:
    """Whether any process has the file open or mapped."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(file) in (directory / "maps").read_text():
                return True
        with contextlib.suppress(OSError):
            if any(os.readlink(entry) == str(file) for entry in (directory / "fd").iterdir()):
                return True
    return False


def files(since: float) -> list[Path]:
    """Files in /dev/shm made since then that nobody uses."""
    found = []
    for file in SHARED.iterdir() if SHARED.exists() else []:
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_mtime >= since and not in_use(file):
                found.append(file)
    return found


def main() -> int:
    wanted, run, start_file = sys.argv[1:]
    action, _, only_processes = wanted.partition("-")
    since = Path(start_file).stat().st_mtime
    give_up = time.monotonic() + (GRACE_SECONDS if action == "check" else 0)
    while (left := processes(run)) and time.monotonic() < give_up:
        time.sleep(0.2)
    for pid, command in left.items():
        print(f"left behind: process {pid}: {command[:200]}")
        if action == "end":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    unused = [] if only_processes else files(since)
    ours = [file for file in unused if file.name.startswith("mpiplus")]
    for file in ours:
        print(f"left behind: {file}")
    if os.environ.get("CI") == "true":
        for file in unused:
            file.unlink(missing_ok=True)
    return 1 if left or ours else 0


if __name__ == "__main__":
    sys.exit(main())
