"""ignite: ``idist.Parallel(backend="mpiplus")`` and ``idist.initialize("mpiplus")``."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..names import BACKEND
from .importing import ChangedError, Integration, function_with


def _change(module: ModuleType) -> None:
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


INTEGRATION = Integration("pytorch-ignite", "ignite.distributed.comp_models.native", (0, 4), (0, 6), _change)
