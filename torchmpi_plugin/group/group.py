"""What a group is, besides its operations: those, and what else has files of its own, are in ``process_group.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import forks, torch_internals
from .._bridge import Call, Calls
from ..communicator import cuda_path
from ..communicator.communicator import Communicator
from ..diagnosis import flight_recorder
from ..diagnosis.diagnosis import Diagnosis
from ..engine import engine
from ..engine.work import CoalescedWork, PendingWork, Work
from ..errors import DistBackendError, RankFailedError, attempt
from ..mpi import failures as mpi_failures
from ..mpi import runtime
from ..names import BACKEND, log
from ..store.checkin import CheckIn
from ..tensors.arguments import check_timeout
from ..tensors.device import types as device_types
from . import failures
from .registration import Registration


@dataclass
class Extension:
    """Time added to a group's deadlines, until ``first``, the first operation started after that, is complete."""

    seconds: float
    first: Work | None = None


class Group(dist.ProcessGroup):
    """The base class of ``ProcessGroupMPI``, which has the operations: state, deadlines, failures and hooks."""

    #: For callers from Python: operations between ``_start_coalescing`` and ``_end_coalescing`` become one Work; there
    #: is ``register_abort_hook``.
    supports_coalescing = supports_abort_hooks = True
    #: Of NCCL, in both its names, and of torchcomms.
    supports_time_estimate = _supports_time_estimate = supports_completion_hooks = supports_reconfigure = False
    #: Tells C of the engine.
    _connect: Callable[[engine.Engine], None]
    #: Lets the group's operations run torch's hooks; None where torch has none.
    run_hooks: Callable[[Any], None] | None = None
    #: Gives a group what torch's hooks are attached to; None where torch has none.
    attach: Callable[[Any], None] | None = None
    #: Makes a backend for torch's own group of one of ours.
    as_backend: Callable[[Any], Any] | None = None
    #: Makes a call by torch's dispatcher, where a TorchDispatchMode sees it; None where this torch has no way back.
    _show_to_modes: Callable[..., Any] | None = None
    #: Lets torch's operators work with the group; None where they do so, or cannot.
    _allow_operators: Callable[[], None] | None = None

    def __init__(
        self,
        communicator: Communicator,
        checkin: CheckIn,
        store: dist.Store,
        name: str,
        global_ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        rank, size = communicator.comm.Get_rank(), communicator.comm.Get_size()
        super().__init__(rank, size)  # type: ignore[call-arg]  # the overload for Python subclasses
        self._rank, self._size, self._global_ranks = rank, size, list(global_ranks)
        #: Its class before torch's hooks change that, for groups that are split off.
        self.plain_type = type(self)
        #: The group's corner of the store, and MPI's side of it.
        self._store, self.checkin, self.communicator = store, checkin, communicator
        self._engine = engine.start()
        self._connect(self._engine)
        self._lib, self._ffi = self._engine.lib, self._engine.ffi
        self._handle = communicator.handle
        #: What starting an operation takes of the group, in C.
        self._calls = Calls()
        self._calls.handle, self._calls.rank, self._calls.size = self._handle, rank, size
        self._calls.extensions = []
        self._calls.timeout = timeout.total_seconds()
        self._calls.compares = size > 1 and communicator.compares
        self._calls.largest_tag = communicator.largest_tag
        self._calls.python_only = self._engine.only_thread is not None
        self._calls.subject = flight_recorder.Subject(name, "", tuple(global_ranks))
        #: CUDA tensors that are only moved are handed to MPI itself.
        self._direct, self._reads_devices = cuda_path.current.direct, cuda_path.current.ipc
        #: Of torch, that collects operations now. It does not say when an exception has ended it.
        self._coalescing_block: Any = None
        #: Second halves of operations, still to be begun: the group is needed for them.
        self.second_halves: set[Callable[[int], int]] = set()
        #: For windows: how many there were, and what the group has registered.
        self._next_window = self.next_registration = 0
        self.registrations: list[Registration] = []
        #: The backend's name in the program, which MPIPLUS_REPLACE may have as another's.
        self.known_as = BACKEND
        #: How many groups were split off.
        self._splits = 0
        #: Finds out why an operation takes so long.
        self.diagnosis = Diagnosis(self, communicator.processes)
        self._failure: Exception | None = None
        self._timed_out = False
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        #: It was destroyed; the program has ended, or is about to.
        self.closed = self._left = False
        #: This rank holds the world's store: its server ends when the world is destroyed here.
        self.serves_store = False
        #: The duplicate that torchmpi_plugin.get_comm hands out.
        self.user_communicator: Any = None

    # ---- what torch asks a group about itself: the base class answers most of it from C++ backends ----

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - the names of the C++ virtual functions

    def name(self) -> str:
        return BACKEND

    getBackendName = _get_backend_name = name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self._calls.subject.name

    group_name = pg_name = property(getGroupName)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch when the group is registered."""
        self._calls.subject = self._calls.subject._replace(name=name)

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._calls.subject.description

    group_desc = property(getGroupDesc)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._calls.subject = self._calls.subject._replace(description=description)

    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in device_types():
            raise RuntimeError(f"group {self.group_name!r} runs on mpiplus, which has no backend for {device}")
        return self

    get_backend = _get_backend

    def _has_hooks(self) -> bool:
        return False

    def get_group_store(self) -> dist.Store:
        """The group's prefix of torch's store."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that were begun: the same on all ranks that agree."""
        return self._calls.sequence

    @property
    def options(self) -> Any:
        """The group's settings as torch's base class has them."""
        options: Any = torch_internals.backend_class().Options("mpiplus", self.timeout)
        options.global_ranks_in_group = self._global_ranks
        options.group_name = self.group_name
        return options

    @property
    def supports_window(self) -> bool:
        """True from torch 2.15 on: ``new_window`` works, or ``split_group``, whose members alone make the new group."""
        return torch_internals.has_python_backends()

    supports_splitting = supports_window

    @property
    def supports_shrinking(self) -> bool:
        """True if ``torch.distributed.shrink_group`` works: it needs torch 2.15 and an MPI with ULFM."""
        if not torch_internals.has_python_backends() or forks.forked:
            return False
        return mpi_failures.supported(self.communicator.comm)

    def comm_split_count(self) -> int:
        """Return how many groups were split off; torch makes names of it."""
        return self._splits

    def _nothing(self, *_: Any) -> None:
        """Do what torch wants of others: a group has one backend, is connected, and each rank counts from zero."""

    _set_default_backend = _set_sequence_number_for_group = _nothing
    perform_nocolor_split = eager_connect_single_device = _nothing

    # ---- what the layers above and below ask ----

    @property
    def label(self) -> str:
        """The group's name in messages."""
        return self._calls.subject.label

    @property
    def last_call(self) -> Call | None:
        """The record of the last collective."""
        return self._calls.last

    def global_rank(self, rank: int) -> int:
        return self._global_ranks[rank]

    def arrivals(self, call: PendingWork) -> list[int]:
        """Of each rank 1 if it has come to this operation, 2 if it has done its part; -1 where memory is not shared."""
        return [int(self._lib.mpp_arrived(call.handle, rank)) for rank in range(self._size)]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait over torch's store until every rank has come; an error names those that have not, always all of them."""
        runtime.refuse_in_forked_child("monitored_barrier")
        timeout = self.timeout if timeout is None else check_timeout("monitored_barrier", timeout)
        self.checkin.barrier(timeout, f"monitored_barrier of {self.label}")

    # ---- failures ----

    def break_off(self, why: str) -> None:
        """No operation can follow: the ranks no longer agree on which one is next."""
        self._calls.broken = f"{self.label} is out of step since {why}"

    def gave_up(self, call: PendingWork) -> None:
        """``call`` has failed here: what others send for it, over MPI, may come and find nobody.

        And those who read its tensors on this rank's device must not take for good what they find there.
        """
        self._lib.mpp_group_gave_up(self._handle)
        if not self.communicator.choice.own or min(self.arrivals(call)) < 0:
            self.communicator.may_be_sent_to = True

    def take_back(self, call: PendingWork) -> None:
        """Cancel a receive that nothing has matched yet."""
        self._lib.mpp_cancel(call.handle)

    def failure_of(self, call: PendingWork) -> Exception:
        """The error of an operation that C or MPI gave up."""
        plain: Exception = DistBackendError(f"{call} failed on rank {self._rank}")
        return attempt(f"why {call} failed", lambda: failures.failure_of(self, call), plain)

    def failed(self, error: Exception, timed_out: bool = False) -> None:
        """An operation of the group has failed, which the user is about to hear."""
        if error is not self._failure:
            self._failure, self._timed_out = error, timed_out
            self.run_abort_hooks()
            if flight_recorder.current is not None:
                flight_recorder.current.write_after_failure()

    def why_aborted(self) -> str:
        """What is said of calls that waited when the group was aborted: what had failed before, if that is known."""
        after = "" if self._failure is None else f"; before that: {self._failure}"
        return f"{self._calls.broken or 'the group was aborted'}{after}"

    def get_error(self) -> Any:
        """c10d's ErrorType of the last failure: SUCCESS, TIMEOUT, REMOTE_ERROR (a rank died) or COMM_ERROR."""
        kinds = torch_internals.find(f"{torch_internals.C10D}:ErrorType")
        if self._failure is None:
            return kinds.SUCCESS
        if self._timed_out:
            return kinds.TIMEOUT
        return kinds.REMOTE_ERROR if isinstance(self._failure, RankFailedError) else kinds.COMM_ERROR

    # ---- hooks: torch's before and after each operation, and those of an abort ----

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` with torch's PreHookArgs before each operation of this group. docs/api-modes.md has the cost.

        Raises:
            RuntimeError: a torch before 2.15, which has no such hooks.
        """
        self._want_hooks("register_pre_hook")
        super().register_pre_hook(hook_id, hook)  # type: ignore[misc]

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """The same with torch's PostHookArgs, after each operation has been issued."""
        self._want_hooks("register_post_hook")
        super().register_post_hook(hook_id, hook)  # type: ignore[misc]

    def _want_hooks(self, what: str) -> None:
        if self.run_hooks is None:
            raise RuntimeError(f"{what}: hooks come with torch 2.15; this is torch {torch.__version__}")
        self.run_hooks(self)

    def boxed(self) -> Any:
        """The group as the operators ``torch.ops.c10d`` take it."""
        if self._allow_operators is not None:
            self._allow_operators()
        return super().boxed()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook`` before the group is aborted, and when an operation of it fails; perhaps more than once."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget a hook; no matter if there is none."""
        self._abort_hooks.pop(hook_id, None)

    def run_abort_hooks(self) -> None:
        """Log what the hooks raise: the failure itself is what the user must see."""
        for hook_id, hook in list(self._abort_hooks.items()):
            try:
                hook()
            except Exception as error:
                log.error("mpiplus: the abort hook %d of group %r failed: %r", hook_id, self.group_name, error)

    # ---- deadlines ----

    @property
    def timeout(self) -> timedelta:
        """The deadline of an operation that is given none."""
        return timedelta(seconds=self._calls.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations started from now on."""
        self._calls.timeout = check_timeout("set_timeout", timeout).total_seconds()

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """More time for operations started from now on, until the first of them is complete. Several add up."""
        self._calls.extensions.append(Extension(timeout.total_seconds()))

    # ---- operations that become one Work ----

    def _start_coalescing(self, device: torch.device) -> None:
        self._calls.coalescing = []
        self._coalescing_block = torch_internals.coalescing_block(self._forget_coalesced)

    def _forget_coalesced(self) -> None:
        self._calls.coalescing = self._coalescing_block = None

    def _end_coalescing(self, device: torch.device) -> Any:
        collected = self._calls.coalescing or []
        self._forget_coalesced()
        return CoalescedWork(
            [work for work, _ in collected], [tensor for _, results in collected for tensor in results]
        )

    # ---- the end ----

    def leave(self) -> None:
        """At the end of the program: nobody need wait for this rank any longer."""
        if not self.closed and self._size > 1 and not self._left and not forks.forked:
            self._left = True
            self.checkin.leave(self._calls.sequence)

    def take_back_failed(self) -> None:
        """Cancel what has failed for the user already, as far as only this process uses its buffers."""
        if not self.closed and any(work.abandoned for work in self._engine.pending() if work.group is self):
            self._lib.mpp_group_abort(self._handle)

    def abort(self) -> None:
        """Free everybody who waits in this group on this rank; no operation can follow."""
        runtime.refuse_in_forked_child("abort")
        self.run_abort_hooks()
        self._calls.broken = self._calls.broken or f"{self.label} was aborted"
        self._lib.mpp_group_abort(self._handle)
