"""Tensors without memory of their own: subclasses that wrap others, what torch.func hands to a function, and on meta.

A backend in C++ is called through torch's dispatcher, which takes such tensors apart on the way: each kind by its own
rule, or with its own error where it has none. A group in Python is called past the dispatcher. So where a method finds
such a tensor, the call goes through the dispatcher after all: as torch's own operation on a stand-in for the group,
which comes back here, with the tensors from inside, just before a kernel would run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from .. import torch_internals


def through_dispatcher(
    group: Any, name: str, method: Callable[..., Any], operands: tuple[Any, ...], refusal: Exception
) -> Any:
    """Carry out a method on tensors without memory of their own, which it has refused.

    Args:
        name: of c10d's method.
        method: takes the group and the operands, with the tensors that are inside.
        refusal: raised where no tensor has others inside: its storage was freed.
    """
    kind: Any = dist.ProcessGroup  # the stubs do not know this constructor
    stand_in = kind(group.rank(), group.size())

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        """The group's method, with these in place of the caller's, which are as many and in the same order."""
        if all(map(operator.is_, tensors, _tensors_in(operands))):
            raise refusal
        given = iter(tensors)
        in_place = tree_map(lambda leaf: next(given) if isinstance(leaf, torch.Tensor) else leaf, operands)
        return method(group, *in_place)

    with _Returning(stand_in, call) as returning:
        result = getattr(stand_in, name)(*operands)
    # None: it never came to a kernel, as with tensors that only pretend to be some.
    return result if returning.work is None else returning.work


class _Returning(TorchDispatchMode):
    """Takes torch's operation on the stand-in back from the dispatcher, where it would go to a kernel."""

    def __init__(self, stand_in: Any, call: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        super().__init__()
        self._stand_in, self._call = stand_in, call
        self.work: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A tensor that only pretends to be one enters a mode of its own, which torch would put below this one. On meta
        # there is a kernel, which does nothing.
        is_meta = all(tensor.is_meta for tensor in _tensors_in(args))
        if torch_internals.are_fake(types) or is_meta or not self._is_ours(func, args):
            return func(*args, **(kwargs or {}))
        if types:
            return NotImplemented  # a subclass comes first, and calls this again with what it wraps
        names = [argument.name for argument in func._schema.arguments]
        results = [given for name, given in zip(names, args, strict=False) if "output" in name]
        self.work = _call_with_memory(self._call, _tensors_in(args), _tensors_in(results))
        returned = [self.work.boxed() if str(kind.type).endswith("Work") else args[0] for kind in func._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _is_ours(self, func: Any, args: tuple[Any, ...]) -> bool:
        if func.namespace != "c10d":
            return False
        names = [argument.name for argument in func._schema.arguments]
        if "process_group" not in names:
            return False
        group = args[names.index("process_group")]
        return bool(dist.ProcessGroup.unbox(group) == self._stand_in)


def _tensors_in(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(given) if isinstance(leaf, torch.Tensor)]


def _call_with_memory(
    call: Callable[[Sequence[torch.Tensor]], Any], tensors: list[torch.Tensor], results: list[torch.Tensor]
) -> Any:
    """Call with these tensors, of which the ``results`` are written to.

    The dispatcher does not look into lists of lists. What is still wrapped there is copied, as gloo copies it, and
    such results are complete when this returns.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        inside = torch_internals.inside_transforms(tensor)
        if not torch_internals.is_wrapper(inside):
            return inside
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            buffer.copy_(tensor)
            if any(tensor is result for result in results):
                tensor.copy_(buffer)  # whether it can be is to show before anything is sent
                copies.append((tensor, buffer))
        return buffer

    work = call([with_memory(tensor) for tensor in tensors])
    if copies:
        work.wait()
        with torch.no_grad():
            for tensor, buffer in copies:
                tensor.copy_(buffer)
    return work
