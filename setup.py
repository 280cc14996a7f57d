"""What pyproject.toml cannot say: the three C extensions, and that one wheel serves every Python 3."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "c_src"))
import generate_stub
from build_shim import bridge

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "torchmpi-plugin is built for Python's stable ABI, which a free-threaded Python (3.13t, 3.14t) does not have"
    )

compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler) and {"bdist_wheel", "build_ext", "editable_wheel", "install", "develop"} & {*sys.argv}:
    sys.exit(
        f"torchmpi-plugin is built from C here, and there is no C compiler: no {compiler!r} on the PATH. Install one "
        f"(apt install gcc, dnf install gcc, conda install c-compiler, your site's module), or name it: export CC=..."
    )

generate_stub.write()
setup(
    cffi_modules=["c_src/build_shim.py:shim_int", "c_src/build_shim.py:shim_ptr"],
    ext_modules=[bridge()],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
