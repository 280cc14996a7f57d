"""The page of a timeline in a browser, from a disk: it asks for nothing else, and shows who was waited for."""

from __future__ import annotations

import base64
from pathlib import Path

import browser
import pytest
from click.testing import CliRunner
from made_up_calls import about, all_reduces, leave
from patience import patient

from torchmpi_plugin.cli import main

pytest.importorskip("plotly", reason="the extra report is not installed")
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium")
PLOT = "document.querySelector('.plotly-graph-div')"


def test_the_page(tmp_path: Path) -> None:
    for rank in range(3):
        leave(tmp_path, about(rank, 3), all_reduces(rank, 3, 3000), [{"name": "all_reduce", "op": "SUM"}])
    file = tmp_path / "t.html"
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(file)])
    assert done.exit_code == 0, done.output
    with browser.opened(tmp_path / "profile", patient(30)) as page:
        page.show(f"file://{file}", 1280)
        page.until(f"{PLOT}.querySelectorAll('path.js-line').length >= 5")
        waited = page.run(f"Array.from({PLOT}._fullData.filter(t => t.type == 'bar')[0].y)")
        assert waited == pytest.approx([2 * 0.5 - 0.0003, 2 * 0.5 - 0.0002, 2 * 0.5 - 0.0001], abs=1e-3), waited
        share = page.run(f"Array.from({PLOT}._fullData.filter(t => t.name == 'in communication')[0].y)")
        assert share[10:90] == pytest.approx([(2 * 0.7 + 0.2) / 3] * 80, rel=0.1)
        page.run(f"Plotly.relayout({PLOT}, {{'xaxis.range': [100, 105]}})")
        page.until(f"{PLOT}.layout.xaxis.range[0] == 100")
        page.until(f"{PLOT}.querySelector('path.js-line').getBoundingClientRect().width > 50")
        picture = base64.b64decode(page.call("Page.captureScreenshot")["data"])
        (tmp_path / "t.png").write_bytes(picture)
        assert len(picture) > 20_000
        assert page.errors == []
        assert [
            url for url in page.requests if not url.startswith((f"file://{tmp_path}", "about:", "data:", "blob:"))
        ] == []
