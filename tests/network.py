"""Nodes on one machine: network namespaces on a bridge, each with a host name of its own.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), and ``ip``, ``tc``, ``unshare`` and ``nsenter``. What it makes, it
removes. ``hosts/on_nodes.py`` runs any command on such hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

SUBNET = "10.77.9"
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")


def missing() -> str:
    """Why there can be no nodes here; empty if there can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (Debian: iproute2, util-linux)"
    name = f"mpp{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def _do(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Hosts:
    """Nodes named node1, node2, ..., which can reach each other and nothing else.

    ``rate``: what each can send, as tc writes it ("1gbit"); empty: as fast as the machine copies memory.
    """

    def __init__(self, count: int, directory: Path, rate: str = "") -> None:
        self._rate = rate
        self._mark = f"mpp{uuid.uuid4().hex[:5]}"
        self._directory = directory
        self.names = [f"node{index + 1}" for index in range(count)]
        self.agent = directory / "launch-agent"
        #: A directory that nodes do not share.
        self.own = directory / "own"

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def make(self) -> None:
        """Switch, cables, addresses, names."""
        switch = self._space("switch")
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "up")
        table = "".join(f"{SUBNET}.{index} {name}\n" for index, name in enumerate(self.names, 1))
        (self._directory / "hosts").write_text("127.0.0.1 localhost\n" + table)
        self.own.mkdir()
        for index, name in enumerate(self.names, 1):
            Path(f"{self.own}-{name}").mkdir()
            self._plug_in(switch, name, f"{SUBNET}.{index}/24", f"port{index}")
        self.agent.write_text(self._agent_text())
        self.agent.chmod(0o755)

    def _plug_in(self, switch: str, name: str, address: str, port: str) -> None:
        space = self._space(name)
        _do("ip", "netns", "add", space)
        _do("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _do("ip", "-n", switch, "link", "set", port, "master", "bridge")
        _do("ip", "-n", switch, "link", "set", port, "up")
        _do("ip", "-n", space, "addr", "add", address, "dev", "eth0")
        for device in ("eth0", "lo"):
            _do("ip", "-n", space, "link", "set", device, "up")
        if self._rate:  # latency: how long a packet may wait before it is dropped, and not how long it travels
            shaper = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
            _do("tc", "-n", space, "qdisc", "add", "dev", "eth0", *shaper)
        names = self._directory / f"{name}.uts"
        names.touch()
        _do("unshare", f"--uts={names}", "hostname", name)

    def cut(self, name: str) -> None:
        """Unplug a node."""
        _do("ip", "-n", self._space(name), "link", "set", "eth0", "down")

    def plug_in(self, name: str) -> None:
        """Plug a node in again."""
        _do("ip", "-n", self._space(name), "link", "set", "eth0", "up")

    def _enter(self, name: str) -> str:
        # Not `ip netns exec`, which mounts another /sys.
        mounts = f"mount --bind {self._directory}/hosts /etc/hosts"
        return (
            f"nsenter --uts={self._directory}/{name}.uts --net=/run/netns/{self._space(name)} "
            f"""unshare -m sh -c '{mounts}; mount --bind {self.own}-{name} {self.own}; exec "$@"' sh"""
        )

    def on(self, name: str, command: list[str]) -> list[str]:
        """The command line that runs a command on a node."""
        return ["sh", "-c", f'exec {self._enter(name)} "$@"', "sh", *command]

    def _agent_text(self) -> str:
        """What a launcher runs in place of ssh: options, the node, the command."""
        cases = "\n".join(f'    {name}) exec {self._enter(name)} sh -c "$*" ;;' for name in self.names)
        return (
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f'case "$host" in\n{cases}\n    *) echo "no node $host" >&2; exit 1 ;;\nesac\n'
        )

    def remove(self) -> None:
        """Everything that was made, as far as it was, and what still runs there: a daemon that was cut off."""
        for name in self.names:
            pids = subprocess.run(
                ["ip", "netns", "pids", self._space(name)], check=False, capture_output=True, text=True
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for name in ("switch", *self.names):
            subprocess.run(["ip", "netns", "delete", self._space(name)], check=False, capture_output=True)
        for name in self.names:
            subprocess.run(["umount", str(self._directory / f"{name}.uts")], check=False, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, directory: Path, rate: str = "") -> Iterator[Hosts]:
    """Nodes that exist as long as the block lasts."""
    made = Hosts(count, directory, rate)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def launch(made: Hosts, mpiexec: str, vendor: str, ranks_per_host: int, command: list[str]) -> list[str]:
    """The launcher's command line, run on the first node, for so many ranks on each node."""
    places = ",".join(f"{name}:{ranks_per_host}" for name in made.names)
    ranks = ["-n", str(ranks_per_host * len(made.names))]
    if vendor == "Open MPI":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        forward = [word for name in sorted(os.environ) if name.startswith("MPIPLUS_") for word in ("-x", name)]
        # It forwards neither these nor Python's variables to other nodes by itself.
        bytecode = (name for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX") if name in os.environ)
        forward += [word for name in ("OMP_NUM_THREADS", *bytecode) for word in ("-x", name)]
        agent = ["--prtemca", "plm_ssh_agent", str(made.agent)]
        options = [*agent, "--bind-to", "none", "--host", places, *root, *forward]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(made.agent), "-hosts", places]
    return made.on(made.names[0], [mpiexec, *options, *ranks, *command])


#: Options of `mpiplus run`: a rank on each of two nodes.
ONE_ON_EACH = ("-n", "2", "--hosts", "node1:1,node2:1")


def mpiplus_run(made: Hosts, vendor: str, *words: object) -> list[str]:
    """The same of `mpiplus run`, with its own options."""
    agent = f"--prtemca plm_ssh_agent {made.agent}" if vendor == "Open MPI" else f"-launcher-exec {made.agent}"
    mpiplus = Path(sys.executable).with_name("mpiplus")
    return made.on(made.names[0], list(map(str, [mpiplus, "run", "--mpi-args", agent, *words])))


@contextlib.contextmanager
def following(command: Sequence[str], environment: dict[str, str], directory: Path) -> Iterator[subprocess.Popen]:
    """A job in a directory, which prints into its file ``output``. Some launchers never notice that a node is gone."""
    with (directory / "output").open("wb") as output:
        job = subprocess.Popen(
            command, env=environment, cwd=directory, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield job
    finally:
        job.terminate()
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait(10)


def wait_for(files: Sequence[Path], seconds: float, output: Path, job: subprocess.Popen | None = None) -> None:
    """Until a job has made these files; what it has printed tells why it does not. One that is given may not end."""
    until = time.monotonic() + seconds
    while left := [file.name for file in files if not file.exists()]:
        lives = job is None or job.poll() is None
        assert lives and time.monotonic() < until, f"no {', '.join(left)}: {output.read_text()}"
        time.sleep(0.05)
