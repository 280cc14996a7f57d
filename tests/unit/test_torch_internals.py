"""The contract with torch's inside: what a release has dropped is named here first; tensors name their device."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from plain_python import printed

import torchmpi_plugin
from torchmpi_plugin import torch_internals
from torchmpi_plugin.torch_internals import NEEDS, Need

PACKAGE = Path(torchmpi_plugin.__file__).parent
#: What takes a name out of torch before a program asks for a group.
WITHOUT = """
import sys, torch, torch.distributed as dist, torchmpi_plugin.torch_internals as internals
module, _, path = {name!r}.partition(":")
*owners, last = path.split(".")
owner = internals.find(module + ":" + ".".join(owners)) if owners else sys.modules[module]
delattr(owner, last)
try:
    dist.init_process_group("mpiplus", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(error)
"""


def test_this_torch_has_what_is_needed() -> None:
    names = [f"{need.name}, for {need.why}" for need in torch_internals.missing()]
    assert not names, f"torch {torch.__version__} has dropped: {names}"


def test_a_name_that_is_gone_is_told_with_both_versions(monkeypatch) -> None:
    gone = Need("torch.distributed:_nothing_of_this_name", (2, 0), "a test")
    monkeypatch.setattr(torch_internals, "NEEDS", (*NEEDS, gone))
    with pytest.raises(RuntimeError) as caught:
        torch_internals.check()
    version = torch.__version__.partition("+")[0]
    for words in ("torchmpi-plugin 0", f"torch {version}", gone.name, gone.why, "pip install ."):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["torch.autograd:_profiler_enabled", "torch:_debug_has_internal_overlap", "torch.distributed:DistBackendError"],
)
def test_a_torch_without_it_is_one_clear_error(name: str) -> None:
    """Also for what is not in the table: no traceback from inside torch without our name on it."""
    told = printed(WITHOUT.format(name=name))
    assert re.search(r"torchmpi-plugin \d\S* does not fit torch \d", told), told
    assert name.rpartition(":")[2] in told


LOADED = """
import sys, torch.distributed as dist
dist.init_process_group("mpiplus", store=dist.HashStore(), rank=0, world_size=1)
print(*sys.modules)
"""


def test_what_torch_compile_leaves_out_is_there_with_the_first_group() -> None:
    """It is marked once: what an operation would import later, Dynamo would compile."""
    layers = ("diagnosis", "engine", "communicator", "group", "tensors")
    files = {f"torchmpi_plugin.{layer}.{file.stem}" for layer in layers for file in (PACKAGE / layer).glob("[!_]*.py")}
    assert files - set(printed(LOADED).split()) == set()


#: Names with one underscore that are looked up on torch, or in it, rather than on an object of ours.
PRIVATE = re.compile(r"\b(?:torch|dist|c10d|profiler|autograd|ProcessGroup|_distributed_c10d)\.(_[a-z]\w*)")
FRAMES = re.compile(r"_getframe|f_locals")


def test_only_one_file_uses_private_names_of_torch() -> None:
    allowed = {"torch_internals.py"}
    walks_frames_of_ours = {"flight_recorder.py", "engine.py", "shutdown.py"}  # the user's, for traces; their own
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        code = re.sub(r"#.*", "", file.read_text())
        if file.name in allowed:
            continue
        found += [f"{file.relative_to(PACKAGE)}: {name}" for name in PRIVATE.findall(code)]
        if FRAMES.search(code) and file.name not in walks_frames_of_ours:
            found.append(f"{file.relative_to(PACKAGE)}: walks frames")
    assert not found


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
