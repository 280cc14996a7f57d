"""Files that the ranks of a job have left on its nodes: on each a process says them on its stdout, and removes them.

``mpiplus run`` starts it, as it has started a job that cannot collect its files, and reads that. Imports neither torch
nor MPI.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

_MARK, _PIECE = "mpiplus-timeline", 32_000
_NAME = re.compile(r"[\w-]+\.\d+\.(json|calls)")


def tell() -> None:
    """Say the files of a directory, given as the first argument, but for those of ranks whose text is in the others."""
    directory, *known = sys.argv[1:]
    for text in Path(directory).glob("*.*.json"):
        taken = text.with_suffix(".taken")
        with contextlib.suppress(OSError):  # another process of this node was first
            if text.name not in known:
                time = text.stat().st_mtime_ns
                text.rename(taken)
                for name, path in ((text.name, taken), (f"{text.stem}.calls", text.with_suffix(".calls"))):
                    words = base64.b64encode(zlib.compress(path.read_bytes(), 1)).decode()
                    for at in range(0, len(words), _PIECE):
                        print(_MARK, name, time, words[at : at + _PIECE])
                    path.unlink()
    with contextlib.suppress(OSError):  # it is gone, or not empty
        Path(directory).rmdir()


def hear(lines: Iterable[str], directory: Path) -> None:
    """Write the files that such processes have said."""
    pieces: dict[tuple[str, int], str] = {}
    for line in lines:
        mark, _, rest = line.partition(" ")
        if mark == _MARK and len(words := rest.split()) == 3 and _NAME.fullmatch(words[0]):
            key = words[0], int(words[1])
            pieces[key] = pieces.get(key, "") + words[2]
    for (name, time), said in pieces.items():
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / name
        path.write_bytes(zlib.decompress(base64.b64decode(said)))
        os.utime(path, ns=(time, time))
