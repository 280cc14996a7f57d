"""What the environment says about who started this process."""

from __future__ import annotations

import dataclasses
import os

import pytest

from torchmpi_plugin import settings
from torchmpi_plugin.launchers import variables as launchers
from torchmpi_plugin.launchers.variables import Launch, detect, explain_misfit, misfit
from torchmpi_plugin.mpi.library import Library

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
OPEN_MPIS_MPIRUN = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-1", "PMIX_RANK": "0"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "9", "MPI_LOCALRANKID": "0"}
SRUN_PMIX = {**SLURM, "PMIX_NAMESPACE": "slurm.1.0", "PMIX_RANK": "3"}
SRUN_PMI2 = {**SLURM, "PMI_SIZE": "8", "PMI_RANK": "3", "PMI_FD": "9"}


def test_no_launcher() -> None:
    assert detect({}) is None
    assert detect({"SLURM_STEP_NUM_TASKS": "8"}) is None  # an allocation, not a task of it
    assert detect({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # salloc's shell: no step
    assert detect({"OMPI_COMM_WORLD_SIZE": "four"}) is None and detect({"PMI_SIZE": "-1"}) is None


def test_launchers_inside_a_slurm_allocation() -> None:
    """The ranks also carry the variables of the step that mpirun's daemon, or a node's torchrun, runs in."""
    assert detect({**SLURM, **OPEN_MPI}) == Launch("Open MPI's mpirun", 4, "OMPI_COMM_WORLD_SIZE")
    assert detect(SRUN_PMI2) == Launch("Slurm's srun", 8, "SLURM_STEP_NUM_TASKS")
    assert detect({**SLURM, **HYDRA}).variable == "PMI_SIZE"
    found = detect({**SLURM, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "RANK": "5"})
    assert found == Launch("torchrun or a script", 16, "WORLD_SIZE")


def library(vendor: str, version: str, pmix: bool = False) -> Library:
    return Library(vendor, version, f"{vendor} v{version}", "mpich", "/opt/lib/libmpi.so", "", pmix)


MPICH_4, MPICH_5 = library("MPICH", "4.0.2"), library("MPICH", "5.0.2")
MPICH_WITH_PMIX, INTEL = library("MPICH", "5.0.2", True), library("Intel MPI", "2021.18.1")
OPEN_MPI_4, OPEN_MPI_5 = library("Open MPI", "4.1.4"), library("Open MPI", "5.0.11")


@pytest.mark.parametrize(
    ("loaded", "environment"),
    [
        (INTEL, OPEN_MPIS_MPIRUN),
        (MPICH_5, {**OPEN_MPIS_MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}),  # MPI_Init ends this one too
        (MPICH_5, SRUN_PMIX),
        (OPEN_MPI_5, HYDRA),
        (OPEN_MPI_5, {**SLURM, **HYDRA}),
    ],
)
def test_a_launcher_that_cannot_start_the_library(loaded: Library, environment: dict[str, str]) -> None:
    assert misfit(loaded, environment) == detect(environment)


@pytest.mark.parametrize(
    ("loaded", "environment"),
    [
        (OPEN_MPI_5, OPEN_MPIS_MPIRUN),
        (MPICH_5, HYDRA),
        (INTEL, HYDRA),
        (MPICH_WITH_PMIX, OPEN_MPIS_MPIRUN),
        (MPICH_WITH_PMIX, SRUN_PMIX),
        (INTEL, {**OPEN_MPIS_MPIRUN, "I_MPI_PMI": "pmix"}),
        (MPICH_4, {**OPEN_MPIS_MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}),  # alone, as wanted
        (MPICH_4, SRUN_PMIX),  # its libpmi may be Slurm's
        (MPICH_5, SRUN_PMI2),
        (OPEN_MPI_4, SRUN_PMI2),  # if built for it
        (OPEN_MPI_5, SRUN_PMIX),
        (MPICH_4, {**OPEN_MPIS_MPIRUN, **HYDRA}),  # mpiexec, started by a rank of mpirun's
        (OPEN_MPI_5, {**HYDRA, **OPEN_MPIS_MPIRUN}),  # and the other way round
        (OPEN_MPI_5, {"PMI_SIZE": "4", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1"}),
        (MPICH_5, {**OPEN_MPI, "WORLD_SIZE": "8", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}),  # bootstrap sees to PMI
        (OPEN_MPI_5, {}),
    ],
)
def test_what_may_work_is_not_refused(loaded: Library, environment: dict[str, str]) -> None:
    assert misfit(loaded, environment) is None


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        (OPEN_MPIS_MPIRUN, "make mpi4py load the launcher's MPI (MPI4PY_LIBMPI=libmpi.so.40 of Open MPI"),
        (HYDRA, "on Debian libmpich.so.12"),
        (SRUN_PMIX, "another srun --mpi=... (pmix for Open MPI, pmi2 for MPICH"),
        ({"PALS_SIZE": "5"}, "make mpi4py load the launcher's MPI"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "importing mpi4py.MPI does"),
    ],
)
def test_the_error_names_launcher_library_and_cure(environment: dict[str, str], cure: str) -> None:
    launch = detect(environment)
    assert launch is not None
    text = explain_misfit(launch, MPICH_4)
    for words in (launch.launcher, f"started {launch.size} ranks", "MPICH 4.0.2 (/opt/lib/libmpi.so)", cure):
        assert words in text
    built = explain_misfit(launch, dataclasses.replace(MPICH_4, abi=""))
    assert "LIBMPI" not in built and ("MPICC=mpicc pip install" in built) == ("LIBMPI" in text)


@pytest.mark.parametrize("size", [1, 2])
def test_a_child_may_start_a_world_of_one_as_its_parent_did(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """With more ranks MPI could take it for its parent."""
    variables = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**variables, settings.RANK_PROCESS: ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getpid", os.getppid)
    launchers.mark_as_rank()
    if size == 1:
        launchers.check_not_a_ranks_child()
    else:
        with pytest.raises(RuntimeError, match="is no rank itself"):
            launchers.check_not_a_ranks_child()
