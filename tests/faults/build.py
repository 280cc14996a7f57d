"""Builds the shim with faults.c in it, in a copy of the sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WRAPPED = ("malloc", "calloc", "realloc", "dlsym")


def build(folder: Path, handles_are_pointers: bool) -> Path:
    """The folder to put on PYTHONPATH; made in ``folder``."""
    found = importlib.util.find_spec("torchmpi_plugin")
    assert found is not None and found.origin is not None
    for source in (ROOT / "c_src", Path(found.origin).parent):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for part in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / part, folder)
    faults = folder / "faults.o"
    kind = ["-DMPP_HANDLES_ARE_POINTERS"] if handles_are_pointers else []
    command = ["gcc", "-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, *kind, f"-I{ROOT / 'c_src'}", "-c", HERE / "faults.c", "-o", faults], check=True)
    flags = {"MPIPLUS_CFLAGS": "-O1", "MPIPLUS_LDFLAGS": f"{faults} " + " ".join(f"-Wl,--wrap={w}" for w in WRAPPED)}
    flags["MPIPLUS_TEST_COVERAGE"] = ""  # the counts there are of another build
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, **flags},
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )
    return folder
