"""The released wheel for aarch64 in a Python of that processor, which is Debian's, under qemu."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
WHEELS = os.environ.get("MPIPLUS_TEST_WHEELS")
LIBRARIES = ["libc6", "libexpat1", "libffi8", "zlib1g"]

pytestmark = [
    pytest.mark.skipif(not WHEELS, reason="MPIPLUS_TEST_WHEELS names no folder filled by .ci/build_release.py"),
    pytest.mark.skipif(not EMULATOR, reason="needs an emulator for aarch64: apt-get install qemu-user-static"),
    pytest.mark.skipif(not shutil.which("apt-get"), reason="the Python for aarch64 comes from Debian, by apt-get"),
]

RANKS, DONE = 3, 1
#: What a rank of a group over shared memory does, in turns with the others, in one process and without MPI.
PROGRAM = f"""
import array, importlib, platform, sys
sys.path[:0] = sys.argv[1:]
for kind in ("_shim_int", "_shim_ptr"):
    shim = importlib.import_module("torchmpi_plugin." + kind)
    ffi, lib = shim.ffi, shim.lib
    memory = ffi.new("char[]", lib.mpp_segment_size({RANKS}, {RANKS}, 4, 4096) + 64)
    segment = (int(ffi.cast("uintptr_t", memory)) + 63) // 64 * 64
    groups = [lib.mpp_group_new(0, rank, {RANKS}, 1000, 1000, 0) for rank in range({RANKS})]
    assert not any([lib.mpp_group_attach(group, segment, 4, 4096, ffi.NULL, False) for group in groups])
    tensors = [array.array("f", [rank + 0.5] * 5000) for rank in range({RANKS})]
    how = ffi.new("mpp_reduction *", dict(dtype=lib.MPP_F32, op=lib.MPP_SUM, divisor=1))
    operands = [dict(of=group, input=tensor.buffer_info()[0], output=tensor.buffer_info()[0], count=5000, how=how,
                     root=-1, tag=-1) for group, tensor in zip(groups, tensors)]
    ops = [lib.mpp_allreduce(ffi.new("mpp_operands *", each)) for each in operands]
    while not all([lib.mpp_state_of(op) & 3 for op in ops]):
        pass
    assert [lib.mpp_state_of(op) & 3 for op in ops] == [{DONE}] * {RANKS}
    assert all(set(tensor) == {{4.5}} for tensor in tensors), [tensor[:3] for tensor in tensors]
    for op, group in zip(ops, groups):
        lib.mpp_release(op)
        assert lib.mpp_group_close(group) == 0
        lib.mpp_group_release(group)
    print(platform.machine(), shim.__file__)
"""


def command(*words: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], check=False, text=True, capture_output=True, timeout=250, **more)


@pytest.fixture
def python(tmp_path) -> list[str]:
    """How to start Debian's Python for aarch64, unpacked into a folder: nothing is installed."""
    lists, debs, root = tmp_path / "lists", tmp_path / "debs", tmp_path / "root"
    (lists / "partial").mkdir(parents=True)
    debs.mkdir()
    apt = ["-q", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64",
           "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={tmp_path}"]  # fmt: skip
    got = command("apt-get", *apt, "update")
    newest = re.search(r"python3\.\d+", command("apt-cache", *apt, "depends", "python3-minimal").stdout)
    if got.returncode == 0 and newest:
        version = newest[0]
        names = [f"{version}-minimal", f"lib{version}-minimal", f"lib{version}-stdlib", *LIBRARIES]
        got = command("apt-get", *apt, "download", *(f"{name}:arm64" for name in names), cwd=debs)
    if got.returncode or not newest:
        pytest.skip(f"no Python for aarch64 from apt-get: {got.stderr[-300:]}")
    for deb in debs.iterdir():
        assert command("dpkg-deb", "-x", deb, root).returncode == 0
    return [EMULATOR, "-L", str(root), str(root / "usr" / "bin" / version), "-I"]


def test_wheel(tmp_path, python) -> None:
    site = tmp_path / "site"
    (wheel,) = Path(WHEELS).glob("*manylinux_2_17_aarch64.whl")
    version = Path(python[3]).name.removeprefix("python")
    done = command(sys.executable, "-m", "pip", "install", "--target", site, "--platform", "manylinux_2_17_aarch64",
                   "--python-version", version, "--only-binary=:all:", "--no-deps", "cffi", wheel)  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = command(*python, "-c", PROGRAM, site)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["aarch64"] * 2, lines
    assert all(str(site) in line for line in lines)
