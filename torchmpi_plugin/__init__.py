"""mpiplus: a ``torch.distributed`` backend on MPI.

Scripts need not import this package: ``init_process_group(backend="mpiplus")`` is enough. It offers what
torch's interface has no place for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .api.public import exscan, get_comm, monitored_barrier, prometheus, scan, shrink, statistics
    from .errors import RankFailedError
    from .options import Options

# Loaded when asked for: torch imports this package at every `import torch`.
_HOMES = {"Options": "options", "RankFailedError": "errors"}

__all__ = [
    "Options",
    "RankFailedError",
    "__version__",
    "exscan",
    "get_comm",
    "monitored_barrier",
    "prometheus",
    "scan",
    "shrink",
    "statistics",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torchmpi-plugin")
    if name in __all__:
        return getattr(import_module(f"torchmpi_plugin.{_HOMES.get(name, 'api.public')}"), name)
    if name in ("dist", "launch", "integrations"):
        return import_module(f"torchmpi_plugin.{name}")
    raise AttributeError(f"module 'torchmpi_plugin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "dist", "integrations", "launch"})
