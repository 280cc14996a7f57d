"""What the documentation says about the package, compared with the package."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from types import ModuleType

import pytest
from code_blocks import PAGES, ROOT
from plain_python import module_of

import torchmpi_plugin
from torchmpi_plugin import dist, integrations, launch, settings

SOURCES = sorted(Path(torchmpi_plugin.__file__).parent.rglob("*.py"))
GAP = "\0"  # where a text has a value put into it
TROUBLE = ROOT / "docs" / "troubleshooting.md"


@functools.cache
def texts_of(source: Path) -> list[str]:
    """The texts in a file, with gaps where values are put into them."""
    texts = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[.\d]*[sdfg]", GAP, node.value))
    return texts


def messages() -> list[str]:
    return re.findall(r"^(?:### |\| )`([^`]*)`(?:$| \|)", TROUBLE.read_text(), re.M)


@pytest.mark.parametrize("message", messages())
def test_messages_are_the_package_s_own(message: str) -> None:
    """Each part between two dots of omission is in some text of the package."""
    texts = [text for source in SOURCES for text in texts_of(source)]
    for part in filter(None, (part.strip() for part in message.split("…"))):
        words = part.strip(" ,;:()")
        assert any(words in text for text in texts), f"no text of the package has {words!r}"


def test_variables_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"\bMPIPLUS_[A-Z_]*[A-Z]\b", page.read_text())}
    of_developers = {name for name in named if name.startswith(("MPIPLUS_TEST_", "MPIPLUS_CI_"))}
    assert named - settings.known() - of_developers == {"MPIPLUS_CUDAA"}  # misspelt, as an example


def test_the_reference_has_every_public_name() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("api.md", "api-helpers.md", "api-launch.md"))
    shown = set(re.findall(r"^::: torchmpi_plugin\.(\S+)$", page, re.M))
    public = {name for name in torchmpi_plugin.__all__ if not name.startswith("__")}
    public |= {
        f"{module.__name__.partition('.')[2]}.{name}"
        for module in (dist, integrations, launch)
        for name in module.__all__
    }
    for name in sorted(public - shown):
        assert f"`{name.rpartition('.')[2]}`" in page, f"{name} is missing"
    assert shown <= public


def test_each_page_says_first_what_it_is_for() -> None:
    """And leaves contents to the site."""
    pages = {page: page.read_text().split("\n") for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert [page.name for page, lines in pages.items() if not re.match(r"[\w`\"\[]", lines[2])] == []
    assert [
        page.name for page, lines in pages.items() if re.search(r"^(- \[[^]]*\]\(#.*\n){3}", "\n".join(lines), re.M)
    ] == []


def test_dir_has_the_public_names() -> None:
    assert {*torchmpi_plugin.__all__, "dist", "integrations", "launch"} <= {*dir(torchmpi_plugin)}


def test_the_readme_is_short_and_of_this_version() -> None:
    readme, pyproject = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    assert len(readme.splitlines()) <= 110
    version, python = re.search(r'^version = "(.*)"$', pyproject, re.M), re.search(r'torch>=([\d.]+)"', pyproject)
    assert version is not None and python is not None
    assert f"**Version {version[1]}**" in readme and f"torch {python[1]} or newer" in readme


def test_the_readme_s_comparison_is_what_a_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what can be run here; the line of commux takes a download."""
    script = tool("compare_backends", monkeypatch)
    lines = (ROOT / "README.md").read_text().splitlines()
    for backend in ("mpiplus", "gloo"):
        said = next(line for line in lines if line.startswith(f"| {backend} |"))
        assert said.endswith(f"| {' | '.join(script.tried(backend))} |")


def test_links_from_the_top_lead_to_files() -> None:
    """Those of docs/ are checked by mkdocs."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tests" / "tools")
    return module_of(ROOT / "tests" / "tools" / f"{name}.py")


@pytest.mark.parametrize("name", ["generate_settings", "generate_command_line", "loggp"])
def test_pages_made_from_the_package_are_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tool(name, monkeypatch)
    assert script.PAGE.read_text() == script.page(), f"write it anew: python tests/tools/{name}.py"


# ---- tests/tools/renew_figures.py ----


def test_marked_figures_are_those_that_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its command before it."""
    script = tool("renew_figures", monkeypatch)
    marked = {
        (page, name) for page in PAGES for name in re.findall(r"^<!-- figures: (\S+) -->$", page.read_text(), re.M)
    }
    assert marked == {(figure.page, name) for name, figure in script.FIGURES.items()}
    for name in script.FIGURES:
        assert " mpiplus bench" in script.find(name)[1]


def test_the_picture_is_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    script = tool("draw_figures", monkeypatch)
    assert script.PICTURE.read_text() == script.picture(script.PAGE.read_text()), "python tests/tools/draw_figures.py"
