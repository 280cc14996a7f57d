"""The launcher of this process: the word of launchers.py, and what only the commands need to know besides."""

from __future__ import annotations

from collections.abc import Mapping

from ..launchers import variables
from ..launchers.variables import Launch, who_am_i

TORCHRUN = "torchrun"


def started_by(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that says how many ranks there are; torchrun itself, where srun has started one on each node."""
    size = environment.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environment and size.isdigit():
        return Launch(TORCHRUN, int(size), "WORLD_SIZE")
    return variables.detect(environment)


def is_shell_step(launch: Launch, environment: Mapping[str, str]) -> bool:
    """Return whether this may be a user's shell in an allocation (``srun --pty bash``): an srun step of one task."""
    of_srun = launch.variable in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE")  # the latter from srun --mpi=pmi2
    return of_srun and launch.size == 1 and environment.get("SLURM_STEP_NUM_TASKS") == "1"


def speaks(environment: Mapping[str, str]) -> bool:
    """Return whether this rank is the one to warn."""
    me = who_am_i(environment)
    if "TORCHELASTIC_RUN_ID" in environment or me is None:
        return environment.get("RANK", "0") == "0"
    return me.rank == 0
