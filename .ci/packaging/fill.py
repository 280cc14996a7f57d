#!/usr/bin/env python3
"""Fill the recipes for conda (recipe.yaml) and Spack (package.py) with the version and the hash of an sdist.

Usage: fill.py SDIST OUT      writes OUT/recipe.yaml and OUT/package.py
"""

import hashlib
import re
import sys
from pathlib import Path

TEMPLATES = [Path(__file__).with_name(name) for name in ("recipe.yaml", "package.py")]


def fill(sdist: Path, out: Path) -> None:
    """Write the recipes that build from this sdist, once it lies on the package index."""
    named = re.fullmatch(r"torchmpi_plugin-(.+)\.tar\.gz", sdist.name)
    if not named:
        sys.exit(f"{sdist.name} is no sdist of torchmpi-plugin")
    values = {"@VERSION@": named[1], "@SHA256@": hashlib.sha256(sdist.read_bytes()).hexdigest()}
    out.mkdir(parents=True, exist_ok=True)
    for template in TEMPLATES:
        text = template.read_text().replace(" A template, see fill.py.", "")
        for mark, value in values.items():
            text = text.replace(mark, value)
        (out / template.name).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    fill(Path(sys.argv[1]), Path(sys.argv[2]))
