"""Accelerate: ``InitProcessGroupKwargs(backend="mpiplus")``, and a warning where each rank would train alone."""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..launchers import variables as launchers
from ..names import BACKEND
from .importing import ChangedError, Integration, function_with


def _change(module: ModuleType) -> None:
    state = getattr(module, "PartialState", None)
    kinds = getattr(module, "DistributedType", None)
    alone, on_cpus = (getattr(kinds, name, None) for name in ("NO", "MULTI_CPU"))
    if state is None or alone is None or on_cpus is None:
        raise ChangedError("PartialState, and DistributedType.MULTI_CPU")
    start = function_with(state, "__init__", "self", "cpu", "kwargs")
    choose = function_with(state, "_prepare_backend", "self", "cpu", "sagemaker_dp", "backend")

    @functools.wraps(start)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        asked = kwargs.get("backend") == BACKEND and not state._shared_state
        if asked and not dist.is_initialized():
            # First: Accelerate goes by variables that mpirun does not set, and by a port that other jobs share.
            own = ("backend", "_use_sagemaker_dp")
            dist.init_process_group(BACKEND, **{name: kwargs[name] for name in kwargs if name not in own})
        start(self, cpu, **kwargs)
        if self.distributed_type == alone:
            _warn_of_being_alone()

    @functools.wraps(choose)
    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found, kind = choose(self, cpu, sagemaker_dp, backend)
        is_ours = dist.is_initialized() and dist.distributed_c10d.get_backend() == BACKEND
        if backend not in (None, BACKEND) or not is_ours:
            return found, kind
        return BACKEND, on_cpus if kind == alone else kind

    state.__init__, state._prepare_backend = init, prepare_backend


@functools.cache
def _warn_of_being_alone() -> None:
    launch, who = launchers.detect(), launchers.who_am_i(os.environ)
    if launch is None or launch.size < 2 or who is None or who.rank != 0:
        return
    warnings.warn(
        f"Accelerate has found neither a GPU nor a process group, so each of the {launch.size} ranks that "
        f"{launch.launcher} has started trains alone, with num_processes=1. To have them train together, use "
        f'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="{BACKEND}")]), with '
        f"from accelerate.utils import InitProcessGroupKwargs",
        stacklevel=4,
    )


INTEGRATIONS = (Integration("accelerate", "accelerate.state", (1, 0), (2, 0), _change),)
