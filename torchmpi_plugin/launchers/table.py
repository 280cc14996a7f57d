"""The launchers and batch systems that are known, and all that is known of them: a row for each."""

from __future__ import annotations

from typing import NamedTuple

SCRIPT = "torchrun or a script"
_HYDRA = "an MPICH-family mpiexec (hydra)"


class Kind(NamedTuple):
    """A kind of launcher, by the variables that it sets for each process; an empty name: it does not tell."""

    launcher: str  # as messages call it
    size: str
    rank: str
    local_rank: str = ""
    local_size: str = ""
    node_rank: tuple[str, ...] = ()  # the first that is set counts
    beside: str = ""  # is set too, where the one for the size is not this launcher's alone
    identity: tuple[str, ...] = ()  # what makes a process this rank of this job, beside the rank
    prefixes: tuple[str, ...] = ()  # of all variables that say something of the process or its node
    daemons: tuple[str, ...] = ()  # its processes on the nodes, if they serve one job only
    cure: str = ""  # what else helps where mpi4py has loaded another MPI


_OF_HYDRA = Kind(
    *(_HYDRA, "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    identity=("PMI_FD", "PMI_PORT"),
    prefixes=("PMI_", "HYDRA_"),
    daemons=("hydra_pmi_proxy", "hydra_pmi_prox", "pmi_proxy"),
)
SLURM = Kind(
    *("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    node_rank=("SLURM_NODEID",),
    beside="SLURM_PROCID",
    identity=("SLURM_STEPID",),
    prefixes=("SLURM",),
    cure="choose another srun --mpi=... (pmix for Open MPI, pmi2 for MPICH and its relatives)",
)
OF_SCRIPTS = Kind(
    *(SCRIPT, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    node_rank=("NODE_RANK", "GROUP_RANK"),
    beside="RANK",
    identity=("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    prefixes=("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"),
)
#: In this order: inside an allocation of Slurm's, ranks that others start carry the SLURM_* of the step that those run
#: in. PMI_SIZE alone is also Slurm's (srun --mpi=pmi2) and Flux's, PMIX_RANK whoever's.
#: Open MPI's OMPI_COMM_WORLD_NODE_RANK is not here: it counts processes on the node, not nodes.
LAUNCHERS = (
    Kind(
        *("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        prefixes=("OMPI_", "PRTE_"),
        daemons=("prted", "orted", "prterun"),
    ),
    _OF_HYDRA._replace(beside="MPI_LOCALRANKID"),
    Kind(
        *("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        prefixes=("MV2_COMM_",),
    ),
    Kind("a PMIx launcher", "", "PMIX_RANK", identity=("PMIX_NAMESPACE",), prefixes=("PMIX_",)),
    Kind(
        *("PALS (aprun/mpiexec)", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        prefixes=("PALS_",),
    ),
    Kind(
        *("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"), beside="FLUX_TASK_RANK", prefixes=("FLUX_",)
    ),
    SLURM,
    _OF_HYDRA,
    OF_SCRIPTS,
)
#: Those that MPI knows, or should know.
OF_MPI = LAUNCHERS[:-1]
PREFIXES = tuple(dict.fromkeys(prefix for kind in OF_MPI for prefix in kind.prefixes))
DAEMONS = frozenset(name for kind in LAUNCHERS for name in kind.daemons)


class Batch(NamedTuple):
    """A batch system, by the variables of an allocation; an empty name: it does not tell."""

    name: str
    mark: str  # set in every allocation
    ranks: str = ""  # how many ranks it is for
    nodes: str = ""  # a file with the names of its nodes
    has_line_per_rank: bool = False  # in that file


BATCH_SYSTEMS = (
    Batch("Slurm", "SLURM_JOB_ID", ranks="SLURM_NTASKS"),
    Batch("PBS", "PBS_NODEFILE", nodes="PBS_NODEFILE", has_line_per_rank=True),
    Batch("LSF", "LSB_JOBID", ranks="LSB_DJOB_NUMPROC", nodes="LSB_DJOB_HOSTFILE"),
    Batch("Grid Engine", "PE_HOSTFILE"),
    Batch("Flux", "FLUX_URI"),
)
