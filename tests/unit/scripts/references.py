"""Every c10d method that C carries out, on a world of one rank: whether objects are left behind.

Run by test_references.py on a Python that notices more: where freed memory is used, where a reference is given back
once too often, where an exception is left behind. Not a test of its own.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import inside
import torch
import torch.distributed as dist

from torchmpi_plugin import operations
from torchmpi_plugin.diagnosis import flight_recorder

CALLS = 200


def calls() -> dict[str, Callable[[bool], object]]:
    one, two = torch.ones(3), torch.ones(3)
    return {
        "barrier": lambda a: dist.barrier(async_op=a),
        "broadcast": lambda a: dist.broadcast(one, 0, async_op=a),
        "all_reduce": lambda a: dist.all_reduce(one, async_op=a),
        "reduce": lambda a: dist.reduce(one, 0, async_op=a),
        "all_gather_into_tensor": lambda a: dist.all_gather_into_tensor(two, one, async_op=a),
        "all_gather": lambda a: dist.all_gather([two], one, async_op=a),
        "reduce_scatter_tensor": lambda a: dist.reduce_scatter_tensor(two, one, async_op=a),
        "reduce_scatter": lambda a: dist.reduce_scatter(two, [one], async_op=a),
        "gather": lambda a: dist.gather(one, [two], 0, async_op=a),
        "scatter": lambda a: dist.scatter(two, [one], 0, async_op=a),
        "all_to_all_single": lambda a: dist.all_to_all_single(two, one, async_op=a),
        "all_to_all": lambda a: dist.all_to_all([two], [one], async_op=a),
        "send": lambda a: message("send", one, two, a),
        "recv": lambda a: message("recv", one, two, a),
        "recv_anysource": lambda a: message("recv_anysource", one, two, a),
    }


def message(method: str, one: torch.Tensor, two: torch.Tensor, asynchronous: bool) -> object:
    """To itself, which torch's own functions refuse; the one that is asked for is the last to begin."""
    group = dist.group.WORLD
    begin = {
        "send": lambda: group.send([one], 0, 1),
        "recv": lambda: group.recv([two], 0, 1),
        "recv_anysource": lambda: group.recv_anysource([two], 1),
    }
    other = "recv" if method == "send" else "send"
    before, work = begin[other](), begin[method]()
    before.wait()
    return work if asynchronous else work.wait()


def wrong() -> None:
    """What C has read in part, and hands over."""
    group = dist.group.WORLD
    for arguments in ((), (3,), ([torch.ones(3, 2)[:, 0], 3],), ([torch.ones(2)], 3), ([torch.ones(2)], [], 3, 4, 5)):
        # some of these are right for recv_anysource
        for name in {row.method for row in operations.ROWS if row.start} - {"recv_anysource"}:
            try:
                getattr(group, name)(*arguments)
            except (TypeError, ValueError, AttributeError, RuntimeError):
                continue


def left_behind(call: Callable[[], object]) -> int:
    """By how many blocks of memory Python has more after ``CALLS`` calls; the fewest of several times."""

    def count() -> int:
        for _ in range(CALLS):
            call()
        dist.barrier()
        # another thread takes them out of the registry, hundreds later where this one holds the interpreter
        until = time.monotonic() + 30
        while inside.pending(dist.group.WORLD):
            assert time.monotonic() < until, "operations that nobody completes"
            time.sleep(0.001)
        gc.collect()
        return sys.getallocatedblocks()

    count()
    fewest = before = count()
    for _ in range(4):
        after = count()
        fewest, before = min(fewest, after - before), after
        if fewest < CALLS // 4:
            break
    return fewest


def main() -> int:
    """Print the calls that leave something behind; their number."""
    dist.init_process_group("mpiplus")
    flight_recorder.current = None  # it keeps the last thousands of calls
    gc.freeze()  # torch's own objects, which it takes long to walk through
    lost = {}
    for name, call in calls().items():
        before = inside.calls(dist.group.WORLD).in_c
        for way, job in (
            ("synchronous", lambda call=call: call(False)),
            ("waited for", lambda call=call: (work := call(True)) and work.wait()),
            ("dropped", lambda call=call: call(True)),
        ):
            lost[f"{name}, {way}"] = left_behind(job)
        if inside.calls(dist.group.WORLD).in_c == before:
            lost[f"{name}: not through C"] = CALLS
    lost["wrong arguments"] = left_behind(wrong)
    found = {name: count for name, count in lost.items() if count >= CALLS // 4}
    print(f"references: {len(lost)} ways, left behind: {found}", flush=True)
    dist.destroy_process_group()
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
