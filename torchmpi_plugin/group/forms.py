"""The forms in which c10d's bound methods may be called, and how each becomes the one that the methods here take.

pybind tries the overloads of a method one after the other and takes the first that the arguments fit; so does this
module. The table is compared with the documentation of torch's own methods by ``tests/unit/test_forms.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

from .. import operations, torch_internals

_INT64 = 1 << 63
#: How many TorchDispatchModes, such as CommDebugMode, this thread has entered.
modes: Callable[[], int] = torch_internals.find("torch._C:_len_torch_dispatch_stack")


class MisfitError(TypeError):
    """An argument that is not of its parameter's type."""


# ---- what an argument becomes, as pybind converts it ----


def _tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise MisfitError
    return value


def _list(value: Any) -> Any:
    """A sequence of tensors, or what can be run through once; a tensor stands for a list of one."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise MisfitError
    return list(value)


def _lists(value: Any) -> Any:
    """Lists of tensors; one list stands for a list of one."""
    lists = _list(value)
    if len(lists) > 0 and isinstance(lists[0], torch.Tensor):
        return [lists]
    return [_list(each) for each in lists]


def _int(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        if isinstance(value, float) or not hasattr(value, "__int__"):
            raise MisfitError from None
        number = int(value)
    if not -_INT64 <= number < _INT64:
        raise MisfitError
    return number


def _ints(value: Any) -> list[int]:
    if value is None:  # as torch's front end has it
        return []
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise MisfitError
    return [_int(each) for each in value]


def _op(value: Any) -> Any:
    if not isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
        raise MisfitError
    return value


def _timeout(value: Any) -> timedelta | None:
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, float):
        return timedelta(seconds=value)
    raise MisfitError


#: The kinds of parameters. A tensor in place of a list of them is the only entry of that list, and so on.
_KINDS: dict[str, Callable[[Any], Any]]
_KINDS = {"tensor": _tensor, "list": _list, "lists": _lists, "int": _int, "ints": _ints, "tag": _int}
_DEPTHS = {"tensor": 0, "list": 1, "lists": 2}
#: Parameters that are fields of the options, and may be left out.
_FIELDS = {"op": ("reduceOp", _op), "timeout": ("timeout", _timeout)}


class Form(NamedTuple):
    """One overload."""

    kinds: dict[str, str]  # of its parameters, by their names; "opts" is the options as a whole
    wraps: tuple[int, ...]  # for each tensor parameter, in how many lists it is put

    def __str__(self) -> str:
        return f"({', '.join(self.kinds)})"


class Method(NamedTuple):
    """The forms of one method. The first is the one that the methods here take."""

    options: Any  # the type of its last argument; None: it has no options
    forms: tuple[Form, ...]


def method_of(row: operations.Operation) -> Method:
    """Read the forms in a row of the table of operations."""
    forms: list[Form] = []
    for text in row.forms:
        parameters = [parameter.strip().partition(": ") for parameter in text.split(",")] if text else []
        kinds = {name: kind or name for name, _, kind in parameters}
        depths = [_DEPTHS[kind] for kind in kinds.values() if kind in _DEPTHS]
        full = [_DEPTHS[kind] for kind in forms[0].kinds.values() if kind in _DEPTHS] if forms else depths
        forms.append(Form(kinds, tuple(most - depth for most, depth in zip(full, depths, strict=True))))
    return Method(getattr(c10d, row.options) if row.options else None, tuple(forms))


FORMS = {row.method: method_of(row) for row in operations.ROWS}


# ---- from the call to the one form ----


def _wrapped(value: Any, times: int) -> Any:
    """In lists; a list of nothing stays one: it is no rank's."""
    return value if times == 0 or (isinstance(value, (list, tuple)) and not value) else [value]


def _fit(method: Method, form: Form, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The arguments of the first form, made of those of this one; or MisfitError."""
    given = dict(zip(form.kinds, arguments, strict=False))
    if len(arguments) > len(form.kinds) or not named.keys() <= form.kinds.keys() - given.keys():
        raise MisfitError
    given |= named
    operands: list[Any] = []
    fields: dict[str, Any] = {}
    opts = None
    for name, kind in form.kinds.items():
        if kind == "opts":
            opts = given.get(name)
            if opts is not None and not isinstance(opts, method.options):
                raise MisfitError
        elif kind in _FIELDS:
            field, read = _FIELDS[kind]
            fields[field] = read(given[name]) if name in given else None
        elif name not in given and kind == "tag":  # torch's own methods want it always
            operands.append(0)
        elif name not in given:
            raise MisfitError
        elif kind == "root":
            fields["rootRank"] = _int(given[name])
        else:
            value = _KINDS[kind](given[name])
            operands.append(_wrapped(value, form.wraps[len(operands)]) if kind in _DEPTHS else value)
    if method.options is None:
        return operands
    opts = method.options() if opts is None else opts
    for field, value in fields.items():
        if value is not None:
            setattr(opts, field, value)
    return [*operands, opts]


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = sorted({_described(each) for each in value})
        return f"{type(value).__name__} of {' and '.join(inner)}" if inner else f"an empty {type(value).__name__}"
    return type(value).__name__


def read(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The arguments of a call, in the method's first form; a TypeError where they fit none of its forms."""
    method = FORMS[name]
    for form in method.forms:
        try:
            return _fit(method, form, arguments, named)
        except MisfitError:
            pass
    given = [_described(value) for value in arguments]
    given += [f"{word}={_described(value)}" for word, value in named.items()]
    forms = " or ".join(map(str, method.forms))
    raise TypeError(f"{name}(): incompatible function arguments: ({', '.join(given)}). It takes {forms}")
