"""Draw the pictures of docs/timeline.md: of jobs that run here, on three ranks, as chromium shows their pages.

python tests/tools/draw_timeline.py [DIRECTORY]      # else docs; needs the extra report, and chromium
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))
import browser  # noqa: E402

#: By the picture's name the program, and which part of its time is shown.
PICTURES = {
    "timeline": ("docs/examples/straggler.py", 0.3, 1.0),
    "timeline-pipeline": ("docs/examples/frameworks/pipeline_1f1b.py", 0.85, 0.95),
}
WIDTH, HEIGHT, SECONDS = 1000, 560, 120
MPIPLUS = str(Path(sys.executable).with_name("mpiplus"))
PLOT = "document.querySelector('.plotly-graph-div')"


def main(pictures: Path) -> None:
    for name, (program, begin, end) in PICTURES.items():
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "timeline.html")
            command = [MPIPLUS, "run", "-n", "3", "--timeline", str(file), str(ROOT / program)]
            subprocess.run(command, check=True, timeout=SECONDS)
            with browser.opened(Path(directory, "profile"), SECONDS) as page:
                page.show(f"file://{file}", WIDTH)
                page.until(f"{PLOT}.querySelectorAll('path.js-line').length > 2")
                until = f"{PLOT}._fullLayout.xaxis.range[1]"
                page.run(f"Plotly.relayout({PLOT}, {{'xaxis.range': [{begin} * {until}, {end} * {until}]}}) && 0")
                page.until(f"Math.abs({PLOT}._fullLayout.xaxis.range[0] / {PLOT}._fullLayout.xaxis.range[1]) > 0")
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
                picture = page.call("Page.captureScreenshot", clip=clip)["data"]
                if page.errors:
                    raise SystemExit(f"{program}: {page.errors}")
        (pictures / f"{name}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
