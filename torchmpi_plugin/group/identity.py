"""What torch asks a group about itself.

The base class answers most of this from its C++ backends, of which a group in Python has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from .._bridge import Calls
from ..diagnosis.flight_recorder import Subject
from ..tensors.device import types as device_types


class Identity(dist.ProcessGroup):
    """Ranks, names, devices and settings of a group."""

    def __init__(
        self, rank: int, size: int, name: str, global_ranks: Sequence[int], store: dist.Store, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the overload for Python subclasses
        self._rank, self._size = rank, size
        self._global_ranks = list(global_ranks)
        self._store = store
        self._name = name
        self._description = ""
        #: What operations need to know of the group, in C as in Python.
        self._calls = Calls()
        self._calls.rank, self._calls.size = rank, size
        self._calls.extensions = []
        self._calls.timeout = timeout.total_seconds()
        self._name_subject()

    def _name_subject(self) -> None:
        self._calls.subject = Subject(self._name, self._description, tuple(self._global_ranks))

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - the names of the C++ virtual functions

    def name(self) -> str:
        """The backend's name."""
        return "mpiplus"

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def sequence(self) -> int:
        """How many collectives were begun: the same on all ranks that agree."""
        return self._calls.sequence

    @property
    def last_entry(self) -> tuple[Any, ...] | None:
        """The last collective, as the flight recorder keeps it."""
        return self._calls.last

    def getGroupName(self) -> str:  # noqa: N802
        """torch's name for the group."""
        return self._name

    group_name = pg_name = property(getGroupName)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch when the group is registered."""
        self._name = name
        self._name_subject()

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group was made for."""
        return self._description

    group_desc = property(getGroupDesc)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch when the group is registered."""
        self._description = description
        self._name_subject()

    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in device_types():
            raise RuntimeError(f"group {self._name!r} runs on mpiplus, which has no backend for {device}")
        return self

    get_backend = _get_backend

    def _set_default_backend(self, backend_type: Any) -> None:
        pass  # there is only one

    def _has_hooks(self) -> bool:
        return False

    def get_group_store(self) -> dist.Store:
        """The group's prefix of torch's store."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.sequence

    def _set_sequence_number_for_group(self) -> None:
        pass  # every rank counts from zero

    @property
    def supports_coalescing(self) -> bool:
        """Whether operations between ``_start_coalescing`` and ``_end_coalescing`` become one Work."""
        return True

    @property
    def supports_time_estimate(self) -> bool:
        """NCCL's estimate of a collective's time."""
        return False

    @property
    def options(self) -> Any:
        """The group's settings as torch's base class has them."""
        options: Any = torch_internals.backend_class().Options("mpiplus", timedelta(seconds=self._calls.timeout))
        options.global_ranks_in_group = self._global_ranks
        options.group_name = self._name
        return options
