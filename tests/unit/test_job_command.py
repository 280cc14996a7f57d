"""The launcher that fits, and what it is started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmpi_plugin.launchers import mpirun
from torchmpi_plugin.launchers.layout import lay_out
from torchmpi_plugin.launchers.mpirun import Launcher, LauncherError, Library, find_launcher, identify

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


def test_the_one_beside_the_library_comes_first(tmp_path, path: Path, library: Library) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 5.0.1")
    beside = program(tmp_path / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    assert find_launcher(library=library).path == beside


def test_one_on_the_path_must_fit(path: Path, library: Library) -> None:
    other = program(path, "mpirun", HYDRA_SAYS)
    right = program(path, "mpiexec", "mpiexec (Open MPI) 5.0.1")
    found = find_launcher(library=library)
    assert found.path == right
    assert found.rejected == {other: "belongs to MPICH (Hydra 4.0.2)"}


def test_none_that_fits(path: Path, library: Library) -> None:
    program(path, "mpirun", HYDRA_SAYS)
    program(path, "mpiexec", "mpiexec (Open MPI) 4.1.4")
    with pytest.raises(LauncherError, match=r"Open MPI 5\.0\.11") as caught:
        find_launcher(library=library)
    for words in (
        "Hydra 4.0.2",
        "of another version (mpiexec (Open MPI) 4.1.4)",
        "--launcher",
        "MPI4PY_LIBMPI=libmpi.so.40",
    ):
        assert words in str(caught.value)


def test_one_that_is_chosen(path: Path, library: Library) -> None:
    right = program(path, "my-mpirun", "mpirun (Open MPI) 5.0.1")
    assert find_launcher(right, library).path == right
    with pytest.raises(LauncherError, match="there is no launcher"):
        find_launcher("no-such-launcher", library)
    with pytest.raises(LauncherError, match="would not find each other"):
        find_launcher(program(path, "other", HYDRA_SAYS), library)
    with pytest.raises(LauncherError, match="does not say"):
        find_launcher(program(path, "bash", "GNU bash"), library)


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
