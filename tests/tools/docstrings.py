"""Docstrings as the site wants them: an extension of griffe, which reads them for mkdocstrings (mkdocs.yml).

They are written for readers of the code, whose editors know Sphinx's ways: a role such as :func:`name`, and an example
behind two colons.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|mod|data|meth):`~?([^`]+)`")
_EXAMPLE = re.compile(r"^(Example|[^\n]*):: *\n\n((?: {4}[^\n]*\n|\n)+)", re.M)


def _fenced(found: re.Match[str]) -> str:
    return f"{found[1]}:\n\n```python\n{textwrap.dedent(found[2]).strip()}\n```\n\n"


class Docstrings(griffe.Extension):
    """Rewrites each as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that griffe has found."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value) + "\n"
            obj.docstring.value = _EXAMPLE.sub(_fenced, text).strip()
