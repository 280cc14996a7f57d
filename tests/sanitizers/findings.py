"""Reads what the sanitizers wrote about each rank and prints what concerns this project.

Everything does, except leaks without a frame of the shim: Python, torch and MPI keep memory to the end.

Usage: findings.py DIRECTORY; exit code 1 if there is anything to report.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OURS = "torchmpi_plugin/_shim_"
LEAK = re.compile(r"^(Direct|Indirect) leak of ")
FRAME = re.compile(r"\((/[^()+]+)\+0x([0-9a-f]+)\)")


def main() -> int:
    findings = [finding for log in sorted(Path(sys.argv[1]).iterdir()) for finding in read(log)]
    alike = {re.sub(r"0x[0-9a-f]+ |[0-9]+", "", finding): finding for finding in findings}  # ranks find the same
    for finding in alike.values():
        print(finding, end="\n\n")
    return 1 if findings else 0


def read(log: Path) -> list[str]:
    paragraphs = [part for part in re.split(r"\n\s*\n", log.read_text(errors="replace")) if part.strip(" =\n")]
    if not any("LeakSanitizer" in part for part in paragraphs):
        return [with_names("\n\n".join(paragraphs))] if paragraphs else []
    leaks = [part for part in paragraphs if LEAK.match(part)]
    others = [part for part in paragraphs if part not in leaks and "ERROR: LeakSanitizer: detected" not in part]
    ours = [part for part in leaks if OURS in part]
    return [with_names(part) for part in (*ours, *others) if not part.startswith(("SUMMARY:", "---"))]


def with_names(report: str) -> str:
    """The report with functions and lines after the frames that lie in the shim."""
    return FRAME.sub(lambda frame: frame[0] + name_of(frame[1], frame[2]) if OURS in frame[1] else frame[0], report)


def name_of(library: str, address: str) -> str:
    command = ["addr2line", "-fsp", "-e", library, f"0x{address}"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    return " " + answer.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
