"""Pages of the site that are files of the repository's top level, and what its search finds: a hook of mkdocs.

The former stay where readers of a checkout look for them. Their links start from the top, those of the site from docs/.
Of the search the history is left out, and reports, which have many words and answer few questions, come last.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
REPORTS = ("performance", "scaling", "operations", "pytorch-tests", "frameworks/table")
SEARCH = {"changelog.md": {"exclude": True}} | {f"{name}.md": {"boost": 0.2} for name in (*REPORTS, "contributing")}
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page, name in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tell the search what a page is worth."""
    if page.file.src_uri in SEARCH:
        page.meta["search"] = SEARCH[page.file.src_uri]
