"""The name "mpiplus" in frameworks whose lists of backends refuse it: docs/frameworks/index.md.

Uses ``names``, ``settings``, ``launchers``, and ``api``. Start with ``importing.py``, which waits for a
framework to be imported; ``frameworks.py`` changes it.
"""

from __future__ import annotations

from .. import settings

__all__ = ["activate"]


def activate(*names: str) -> None:
    """Have frameworks take ``backend="mpiplus"``: those that are imported already now, others when they are imported.

    Where a framework is not as expected, it stays as it is, with a warning.

    Args:
        names: of ``accelerate``, ``ignite`` and ``transformers``; none: all of them.

    Raises:
        ValueError: another name.
    """
    wanted = settings.integrations(",".join(names)) if names else settings.FRAMEWORKS
    from .frameworks import INTEGRATIONS
    from .importing import when_imported

    for name in wanted:
        for integration in INTEGRATIONS[name]:
            when_imported(integration)
