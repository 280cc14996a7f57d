"""The extension made from c_src/python/bridge_module.c."""

from collections.abc import Callable, Sequence
from typing import Any

#: Of shim.h: the states of an operation, and how long C polls in one call.
PENDING: int
DONE: int
FAILED: int
ABORTED: int
REPORTED: int
SLICE_NS: int
#: Names by C's numbers: of kinds of calls, reductions and dtypes; and of the MPI datatypes that MPI can reduce.
CALLS: tuple[str, ...]
REDUCTIONS: tuple[str, ...]
DTYPES: tuple[str, ...]
MPI_DATATYPES: tuple[str | None, ...]

class Calls:
    """What starting an operation takes of a group."""

    handle: int
    rank: int
    size: int
    largest_tag: int
    #: The ranks compare what they call, before each operation.
    compares: bool
    #: Each call is to come through Python.
    python_only: bool
    #: How many collectives were begun: the same on all ranks.
    sequence: int
    #: How many messages.
    messages: int
    #: Of collectives and messages, how many began without Python.
    in_c: int
    #: Of operations that are given none, in seconds.
    timeout: float
    #: Why no operation can follow.
    broken: str | None
    #: The operations to become one Work, with the results of each.
    coalescing: list[tuple[Any, list[Any]]] | None
    #: Times added to deadlines.
    extensions: list[Any]
    #: What records of calls say of the group.
    subject: Any
    #: The last collective.
    last: Call | None

class Call:
    """The record of a call, which C writes once; its Work and the flight recorder keep it, without the tensors.

    ``collective`` and ``message`` count the group's calls of either kind; ``sequence`` is the one of its own kind.
    """

    subject: Any  # of the group: flight_recorder.Subject
    operation: str
    peer: int | None  # of a message the other rank; -1: any
    inputs: tuple[tuple[Sequence[int], Any], ...]  # shapes and dtypes
    outputs: tuple[tuple[Sequence[int], Any], ...]
    tag: int  # of a message
    lengths: list[int] | None  # where calls are compared in detail: of two lists, of one for each rank
    work: Callable[[], Any] | None  # refers to its Work; None: it was complete at once, or is not recorded
    frames: list[Any] | None  # who called, if it was not complete at once: code, instruction, the next one's code ...
    collective: int
    message: int
    sequence: int
    number: int  # among this process's calls, whose times C keeps (mpp_record)
    begun: int  # when, by time.monotonic_ns
    limit: float  # the group's timeout, and by how much the deadline was put off, in seconds
    extension: float

class Method:
    """Carries out a method of c10d in C where it can, and hands over to ``python`` where it cannot."""

    def __new__(cls, python: Callable[..., Any] | None, operation: str, start: str, roles: str) -> Method: ...
    def __call__(self, *arguments: Any, **named: Any) -> Any: ...
    @property
    def __wrapped__(self) -> Callable[..., Any]: ...

def connect(
    entries: int,
    capsule: Any,
    types: tuple[type, ...],
    samples: dict[Any, tuple[Any, int, int, bool, bool]],
    operations: dict[int, tuple[int, bool, bool]],
    objects: tuple[Any, ...],
) -> None: ...
def disconnect() -> None: ...
def set_watched(is_watched: bool) -> None: ...
def asked_for(future: Any) -> None: ...
def set_timeline(kind_of: Callable[..., int] | None) -> None: ...
def start_plain(
    method: Method, operands: tuple[Any, ...], finish: Any, keep: Any, results: Any, lists: int, /
) -> Any: ...
def last_call() -> Call | None: ...
def wait_for(work: Any) -> bool: ...
