"""Tensors of the package's own are made on a device that it names: the default one is the user's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torchmpi_plugin

PACKAGE = Path(torchmpi_plugin.__file__).parent
#: Of torch, that look at the default device where they are given none.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}
#: Models and their batches: made where the user of `mpiplus bench` lets them be made.
LEFT_OUT = {"cli/bench/training/models.py"}


def without_device(source: str) -> list[int]:
    """The lines in which a factory of torch is called without a device."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_it_finds_them() -> None:
    assert without_device("torch.empty(1, device='cpu')\nx = torch.zeros(2, dtype=d)\n") == [2]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_tensor_has_a_device(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in LEFT_OUT:
        assert without_device(path.read_text()) == []
