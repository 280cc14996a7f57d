"""The page of a timeline in a browser, from a disk: it asks for nothing else, and shows who was waited for."""

from __future__ import annotations

import base64
from pathlib import Path

import browser
import numpy as np
import pytest
from click.testing import CliRunner
from made_up_calls import STEP_NS, about, all_reduces, leave
from patience import patient

from torchmpi_plugin.cli import main
from torchmpi_plugin.timeline import rows

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium; on Debian: apt-get install chromium")
PLOT = "document.querySelector('.plotly-graph-div')"


def test_the_page(tmp_path: Path) -> None:
    for rank in range(3):
        ring = all_reduces(rank, 3, 3000)
        steps = ring[3001:3100]
        steps["number"], steps["kind"] = range(3001, 3100), rows.STEP
        steps["sequence"], steps["begun"] = range(1, 100), 30 * STEP_NS * np.arange(1, 100) - STEP_NS // 5
        reached = [{"messages": {"4096": 2000, "16384": 4000}, "with": 2}] if rank == 0 else []
        leave(tmp_path, about(rank, 3), ring, [{"name": "all_reduce", "op": "SUM"}], *reached)
    file = tmp_path / "t.html"
    done = CliRunner().invoke(main, ["timeline", str(tmp_path), str(file)])
    assert done.exit_code == 0, done.output
    with browser.opened(tmp_path / "profile", patient(30)) as page:
        page.show(f"file://{file}", 1280)
        page.until(f"{PLOT}.querySelectorAll('path.js-line').length >= 5")
        waited = page.run(f"Array.from({PLOT}._fullData.filter(t => t.type == 'bar')[0].y)")
        assert waited == pytest.approx([2 * 0.5 - 0.0003, 2 * 0.5 - 0.0002, 2 * 0.5 - 0.0001], abs=1e-3), waited
        shares = f"{PLOT}._fullData.filter(t => t.name == 'in communication')[0]"
        assert page.run(f"Array.from({shares}.x)") == list(range(2, 100))
        assert page.run(f"Array.from({shares}.y)") == pytest.approx([(2 * 0.7 + 0.2) / 3] * 98, rel=0.01)
        of_kind = f"{PLOT}._fullData.filter(t => t.name == 'all_reduce')[0]"
        rate, share = page.run(f"[{of_kind}.y[0], {of_kind}.text[0]]")
        assert (rate, share) == (pytest.approx(4096 / 200e-6), "1% of plain messages")
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
