#!/usr/bin/env python3
"""How fast the reductions are as the release's compiler makes them, against gcc's: python tests/processors/speed.py

Both take turns in one process, and the best turn of each counts. For each instruction set of this machine it prints the
geometric mean of release / gcc over all types and operations, and the cases in which the release is slowest.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import platform
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
C_SRC = ROOT / "c_src"
BYTES, TURNS, SECONDS_PER_TURN = 65536, 12, 3e-4


class Reduction(ctypes.Structure):
    """mpp_reduction"""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "op", "has_premul", "reserved")),
        ("premul", ctypes.c_double),
        ("divisor", ctypes.c_int64),
        ("factors", ctypes.c_void_p),
    ]


def names(of: str) -> list[str]:
    """The names in a table of dtypes.h."""
    text = re.search(rf"#define {of}\(X\)(.*?)\n\n", (C_SRC / "arith" / "dtypes.h").read_text(), re.DOTALL)[1]
    return re.findall(r"X\((\w+)", text)


def libraries(folder: Path) -> list[ctypes.CDLL]:
    """The kernels by gcc and by the release's compiler."""
    spec = importlib.util.spec_from_file_location("build_release", ROOT / ".ci" / "build_release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    built = []
    for name, compiler in (("gcc", ["gcc"]), ("zig", [*release.compiler(platform.machine()), *release.LINKING])):
        library = folder / f"{name}.so"
        subprocess.run(
            [
                *compiler,
                "-std=gnu11",
                "-O3",
                "-fPIC",
                "-shared",
                f"-I{C_SRC}",
                "-o",
                library,
                C_SRC / "arith" / "reduce.c",
            ],
            check=True,
        )
        built.append(ctypes.CDLL(str(library)))
    return built


def seconds(built: list[ctypes.CDLL], case: Reduction, sources: list, out: ctypes.Array) -> list[float]:
    """The best time of each library."""
    pointers = (ctypes.c_void_p * len(sources))(*map(ctypes.addressof, sources))
    count = ctypes.c_size_t(BYTES // built[0].mpp_dtype_size(case.dtype))

    def turn(library: ctypes.CDLL, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            library.mpp_reduce(ctypes.byref(case), out, pointers, len(sources), count)
        return (time.perf_counter() - start) / times

    times = max(1, int(SECONDS_PER_TURN / turn(built[0], 1)))
    turns = [[turn(library, times) for library in built] for _ in range(TURNS)]
    return [min(best) for best in zip(*turns, strict=True)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = libraries(Path(folder))
    out = ctypes.create_string_buffer(BYTES)
    # small and alike, so that no case is made of subnormals or NaN
    blocks = [ctypes.create_string_buffer(bytes(random.choices(range(60), k=BYTES)), BYTES) for _ in range(4)]
    for isa in ("baseline", "avx2", "avx512"):
        if not all(library.mpp_kernel_select(isa.encode()) for library in built):
            continue
        cases = []
        for (dtype, type_name), (op, op_name) in itertools.product(
            enumerate(names("MPP_DTYPES")), enumerate(names("MPP_REDOPS"))
        ):
            for count in (2, 4) if built[0].mpp_reduction_supported(dtype, op) else ():
                gcc, zig = seconds(built, Reduction(dtype, op, 0, 0, 0.0, 1, None), blocks[:count], out)
                cases.append((zig / gcc, type_name, op_name, count, gcc * 1e6, zig * 1e6))
        mean = math.exp(sum(math.log(case[0]) for case in cases) / len(cases))
        print(f"{isa}: {mean:.2f} of gcc's time, over {len(cases)} cases; the slowest:")
        for ratio, *case in sorted(cases, reverse=True)[:5]:
            print("  {:.2f}  {} {} of {} sources: gcc {:.1f} us, release {:.1f} us".format(ratio, *case))


if __name__ == "__main__":
    main()
