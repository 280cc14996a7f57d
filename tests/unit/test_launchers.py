"""What the environment says about who started this process."""

from __future__ import annotations

import pytest

from torchmpi_plugin.launchers import Launch, detect

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("environment", "size", "launcher"),
    [
        (OPEN_MPI, 4, "Open MPI"),
        ({"PMI_SIZE": "3"}, 3, "hydra"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2, "MVAPICH"),
        (SLURM, 8, "srun"),
        ({"PALS_SIZE": "5"}, 5, "PALS"),
        ({"FLUX_JOB_SIZE": "6", "FLUX_TASK_RANK": "0"}, 6, "Flux"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, 2, "torchrun"),
    ],
)
def test_each_launcher(environment: dict[str, str], size: int, launcher: str) -> None:
    found = detect(environment)
    assert found is not None
    assert found.size == size
    assert launcher in found.launcher
    assert environment[found.variable] == str(size)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "8"},  # an allocation, not a task of it
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # salloc's shell: no step
        {"FLUX_JOB_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": ""},
        {"OMPI_COMM_WORLD_SIZE": "four"},
        {"PMI_SIZE": "-1"},
    ],
)
def test_no_launcher(environment: dict[str, str]) -> None:
    assert detect(environment) is None


def test_mpirun_inside_a_slurm_allocation() -> None:
    """The ranks also carry the variables of the step that mpirun's daemon runs in."""
    assert detect({**SLURM, **OPEN_MPI}) == Launch("Open MPI's mpirun", 4, "OMPI_COMM_WORLD_SIZE")


def test_torchrun_in_a_slurm_step() -> None:
    """srun starts one torchrun per node, whose ranks inherit what srun said of that."""
    found = detect({**SLURM, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "RANK": "5"})
    assert found is not None
    assert found.size == 16
    assert "torchrun" in found.launcher


def test_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MV2_COMM_WORLD_SIZE", "7")
    found = detect()
    assert found is not None
    assert found.size == 7
