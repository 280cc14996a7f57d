"""A Slurm cluster of two nodes on one machine, whose daemons are started by hand.

Everything is new and has names of its own, and goes away at the end, but for what Debian's packages have installed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import network

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "munged")
CPUS = 4
#: Debian's pmix plug-in looks for the library by its development name.
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")
CONFIGURATION = """
ClusterName={first}
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=30
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
TmpFS={directory}/tmp-%n
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPort={port}
SlurmdPort={next_port}
KillWait=5
NodeName={first},{second} CPUs={cpus}
PartitionName=ci Nodes={first},{second} Default=YES State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)}; on Debian: apt-get install slurm-wlm munge libpmix2"
    return network.missing()


class Batch(NamedTuple):
    """A job of Slurm's: its number, and the file with what it prints."""

    job: str
    log: Path


@dataclass
class Cluster:
    """Two nodes that run Slurm's daemons."""

    directory: Path
    network: network.Hosts

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def on(self, host: str, *command: str) -> list[str]:
        """The command line that runs a command on a node."""
        return self.network.on(host, list(command))

    def run(self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = 30) -> str:
        """Run a client of Slurm's on the first node; what it says."""
        done = subprocess.run(
            self.on(self.network.names[0], *command),
            env={**os.environ, **(environment or {}), **self.environment},
            cwd=self.directory,
            check=False,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}{self.logs()}")
        return done.stdout

    def submit(
        self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> tuple[int, str]:
        """Run a batch script; its exit code and all it has printed, or what is known if it did not end."""
        batch = self.start(script, arguments, environment)
        state = self.wait(batch, seconds)
        return int(state.partition(" ExitCode=")[2].partition(":")[0]), batch.log.read_text()

    def start(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Batch:
        """Submit a batch script."""
        words = ["--parsable", "--time=20", "--open-mode=append", f"--chdir={self.directory}"]
        log = self.directory / f"{secrets.token_hex(4)}.log"
        job = self.run("sbatch", *words, f"--output={log}", str(script), *arguments, environment=environment)
        return Batch(job.strip(), log)

    def wait(self, batch: Batch, seconds: float) -> str:
        """Wait for its end; how that was, in Slurm's words."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = self.run("scontrol", "--oneliner", "show", "job", batch.job)
            if any(f"JobState={end}" in state for end in ("COMPLETED", "FAILED", "CANCELLED")):
                return state
            time.sleep(0.2)
        self.run("scancel", batch.job)
        log = batch.log.read_text() if batch.log.exists() else ""
        raise TimeoutError(f"job {batch.job} did not end: {state}\n{log}{self.logs()}")

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        tails = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.directory.glob("slurm*.log"))]
        return "\n".join(tails)


def _start_daemons(cluster: Cluster) -> None:
    directory, (first, second) = cluster.directory, cluster.network.names
    port = 20000 + secrets.randbelow(12000)  # below those that the system gives to whoever asks for any
    for name in ("state", "spool", f"tmp-{first}", f"tmp-{second}"):
        (directory / name).mkdir()
    text = CONFIGURATION.format(
        first=first, second=second, directory=directory, cpus=CPUS, port=port, next_port=port + 1
    )
    (directory / "slurm.conf").write_text(text)
    (directory / "munge.key").write_bytes(secrets.token_bytes(128))
    (directory / "munge.key").chmod(0o400)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={directory}/munge.{end}" for option, end in files.items()]
    subprocess.run(["munged", "--force", *options], check=True, capture_output=True, timeout=20)
    environment = {**os.environ, **cluster.environment}
    daemons = (first, ["slurmctld", "-c"]), (first, ["slurmd", "-N", first]), (second, ["slurmd", "-N", second])
    for host, daemon in daemons:
        subprocess.run(cluster.on(host, *daemon), env=environment, check=True, timeout=20)


def _wait_until_idle(cluster: Cluster) -> None:
    until = time.monotonic() + 60
    state = ""
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            state = cluster.run("sinfo", "--noheader", "--Node", "--format=%T")
        if state.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    raise RuntimeError(f"the cluster did not come up: {state}{cluster.logs()}")


def _stop(cluster: Cluster) -> None:
    numbers = []
    for file in (*cluster.directory.glob("slurm*.pid"), cluster.directory / "munge.pid"):
        with contextlib.suppress(OSError, ValueError):
            numbers.append(int(file.read_text()))
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, wanted)
        until = time.monotonic() + 5
        while any(Path(f"/proc/{number}").exists() for number in numbers) and time.monotonic() < until:
            time.sleep(0.05)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """A cluster that is ready for jobs, and gone afterwards."""
    directory.chmod(0o755)
    linked = PMIX.parent.exists() and not PMIX.exists()
    if linked:
        PMIX.symlink_to("libpmix.so.2")
    try:
        with network.hosts(2, directory) as hosts:
            cluster = Cluster(directory, hosts)
            try:
                _start_daemons(cluster)
                _wait_until_idle(cluster)
                yield cluster
            finally:
                _stop(cluster)
    finally:
        if linked:
            PMIX.unlink()
