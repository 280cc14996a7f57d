"""Code of ``import torch``: register two names, import nothing, start nothing; frameworks where they are named.

torch turns an exception in here into a broken ``import torch`` for every program of the environment, so
whatever goes wrong becomes one warning and an unregistered backend.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import forks, settings, torch_internals  # noqa: F401 - forks is to be imported with torch
from .names import BACKEND


def _load(module: str) -> Any:
    """Our own module, on a torch that has what it needs."""
    torch_internals.check()
    return _imported(module)


def _imported(module: str) -> Any:
    """Our own module, which a torch to come may not let us import."""
    try:
        return importlib.import_module(f".{module}", __package__)
    except (AttributeError, ImportError) as error:
        why = _uncompiled() or _lacking(error) or torch_internals.misfit()
        raise RuntimeError(f"{why}. What went wrong: {error}") from error


def _lacking(error: Exception) -> str:
    """Name another package than torch that is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name in ("", "torch", __package__) else f"torchmpi-plugin needs the package {name}: pip install {name}"


def _uncompiled() -> str:
    """Describe a checkout that Python finds in front of the package, as beside a script; empty: it is compiled."""
    if importlib.util.find_spec("._bridge", __package__):
        return ""
    home = Path(__file__).parent
    return (
        f"torchmpi-plugin was imported from {home}, where it has not been compiled. Start the program from another "
        f"directory than {home.parent}, also if only the script lies there, or compile it: pip install -e {home.parent}"
    )


def _create(options: Any, backend_options: Any = None) -> Any:
    return _load("lifecycle.creation").create_process_group(options, backend_options)


def _mpi_rendezvous(url: str, **arguments: Any) -> Any:
    return _load("lifecycle.rendezvous").mpi_rendezvous(url, **arguments)


def _instead(torchs: Callable[..., Any], url: str, **arguments: Any) -> Any:
    """torch's own handler, unless mpiplus asks: then what torch lacks is MPI's, and a port that is taken has a word."""
    if torch_internals.missing():  # not ours to say to those who ask for another backend
        return torchs(url, **arguments)
    return _imported("lifecycle.rendezvous").torchs_rendezvous(torchs, url, **arguments)


def _register() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    handlers = torch_internals.find("torch.distributed.rendezvous:_rendezvous_handlers")
    dist.register_rendezvous_handler("mpi", _mpi_rendezvous)
    try:
        # A torch that knows no CUDA would ask a group about tensors that cannot be.
        devices = ["cpu", "cuda"] if torch.version.cuda is not None else ["cpu"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)
        torch_internals.set_backend_type(BACKEND)
    except Exception:
        del handlers["mpi"]
        raise
    for scheme in ("env", "tcp"):
        handlers[scheme] = functools.partial(_instead, handlers[scheme])
    atexit.register(_at_exit)


def _at_exit() -> None:
    """After all exit handlers that were registered since ``import torch``: they may communicate."""
    if (shutdown := sys.modules.get(f"{__package__}.lifecycle.shutdown")) is not None:
        shutdown.at_exit()


def _take(setting: settings.Setting[tuple[str, ...]], past: str, use: Callable[[tuple[str, ...]], None]) -> None:
    """Names that the user has given. A wrong one is an error later: of init_process_group."""
    try:
        names = setting.value()
    except ValueError as error:
        warnings.warn(f"mpiplus: {error}; none is {past}", stacklevel=3)
        return
    if names:
        use(names)


def autoload() -> None:
    """Entry point of the groups ``torch.backends`` and ``torch.distributed.backends``."""
    try:
        _register()
        _take(settings.INTEGRATIONS, "integrated", lambda names: _imported("integrations").activate(*names))
        _take(settings.REPLACE, "replaced", lambda names: _imported("integrations.replacing").replace(names))
    except Exception as error:
        text = f"torchmpi-plugin could not register the backend 'mpiplus': {error!r}"
        with contextlib.suppress(Exception):
            text += f". {torch_internals.misfit()}"
        warnings.warn(text, stacklevel=2)
