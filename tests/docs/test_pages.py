"""What the documentation says about the package, compared with the package."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
from code_blocks import PAGES, ROOT

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
    return re.findall(r"^### `(.*)`$", TROUBLE.read_text(), re.M)


@pytest.mark.parametrize("message", messages())
def test_messages_are_the_package_s_own(message: str) -> None:
    """Each part between two dots of omission is in some text of the package."""
    texts = [text for source in SOURCES for text in texts_of(source)]
    for part in filter(None, (part.strip() for part in message.split("…"))):
        words = part.strip(" ,;:()")
        assert any(words in text for text in texts), f"no text of the package has {words!r}"


def test_variables_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"\bMPIPLUS_[A-Z_]*[A-Z]\b", page.read_text())}
    assert named - settings.known() == {"MPIPLUS_CUDAA"}  # misspelt, as an example


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
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


def test_links_from_the_top_lead_to_files() -> None:
    """Those of docs/ are checked by mkdocs."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("name", ["generate_settings", "generate_command_line", "loggp"])
def test_pages_made_from_the_package_are_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    path = ROOT / "docs" / "tools" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), f"write it anew: python docs/tools/{path.name}"
