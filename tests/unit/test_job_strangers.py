"""Strangers on the port of `mpiplus run`, before its ranks have come and after: the job goes on and ends right."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import strangers

from torchmpi_plugin.jobs.job import run_job
from torchmpi_plugin.jobs.spec import JobSpec
from torchmpi_plugin.launchers.mpirun import Launcher, Library

MPIRUN = Path(__file__).parent / "scripts" / "plain_mpirun.py"
RANKS = 2
DESCRIPTORS = 40
MEMORY_GROWTH = 64 << 20


def attack_again() -> None:
    """What the ranks run: they have come, so the port is closed."""
    port = int(os.environ["PORT"])
    with contextlib.suppress(ConnectionRefusedError):
        strangers.ATTACKS[os.environ["ATTACK"]](port)
    try:
        strangers.silent(port)
    except ConnectionRefusedError:
        print("refused")


def run(mpirun: str) -> None:
    """The process of `mpiplus run`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    library = Library("MPICH", "4", "MPICH 4", "mpich", "", "")
    before = strangers.peak_memory(os.getpid())
    command = [sys.executable, __file__, "attack_again"]
    result = run_job(JobSpec(command, nproc=RANKS, launcher=Launcher(mpirun, "MPICH", "", library)))
    grown = strangers.peak_memory(os.getpid()) - before
    print(json.dumps({"code": result.returncode, "message": result.message, "grown": grown}))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("attack", strangers.ATTACKS)
def test_strangers_cannot_stop_a_job(attack: str, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nexec {sys.executable} {MPIRUN} "$@"\n')
    mpirun.chmod(0o755)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    job = subprocess.run(
        [sys.executable, __file__, "run", str(mpirun)],
        env={**os.environ, "ATTACK": attack, "PYTHONPATH": paths},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    *lines, result = job.stdout.splitlines()
    assert sorted(lines) == [f"[rank {rank}] refused" for rank in range(RANKS)], job.stdout
    ended = json.loads(result)
    assert (ended["code"], ended["message"]) == (0, ""), ended
    assert ended["grown"] < MEMORY_GROWTH


if __name__ == "__main__":
    {"run": run, "attack_again": attack_again}[sys.argv[1]](*sys.argv[2:])
