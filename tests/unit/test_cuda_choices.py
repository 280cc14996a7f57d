"""What is decided about CUDA tensors before any is communicated; what torch's kernels make of all ranks' blocks."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reduce_kernels import CASES, DTYPES, OPS, TORCH, as_bytes, as_torch, check_equal, expected, random_bytes

from torchmpi_plugin.group import device_reductions
from torchmpi_plugin.mpi import cuda_aware
from torchmpi_plugin.tensors import arguments, device


def library(query: int | None = None, mpich: tuple[int, int] | None = None) -> SimpleNamespace:
    """An MPI library with the functions to ask: what they answer, MPICH's with an error code before it."""
    functions = SimpleNamespace()
    if query is not None:
        functions.MPIX_Query_cuda_support = lambda: query
    if mpich is not None:

        def ask(kind: int, answer) -> int:
            answer._obj.value = mpich[1]
            return mpich[0]

        functions.MPIX_GPU_query_support = ask
    return functions


@pytest.mark.parametrize(
    ("asked", "version", "variables", "aware"),
    [
        (library(1), "Open MPI v5", {}, True),
        (library(0), "Open MPI v5", {}, False),
        (library(mpich=(0, 1)), "MPICH Version: 4", {}, True),
        (library(mpich=(0, 0)), "MPICH Version: 4", {}, False),
        (library(mpich=(5, 1)), "MPICH Version: 4", {}, False),
        (library(1), "MPICH Version:\t3.4.3\nMPICH Release date: ...", {}, False),  # it would end the job
        (library(1), "MPICH Version:      4.3.0", {}, True),
        (library(1), "MPICH", {"MPIR_CVAR_ENABLE_GPU": "OFF"}, False),
        (library(1), "MVAPICH2 Version: 2.3.7", {}, False),
        (library(1), "MVAPICH2 Version: 2.3.7", {"MV2_USE_CUDA": "1"}, True),
        (library(), "Intel(R) MPI Library 2021", {}, None),
    ],
)
def test_detection(asked, version: str, variables: dict[str, str], aware: bool | None) -> None:
    support = cuda_aware.detect(asked, version, variables)
    assert support.aware is aware
    assert cuda_aware.path(support, "auto", "")[0] == bool(aware)
    for wanted in ("staged", "direct"):  # a setting counts more than what is found
        assert cuda_aware.path(support, wanted, "a place") == (wanted == "direct", f"a place says {wanted}")


@pytest.mark.parametrize(("module", "aware"), [("", False), ("/usr/lib/ucx/libuct_cuda.so.0\n", True)])
def test_ucx_without_its_cuda_module(module: str, aware: bool) -> None:
    support = cuda_aware.detect(library(1), "Open MPI v5", {})
    support = cuda_aware.unless_ucx_lacks_cuda(support, "/usr/lib/libucp.so.0\n" + module)
    assert support.aware is aware
    assert ("libuct_cuda" in support.why) is not aware


@pytest.mark.parametrize(
    ("option", "variable", "wanted"),
    [
        (None, "", ("auto", "")),
        (None, "staged", ("staged", "MPIPLUS_CUDA")),
        ("direct", "staged", ("direct", "Options(cuda=...)")),
    ],
)
def test_option_before_variable(option, variable: str, wanted: tuple[str, str]) -> None:
    assert cuda_aware.asked_for(option, {"MPIPLUS_CUDA": variable}) == wanted


class OnCuda(torch.Tensor):
    """Says that it is on ``cuda:1``."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 1))


def test_tensors(monkeypatch) -> None:
    there = torch.ones(3).as_subclass(OnCuda)
    with pytest.raises(ValueError, match="all_gather: all tensors must be on one device, not cpu and cuda:1"):
        arguments.check_alike(there, torch.ones(3), "all_gather")
    assert device.devices_of([torch.ones(1)]) == []
    assert device.devices_of([there, torch.ones(1), there]) == [torch.device("cuda", 1)]
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ValueError, match="CPU and CUDA tensors; this one is on cuda:1"):
        arguments.check(there, "op")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"libcuda-of-nobody.so.1", "driver library cannot be loaded: libcuda-of-nobody.so.1: cannot open"),
        (b"libc.so.6", "the CUDA driver library libc.so.6 has no function cuInit"),
    ],
)
def test_no_driver(name: bytes, words: str) -> None:
    """Found at run time: what is said where it is not there, or too old."""
    shim = importlib.import_module("torchmpi_plugin._shim_int")
    message = shim.ffi.new("char[]", 512)
    assert shim.lib.mpp_cuda_load(name, message, 512) != 0
    assert words in shim.ffi.string(message).decode()


def suits(dtype: str, op: str, has_premul: int = 0) -> bool:
    tensor = SimpleNamespace(is_cpu=False, dtype=TORCH[dtype])
    how = SimpleNamespace(op=OPS.index(op), has_premul=has_premul)
    return device_reductions.suits(tensor, 65, how, 64)


@pytest.mark.parametrize("dtype,op", [case for case in CASES if suits(*case)])
def test_combine(dtype: str, op: str) -> None:
    rng = np.random.default_rng(DTYPES.index(dtype) * 10 + OPS.index(op))
    kind = TORCH[dtype]
    for ranks in (1, 2, 3, 5):
        sources = [random_bytes(rng, dtype, 1003, kind.itemsize) for _ in range(ranks)]
        for divisor in (1,) if dtype == "BOOL" else (1, 3):
            wanted = expected(sources, dtype, op, None, divisor)
            how = SimpleNamespace(op=OPS.index(op), divisor=divisor)
            for place in (None, 0, ranks - 1):
                blocks = [as_torch(source, kind) for source in sources]
                target = torch.empty_like(blocks[0]) if place is None else blocks[place]
                with np.errstate(all="ignore"):
                    device_reductions.combine(blocks, target, how)
                check_equal(as_bytes(target), wanted, dtype, op, (ranks, divisor, place))


def test_what_is_staged() -> None:
    """Types and operations that torch has no kernels for on a GPU, and what is short."""
    for dtype in ("F8_E4M3FN", "U16", "U32", "U64", "CHALF"):
        assert not suits(dtype, "SUM")
    assert not suits("CFLOAT", "PROD")
    assert not suits("F32", "SUM", has_premul=1)
    assert all(suits(dtype, "SUM") for dtype in ("BOOL", "U8", "I64", "BF16", "F16", "F64", "CFLOAT", "CDOUBLE"))
    how = SimpleNamespace(op=0, has_premul=0)
    on_device = SimpleNamespace(is_cpu=False, dtype=torch.float32)
    assert not device_reductions.suits(on_device, 64, how, 64)
    assert not device_reductions.suits(on_device, 1 << 40, how, None)
    assert not device_reductions.suits(torch.zeros(2), 65, how, 64)
