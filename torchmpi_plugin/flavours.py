"""The flavours of MPI: all that differs between Open MPI and the relatives of MPICH, apart from its CUDA switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Flavour(NamedTuple):
    """One row of the table."""

    name: str
    file: str  # the library's
    programs: tuple[str, ...]  # launchers that it comes with, the likeliest first
    marks: tuple[str, ...]  # in what these say on --version, in small letters
    srun: tuple[str, ...]  # values of srun --mpi that it understands
    by_pmi: bool  # it finds its peers over PMI-1, which bootstrap.py can serve, and need not be started over PMIx
    is_strict: bool  # a launcher of another major version starts its ranks by other means
    keeps_finalize_threads: bool  # a thread may still be in a call of MPI's while MPI_Finalize runs
    shares_communicators: bool  # it has few: many groups of the same ranks share one
    waits_in_pmi: bool = True  # a rank can leave out MPI_Finalize and be waited for by PMI's barrier alone
    quick: Mapping[str, str] = {}  # variables for jobs on one node
    crowded: Mapping[str, str] = {}  # variables for nodes with more ranks than cores


OPEN_MPI = Flavour(
    name="Open MPI",
    file="libmpi.so.40",
    programs=("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    marks=("open mpi", "openrte", "prrte"),
    srun=("pmix",),
    by_pmi=False,
    is_strict=True,
    keeps_finalize_threads=True,
    shares_communicators=False,
    quick={"OMPI_MCA_btl": "^ofi"},  # else a search for fabrics takes a second
    # Ranks that spin on the cores others need: 8,000 us instead of 7 for 8 bytes.
    crowded={"OMPI_MCA_mpi_yield_when_idle": "1"},
)
MPICH = Flavour(
    name="MPICH",
    file="libmpi.so.12",
    programs=("mpiexec", "mpiexec.hydra", "mpirun", "mpiexec.mpich"),
    marks=("hydra", "mpich", "intel(r) mpi", "mvapich", "pals"),
    srun=("pmi2",),
    by_pmi=True,
    is_strict=False,
    keeps_finalize_threads=False,  # it frees there what that thread looks at
    shares_communicators=True,
)
#: Its MPI_Finalize wants messages of all ranks first: those that come to it would wait for ever.
INTEL_MPI = MPICH._replace(waits_in_pmi=False)
FLAVOURS = (OPEN_MPI, MPICH)


def flavour_of(vendor: str) -> Flavour:
    """Find the row of a library by its maker, or its own description; what is not Open MPI is a relative of MPICH."""
    return OPEN_MPI if OPEN_MPI.name in vendor else INTEL_MPI if "Intel" in vendor else MPICH


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    vendor: str  # as mpi4py names its maker
    version: str
    text: str  # its own description
    abi: str  # openmpi, mpich or mpiabi (the standard's); empty where mpi4py was built for one MPI of another ABI
    path: str  # the library's file; empty where it cannot be told
    extension: str  # mpi4py's extension module
    pmix: bool = False  # whether ranks of the MPICH family can be started over PMIx, as by Open MPI's mpirun

    @property
    def flavour(self) -> Flavour:
        """The MPI flavour whose launchers fit."""
        return flavour_of(self.vendor)

    @property
    def name(self) -> str:
        return f"{self.vendor} {self.version}"

    @property
    def headline(self) -> str:
        """The first line of its description."""
        return " ".join(self.text.split("\n")[0].split())[:200]

    @property
    def cure(self) -> str:
        """What to do where a launcher belongs to another MPI: mpi4py's wheels choose theirs, a build has one."""
        if self.abi in ("openmpi", "mpich"):  # which only a wheel's extensions have in their names
            files = "libmpi.so.40 of Open MPI, libmpi.so.12 of MPICH, on Debian libmpich.so.12, or a full path"
            return f"make mpi4py load the launcher's MPI (MPI4PY_LIBMPI={files})"
        build = "MPICC=mpicc pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py"
        return f"build mpi4py for the launcher's MPI ({build})"

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])
