"""torch's dispatcher: kernels put in front of its own, and what operators are given. Beside ``torch_internals``.

Imports no torch when it is imported itself.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from .torch_internals import find

C10D = "torch._C._distributed_c10d"


def can_replace_kernels() -> bool:
    """Whether a kernel may be put in front of one of torch's, and call it."""
    import torch

    return hasattr(torch.library, "get_kernel")


@functools.cache
def _library(namespace: str) -> Any:
    import torch

    return torch.library.Library(namespace, "IMPL")


def put_before_kernels(namespace: str, operator: str, make: Callable[[Any, Any], Callable[..., Any]]) -> None:
    """Let an operator, on all kinds of devices that mpiplus knows, call a kernel of ours; nothing if torch has no such.

    Args:
        make: of the operator's schema and torch's kernel, ours; it takes the key set first.
    """
    import torch

    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return
    name = f"{namespace}::{operator}"
    for key in ("CPU", "CUDA", "SparseCPU", "SparseCUDA"):
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key):
            kernel = make(packet.default._schema, torch.library.get_kernel(name, key))
            with warnings.catch_warnings():  # torch warns of the first that is replaced
                warnings.simplefilter("ignore", UserWarning)
                _library(namespace).impl(operator, kernel, key, with_keyset=True)


def group_of_operator(group: Any) -> Any:
    """The process group that an operator is given: a name, or a group in one of two wrappings."""
    if isinstance(group, str):
        return find(f"{C10D}:_resolve_process_group")(group)
    return find(f"{C10D}:ProcessGroup").unbox(group) if is_group(group) else group


def is_group(argument: Any) -> bool:
    """Whether an operator's argument is a process group."""
    import torch

    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def register_work(tensor: Any, work: Any) -> None:
    """What ``wait_tensor`` of a functional collective's result waits for."""
    find(f"{C10D}:_register_work")(tensor, work)


def hides_from_modes() -> bool:
    """Whether this thread's calls are not to be seen by the TorchDispatchModes that it has entered."""
    import torch

    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
