"""What pyproject.toml cannot say: the three C extensions, and that one wheel serves every Python 3."""

import sys
import sysconfig
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "c_src"))
from build_shim import bridge

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "torchmpi-plugin is built for Python's stable ABI, which a free-threaded Python (3.13t, 3.14t) does not have"
    )

setup(
    cffi_modules=["c_src/build_shim.py:shim_int", "c_src/build_shim.py:shim_ptr"],
    ext_modules=[bridge()],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
