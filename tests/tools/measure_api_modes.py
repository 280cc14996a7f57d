"""What a call costs through each API mode: writes the table in docs/api-modes.md.

    python tests/tools/measure_api_modes.py

One rank, so nothing is sent. Each line is measured in a process of its own, in turns; medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api-modes.md"
MARKED = re.compile(r"(?<=<!-- api modes -->\n).*?(?=<!-- /api modes -->)", re.S)
TURNS, CALLS, REPEATS = 5, 2000, 7
#: What is measured: in words, the API mode, a hook or none, and the size of the flight recorder.
LINES = (
    ("direct", "direct", False, "2000"),
    ("direct, no flight recorder", "direct", False, "0"),
    ("direct with a hook, no flight recorder", "direct", True, "0"),
    ("direct with a hook", "direct", True, "2000"),
    ("dispatcher, no flight recorder", "dispatcher", False, "0"),
    ("dispatcher", "dispatcher", False, "2000"),
)


def measure(api_mode: str, hooked: bool) -> float:
    """Microseconds of an 8-byte all_reduce in this process."""
    import torch
    import torch.distributed as dist

    from torchmpi_plugin import Options

    dist.init_process_group("mpiplus", pg_options=Options(api_mode=api_mode))
    if hooked:
        dist.group.WORLD.register_pre_hook(1, lambda call: None)
    tensor, times = torch.ones(2), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    dist.destroy_process_group()
    return statistics.median(times)


def in_a_process(api_mode: str, hooked: bool, entries: str) -> float:
    command = [sys.executable, __file__, api_mode, "hooked" if hooked else ""]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": entries}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    return float(done.stdout.split()[-1])


def main() -> None:
    import torch

    from torchmpi_plugin import torch_internals

    newer = torch_internals.has_python_backends()
    lines = [line for line in LINES if newer or (line[1] == "direct" and not line[2])]
    times: dict[str, list[float]] = {words: [] for words, *_ in lines}
    for _ in range(TURNS):
        for words, *how in lines:
            times[words].append(in_a_process(*how))
    table = ["| API mode | us | times the first |", "|---|---|---|"]
    first = statistics.median(times[lines[0][0]])
    for words, found in times.items():
        table.append(f"| {words} | {statistics.median(found):.1f} | {statistics.median(found) / first:.2f} |")
    cores = len(os.sched_getaffinity(0))
    table += ["", f"Medians of one run, torch {torch.__version__}, one rank on a machine of {cores} cores.", ""]
    text = "\n".join(table)
    print(text)
    if newer:
        PAGE.write_text(MARKED.sub(text, PAGE.read_text()))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measure(sys.argv[1], sys.argv[2] == "hooked"))
    else:
        main()
