"""What was read of the C code when a model was last compared with it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "c_src"


def digest_of(function: str, *files: str) -> str:
    """Of a function in these files, without comments and layout."""
    text = "".join((SOURCES / name).read_text() for name in files)
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(rf"^[a-z][^;{{}}()]*\b{function}\([^;]*?\) {{.*?^}}", code, re.DOTALL | re.MULTILINE)
    assert found, f"{' and '.join(files)} have no function {function}"
    return hashlib.sha256("".join(found[0].split()).encode()).hexdigest()[:12]
