"""What CI keeps between runs may be empty, cut off or another's: then it is made again, and nothing else changes."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"
SAYS = "from said import WORD; print(WORD)"

pytestmark = [
    pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock (Debian: util-linux)"),
    pytest.mark.timeout(1200),  # each makes environments, of which one takes some seconds of CPU
]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, CI / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel_that_says(word: str, folder: Path) -> Path:
    """A package of one file."""
    folder.mkdir(exist_ok=True)
    wheel, info = folder / "said-1.0-py3-none-any.whl", "said-1.0.dist-info"
    members = {
        "said.py": f"WORD = {word!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: said\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return wheel


class Run:
    """A run of CI with a cache, of which only its environments are asked for."""

    def __init__(self, folder: Path, name: str, cold: bool = False) -> None:
        self.folder, self.name, self.cold = folder, name, cold
        (folder / name).mkdir()
        (folder / "constraints.txt").touch()

    def says(self, wheel: Path) -> tuple[str, str, Path]:
        """What the package in the environment says, what the run says, and where the environment is."""
        work = self.folder / self.name
        program = f"""
            set -euo pipefail
            root={ROOT} work={work} uv=
            limited() {{ timeout "$@"; }}
            source {CI}/environments.sh
            open_cache {int(self.cold)} >&2
            mkdir -p "$work/environments"
            bin=$(environment test "said @ file://{wheel}")
            echo "$bin"
            "$bin/python" -c '{SAYS}'
        """
        variables = {"MPIPLUS_CI_CACHE": str(self.folder / "cache"), "PIP_NO_INDEX": "1"}
        variables["PIP_CONSTRAINT"] = str(self.folder / "constraints.txt")
        done = subprocess.run(
            ["bash", "-c", program],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *_, place, word = done.stdout.splitlines()
        return word, done.stderr, Path(place).parent


@pytest.fixture
def wheel(tmp_path) -> Path:
    return wheel_that_says("right", tmp_path / "wheels")


def cut_off(place: Path) -> None:
    next(place.glob("lib/python*/site-packages/said.py")).write_text("")


def overwritten(place: Path) -> None:
    next(place.glob("lib/python*/site-packages/said.py")).write_text("WORD = 'wrong'\n")


def lacks_a_file(place: Path) -> None:
    next(place.glob("lib/python*/site-packages/said.py")).unlink()


def without_python(place: Path) -> None:
    (place / "bin" / "python").unlink()


def half_made(place: Path) -> None:
    overwritten(place)
    (place / "complete").unlink()


@pytest.mark.slow
def test_a_wrong_cache_is_made_again(wheel, tmp_path) -> None:
    _, _, place = Run(tmp_path, "good").says(wheel)
    for poison in (cut_off, overwritten, lacks_a_file, without_python, half_made):
        poison(place)
        word, said, again = Run(tmp_path, poison.__name__).says(wheel)
        assert (word, again) == ("right", place), poison
        assert poison is half_made or "is not what was installed" in said, poison


def test_what_another_run_uses_is_left_as_it_is(wheel, tmp_path) -> None:
    _, _, place = Run(tmp_path, "1").says(wheel)
    overwritten(place)
    lock = place.parents[1] / "lock"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        word, _, its_own = Run(tmp_path, "2").says(wheel)
    assert word == "right" and its_own != place
    assert "wrong" in next(place.glob("lib/python*/site-packages/said.py")).read_text()


def test_the_hash_of_a_wheel_is_of_its_content(tmp_path) -> None:
    def digest(file: Path) -> str:
        command = [sys.executable, CI / "content_hash.py", file]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    one, other = wheel_that_says("a", tmp_path / "1"), wheel_that_says("b", tmp_path / "2")
    again = tmp_path / "again.whl"
    with zipfile.ZipFile(one) as source, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as target:
        for name in reversed(source.namelist()):
            target.writestr(zipfile.ZipInfo(name, (2001, 1, 1, 0, 0, 0)), source.read(name))
    assert digest(one) == digest(again) != digest(other)
