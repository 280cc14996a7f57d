"""The forms in which c10d's methods may be called: as torch's own documentation has them, and as pybind converts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchmpi_plugin.group import forms
from torchmpi_plugin.group.process_group import ProcessGroupMPI

#: What begins an operation, by the type that it returns.
_OPERATION = re.compile(r"(?:^|\d+\. )(\w+)\(self: [\w.]+(?:, (?P<parameters>.*))?\) -> c10d::Work$", re.MULTILINE)
_PARAMETER = re.compile(r"(\w+): (.*?)(?: = .*?)?(?=, \w+: |$)")
#: torch's words for the types of parameters, from 2.8 on, and ours.
_TYPES = {
    "torch.Tensor": "tensor",
    "Sequence[torch.Tensor]": "list",
    "Sequence[Sequence[torch.Tensor]]": "lists",
    **dict.fromkeys(("SupportsInt | SupportsIndex", "SupportsInt", "int"), "int"),
    **dict.fromkeys(("Sequence[SupportsInt | SupportsIndex]", "Sequence[SupportsInt]", "Sequence[int]"), "ints"),
    "ReduceOp": "op",
    "datetime.timedelta | None": "timeout",
    "datetime.timedelta": "timeout",
}
#: Not operations on tensors.
_OTHERS = {"_end_coalescing", "reconfigure"}
TENSOR = torch.ones(1)
SECOND = timedelta(seconds=1)


class Overload(NamedTuple):
    method: str
    kinds: dict[str, str]


def _kind(text: str) -> str:
    text = re.sub(r"torch\._C\._distributed_c10d\.|collections\.abc\.|typing\.", "", text)
    text = re.sub(r"\blist\[", "Sequence[", text)
    text = re.sub(r"Optional\[(.*)\]", r"\1 | None", text)
    return "opts" if text.endswith("Options") else _TYPES.get(text, text)


def documented() -> Iterator[Overload]:
    for name in dir(dist.ProcessGroup):
        for found in _OPERATION.finditer(getattr(dist.ProcessGroup, name).__doc__ or ""):
            if name not in _OTHERS:
                text = re.sub(r"<[^<>]*(?:<[^<>]*>)?[^<>]*>", "default", found["parameters"] or "")
                yield Overload(name, {word: _kind(kind) for word, kind in _PARAMETER.findall(text)})


def ours(method: str) -> list[dict[str, str]]:
    plain = {"root": "int", "tag": "int"}
    known = forms.FORMS[vars(ProcessGroupMPI)[method].__name__]
    return [{name: plain.get(kind, kind) for name, kind in form.kinds.items()} for form in known.forms]


def is_known(overload: Overload) -> bool:
    """An older torch has no timeouts in some."""
    wanted = list(overload.kinds.items())
    return any(wanted in (given, given[:-1]) for given in ([*form.items()] for form in ours(overload.method)))


def test_every_documented_overload_is_in_the_table() -> None:
    overloads = list(documented())
    assert len(overloads) > 20, "the documentation could not be read"
    names = {overload.method for overload in overloads}
    assert {"allreduce", "broadcast", "alltoall_base", "send", "recv_anysource"} <= names
    assert not names - vars(ProcessGroupMPI).keys()
    lacking = [overload for overload in overloads if not is_known(overload)]
    assert not lacking, f"torch {torch.__version__} takes these and mpiplus does not: {lacking}"


def test_every_documented_line_is_read() -> None:
    """Whatever returns a Work, of whichever module torch says that it is, is an overload that the table is held to."""
    for name in dir(dist.ProcessGroup):
        text = getattr(dist.ProcessGroup, name).__doc__ or ""
        returning = [line for line in text.splitlines() if re.search(r"-> (\S*[.:])?Work\b", line)]
        assert len(returning) == len(_OPERATION.findall(text)), f"{name}: {returning}"


def test_defaults_are_those_of_torch() -> None:
    """Nothing but the tag may be left out that torch's own methods want."""
    for name, method in forms.FORMS.items():
        if method.options is not None:
            with pytest.raises(TypeError):
                forms.read(name, (), {"tensors": TENSOR, "no_such": 1})
    assert forms.read("send", ([TENSOR], 1), {})[1:] == [1, 0]
    assert forms.read("allreduce", (TENSOR,), {})[-1].reduceOp == dist.ReduceOp.SUM


class Index:
    def __index__(self) -> int:
        return 3


def test_any_sequence_of_integers_any_integer_and_any_timeout() -> None:
    arrays = numpy.array([1, 2]), numpy.array([1, 2], dtype=numpy.int32), torch.tensor([1, 2]), torch.Size([1, 2])
    for sizes in ([1, 2], (1, 2), range(1, 3), (size for size in (1, 2)), *arrays):
        assert forms.read("alltoall_base", (TENSOR, TENSOR, sizes, []), {})[2:4] == [[1, 2], []]
    for number in (3, numpy.int8(3), Index(), torch.tensor(3)):
        assert forms.read("broadcast", (TENSOR, number), {})[1].rootRank == 3
    for name, arguments in {"barrier": (), "allreduce": (TENSOR, dist.ReduceOp.MAX), "broadcast": (TENSOR, 0)}.items():
        for given in (SECOND, 1.0):
            assert forms.read(name, (*arguments, given), {})[-1].timeout == SECOND
            assert forms.read(name, arguments, {"timeout": given})[-1].timeout == SECOND


def test_a_list_for_each_device() -> None:
    one, nested = [TENSOR], [[TENSOR]]
    for outputs, given in ((one, TENSOR), (nested, one)):
        assert forms.read("allgather", (outputs, given), {})[:2] == [nested, one]
    assert forms.read("gather", ([], TENSOR, 1), {})[:2] == [[], one]
    assert forms.read("scatter", (TENSOR, one, 1), {})[:2] == [one, nested]
    assert forms.read("reduce_scatter", (), {"output": TENSOR, "input": one})[:2] == [one, nested]
    assert forms.read("allreduce", ({TENSOR},), {})[0] == forms.read("allreduce", (iter(one),), {})[0] == one


WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "an operation in place of a timeout": ("broadcast", (TENSOR, 0, dist.ReduceOp.SUM), {}),
    "a number of seconds": ("allreduce", (TENSOR, dist.ReduceOp.SUM, 5), {}),
    "a fraction as a root": ("broadcast", (TENSOR, 1.0), {}),
    "a list and a root": ("broadcast", ([TENSOR], 1), {}),
    "others' options": ("broadcast", ([TENSOR], c10d.AllreduceOptions()), {}),
    "no such name": ("allreduce", ([TENSOR],), {"group": 1}),
    "a name twice": ("allreduce", ([TENSOR],), {"tensors": [TENSOR]}),
    "too many": ("barrier", (SECOND, SECOND), {}),
    "nothing": ("allreduce", (), {}),
    "fractions as sizes": ("alltoall_base", (TENSOR, TENSOR, [1.0], [1.0]), {}),
    "more than 64 bits": ("recv", ([TENSOR], 1 << 64), {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_a_type_error_that_says_what_is_taken(case: str) -> None:
    name, arguments, named = WRONG[case]
    with pytest.raises(TypeError, match=rf"{name}\(\): incompatible function arguments: .* It takes \("):
        forms.read(name, arguments, named)
