#!/usr/bin/env python3
"""Load what is compiled of a wheel into this Python, and compile all of its Python files. Needs cffi, and no torch.

Usage: load_wheel.py WHEEL
"""

from __future__ import annotations

import compileall
import importlib.util
import platform
import sys
import tempfile
import zipfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    with zipfile.ZipFile(sys.argv[1]) as archive:
        archive.extractall(folder)
    package = Path(folder, "torchmpi_plugin")
    if not compileall.compile_dir(package, quiet=1):
        sys.exit(f"not all of the package is Python {platform.python_version()}")
    for name in ("_bridge", "_shim_int", "_shim_ptr"):
        loader = ExtensionFileLoader(name, str(package / f"{name}.abi3.so"))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        loader.exec_module(module)
        if name != "_bridge":
            assert module.lib.mpp_dtype_size(module.lib.MPP_BF16) == 2
print(f"Python {platform.python_version()}: compiles, and the three extensions load")
