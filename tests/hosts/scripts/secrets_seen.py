"""A rank of `mpiplus run` that looks for the job's secret where others could see it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path


def variables(process: int | str) -> dict[bytes, bytes]:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (word.partition(b"=") for word in words)}


def main() -> None:
    secret = json.loads(variables(os.getppid())[b"MPIPLUS_JOB"])["secret"].encode()
    places = ["a variable"] if any(secret in value for value in variables("self").values()) else []
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            if directory.name.isdigit() and secret in (directory / "cmdline").read_bytes():
                places.append((directory / "cmdline").read_bytes().decode(errors="replace"))
    print("seen:", ", ".join(places) or "nowhere", flush=True)


main()
