# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyTorchmpiPlugin(PythonPackage):
    """mpiplus: a torch.distributed backend on MPI, for stock PyTorch and any MPI."""

    pypi = "torchmpi-plugin/torchmpi_plugin-@VERSION@.tar.gz"

    license("BSD-3-Clause")

    version("@VERSION@", sha256="@SHA256@")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cffi@1.16:", type=("build", "run"))
    depends_on("py-torch@2.8:", type="run")
    depends_on("py-mpi4py@4.1:", type="run")  # and with it the MPI
    depends_on("py-numpy@1.24:", type="run")
    depends_on("py-click@8.1:", type="run")
    depends_on("py-rich@13:", type="run")
    depends_on("py-cloudpickle@3:", type="run")
    depends_on("py-psutil@5.9:", type="run")

    import_modules = ["torchmpi_plugin", *(f"torchmpi_plugin._{part}" for part in ("bridge", "shim_int", "shim_ptr"))]
