"""Changes to a framework when it is imported, and only where it is as expected."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ChangedError(Exception):
    """The framework is not as expected; what is missing."""


@dataclass(frozen=True)
class Integration:
    """Changes to one framework."""

    distribution: str  # the framework, as it is installed
    module: str  # which of its modules is changed
    #: the versions that have the expected shape, the second excluded
    since: tuple[int, ...]
    before: tuple[int, ...]
    change: Callable[[ModuleType], None]  # does it, once :class:`ChangedError` cannot come any more


def function_with(owner: Any, name: str, *parameters: str) -> Callable[..., Any]:
    """A function of a module or class that takes these parameters, in this order; a ChangedError: there is none."""
    found = getattr(owner, name, None)
    if not inspect.isfunction(found) or tuple(inspect.signature(found).parameters) != parameters:
        raise ChangedError(f"{owner.__name__}.{name}({', '.join(parameters)})")
    return found


def when_imported(integration: Integration) -> None:
    """Change the framework: now if it is imported already, else when it is."""
    if integration.module in finder.waiting or integration.module in _done:
        return
    module = sys.modules.get(integration.module)
    parent, _, name = integration.module.rpartition(".")
    if module is not None and name in vars(sys.modules[parent]):
        _change(integration, module)
        return
    finder.waiting[integration.module] = integration
    if module is not None:
        _announce_children(sys.modules[parent])  # it is being imported: the framework has come to its "import torch"
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


_done: set[str] = set()


def _announce_children(package: ModuleType) -> None:
    """Python binds a module in its package when it has been imported."""
    kind = type(package)

    class Announcing(kind):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            integration = finder.waiting.pop(f"{self.__name__}.{name}", None)
            if integration is not None:
                _change(integration, value)
                self.__class__ = kind  # type: ignore[assignment]

    package.__class__ = Announcing


def _change(integration: Integration, module: ModuleType) -> None:
    _done.add(integration.module)
    name = integration.distribution
    versions = {"torchmpi-plugin": "", name: "of no known version"}
    for each in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[each] = importlib.metadata.version(each)
    try:
        numbers = tuple(int(number) for number in versions[name].split(".")[:2] if number.isdigit())
        if not integration.since <= numbers < integration.before:
            since, before = (".".join(map(str, numbers)) for numbers in (integration.since, integration.before))
            raise ChangedError(f"a version from {since} on, and before {before}")
        integration.change(module)
    except Exception as error:  # whatever it is, the framework's import goes on
        missing = str(error) if isinstance(error, ChangedError) else repr(error)
        warnings.warn(
            f"torchmpi-plugin {versions['torchmpi-plugin']} leaves {name} {versions[name]} as it is: it expects "
            f'{missing}. Without it {name} refuses the name "mpiplus"; call '
            'torch.distributed.init_process_group("mpiplus") yourself, first',
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Has the integration's change follow what the module's own loader does."""

    def __init__(self) -> None:
        self.waiting: dict[str, Integration] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        integration = self.waiting.get(fullname)
        if integration is None:
            return None
        others = (other for other in sys.meta_path if other is not self)
        spec = next(filter(None, (other.find_spec(fullname, path, target) for other in others)), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # A loader may be that of many modules, as for a zip file.
                if module.__name__ == fullname and self.waiting.pop(fullname, None) is not None:
                    _change(integration, module)

            loader.exec_module = exec_module
        return spec


finder = _Finder()
