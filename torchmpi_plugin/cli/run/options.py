"""Options of ``mpiplus run`` that torchrun has too: their values, what does the same here, or why nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from ...jobs.outcome import ANY, KINDS
from ...node import node

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Taken, and without effect: what MPI's launcher does in their place.
_MEETING = "the ranks find each other through MPI"
_OUTPUT = "--log-dir DIR writes each rank's output to files and shows it too; --local-ranks-filter shows less of it"
_WITHOUT_EFFECT = {
    "rdzv_backend": _MEETING,
    "rdzv_endpoint": _MEETING,
    "rdzv_id": _MEETING,
    "rdzv_conf": _MEETING,
    "local_addr": _MEETING,
    "start_method": "each rank is a program of its own",
    "role": "all ranks have the role 'default'",
    "event_log_handler": "no events are logged",
    "monitor_interval": "the end of a rank is noticed at once",
}
#: Refused: a user who gives them counts on what they do.
_REFUSED = {
    "redirects": _OUTPUT,
    "tee": _OUTPUT,
    "duplicate_stdout_filters": _OUTPUT,
    "duplicate_stderr_filters": _OUTPUT,
    "logs_specs": _OUTPUT,
    "shutdown_timeout": "--grace SECONDS is the time between SIGTERM and SIGKILL",
    "signals_to_handle": "SIGTERM, SIGINT and SIGHUP end the job, SIGUSR1 and SIGUSR2 are passed on",
    "virtual_local_rank": "LOCAL_RANK is the rank's number on its node",
    "run_path": "PROGRAM is run as python PROGRAM",
    "numa_binding": "the MPI's launcher binds ranks: --map-by, --mpi-args '--bind-to numa'",
}
_FLAGS = {"run_path", "virtual_local_rank"}
_SHORT = {"redirects": ["-r"], "tee": ["-t"]}
_RANK = "attempt_{attempt}/{rank}"
LAYOUT = "attempt_0/RANK/stdout.log, stderr.log, error.json"


def with_hyphens(name: str) -> str:
    """An option's name, in which torchrun takes underscores as well."""
    return name.replace("_", "-")


class _PerNode(click.IntRange):
    """A number, or ``auto`` or ``cpu``: one rank for each core that this process may use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "cpu"):
            return len(node.cores())
        if value in ("gpu", "xpu"):
            self.fail(f"{value!r} does not go with tensors on the CPU; give a number, auto or cpu", param, ctx)
        return super().convert(value, param, ctx)


class NodeRange(NamedTuple):
    """Bounds of a job's number of nodes."""

    least: int
    most: int


class _Nodes(click.IntRange):
    """A number, or torchrun's ``min:max``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least: Any
        most: Any
        least, colon, most = str(value).partition(":")
        if colon and least != most:
            numbers = NodeRange(super().convert(least, param, ctx), super().convert(most, param, ctx))
            if numbers.least > numbers.most:
                self.fail(f"{value!r} is no range: the lower number comes first", param, ctx)
            return numbers
        return super().convert(least if colon else value, param, ctx)


#: More than any machine has: a job of more is a mistake, for which lists of ranks would fill the memory.
MOST = 10_000_000
PER_NODE, NODES = _PerNode(1, MOST), _Nodes(1, MOST)


def parse_ranks(_: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    """``0,1``."""
    words = value.split(",") if value is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is no list of ranks, such as 0,1", param=option)
    return [int(word) for word in words] or None


def parse_ends(_: click.Context, option: click.Parameter, value: str) -> list[str]:
    """``signal,lost,75``."""
    words = [word.strip() for word in value.split(",")]
    for word in words:
        if word not in (*KINDS, ANY) and not (word.isdigit() and 0 < int(word) < 256):
            known = f"there are {ANY}, {', '.join(KINDS)} and exit codes, 1 to 255"
            raise click.BadParameter(f"{word!r} is no end of a job; {known}", param=option)
    return words


def files_of(log_dir: str | None, stdout: str | None, stderr: str | None) -> dict[str, Any]:
    """FORMATs of each rank's files: torchrun's layout below ``log_dir``; what is named for a stream counts instead."""
    if log_dir is None:
        return {"stdout": stdout, "stderr": stderr, "error_file": None}
    below = f"{log_dir.replace('{', '{{').replace('}', '}}')}/{_RANK}"
    stdout, stderr = stdout or f"{below}/stdout.log", stderr or f"{below}/stderr.log"
    return {"stdout": stdout, "stderr": stderr, "error_file": f"{below}/error.json"}


def torchrun_options(function: _Function) -> _Function:
    """Declare them, hidden, for a click command."""
    for name in (*_WITHOUT_EFFECT, *_REFUSED):
        spellings = [name, f"--{with_hyphens(name)}", *_SHORT.get(name, ())]
        callback = _refuse if name in _REFUSED else None
        option = click.option(*spellings, is_flag=name in _FLAGS, default=None, hidden=True, callback=callback)
        function = option(function)
    return function


def _refuse(context: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None and not context.resilient_parsing:
        name = str(option.name)
        raise click.UsageError(f"--{with_hyphens(name)} is torchrun's. With mpiplus run: {_REFUSED[name]}")


def no_effect(given: Mapping[str, object]) -> list[str]:
    """Return a warning to a user who gives options that change nothing."""
    return [
        f"--{with_hyphens(name)} has no effect: {reason}"
        for name, reason in _WITHOUT_EFFECT.items()
        if given.get(name) is not None
    ]
