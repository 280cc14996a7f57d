"""The C code for many ranks in one process; and the kernels, compiled twice: as setuptools would, and with
-march=native, where the compiler may fuse a multiplication with an addition and must be kept from it."""

import pytest
import ranks_in_one_process
from reduce_kernels import load_kernels


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory.mktemp("reduce"), "_reduce_plain", ["-O3", "-std=c11"])


@pytest.fixture(scope="session")
def native_kernels(tmp_path_factory):
    flags = ["-O3", "-std=gnu11", "-march=native"]
    return load_kernels(tmp_path_factory.mktemp("native"), "_reduce_native", flags)


@pytest.fixture(scope="session")
def shim_of_all_ranks(tmp_path_factory):
    return ranks_in_one_process.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(autouse=True)
def best_isa_afterwards(request):
    yield
    for name in {"kernels", "native_kernels"} & set(request.fixturenames):
        k = request.getfixturevalue(name)
        k.lib.mpp_kernel_select(k.ffi.NULL)
