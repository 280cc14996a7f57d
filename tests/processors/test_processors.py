"""The C code compiled as for a release, for this processor and another: the same bits, and a protocol that works.

What runs under qemu here is the code for aarch64, but in the memory order of this machine: whether the C code asks for
enough order is for the model (tests/model) and ThreadSanitizer (tests/sanitizers) to say.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from plain_python import module_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
C_SRC = ROOT / "c_src"
ARITHMETIC = [HERE / "arithmetic.c", C_SRC / "arith" / "reduce.c", C_SRC / "arith" / "mpi_representation.c"]
LIBRARIES = Path("/usr/aarch64-linux-gnu")
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", f"-I{C_SRC}"]

EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
HAS_ZIG = importlib.util.find_spec("ziglang") is not None
needs_zig = pytest.mark.skipif(not HAS_ZIG, reason="needs zig's compiler: pip install ziglang")
needs_emulator = pytest.mark.skipif(
    not EMULATOR or not (LIBRARIES / "lib" / "ld-linux-aarch64.so.1").exists(),
    reason="needs an emulator for aarch64 and its glibc: apt-get install qemu-user-static libc6-arm64-cross",
)
each_processor = pytest.mark.parametrize(
    "processor",
    [
        pytest.param("x86_64", marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="this is no x86-64")),
        pytest.param("aarch64", marks=needs_emulator),
    ],
)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Iterator[ModuleType]:
    """The script that builds what is released, which knows the compiler's flags; and a cache for the compiler."""
    module = module_of(ROOT / ".ci" / "build_release.py")
    with pytest.MonkeyPatch.context() as patch:
        if "ZIG_GLOBAL_CACHE_DIR" not in os.environ:
            patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path_factory.mktemp("zig")))
        yield module


def compile_c(compiler: list[str], out: Path, *arguments: object) -> Path:
    done = subprocess.run([*compiler, *FLAGS, "-o", out, *map(str, arguments)], check=False, text=True,
                          capture_output=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def run(processor: str, *command: object) -> str:
    emulated = [EMULATOR, "-L", str(LIBRARIES)] if processor == "aarch64" != platform.machine() else []
    done = subprocess.run([*emulated, *map(str, command)], check=False, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def results_here(tmp_path_factory) -> list[str]:
    """What this machine's own compiler makes of arithmetic.c."""
    program = compile_c(["gcc"], tmp_path_factory.mktemp("here") / "arithmetic", *ARITHMETIC)
    return run(platform.machine(), program).splitlines()


@needs_zig
@each_processor
def test_reductions_and_conversions_give_the_bits_that_gcc_gives_here(
    tmp_path, release, processor, results_here
) -> None:
    program = compile_c([*release.compiler(processor), *release.LINKING], tmp_path / "arithmetic", *ARITHMETIC)
    assert len(results_here) > 1000
    assert run(processor, program).splitlines() == results_here


@needs_zig
@each_processor
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_collectives_over_shared_memory(tmp_path, release, processor, ranks) -> None:
    compiler = [*release.compiler(processor), *release.LINKING]
    sources = [C_SRC / name for name in module_of(C_SRC / "build_shim.py").SOURCES]
    shim = compile_c([*compiler, "-fPIC", "-shared"], tmp_path / "shim.so", *sources, "-ldl", "-lpthread")
    copies = [shutil.copy(shim, tmp_path / f"rank{rank}.so") for rank in range(ranks)]
    source = ROOT / "tests" / "sanitizers" / "shared_memory_ranks.c"
    program = compile_c(compiler, tmp_path / "ranks", source, "-ldl", "-lpthread")
    assert f"{ranks} ranks" in run(processor, program, 300, *copies)
