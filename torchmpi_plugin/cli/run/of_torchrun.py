"""Options of torchrun that ``mpiplus run`` knows, to say what does the same here, or why nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Taken, and without effect: what MPI's launcher does in their place.
_MEETING = "the ranks find each other through MPI"
_WITHOUT_EFFECT = {
    "rdzv_backend": _MEETING,
    "rdzv_endpoint": _MEETING,
    "rdzv_id": _MEETING,
    "rdzv_conf": _MEETING,
    "local_addr": _MEETING,
    "start_method": "each rank is a program of its own",
    "role": "all ranks have the role 'default'",
    "monitor_interval": "the end of a rank is noticed at once",
}
#: Refused: a user who gives them counts on what they do.
_REFUSED = {
    "log_dir": "a file per rank is --stdout 'logs/{rank}.out' --stderr 'logs/{rank}.err'",
    "redirects": "--stdout FORMAT and --stderr FORMAT write each rank's output to a file and show it too",
    "tee": "--stdout FORMAT and --stderr FORMAT write each rank's output to a file and show it too",
    "local_ranks_filter": "every rank's output is shown; --stdout 'logs/{rank}.out' keeps each apart",
    "no_python": "for a program that is no Python script: mpiplus run -n 4 -c PROGRAM",
    "run_path": "PROGRAM is run as python PROGRAM",
    "numa_binding": "the MPI's launcher binds ranks: --map-by, --mpi-args '--bind-to numa'",
}
_FLAGS = {"no_python", "run_path"}
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
    """What to tell a user who gives options that change nothing."""
    return [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in _WITHOUT_EFFECT.items()
        if given.get(name) is not None
    ]
