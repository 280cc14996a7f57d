"""A user's options for a group beyond torch's own arguments."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

from . import settings, torch_internals
from .names import BACKEND

API_MODES = ("direct", "dispatcher")
#: Of version 0.2, which the next one still takes.
_OLD_API_MODES = {"process_group": "direct", "backend": "dispatcher"}
#: What each may be, but for the communicator.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "abort_on_exception": (True, False),
    "cuda": (*settings.CUDA_PATHS, None),
    "api_mode": API_MODES,
    "collectives": (*settings.COLLECTIVES_OF, None),
    "reproducible": (True, False, None),
    "wire_dtype": (*settings.WIRE_DTYPES, None),
}


@dataclass
class Options:
    """Pass as ``pg_options`` of ``init_process_group``, or of ``new_group``.

    Attributes:
        comm: an ``mpi4py`` intracommunicator. The world then consists of its ranks; torch's ranks are
            its ranks unless the rendezvous says otherwise. It is duplicated, never used itself. For a subgroup it
            must have just the group's ranks.
        abort_on_exception: of the world: an exception that nobody catches on one rank ends the whole job, so that
            the others do not wait for it. The variable ``MPIPLUS_ABORT_ON_EXCEPTION=0`` switches this off as well.
        cuda: of the world: how CUDA tensors travel. "staged": through host memory; "ipc": the same, but long ones
            between the devices of a node, where the driver allows it; "direct": MPI is handed their addresses, and
            reductions are computed on the device, or staged; None: as the variable ``MPIPLUS_CUDA`` says, or "auto",
            which asks the MPI library. The same on all ranks, or all stage.
        collectives: "own": mpiplus's, over shared memory and between nodes; "mpi": those of the MPI library, which may
            have them in hardware; "auto": as the file of the variable ``MPIPLUS_TUNING`` says, else mpiplus's, but on
            more than 16 nodes MPI's for what is not short; None: as the variable ``MPIPLUS_COLLECTIVES`` says. Of a
            group; what its rank 0 has counts.
        reproducible: sums have the same bits wherever the ranks are: see docs/sharp-bits.md. Always over mpiplus's
            collectives. None: as the variable ``MPIPLUS_REPRODUCIBLE`` says. Of a group; what its rank 0 has counts.
        wire_dtype: the type in which long sums of bfloat16 and float16 cross between nodes that have several ranks.
            "float32", which rounds once, at the end; "tensor": the tensor's own type, which is half the bytes, rounds
            on each node, and overflows sooner in float16. None: as the variable ``MPIPLUS_WIRE_DTYPE`` says. Of
            mpiplus's collectives. Of a group; what its rank 0 has counts. See docs/sharp-bits.md.
        api_mode: "direct": torch calls mpiplus directly, which is fastest; "dispatcher" (from torch 2.15 on): through
            its own process group and dispatcher, as it calls backends in C++. See docs/api-modes.md. In a group with
            other backends it is always the latter.
        face: deprecated: ``api_mode`` under its old name, with its old values "process_group" and "backend".
    """

    comm: Any = None
    abort_on_exception: bool = True
    cuda: str | None = None
    api_mode: str = "direct"
    collectives: str | None = None
    reproducible: bool | None = None
    wire_dtype: str | None = None
    face: str | None = None

    def __post_init__(self) -> None:
        if self.face is not None or str(self.api_mode) in _OLD_API_MODES:
            self._take_over_old_names()
        for name, allowed in _ALLOWED.items():
            given = getattr(self, name)
            if getattr(given, "ndim", 0) or given not in allowed:  # arrays are compared element by element
                words = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
                error = ValueError if isinstance(given, str) and str in map(type, allowed) else TypeError
                raise error(f"Options({name}=...) is {words}, not {given!r}")
        if self.api_mode == "dispatcher" and not torch_internals.has_python_backends():
            raise ValueError("Options(api_mode='dispatcher') needs torch 2.15, which knows backends in Python")

    def _take_over_old_names(self) -> None:
        given = self.api_mode if self.face is None else self.face
        self.api_mode, self.face = _OLD_API_MODES.get(str(given), given), None
        warnings.warn(
            f"Options(face=...) and its values are deprecated: use Options(api_mode={self.api_mode!r})",
            FutureWarning,
            stacklevel=4,
        )


def among(given: Any, shared: bool) -> Options | None:
    """Ours among the ``pg_options`` of a group.

    Args:
        shared: other backends are in the group, and the options may be theirs.

    Raises:
        TypeError: they are not ours, and can be nobody else's; or their communicator is none.
    """
    import torch.distributed as dist

    if isinstance(given, dict) and all(str(name).lower() in dist.Backend.backend_list for name in given):
        given = given.get(BACKEND)
    if isinstance(given, Options):
        comm, mpi = given.comm, sys.modules.get("mpi4py.MPI")
        if comm is not None and not (mpi and isinstance(comm, mpi.Intracomm) and comm):
            raise TypeError(f"Options(comm=...) is an intracommunicator of mpi4py's that is not null, not {comm!r}")
        return given
    if given is None or shared:
        return None
    raise TypeError(f"pg_options must be torchmpi_plugin.Options, not {type(given).__name__}")
