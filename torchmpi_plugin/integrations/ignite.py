"""ignite: ``idist.Parallel(backend="mpiplus")``, ``idist.initialize("mpiplus")``, and ``idist.auto_model``."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..names import BACKEND
from .importing import ChangedError, Integration, function_with

_SINCE, _BEFORE = (0, 4), (0, 6)


def _change_names(module: ModuleType) -> None:
    model = getattr(module, "_NativeDistModel", None)
    if model is None or not isinstance(getattr(model, "available_backends", None), tuple):
        raise ChangedError("_NativeDistModel.available_backends")
    names = ("self", "backend", "timeout", "init_method", "world_size", "rank", "kwargs")
    create = function_with(model, "_create_from_backend", *names)
    function_with(model, "_init_from_context", "self")

    @functools.wraps(create)
    def create_from_backend(self: Any, backend: str, **kwargs: Any) -> None:
        if backend != BACKEND:
            create(self, backend, **kwargs)
            return
        # Before ignite looks at variables: where mpirun has set none of torch's, it takes each rank for a world of one.
        given = ("timeout", "init_method", "world_size", "rank")
        dist.init_process_group(BACKEND, **{name: kwargs[name] for name in given if kwargs.get(name) is not None})
        self._init_from_context()
        if torch.cuda.is_available():
            torch.cuda.set_device(self.get_local_rank())

    model._create_from_backend = create_from_backend
    model.available_backends = (*model.available_backends, BACKEND)


class _EitherName(str):
    """torch's own MPI backend, or ours."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == BACKEND


def _change_wrapping(module: ModuleType) -> None:
    """``auto_model`` wraps a model for the backends it knows; for others it leaves each rank to train its own."""
    wrap = function_with(module, "auto_model", "model", "sync_bn", "kwargs")
    native = getattr(module, "idist_native", None)
    if not {"idist_native", "MPI"} <= set(wrap.__code__.co_names) or not hasattr(native, "MPI"):
        raise ChangedError("auto_model that compares with idist_native.MPI")
    module.idist_native = SimpleNamespace(**{**vars(native), "MPI": _EitherName("mpi")})  # type: ignore[attr-defined]


INTEGRATIONS = (
    Integration("pytorch-ignite", "ignite.distributed.comp_models.native", _SINCE, _BEFORE, _change_names),
    Integration("pytorch-ignite", "ignite.distributed.auto", _SINCE, _BEFORE, _change_wrapping),
)
