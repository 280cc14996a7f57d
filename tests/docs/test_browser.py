"""The site in a browser: at the width of a desk and of a telephone, from a disk and over HTTP."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from code_blocks import ROOT
from patience import patient
from sampling import share

pytestmark = [
    pytest.mark.timeout(patient(280)),
    pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium"),
]
SEARCHES = {  # what people look for, and where it has to be among the first five
    "segfault": "status.html",
    "sbatch torchrun": "coming-from.html",
    "hang": "status.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As CI has built it, or as mkdocs builds it here."""
    if given := os.environ.get("MPIPLUS_TEST_SITE"):
        return Path(given)
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no site: MPIPLUS_TEST_SITE names none, and mkdocs is not installed here")
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(made)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=patient(200), env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return made


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(params=["disk", "HTTP"])
def address(request: pytest.FixtureRequest, site: Path) -> str:
    return f"file://{site}" if request.param == "disk" else str(request.getfixturevalue("served"))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[browser.Page]:
    with browser.opened(tmp_path / "profile", patient(30)) as opened:
        yield opened


def test_no_page_is_wider_than_the_screen(page: browser.Page, site: Path) -> None:
    """At either width; and none has an error in its console. (404.html names files from a server's top.)"""
    wide = {}
    pages = sorted(set(site.rglob("*.html")) - {site / "404.html"})
    for file in share("pages in a browser", pages, 3, 8):
        page.show(f"file://{file}", 1280)
        for width in (1280, 400):
            page.resize(width)
            if (found := page.run("document.documentElement.scrollWidth")) > width:
                wide[f"{file.relative_to(site)} at {width}"] = found
    assert (wide, page.errors) == ({}, [])


@pytest.mark.cases(2)
@pytest.mark.parametrize("words", SEARCHES)
def test_the_search_finds(page: browser.Page, address: str, words: str) -> None:
    page.show(f"{address}/index.html", 1280)
    page.run("document.querySelector('[data-md-component=search-query]').focus()")
    page.call("Input.insertText", text=words)
    results = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    page.until(f"{results}.length > 0")
    first = list(dict.fromkeys(link.split("#")[0].split("?")[0].rpartition("/")[2] for link in page.run(results)))[:5]
    assert SEARCHES[words] in first
    assert page.errors == []
