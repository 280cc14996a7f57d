"""Options of torchrun that ``mpiplus run`` knows, to say what does the same here, or why nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

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


def torchrun_options(function: _Function) -> _Function:
    """Declare them, hidden, for a click command."""
    for name in (*_WITHOUT_EFFECT, *_REFUSED):
        spellings = [name, *dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), *_SHORT.get(name, ())]
        callback = _refuse if name in _REFUSED else None
        option = click.option(*spellings, is_flag=name in _FLAGS, default=None, hidden=True, callback=callback)
        function = option(function)
    return function


def _refuse(context: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None and not context.resilient_parsing:
        name = str(option.name)
        raise click.UsageError(f"--{name.replace('_', '-')} is torchrun's. With mpiplus run: {_REFUSED[name]}")


def no_effect(given: Mapping[str, object]) -> list[str]:
    """Return a warning to a user who gives options that change nothing."""
    return [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in _WITHOUT_EFFECT.items()
        if given.get(name) is not None
    ]
