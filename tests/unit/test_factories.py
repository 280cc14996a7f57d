"""Tensors of the package's own are made on a device that it names: the default one is the user's."""

from __future__ import annotations

import ast
from pathlib import Path

import torchmpi_plugin

PACKAGE = Path(torchmpi_plugin.__file__).parent
#: Of torch, that look at the default device where they are given none.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}


def test_every_tensor_has_a_device() -> None:
    """But those of models and their batches: made where the user of `mpiplus bench` lets them be made."""
    calls = [
        (path.name, call.lineno)
        for path in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert calls and {name for name, _ in calls} == {"models.py"}, calls
