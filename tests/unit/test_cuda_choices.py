"""What is decided about CUDA tensors before any is communicated."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

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


class TestDetection:
    @pytest.mark.parametrize("answer", [0, 1])
    def test_by_the_query_that_most_have(self, answer: int) -> None:
        support = cuda_aware.detect(library(answer), "Open MPI v5", {})
        assert support == (bool(answer), f"MPIX_Query_cuda_support() says {answer}")

    @pytest.mark.parametrize(("answer", "aware"), [((0, 1), True), ((0, 0), False), ((5, 1), False)])
    def test_as_mpich_has_it(self, answer: tuple[int, int], aware: bool) -> None:
        assert cuda_aware.detect(library(mpich=answer), "MPICH Version: 4", {}).aware is aware

    def test_a_library_that_ends_the_job_is_not_asked(self) -> None:
        asked = library(1)
        assert cuda_aware.detect(asked, "MPICH Version:\t3.4.3\nMPICH Release date: ...", {}).aware is False
        assert cuda_aware.detect(asked, "MPICH Version:      4.3.0", {}).aware is True

    def test_nobody_to_ask(self) -> None:
        support = cuda_aware.detect(library(), "Intel(R) MPI Library 2021", {})
        assert support.aware is None
        direct, why = cuda_aware.path(support, "auto", "")
        assert not direct
        assert "neither MPIX_Query_cuda_support nor" in why

    @pytest.mark.parametrize("value", ["0", "no", "OFF"])
    def test_switched_off_by_a_variable(self, value: str) -> None:
        support = cuda_aware.detect(library(1), "MPICH", {"MPIR_CVAR_ENABLE_GPU": value})
        assert support == (False, f"MPIR_CVAR_ENABLE_GPU={value}")

    def test_off_until_a_variable_says_otherwise(self) -> None:
        version = "MVAPICH2 Version: 2.3.7"
        assert cuda_aware.detect(library(1), version, {}) == (False, "MVAPICH2 wants MV2_USE_CUDA=1 for it")
        assert cuda_aware.detect(library(1), version, {"MV2_USE_CUDA": "1"}).aware

    @pytest.mark.parametrize(("module", "aware"), [("", False), ("/usr/lib/ucx/libuct_cuda.so.0\n", True)])
    def test_ucx_without_its_cuda_module(self, module: str, aware: bool) -> None:
        support = cuda_aware.detect(library(1), "Open MPI v5", {})
        support = cuda_aware.unless_ucx_lacks_cuda(support, "/usr/lib/libucp.so.0\n" + module)
        assert support.aware is aware
        assert ("libuct_cuda" in support.why) is not aware


class TestWish:
    @pytest.mark.parametrize(
        ("option", "variable", "wanted"),
        [
            (None, None, ("auto", "")),
            (None, "staged", ("staged", "MPIPLUS_CUDA")),
            ("direct", "staged", ("direct", "Options(cuda=...)")),
            ("auto", "staged", ("auto", "")),
        ],
    )
    def test_option_before_variable(self, option, variable, wanted) -> None:
        assert cuda_aware.asked_for(option, {} if variable is None else {"MPIPLUS_CUDA": variable}) == wanted

    @pytest.mark.parametrize("wanted", ["staged", "direct"])
    def test_a_setting_counts_more_than_what_is_found(self, wanted: str) -> None:
        support = cuda_aware.Support(wanted == "staged", "the library says")
        assert cuda_aware.path(support, wanted, "a place") == (wanted == "direct", f"a place says {wanted}")


class OnCuda(torch.Tensor):
    """Says that it is on ``cuda:1``."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 1))


class TestTensors:
    def test_not_those_of_rocm(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.2")
        with pytest.raises(ValueError, match="CPU and CUDA tensors; this one is on cuda:1"):
            arguments.check(torch.ones(3).as_subclass(OnCuda), "op")

    def test_on_two_devices(self) -> None:
        with pytest.raises(ValueError, match="all_gather: all tensors must be on one device, not cpu and cuda:1"):
            arguments.check_alike(torch.ones(3).as_subclass(OnCuda), torch.ones(3), "all_gather")

    def test_devices_of_a_future(self) -> None:
        there = torch.ones(3).as_subclass(OnCuda)
        assert device.devices_of([torch.ones(1)]) == []
        assert device.devices_of([there, torch.ones(1), there]) == [torch.device("cuda", 1)]

    @pytest.mark.parametrize(("built_for", "kinds"), [(None, ["cpu"]), ("12.8", ["cpu", "cuda"])])
    def test_kinds_of_device(self, built_for, kinds, monkeypatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", built_for)
        assert device.types() == kinds


def test_no_driver_is_told() -> None:
    lib, ffi = Mock(mpp_cuda_load=lambda *_: 1), Mock(string=lambda _: b"no driver")
    with pytest.raises(RuntimeError, match=r"CUDA tensors: no driver\. Move"):
        device._load(lib, ffi)


@pytest.mark.parametrize("name", ["_shim_int", "_shim_ptr"])
class TestDriverLibrary:
    """Found at run time: what is said where it is not there."""

    def load(self, name: str, library_name: bytes) -> str:
        shim = importlib.import_module(f"torchmpi_plugin.{name}")
        message = shim.ffi.new("char[]", 512)
        assert shim.lib.mpp_cuda_load(library_name, message, 512) != 0
        return shim.ffi.string(message).decode()

    def test_no_driver(self, name: str) -> None:
        said = self.load(name, b"libcuda-of-nobody.so.1")
        assert said.startswith("the CUDA driver library cannot be loaded: libcuda-of-nobody.so.1: cannot open")

    def test_a_driver_that_is_too_old(self, name: str) -> None:
        assert self.load(name, b"libc.so.6") == "the CUDA driver library libc.so.6 has no function cuInit"
