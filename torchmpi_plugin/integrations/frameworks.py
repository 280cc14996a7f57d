"""Accelerate, ignite and Transformers: what is changed in each of their modules."""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..launchers import variables as launchers
from ..names import BACKEND
from .importing import ChangedError, Integration, function_with


def _change_accelerate(module: ModuleType) -> None:
    """``InitProcessGroupKwargs(backend="mpiplus")``, and a warning where each rank would train alone."""
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


def _change_names_of_ignite(module: ModuleType) -> None:
    """``idist.Parallel(backend="mpiplus")`` and ``idist.initialize("mpiplus")``."""
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


def _change_wrapping_by_ignite(module: ModuleType) -> None:
    """``auto_model`` wraps a model for the backends it knows; for others it leaves each rank to train its own."""
    wrap = function_with(module, "auto_model", "model", "sync_bn", "kwargs")
    native = getattr(module, "idist_native", None)
    if not {"idist_native", "MPI"} <= set(wrap.__code__.co_names) or not hasattr(native, "MPI"):
        raise ChangedError("auto_model that compares with idist_native.MPI")
    module.idist_native = SimpleNamespace(**{**vars(native), "MPI": _EitherName("mpi")})  # type: ignore[attr-defined]


def _change_transformers(module: ModuleType) -> None:
    """``--ddp_backend mpiplus`` on the command line. In code its Trainer asks Accelerate."""
    fields = getattr(getattr(module, "TrainingArguments", None), "__dataclass_fields__", {})
    choices = fields["ddp_backend"].metadata.get("choices") if "ddp_backend" in fields else None
    if not isinstance(choices, list) or "gloo" not in choices:
        raise ChangedError('TrainingArguments.ddp_backend with a list of choices in its metadata, with "gloo"')
    choices.append(BACKEND)


_ACCELERATE = Integration("accelerate", "accelerate.state", (1, 0), (2, 0), _change_accelerate)
_IGNITE = "ignite.distributed"
#: By framework; Transformers needs Accelerate's too.
INTEGRATIONS = {
    "accelerate": (_ACCELERATE,),
    "ignite": (
        Integration("pytorch-ignite", f"{_IGNITE}.comp_models.native", (0, 4), (0, 6), _change_names_of_ignite),
        Integration("pytorch-ignite", f"{_IGNITE}.auto", (0, 4), (0, 6), _change_wrapping_by_ignite),
    ),
    "transformers": (
        _ACCELERATE,
        Integration("transformers", "transformers.training_args", (4, 40), (6, 0), _change_transformers),
    ),
}
