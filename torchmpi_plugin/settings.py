"""The variables that begin with MPIPLUS_: their names, what they may be, what they do. Imports nothing of weight.

A value is looked up when a world or a group is made, not at import: a program may set it before. The tables are what
``docs/settings.md`` is written from.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .names import BACKEND, log

PREFIX = "MPIPLUS_"
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A variable that users set."""

    name: str  # of the variable
    default: str  # what counts where it is not set, or empty
    allowed: str  # what it may be, in words
    read: Callable[[str], T]  # what its text means; a ValueError for what is not allowed
    meaning: str  # what it does, in Markdown

    def value(self, environment: Mapping[str, str] | None = None) -> T:
        """Return its value.

        Args:
            environment: where to look; None: this process's.

        Raises:
            ValueError: what it is set to is not allowed.
        """
        text = (os.environ if environment is None else environment).get(self.name, "") or self.default
        try:
            return self.read(text)
        except ValueError:
            raise ValueError(f"{self.name} must be {self.allowed}, not {text!r}") from None


CUDA_PATHS = ("auto", "staged", "ipc", "direct")
COLLECTIVES_OF = ("auto", "own", "mpi")
MPI_ONLY = "mpi-only"
PROGRESS_OF = ("background", "auto", "caller")  # as enum mpp_inline_mode
FRAMEWORKS = ("accelerate", "ignite", "transformers")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def replaced(text: str) -> tuple[str, ...]:
    """The names of backends in a list with commas; a ValueError for what can be no name of a backend, or our own."""
    names = _names(text.lower())
    if BACKEND in names or not all(name.isidentifier() for name in names):
        raise ValueError
    return names


def integrations(text: str) -> tuple[str, ...]:
    """The frameworks in a list with commas; a ValueError for another name, with all that there are."""
    names = _names(text)
    if wrong := [name for name in names if name not in FRAMEWORKS]:
        raise ValueError(f"there is no integration with {wrong[0]!r}, only with {', '.join(FRAMEWORKS)}")
    return names


def _summary(text: str) -> str:
    if text not in ("0", "1") and not text.endswith(".json"):
        raise ValueError
    return "" if text == "0" else text


def _path(is_of_the_kind: Callable[[str], bool], text: str) -> str:
    if os.path.exists(text) and not is_of_the_kind(text):
        raise ValueError
    return text


def _switch(name: str, default: str, meaning: str) -> Setting[bool]:
    return Setting(name, default, "0 or 1", lambda text: bool(("0", "1").index(text)), meaning)


def _choice(name: str, words: tuple[str, ...], default: str, meaning: str) -> Setting[str]:
    allowed = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    return Setting(name, default, allowed, lambda text: words[words.index(text)], meaning)


def _seconds(name: str, default: str, meaning: str) -> Setting[float]:
    def read(text: str) -> float:
        seconds = float(text)
        if not math.isfinite(seconds) or seconds < 0:
            raise ValueError
        return seconds

    return Setting(name, default, "a number of seconds, 0 or more", read, meaning)


COLLECTIVES = _choice(
    *("MPIPLUS_COLLECTIVES", (*COLLECTIVES_OF, MPI_ONLY), "auto"),
    "`own`: mpiplus's collectives, over shared memory and [between nodes](architecture/internode.md); `mpi`: those "
    "of the MPI library; `auto`: as `MPIPLUS_TUNING` says, else `own`, but on more than 16 nodes those of the MPI "
    "library for what is not short. What rank 0 of a group has counts, and `Options(collectives=...)` comes before it. "
    "`mpi-only`: those of the MPI library whatever the options say, and mpiplus shares no memory at all, for "
    "[windows](windows.md#mapped-or-by-messages) neither; for these each rank reads it for itself.",
)
ASYNC_PROGRESS = _choice(
    *("MPIPLUS_ASYNC_PROGRESS", PROGRESS_OF, "auto"),
    "Who moves the data of an asynchronous collective: a thread in the `background`; the `caller`, which polls for "
    "about as long as the data needs, and for 50 ms at most; `auto`: the caller [where no core is "
    "idle](architecture/call-path.md#inline-progress). Always the background's: messages (`isend`, `irecv`, windows), "
    "tensors on a CUDA device, and all but `all_to_all`, `gather` and `scatter` where the collectives are MPI's own. "
    "Each process reads it for itself, with the first group.",
)
TUNING = Setting(
    "MPIPLUS_TUNING",
    "",
    "the path of a file",
    functools.partial(_path, os.path.isfile),  # to read a pipe or a device may have no end
    "The file of [`mpiplus bench --tune`](tuning.md#between-nodes), which `auto` above follows in groups on as many "
    "nodes: which way an operation takes up to which size. What rank 0 of a group has counts, and only its node needs "
    "the file.",
)
REPRODUCIBLE = _switch(
    *("MPIPLUS_REPRODUCIBLE", "0"),
    "`1`: sums have [the same bits wherever the ranks are](sharp-bits.md#results-to-the-bit), always with mpiplus's "
    "collectives. What rank 0 of a group has counts, and `Options(reproducible=...)` comes before it.",
)
WIRE_DTYPES = ("float32", "tensor")
WIRE_DTYPE = _choice(
    *("MPIPLUS_WIRE_DTYPE", WIRE_DTYPES, "float32"),
    "`tensor`: long sums of bfloat16 and float16 cross between nodes [in the tensor's own "
    "type](sharp-bits.md#narrow-sums-between-nodes). What rank 0 of a group has counts, and `Options(wire_dtype=...)` "
    "comes before it.",
)
CUDA = _choice(
    *("MPIPLUS_CUDA", CUDA_PATHS, "auto"),
    "How [CUDA tensors](cuda.md#which-path-the-data-takes) travel: `staged` through host memory, `ipc` (the same, "
    "but on a node between the devices), `direct`, or as the MPI library says. `Options(cuda=...)` comes before it.",
)
EXIT_GRACE = _seconds(
    *("MPIPLUS_EXIT_GRACE", "10"),
    "Seconds that operations still pending at the end of the program get to complete, before the job is aborted.",
)
ABORT_ON_EXCEPTION = _switch(
    *("MPIPLUS_ABORT_ON_EXCEPTION", "1"),
    "`0`: an uncaught exception on one rank does not end the job. So does `Options(abort_on_exception=False)`.",
)
WATCHDOG = _seconds("MPIPLUS_WATCHDOG", "60", "Seconds after which a wait is reported on stderr; `0`: never.")
REPLACE = Setting(
    "MPIPLUS_REPLACE",
    "",
    "names of other backends, such as gloo, nccl, mpi or ccl, with commas; or default",
    replaced,
    "Names of backends that mean `mpiplus` to `init_process_group` and `new_group`, for "
    "[scripts that cannot be changed](usage.md#scripts-that-cannot-be-changed); `default`: where none is named.",
)
STATUS = _switch(
    *("MPIPLUS_STATUS", "1"),
    "`0`: this process does not answer [`mpiplus status`](status.md), which lists this user's jobs on a node.",
)
SUMMARY = Setting(
    "MPIPLUS_SUMMARY",
    "0",
    "0, 1 or the name of a file that ends with .json",
    _summary,
    "`1`: when the world ends, rank 0 prints [who has waited for whom](status.md#who-was-slow); a file gets the "
    "figures as well.",
)
TIMELINE = Setting(
    "MPIPLUS_TIMELINE",
    "",
    "a directory, which need not be there yet",
    functools.partial(_path, os.path.isdir),
    "Where each rank records its last calls, for a [timeline](timeline.md).",
)
INTEGRATIONS = Setting(
    "MPIPLUS_INTEGRATIONS",
    "",
    f"names, with commas, of {', '.join(FRAMEWORKS)}",
    integrations,
    "[Frameworks](frameworks/index.md#by-name) that are taught the name `mpiplus` when they are imported.",
)

#: Those that users set.
SETTINGS: tuple[Setting[Any], ...] = (
    *(COLLECTIVES, ASYNC_PROGRESS, TUNING, REPRODUCIBLE, WIRE_DTYPE, CUDA),
    *(EXIT_GRACE, ABORT_ON_EXCEPTION, WATCHDOG, REPLACE, STATUS, SUMMARY, TIMELINE, INTEGRATIONS),
)

#: Says what COLLECTIVES says, and goes with the next release.
SHM = _switch("MPIPLUS_SHM", "1", f"in place of 0 set {COLLECTIVES.name}={MPI_ONLY}")
DEPRECATED: tuple[Setting[Any], ...] = (SHM,)

JOB = "MPIPLUS_JOB"
ATTACHMENT = "MPIPLUS_ATTACHMENT"
STATUS_DIRECTORY = "MPIPLUS_STATUS_DIRECTORY"
RUN = "MPIPLUS_RUN"
LEAVING = "MPIPLUS_LEAVING"
RANK_PROCESS = "MPIPLUS_RANK_PROCESS"

#: Those that mpiplus sets, for processes of its own and those that ranks start.
INTERNAL = {
    JOB: "How the processes of `mpiplus run` find each other.",
    ATTACHMENT: "How rank 0 of `launch_subprocesses` gets its function.",
    STATUS_DIRECTORY: "Where the sockets for `mpiplus status` are, in tests.",
    RUN: "In the ranks that `mpiplus run` has started: which of torch's variables it has set.",
    LEAVING: "How a rank tells `mpiplus run` that it leaves with an error.",
    RANK_PROCESS: "Which process is a rank: a child of it, which inherits the launcher's variables, is none.",
}

#: Those of the build.
BUILD = {
    "MPIPLUS_CFLAGS": "Further arguments for the compiler, when the package is built.",
    "MPIPLUS_LDFLAGS": "Further arguments for the linker.",
}
#: How the names of those of the tests and of CI begin, which are in tests/development_variables.py.
DEVELOPMENT = (f"{PREFIX}TEST_", f"{PREFIX}CI_")


def check(environment: Mapping[str, str] | None = None) -> None:
    """Look at all of :data:`SETTINGS`, before anybody waits for this rank; a ValueError for what is not allowed."""
    problems = []
    for setting in (*SETTINGS, *DEPRECATED):
        try:
            setting.value(environment)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))


def unknown(environment: Mapping[str, str]) -> dict[str, str]:
    """The names that are in no table, each with the setting that is most like it, or ``""``."""
    import difflib  # needed by few

    settings = [setting.name.removeprefix(PREFIX) for setting in SETTINGS]
    found = {}
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name.startswith(DEVELOPMENT) or name in known():
            continue
        near = difflib.get_close_matches(name.removeprefix(PREFIX), settings, 1)
        found[name] = PREFIX + near[0] if near else ""
    return found


@functools.cache
def known() -> frozenset[str]:
    return frozenset({setting.name for setting in (*SETTINGS, *DEPRECATED)} | {*INTERNAL, *BUILD})


def unshared() -> str:
    """The variable and value by which the user forbids shared memory, or empty; a ValueError for another value."""
    if not SHM.value():
        return f"{SHM.name}=0"
    return f"{COLLECTIVES.name}={MPI_ONLY}" if COLLECTIVES.value() == MPI_ONLY else ""


_warned: set[str] = set()


def warn_of_names() -> None:
    """Say once of each name that is in no table that nobody reads it, and of each deprecated one what replaces it."""
    for setting in DEPRECATED:
        if os.environ.get(setting.name) and setting.name not in _warned:
            _warned.add(setting.name)
            log.warning("mpiplus: the variable %s is deprecated: %s", setting.name, setting.meaning)
    for name, near in unknown(os.environ).items():
        if name not in _warned:
            _warned.add(name)
            names = ", ".join(setting.name for setting in SETTINGS)
            hint = f"did you mean {near}?" if near else f"there are {names}"
            log.warning("mpiplus: the variable %s means nothing: %s", name, hint)
