#!/usr/bin/env python3
"""Print from what a CI run's stages have printed: the slowest tests, what is for the night, and last what failed.

Usage: report.py LOGS
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHOWN = 25
#: Of what a test that failed has printed, its last lines.
LINES = 30
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DURATION = re.compile(r"^ *(\d+\.\d+)s (call|setup|teardown) +(\S.*)$", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?)(?::\d+)?: (.*MPIPLUS_TEST_FULL.*)$", re.MULTILINE)
FAILURE = re.compile(r"^(?:_{3,}|={3,}) (test_\S.*?|failed, and run again: .*?) (?:_{3,}|={3,})$", re.MULTILINE)
SECTION = re.compile(r"^(?:_{3,}|={3,}) .* (?:_{3,}|={3,})$", re.MULTILINE)
NOT_RUN = re.compile(r"^for the night: (.*)$", re.MULTILINE)


def failures(text: str) -> Iterator[tuple[str, str]]:
    """Of each test that failed its name and its last words, also where it passed when it was run again."""
    for found in FAILURE.finditer(text):
        end = SECTION.search(text, found.end())
        lines = text[found.end() : end.start() if end else len(text)].strip().splitlines()
        yield found.group(1), "\n".join(line[:400] for line in lines[-LINES:])


def main(logs: Path) -> None:
    texts = {log.name: COLOUR.sub("", log.read_text(errors="replace")) for log in sorted(logs.iterdir())}
    slow = sorted(
        ((float(seconds), stage, what, test) for stage, text in texts.items()
         for seconds, what, test in DURATION.findall(text)), reverse=True,
    )  # fmt: skip
    if slow:
        print("\n======== the slowest tests ========")
    for seconds, stage, what, test in slow[:SHOWN]:
        print(f"{seconds:7.1f} s  {stage:16} {test[:90]}{'' if what == 'call' else f' ({what})'}")
    if os.environ.get("MPIPLUS_TEST_FULL") != "1":
        print_what_the_night_adds(texts)
    for stage, text in texts.items():
        for name, words in failures(text):
            print(f"\n======== stage {stage}: {name} ========\n{words}")


def print_what_the_night_adds(texts: dict[str, str]) -> None:
    print("\n======== what the night adds: MPIPLUS_TEST_FULL=1 .ci/run ========")
    skipped: Counter[str] = Counter()
    for stage, text in texts.items():
        for count, file, reason in SKIPPED.findall(text):
            skipped[f"{stage}: {file}: {reason}"] += int(count)
        for what in NOT_RUN.findall(text):
            print(f"  {stage}: {what}")
    for what, count in sorted(skipped.items()):
        print(f"  {what} ({count})")
    print("  stages aarch64, frameworks and pytorch_tests")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
