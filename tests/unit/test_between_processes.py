"""What processes tell each other by signals, pipes and files reaches those that it is meant for, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmpi_plugin import settings
from torchmpi_plugin.communicator.shared_memory import create_file
from torchmpi_plugin.jobs import signals
from torchmpi_plugin.node import leaving
from torchmpi_plugin.node.shared_files import open_share, share

PROGRAM = """
import signal, sys
exec(sys.argv[1])
print("ready", flush=True)
if sys.stdin.readline():  # else the test is over
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    print("unblocked", flush=True)
    sys.stdin.readline()
"""
IGNORES = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
CATCHES = "signal.signal(signal.SIGUSR1, lambda *_: None)"
BLOCKS = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"


@pytest.mark.parametrize(
    ("provision", "unblocks", "passed"),
    [("", False, False), (IGNORES, False, True), (CATCHES, False, True), (BLOCKS, False, True), (BLOCKS, True, False)],
)
def test_who_gets_a_signal(monkeypatch: pytest.MonkeyPatch, provision: str, unblocks: bool, passed: bool) -> None:
    """A shell that starts a program unblocks all signals a moment later, and would die of it."""
    command = [sys.executable, "-c", PROGRAM, provision]
    pipe, alone = subprocess.PIPE, os.setpgrp
    program = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, preexec_fn=alone)  # noqa: PLW1509
    assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
    to, back = program.stdin, program.stdout

    def meanwhile(_: float) -> None:
        if unblocks:
            to.write("unblock\n")
            to.flush()
            assert back.readline() == "unblocked\n"

    monkeypatch.setattr(signals, "time", SimpleNamespace(sleep=meanwhile))
    assert signals.pass_on(program.pid, signal.SIGUSR1) == passed
    program.communicate("\n" if unblocks else "", timeout=30)
    assert program.returncode == 0


def heard(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 9)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("replaced", ["not", "file", "pipe", "closed"])
def test_what_the_number_stands_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: str) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(settings.LEAVING, leaving.name_of(writer))
    users, other = os.pipe()
    if replaced == "file":
        users = other = os.open(tmp_path / "users", os.O_RDWR | os.O_CREAT)
    if replaced == "closed":
        os.close(writer)
    elif replaced != "not":
        os.dup2(other, writer)
    leaving.tell(3)
    assert heard(reader) == (b"\3" if replaced == "not" else b"")
    assert heard(users) == b""
    if replaced == "file":
        assert (tmp_path / "users").read_bytes() == b""
    if replaced in ("file", "pipe"):
        os.fstat(writer)  # open


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_file(4096)
    yield made
    os.close(made)


def test_it_has_no_name(descriptor: int) -> None:
    status = os.fstat(descriptor)
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 4096)


def test_what_another_table_of_processes_has_under_that_number(descriptor: int) -> None:
    offered = share(descriptor, 4096)
    for other in (offered._replace(inode=offered.inode + 1), offered._replace(device=offered.device + 1)):
        with pytest.raises(OSError, match="a file of another process"):
            open_share(os.getpid(), other)
    with pytest.raises(OSError, match="No such file"):
        open_share(0, offered)
