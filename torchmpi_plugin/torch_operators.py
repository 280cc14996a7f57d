"""torch's dispatcher: kernels put in front of its own, and what operators are given. Beside ``torch_internals``.

Imports no torch when it is imported itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .torch_internals import C10D, find, version


def operators_tell_the_reduction() -> bool:
    """Return whether Python can read an operator's ReduceOp, which has a method for that from torch 2.10 on."""
    return version() >= (2, 10)


#: Where a kernel comes before those of all devices, and after all else: modes, functionalization, autograd.
_BEFORE_DEVICES = "BackendSelect"
_DEVICES = ("CPU", "CUDA", "SparseCPU", "SparseCUDA")


@functools.cache
def _library(namespace: str) -> Any:
    import torch

    return torch.library.Library(namespace, "IMPL")


def put_before_kernels(namespace: str, operator: str, make: Callable[[Any, Any], Callable[..., Any]]) -> None:
    """Let an operator, on all kinds of devices that mpiplus knows, call a kernel of ours; nothing if torch has no such.

    Torch's kernels stay, and are called by the dispatcher, which releases the GIL. To call one while this thread holds
    the GIL may block for ever: gloo's threads drop tensors, which takes the GIL, while they hold a lock of the group.

    Args:
        make: of the operator's schema and torch's kernel, ours. Both take the key set first.
    """
    import torch

    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return
    function, key = packet.default, torch._C.DispatchKey
    after = torch._C._dispatch_keyset_full_after(getattr(key, _BEFORE_DEVICES))
    devices = [getattr(key, name) for name in _DEVICES]

    def original(keys: Any, *arguments: Any, **named: Any) -> Any:
        return function.redispatch(keys & after, *arguments, **named)

    ours = make(function._schema, original)

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        # Fake tensors have the keys of both, while their shapes are computed.
        has_memory = not keys.has(key.Meta) and any(keys.has(device) for device in devices)
        return (ours if has_memory else original)(keys, *arguments, **named)

    _library(namespace).impl(operator, kernel, _BEFORE_DEVICES, with_keyset=True)


def group_of_operator(group: Any) -> Any:
    """The process group that an operator is given: a name, or a group in one of two wrappings."""
    if isinstance(group, str):
        return find(f"{C10D}:_resolve_process_group")(group)
    return find(f"{C10D}:ProcessGroup").unbox(group) if is_group(group) else group


def is_group(argument: Any) -> bool:
    import torch

    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def hides_from_modes() -> bool:
    """Return whether this thread's calls are not to be seen by the TorchDispatchModes that it has entered."""
    import torch

    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
