#!/usr/bin/env python3
"""Print a hash of what is in a wheel or sdist: the same whenever it was packed.

Usage: content_hash.py FILE
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import zipfile
from collections.abc import Iterator


def members(name: str) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(name):
        with zipfile.ZipFile(name) as archive:
            yield from ((member, archive.read(member)) for member in archive.namelist())
        return
    with tarfile.open(name) as archive:
        for member in archive:
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is not None:
                yield member.name, opened.read()


digest = hashlib.sha256()
for member, content in sorted(members(sys.argv[1])):
    digest.update(f"{member} {hashlib.sha256(content).hexdigest()}\n".encode())
print(digest.hexdigest())
