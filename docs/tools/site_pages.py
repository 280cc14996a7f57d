"""Pages of the site that are files of the repository's top level: a hook of mkdocs (mkdocs.yml).

They stay where readers of a checkout look for them. Links in them start from the top, those of the site from docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page, name in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files
