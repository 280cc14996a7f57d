"""The description of a job as a user wants it, made once and read by all that start and watch it."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..launchers.layout import Layout, lay_out
from ..launchers.mpirun import Launcher, inherited
from .formats import check_format


@dataclass(frozen=True)
class JobSpec:
    """A program on several ranks.

    The files of ranks are FORMATs with the fields {rank}, {local_rank}, {world_size}, {node_rank}, {local_world_size}
    and {attempt}.
    """

    command: Sequence[str]  # what each rank runs
    nproc: int  # how many ranks; with nnodes how many on each node
    nnodes: int | None = None
    hosts: str | None = None  # h1:2,h2:2 or h1,h2; None: those of the batch allocation, or this node
    hostfile: str | os.PathLike[str] | None = None  # with the same
    map_by: str | None = None  # the launcher's own option of this name
    mpi_args: Sequence[str] = ()  # further options for the launcher
    env: Mapping[str, str] = field(default_factory=dict)  # variables for the ranks, beside this process's
    stdout: str | None = None  # each rank's stdout goes to this file too
    stderr: str | None = None
    error_file: str | None = None  # where torch's @record writes a last exception; None: nowhere that stays
    shown_local_ranks: Sequence[int] | None = None  # whose output is shown, by their numbers on their nodes; None: all
    timeout: float | None = None  # seconds after which the job is ended
    grace: float = 10.0  # seconds between SIGTERM and SIGKILL when the job is ended
    start_timeout: float = 120.0  # seconds for all ranks to come up
    verbose: bool = False  # tell how the job is started
    prefix: bool = True  # "[rank 2]" in front of the lines of rank 2
    colour: bool | None = None  # of that; None: on a terminal, unless NO_COLOR is set
    out: TextIO | None = None  # where the ranks' stdout goes; None: sys.stdout
    err: TextIO | None = None  # where their stderr goes; None: sys.stderr
    launcher: Launcher | str | None = None  # None: the one that belongs to the MPI that mpi4py loads
    attachment: bytes = b""  # for rank 0's program, wherever it runs; :func:`.guard.attachment` reads it there
    attempt: int = 0  # how often the job has been started before
    max_restarts: int = 0  # how often it may be started again

    @functools.cached_property
    def layout(self) -> Layout:
        """Ranks on each node; a ValueError: the numbers do not go together, or ranks would write to one file."""
        if self.nproc < 1 or (self.nnodes is not None and self.nnodes < 1):
            raise ValueError("a job has at least one rank and one node")
        layout = lay_out(self.nproc, self.nnodes, self.hosts, self.hostfile)
        for format_ in filter(None, (self.stdout, self.stderr)):
            check_format(format_, layout.ranks)
        return layout

    def beside(self, command: Sequence[str], **changes: Any) -> JobSpec:
        """Describe a job with another program, which is started as this one's is and shows nothing; with changes."""
        same = ("nproc", "nnodes", "hosts", "hostfile", "map_by", "mpi_args", "env", "grace", "launcher")
        how = {name: getattr(self, name) for name in same}
        return JobSpec(command, **{**how, "prefix": False, "out": io.StringIO(), "err": io.StringIO(), **changes})

    def environment(self) -> dict[str, str]:
        """This process's variables, and those for the ranks. Open MPI does not start without ``HOME``."""
        return {"HOME": os.path.expanduser("~"), **os.environ, **self.env}

    def for_supervisors(self) -> dict[str, Any]:
        """Return the settings that the supervisors of all ranks get."""
        names = ("stdout", "stderr", "grace", "attempt", "error_file")
        told = {name: getattr(self, name) for name in names}
        others = {} if self.layout.here else inherited(self.environment())
        return {**told, "command": list(self.command), "cwd": os.getcwd(), "inherited": others}
