"""Signals go to those processes of a program that have made provision for them."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from torchmpi_plugin.jobs import signals

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
