"""What is released agrees with pyproject.toml, and what must not be released is refused."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from plain_python import module_of

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)[1]
REQUIREMENTS = dict(
    re.findall(r'"([a-z0-9]+)>=([0-9.]+)"', re.search(r"^dependencies = \[(.*?)\]$", PYPROJECT, re.M | re.S)[1])
)


def script(name: str) -> ModuleType:
    return module_of(ROOT / ".ci" / name)


# ---- the version, and what stands beside it ----


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {VERSION}\n" in citation
    date = re.search(r'^date-released: "(.*)"$', citation, re.MULTILINE)[1]
    newest = re.findall(r"^## \[(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:2]
    assert newest == ["Unreleased]", f"{VERSION}] - {date}"]


def test_the_readme_has_the_figures_of_what_the_tests_run() -> None:
    python = re.search(r"^fail_under = (\S+)$", PYPROJECT, re.M)[1]
    c = re.search(r'^fail-under-line = "(\S+)"$', PYPROJECT, re.M)[1]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{python} % of the Python lines and branches, and {c} % of the C lines" in readme


# ---- the recipes for conda and Spack ----


@pytest.fixture
def recipes(tmp_path) -> Path:
    """The recipes, filled in for an sdist."""
    sdist = tmp_path / f"torchmpi_plugin-{VERSION}.tar.gz"
    sdist.write_bytes(b"an sdist")
    script("packaging/fill.py").fill(sdist, tmp_path / "recipes")
    return tmp_path / "recipes"


def test_recipes_name_the_version_and_the_hash_and_nothing_is_left_to_fill_in(recipes) -> None:
    digest = hashlib.sha256(b"an sdist").hexdigest()
    for name in ("recipe.yaml", "package.py"):
        template, text = (ROOT / ".ci" / "packaging" / name).read_text(), (recipes / name).read_text()
        assert VERSION not in template and VERSION in text
        assert digest in text
        assert not re.search(r"@[A-Z0-9]+@", text)
        assert "template" not in text


def test_conda_recipe_wants_what_the_package_wants(recipes) -> None:
    text = (recipes / "recipe.yaml").read_text()
    run = re.search(r"^  run:.*\n((?:    - .*\n)+)", text, re.MULTILINE)[1]
    wanted = dict(re.findall(r"- (\S+) >=(\S+)", run))
    assert wanted.pop("python") == re.search(r'^requires-python = ">=(.*)"$', PYPROJECT, re.MULTILINE)[1]
    wanted["torch"] = wanted.pop("pytorch")
    assert wanted == REQUIREMENTS


def test_spack_package_wants_what_the_package_wants(recipes) -> None:
    text = (recipes / "package.py").read_text()
    assert re.findall(r'^    version\("([^"]+)"', text, re.M) == [VERSION]
    wanted = re.findall(r'depends_on\("py-([a-z0-9-]+)@([0-9.]+):", type=.*run', text)
    assert dict(wanted) == REQUIREMENTS


# ---- wheels that are refused ----

known_processor = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no wheel is for this")
BOTH = tuple(f"torchmpi_plugin/_{part}.abi3.so" for part in ("bridge", "shim_int", "shim_ptr"))


def wheel_of(folder: Path, *flags: str, members: tuple[str, ...] = BOTH) -> Path:
    """A wheel whose libraries are compiled from nothing, with these flags."""
    library, wheel = folder / "some.so", folder / "some.whl"
    subprocess.run(["gcc", "-shared", "-o", library, "-xc", "/dev/null", "-xnone", *flags], check=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in members:
            archive.write(library, member)
    return wheel


@known_processor
def test_wheels_that_are_refused(tmp_path) -> None:
    """Those that are tied to this machine, for another processor, and with other libraries."""
    release, here = script("build_release.py"), platform.machine()
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[here]
    release.check(wheel_of(tmp_path), here)
    for arguments, members, processor, words in (
        (["-Wl,-rpath,/opt/python/lib"], BOTH, here, r"looks for libraries in \['/opt/python/lib'\]"),
        (["-Wl,--no-as-needed", "-lm"], BOTH, here, "needs libm.so.6"),
        ([], BOTH, other, f"is not for {other}"),
        ([], BOTH[:1], here, "has these libraries"),
        ([], (*BOTH, "torchmpi_plugin.libs/libmpi.so.40"), here, "libmpi"),
    ):
        with pytest.raises(release.ReleaseError, match=words):
            release.check(wheel_of(tmp_path, *arguments, members=members), processor)
