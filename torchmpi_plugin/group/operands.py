"""Plain tensors for C in place of a call's own: of what C does not take as it is, for every operation.

What an operation reads and writes is said by its roles in operations.py. By these :class:`Method` makes a
:class:`~torchmpi_plugin.tensors.operands.Plain` for each tensor: memory in which its elements lie in order; and what
puts the results into the user's tensors. Then C reads the call again. If it cannot, ``refused.py`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _bridge, operations
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, Finish, NotDenseError, WithoutMemoryError, bytes_of, check, single
from ..tensors.operands import plain
from ..tensors.overlaps import Memory
from . import forms, refused, several, sparse
from .dispatching import through_dispatcher
from .group import ProcessGroupMPI as Group
from .starting import tell_of_no_memory

Tensors = Sequence[torch.Tensor]


#: What C is given (``mpp_start_plain``):
#:
#: - the group, and a method's arguments with a Plain for each tensor;
#: - what puts the results into the user's tensors, or None: they are there;
#: - the memory of these, which must live until the operation is complete: of what is read and written at once the
#:   buffer, else what is sent and what is received;
#: - the Work's tensors, or None: those of the Plains; and in how many lists its future has them.
Operands = tuple[tuple[Any, ...], Finish, Any, list[torch.Tensor] | None, int]


def _first_of(lists: Any, operation: str) -> Any:
    """The one inner list of an argument that c10d passes as a list of lists; a list of nothing is itself.

    Raises:
        ValueError: there are several.
    """
    if not lists or not isinstance(lists[0], (list, tuple)):
        return lists
    if len(lists) > 1:
        raise ArgumentError(f"{operation}: one tensor per rank goes with one list of tensors, not {len(lists)}")
    return lists[0]


class Method:
    """Of a method of c10d what C calls where it cannot read a call, or is not to.

    Args:
        row: of the table of operations.

    Attributes:
        in_c: what stands in the class of groups.
    """

    def __init__(self, row: operations.Operation) -> None:
        self.row = row
        self.__name__, self.__doc__ = row.method, f"``{row.name}`` in c10d's words. Its tensors: {row.roles!r}."
        self.in_c = _bridge.Method(self, row.name, row.start, row.roles)
        first = forms.method_of(row)
        kinds = [_TYPES.get(kind) for kind in first.forms[0].kinds.values() if kind != "opts"]
        #: The types of a call's arguments that need not be looked at more closely, where there are such.
        self._types = None if None in kinds else (*kinds, *([first.options] if first.options else []))
        #: By which torch's dispatcher takes its tensors apart.
        self._dispatched = "allreduce" if row in operations.OWN else row.method
        roles, _, others = row.roles.partition(" ")
        self._out, _, self._in = roles.partition("+")
        self._has_root, self._reduces = "root" in others.split(), row.reduces
        #: The operands of a call: of the group, its arguments, and where the results go, if that is settled.
        of_tensors = self._moved if self._in else self._in_place
        self.made_plain: Callable[..., Operands] = self._message if not roles or "@" in roles else of_tensors

    def __call__(self, group: Group, *given: Any, **named: Any) -> Any:
        """Carry out a call in any of the method's forms; its Work.

        Raises:
            ValueError, TypeError: it makes no sense, or fits none of the forms.
        """
        types = self._types
        if named or types is None or len(types) != len(given) or not all(map(isinstance, given, types)):
            given = tuple(forms.read(self.row.method, given, named))
        if group._show_to_modes is not None and forms.modes() and self.row not in operations.OWN:
            return group._show_to_modes(group, self.row.method, *given)
        return self.first_form(group, *given)

    def first_form(self, group: Group, *given: Any) -> Any:
        """The same of the first form, which no TorchDispatchMode is to see."""
        before = group._calls.sequence
        try:
            return self.start(group, given)
        except WithoutMemoryError:
            if not hasattr(dist.ProcessGroup, self._dispatched):
                raise
        except NotDenseError:
            if self.row.method != "allreduce" or not sparse.are_meant(given[0]):
                raise
            return sparse.all_reduce(group, *given)
        except torch.OutOfMemoryError:
            if "@" not in self.row.roles:  # all ranks call it
                tell_of_no_memory(group, self.row.method, before)
            raise
        # Not in the handler: errors are to show one cause only.
        return through_dispatcher(group, self._dispatched, self.first_form, given)

    def start(self, group: Group, given: tuple[Any, ...], memory: Memory | None = None) -> Work:
        """The same of dense tensors with memory; ``memory``: the results', where that is settled."""
        work = _bridge.start_plain(self.in_c, *self.made_plain(group, given, memory))
        if work is NotImplemented:
            raise refused.explain(group, self.row, given, self.tensors_of)
        return work

    # ---- the operands, by the roles ----

    def _message(self, group: Group, given: tuple[Any, ...], _: Memory | None) -> Operands:
        name = self.row.name
        if not self._out:  # a barrier
            return (group, *given), None, None, None, 1
        tensor, writes = single(given[0], name), self._out.startswith("out")
        buffer, finish = arguments.writable(tensor, name) if writes else (arguments.readable(tensor), None)
        return (group, plain(tensor, buffer), *given[1:]), finish, buffer, None, 1

    def _moved(self, group: Group, given: tuple[Any, ...], memory: Memory | None) -> Operands:
        if self.row.method == "allgather" and len(given[1]) > 1:
            buffers, packed, finish, results = several.packed(group.size(), *given[:2])
            tensors = [plain(buffer, buffer) for buffer in buffers], plain(packed, packed)
            return (group, *tensors, *given[2:]), finish, (packed, buffers), results, len(given[0])
        outs, ins = self.tensors_of(group, given)
        sources = [arguments.readable(tensor) for tensor in ins]
        (buffers, finish), sources = self._apart(group.rank(), outs, sources, memory)
        places = _plain(self._out, outs, buffers), _plain(self._in, ins, sources)
        return (group, *places, *given[2:]), finish, (sources, buffers), None, 1

    def _apart(self, rank: int, outs: Tensors, sources: Tensors, memory: Memory | None) -> tuple[Memory, Tensors]:
        """Memory for the results, and the sources, of which none lies in it but what this rank sends itself."""
        name, own = self.row.name, rank if "[" in self._in else 0
        own = own if own < len(sources) and "/" not in self._in else -1
        if self._out == "out":
            block = rank * bytes_of(outs[0]) if "*" in self._in else 0
            address = sources[own].data_ptr() + block if sources else 0
            return memory or overlaps.result(outs[0], name, sources, own, address), sources
        buffers, _ = memory = memory or overlaps.results(outs, name)
        place = rank if "[" in self._out and "*" not in self._out else 0
        if own < 0 or place >= len(buffers):
            return memory, overlaps.inputs(sources, buffers)
        block = rank * bytes_of(sources[own]) if "*" in self._out else 0
        return memory, overlaps.inputs(sources, buffers, own, buffers[place].data_ptr() + block)

    def _in_place(self, group: Group, given: tuple[Any, ...], memory: Memory | None) -> Operands:
        (tensors, opts), at_root = given, True
        name, reduces = self.row.name, self._reduces
        if self._has_root:
            at_root = arguments.check_root(opts.rootRank, group.size(), name) == group.rank()
        if (len(tensors) > 1 and name == "all_reduce") or (len(tensors) != 1 and name == "broadcast"):
            return self._of_several(group, tensors, opts, at_root)
        tensor = check(tensors[0], name) if len(tensors) == 1 else single(tensors, name)
        if memory is not None:
            [buffer], finish = memory
        elif not self._has_root or at_root == reduces:  # a root's result, or what others receive from it
            buffer, finish = arguments.writable(tensor, name, reduces)
        else:
            buffer, finish = arguments.readable(tensor), None
        return (group, plain(tensor, buffer), opts), finish, buffer, None, 1

    def _of_several(self, group: Group, tensors: Tensors, opts: Any, at_root: bool) -> Operands:
        """A rank's tensors, which become one: the one that is sent, or their sum; all receive the result."""
        name, finish = self.row.name, None
        if self.row.reduces:
            tensor = buffer = several.joined(group, tensors, opts.reduceOp)
            others: Tensors = tensors
        else:
            tensor, others = several.one_of(tensors, opts.rootTensor, name)
            buffer, finish = (arguments.readable(tensor), None) if at_root else arguments.writable(tensor, name)
        finish = several.copied(buffer, others, name, finish)
        return (group, plain(tensor, buffer), opts), finish, buffer, list(tensors), 1

    def tensors_of(self, group: Group, given: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        """The tensors that are written, and those that are read: of a root's list none elsewhere.

        Raises:
            ValueError, TypeError: one is none that can be, or somebody else passes what the root alone gives.
        """
        name, is_root = self.row.name, True
        if self._has_root:
            is_root = arguments.check_root(given[-1].rootRank, group.size(), name) == group.rank()
        found: list[Tensors] = []
        for role, argument, what in ((self._out, given[0], "output"), (self._in, given[1], "input")):
            if role.endswith("*[root]") and not is_root:
                found.append(())
            elif "[" not in role or "*" in role:
                found.append([single(argument, name)])
            elif role.endswith("[root]") and not is_root:
                if argument and _first_of(argument, name):
                    raise ArgumentError(f"{name}: only the root may pass an {what} list")
                found.append(())
            else:
                found.append([check(tensor, name) for tensor in _first_of(argument, name)])
        return found[0], found[1]


_TYPES: dict[str, Any] = {"tensor": torch.Tensor, "list": (list, tuple), "int": int}


def _plain(role: str, tensors: Tensors, buffers: Tensors) -> Any:
    """As the method takes its argument of this role."""
    made = [plain(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
    return made if "[" in role and "*" not in role else made[0] if made else None
