"""Files of ranks as a job would leave them, with calls that nobody made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from torchmpi_plugin.timeline import rows

STEP_NS = 1_000_000


def about(rank: int, size: int, ranks_per_node: int = 0, epoch: int = 0) -> dict[str, Any]:
    node = rank // ranks_per_node if ranks_per_node else 0
    return {"rank": rank, "size": size, "node": node, "host": f"node{node}", "pid": 1, "first": 1, "epoch": epoch}


def leave(directory: Path, each: dict[str, Any], ring: np.ndarray, kinds: list[dict[str, Any]], *more: Any) -> None:
    """The two files of a rank; the kinds are numbered from 1 on, of one group of all ranks."""
    group = {"group": 0, "name": "default_pg", "ranks": list(range(each["size"]))}
    usual = {"of": 0, "dtype": "float32", "op": "", "file": "/train.py", "line": 7}
    numbered = [{**usual, "kind": number, **kind} for number, kind in enumerate(kinds, 1)]
    lines = [each, group, *numbered, *more]
    text = directory / f"1-job.{each['rank']}.json"
    text.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ring.tofile(text.with_suffix(".calls"))


def all_reduces(rank: int, size: int, count: int) -> np.ndarray:
    """One a millisecond; rank ``step % size`` comes last, 0.5 ms after the others, and each takes 0.2 ms from there."""
    ring = np.zeros(rows.PLACES, rows.ROW)
    step = np.arange(1, count + 1)
    late = STEP_NS // 2
    ring["number"][step] = ring["sequence"][step] = step
    ring["begun"][step] = step * STEP_NS + np.where(step % size == rank, late, 100 * rank)
    ring["complete"][step] = step * STEP_NS + late + 200_000
    ring["asked"][step] = ring["complete"][step] + np.where(step % 2, 10_000, -10_000)
    ring["bytes"][step], ring["kind"][step], ring["peer"][step] = 4096, 1, -1
    return ring
