"""The launcher that fits, and what it is started with; other parts of `mpiplus run` that start nothing."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from patience import wait_until

from torchmpi_plugin.jobs.formats import check_format
from torchmpi_plugin.jobs.output import Stream, Terminal, destination
from torchmpi_plugin.launchers import mpirun
from torchmpi_plugin.launchers.layout import Node, allocated_ranks, lay_out, parse_nodes, read_hostfile
from torchmpi_plugin.launchers.mpirun import Launcher, LauncherError, Library, find_launcher, identify
from torchmpi_plugin.node import node
from torchmpi_plugin.node.node import Place, places

OPEN_MPI = Library("Open MPI", "5.0.11", "Open MPI v5.0.11", "openmpi", "/opt/ompi/lib/libmpi.so.40", "")
MPICH = Library("MPICH", "5.0.2", "MPICH Version: 5.0.2", "mpich", "/opt/mpich/lib/libmpi.so.12", "")
BATCH = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}

HYDRA_SAYS = "HYDRA build details:\n    Version:                                 4.0.2\n"


def test_launchers_say_whose_they_are() -> None:
    assert identify("mpirun (Open MPI) 5.0.11\n\nReport bugs to") == ("Open MPI", "mpirun (Open MPI) 5.0.11")
    assert identify(HYDRA_SAYS) == ("MPICH", "Hydra 4.0.2")
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619"
    for text, family in (("prterun (PRRTE) 3.0.5", "Open MPI"), (intel, "MPICH"), ("slurm 22.05.8", "Slurm")):
        assert identify(text) == (family, text)


def program(directory: Path, name: str, says: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    (directory / name).chmod(0o755)
    return str(directory / name)


@pytest.fixture
def library(tmp_path) -> Library:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so.40").touch()
    return Library(**{**vars(OPEN_MPI), "path": str(tmp_path / "lib/libmpi.so.40")})


@pytest.fixture
def path(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(mpirun.os, "get_exec_path", lambda: [f"{tmp_path}/path"])
    return tmp_path / "path"


def test_which_launcher_is_found(tmp_path, path: Path, library: Library) -> None:
    """One that fits; the one beside the library comes first."""
    other = program(path, "mpirun", HYDRA_SAYS)
    wrong = program(path, "mpiexec", "mpiexec (Open MPI) 4.1.4")
    with pytest.raises(LauncherError, match=r"Open MPI 5\.0\.11") as caught:
        find_launcher(library=library)
    version = "of another version (mpiexec (Open MPI) 4.1.4)"
    for words in ("Hydra 4.0.2", version, "--launcher", "MPI4PY_LIBMPI=libmpi.so.40"):
        assert words in str(caught.value)
    right = program(path, "mpiexec", "mpiexec (Open MPI) 5.0.1")
    found = find_launcher(library=library)
    assert (found.path, found.rejected) == (wrong, {other: "belongs to MPICH (Hydra 4.0.2)"}) and wrong == right
    beside = program(tmp_path / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    assert find_launcher(library=library).path == beside


def test_one_that_is_chosen(path: Path, library: Library) -> None:
    right = program(path, "my-mpirun", "mpirun (Open MPI) 5.0.1")
    assert find_launcher(right, library).path == right
    others = program(path, "other", HYDRA_SAYS), program(path, "bash", "GNU bash")
    for chosen, problem in zip(
        ("no-such", *others), ("no launcher", "not find each other", "does not say"), strict=True
    ):
        with pytest.raises(LauncherError, match=problem):
            find_launcher(chosen, library)


def test_srun_in_an_allocation_without_mpirun(path: Path, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "srun", "slurm 22.05.8")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert find_launcher(library=library).family == "Slurm"


# ---- command lines ----


def line(found: Library, *layout, environment=None, family: str | None = None, **more) -> str:
    """The options of the launcher, without the supervisor's command."""
    used = Launcher("launcher", family or found.flavour.name, "", found)
    words = mpirun.launch_command(used, lay_out(*layout, environment=environment or {}), **more)
    return " ".join(words[1:-3])


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mpirun.node, "cores", lambda: [0, 1])
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "MPI4PY_MPIABI", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("user")
def test_open_mpi() -> None:
    assert line(OPEN_MPI, 2) == "-n 2 --bind-to none"
    assert line(OPEN_MPI, 3) == "-n 3 --oversubscribe --bind-to none"
    assert line(OPEN_MPI, 2, map_by="core", mpi_args=["--x"]) == "-n 2 --map-by core --x"
    assert line(OPEN_MPI, 2, mpi_args=["--bind-to", "core"]) == "-n 2 --bind-to core"
    forwarded = "-x PATH -x MPIPLUS_JOB"
    assert line(OPEN_MPI, 4, None, "a:2,b:2") == f"-n 4 --host a:2,b:2 --bind-to none {forwarded}"
    in_batch = line(OPEN_MPI, 3, 2, environment=BATCH)
    assert in_batch == f"-n 6 --map-by ppr:3:node --bind-to none {forwarded}"


@pytest.mark.usefixtures("user")
def test_mpich() -> None:
    assert line(MPICH, 3) == "-n 3"
    assert line(MPICH, 4, None, "a:2,b:2") == "-n 4 -hosts a,b -ppn 2"
    assert line(MPICH, 3, None, "a:2,b:2") == "-n 3 -hosts a:2,b:1"
    assert line(MPICH, 3, 2, environment=BATCH, map_by="core") == "-n 6 -ppn 3 -map-by core"


@pytest.mark.usefixtures("user")
def test_srun(tmp_path) -> None:
    srun = program(tmp_path, "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    used = Launcher(srun, "Slurm", "", MPICH)
    words = mpirun.launch_command(used, lay_out(2, 2, environment=BATCH))
    assert words[1:6] == ["--kill-on-bad-exit=1", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmi2"]
    with pytest.raises(LauncherError, match=r"no --mpi=pmix, which Open MPI 5.0.11 needs .*none pmi2"):
        mpirun.launch_command(Launcher(srun, "Slurm", "", OPEN_MPI), lay_out(2, environment=BATCH))
    chosen = mpirun.launch_command(used, lay_out(2, environment=BATCH), mpi_args=["--mpi=none"])
    assert chosen[1:4] == ["--kill-on-bad-exit=1", "--ntasks=2", "--mpi=none"]


@pytest.mark.usefixtures("user")
def test_the_environment_has_the_cures() -> None:
    here = {"RANK": "3", "PATH": "/bin"}
    used = Launcher("mpirun", "Open MPI", "", OPEN_MPI)
    alone = mpirun.launch_environment(used, lay_out(2, environment={}), here)
    assert alone == {"PATH": "/bin", "OMPI_MCA_btl": "^ofi"}
    crowded = mpirun.launch_environment(used, lay_out(3, environment={}), {"OMPI_MCA_btl": "tcp,self"})
    assert crowded == {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert mpirun.launch_environment(used, lay_out(4, None, "a:2,b:2", environment={}), {}) == {}
    assert mpirun.launch_environment(Launcher("", "MPICH", "", MPICH), lay_out(3, environment={}), {}) == {}


def test_ranks_are_not_started_as_parts_of_an_srun_step() -> None:
    used = Launcher("mpirun", "MPICH", "", MPICH)
    step = {"PMI_RANK": "0", "PMI_FD": "9", "PMIX_SERVER_URI2": "x", "PMIX_RANK": "0", "PMIX_MCA_gds": "hash"}
    assert mpirun.launch_environment(used, lay_out(3, environment={}), step) == {"PMIX_MCA_gds": "hash"}


def test_who_asks_for_recovery() -> None:
    for words in (["--with-ft", "ulfm"], ["--x", "--with-ft=ulfm"], ["--enable-recovery"], ["-disable-auto-cleanup"]):
        assert mpirun.asks_for_recovery(words)
    assert not mpirun.asks_for_recovery(["--with-ft", "none"])


def test_other_hosts_get_what_the_user_has_set() -> None:
    environment = {"MY": "1", "RANK": "0", "SLURM_PROCID": "0", "PMIX_RANK": "1", "PWD": "/x", "MPIPLUS_JOB": "secret"}
    assert mpirun.inherited(environment) == {"MY": "1"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("log-{rnak}", "unknown field {rnak}"),
        ("log-{rank!x}", "no file name"),
        ("log-{rank:x.5}", "no file name"),
        ("log", "same file for all 4"),
    ],
)
def test_a_format_that_cannot_work(words: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_format(words, 4)


@pytest.mark.parametrize("text", ["h1,,h2", "h1:", "h1:x", "h1:0", ":4"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="is no node"):
        parse_nodes(text)


def test_hostfiles(tmp_path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(ValueError, match="cannot be read"):
        read_hostfile(file)
    for text, nodes in {
        "h1 slots=2 max-slots=4\n\n# a comment\nh2 slots=3 # and another\n": [Node("h1", 2), Node("h2", 3)],
        "h1:2\nh2\n": [Node("h1", 2), Node("h2", None)],
        "h1\nh1\nh2\n": [Node("h1", 2), Node("h2", 1)],
    }.items():
        file.write_text(text)
        assert read_hostfile(file) == nodes
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="names no node"):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("nproc", "nnodes", "hosts", "ranks", "spread"),
    [
        (4, None, "h1:2,h2:2", 4, [("h1", 2), ("h2", 2)]),
        (3, None, "h1,h2", 3, [("h1", 2), ("h2", 1)]),
        (2, None, "h1:4,h2:4", 2, [("h1", 2)]),
        (2, 2, "h1,h2,h3", 4, [("h1", 2), ("h2", 2)]),
    ],
)
def test_ranks_are_spread(nproc: int, nnodes: int | None, hosts: str, ranks: int, spread: list) -> None:
    layout = lay_out(nproc, nnodes, hosts, environment={})
    assert (layout.ranks, list(layout.nodes)) == (ranks, spread)
    assert not layout.here


def test_where_the_ranks_are() -> None:
    """This decides whether the launcher listens to other nodes, and whether Open MPI needs its fabrics."""
    assert lay_out(2, environment={})[-2:] == (True, True)
    assert lay_out(2, hosts="localhost:2", environment={})[-2:] == (True, True)
    assert lay_out(2, environment={"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"})[-2:] == (True, False)
    assert lay_out(2, environment={"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"})[-2:] == (False, False)
    assert lay_out(2, 2, environment={"PBS_NODEFILE": "f"})[-2:] == (False, False)


def test_the_ranks_of_an_allocation(tmp_path) -> None:
    (tmp_path / "nodes").write_text("h1\nh1\nh2\n")
    assert allocated_ranks({}) is None
    assert allocated_ranks({"SLURM_NTASKS": "8"}) == 8
    assert allocated_ranks({"LSB_DJOB_NUMPROC": "6"}) == 6
    assert allocated_ranks({"PBS_NODEFILE": str(tmp_path / "nodes")}) == 3


def test_places_go_by_the_order_of_ranks() -> None:
    wanted = (0, 2, 0), (0, 3, 1), (1, 2, 0), (1, 3, 1), (2, 3, 1)
    assert places(["b", "a", "b", "a", "a"]) == [Place(*place) for place in wanted]


def test_a_session_is_killed_and_nobody_else() -> None:
    leader, other = (
        subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    )
    children = [psutil.Process(int(process.stdout.readline())) for process in (leader, other)]
    node.kill_session(leader.pid)
    assert leader.wait(20) == -signal.SIGKILL
    wait_until(lambda: not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE, 20)
    assert children[1].is_running() and other.poll() is None
    node.kill_session(other.pid)
    for process in (leader, other):
        process.wait(20)
        process.stdout.close()


def test_lines_are_kept_together() -> None:
    sent: list[bytes] = []
    stream = Stream(io.BytesIO(), None, sent.append)
    stream.feed(b"one\ntw")
    assert stream.unfinished
    stream.feed(b"o\n10%\r")
    assert not stream.unfinished
    stream.feed(b"prompt> ")
    stream.flush()
    stream.feed(b"x" * 100_000)
    assert sent == [b"one\n", b"two\n10%\r", b"", b"prompt> ", b"x" * 100_000]


def show(*pieces: tuple[int, bytes], **options: bool) -> str:
    stream = io.StringIO()
    terminal = Terminal(stream, **{"prefix": True, "colour": False, **options})
    for rank, data in pieces:
        terminal.show(rank, data)
    terminal.finish()
    terminal.writer.close(10)
    assert not terminal.writer.waiting
    return stream.getvalue()


def test_pieces_of_lines() -> None:
    """An open line goes on unless another rank speaks; a character may come in two pieces."""
    assert show((0, b"a"), (0, b"b\n")) == "[rank 0] ab\n"
    assert show((0, b"a"), (1, b"c\n"), (0, b"b")) == "[rank 0] a\n[rank 1] c\n[rank 0] b\n"

    assert show((0, b"\xc3"), (1, b"x\n"), (0, b"\xbc\n"), (0, b"\xff\n"), prefix=False) == "x\nü\n�\n"


def test_streams_that_lead_to_one_place(tmp_path) -> None:
    """Their lines must keep their order."""
    with (tmp_path / "a").open("a") as one, (tmp_path / "a").open("a") as other, (tmp_path / "b").open("a") as third:
        assert destination(one) == destination(other) != destination(third)
    text = io.StringIO()
    assert destination(text) == destination(text) != destination(io.StringIO())
