"""The name "mpiplus" in frameworks whose lists of backends refuse it: docs/frameworks/index.md.

Uses ``names``, ``settings``, and ``launchers``. Start with ``importing.py``, which waits for a
framework to be imported; each of the others is about one framework.
"""

from __future__ import annotations

from importlib import import_module

from .. import settings

__all__ = ["activate"]

#: Those that another one needs.
_WITH = {"transformers": ("accelerate",)}


def activate(*names: str) -> None:
    """Have frameworks take ``backend="mpiplus"``: those that are imported already now, others when they are imported.

    Where a framework is not as expected, it stays as it is, with a warning.

    Args:
        names: of ``accelerate``, ``ignite`` and ``transformers``; none: all of them.

    Raises:
        ValueError: another name.
    """
    wanted = settings.integrations(",".join(names)) if names else settings.FRAMEWORKS
    from .importing import when_imported

    for name in dict.fromkeys(each for framework in wanted for each in (*_WITH.get(framework, ()), framework)):
        for integration in import_module(f".{name}", __package__).INTEGRATIONS:
            when_imported(integration)
