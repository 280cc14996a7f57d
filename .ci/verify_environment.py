#!/usr/bin/env python3
"""Whether an environment is what was installed: every file has the hash that its package's RECORD says.

What lies in a cache may be cut off, overwritten or another's. Prints the packages that are not as recorded, and exits
with 1 if there is one. MEMO notes what has been looked at, which is not read again; hard links are one file.

Usage: verify_environment.py ENVIRONMENT MEMO
"""

from __future__ import annotations

import base64
import csv
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path


def digest(file: Path, algorithm: str) -> str:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, algorithm) if sys.version_info >= (3, 11) else _digest(opened, algorithm)
    return base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


def _digest(opened, algorithm: str):
    found = hashlib.new(algorithm)
    while block := opened.read(1 << 20):
        found.update(block)
    return found


def is_as_recorded(file: Path, wanted: str, seen: set[str], memo) -> bool:
    """Whether a file has this hash, written as in RECORD."""
    try:
        stat = file.stat()
    except OSError:
        return False
    key = f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {wanted}"
    if key in seen:
        return True
    algorithm, _, value = wanted.partition("=")
    if digest(file, algorithm) != value:
        return False
    seen.add(key)
    memo.write(key + "\n")
    return True


def changed(environment: Path, seen: set[str], memo) -> Iterator[str]:
    """The packages of which a file is missing or another."""
    records = sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD"))
    if not records:
        yield "everything"
    for record in records:
        site = record.parents[1]
        with record.open(newline="") as opened:
            for name, wanted, *_ in csv.reader(opened):
                if wanted and not is_as_recorded(site / name, wanted, seen, memo):
                    yield record.parent.name.partition("-")[0]
                    break


def main(environment: str, memo_name: str) -> int:
    memo_file = Path(memo_name)
    seen = set(memo_file.read_text().splitlines()) if memo_file.exists() else set()
    with memo_file.open("a") as memo:
        wrong = list(changed(Path(environment), seen, memo))
    print(*wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
