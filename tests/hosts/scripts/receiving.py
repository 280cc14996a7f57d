"""What memory ranks need beside their tensors for long operations between nodes: receiving.py HOW MIB.

HOW: `idle` ranks do nothing else; rank 0 may be `computing`, or have `aborted`, or `given-up` in the middle.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

how, mib = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("mpiplus")
rank, size = dist.get_rank(), dist.get_world_size()
blocks = [torch.ones(mib << 18) for _ in range(size)]
results = [torch.zeros(mib << 18) for _ in range(size)]
DEADLINE = 60 if how in ("idle", "computing") else 3
matrix = torch.ones(512, 512)
#: Rank 0 has nothing to send, and gets all; or it alone gets anything.
uneven = [tensor[:0] if r == 0 else tensor for r, tensor in enumerate(results)]
to_one = [tensor if r == 0 else tensor[:0] for r, tensor in enumerate(blocks)]
own_block, own_sum = (blocks[0], results[0][:0]) if rank else (blocks[0][:0], results[0])
SUM = dist.ReduceOp.SUM
#: Each with what rank 0 has first of the others' data.
COLLECTIVES = {
    "gather": (lambda g: dist.gather(blocks[0], results if rank == 0 else None, 0, g, True), results[1]),
    "scatter": (lambda g: dist.scatter(results[0], blocks if rank == 2 else None, 2, g, True), results[0]),
    "all_to_all": (lambda g: dist.all_to_all(results, blocks, g, True), results[1]),
    "broadcast": (lambda g: dist.broadcast(blocks[0] if rank == 2 else results[0], 2, g, True), results[0]),
    "all_gather": (lambda g: dist.all_gather(results, blocks[0], g, True), results[1]),
    "all_gather of the others": (lambda g: dist.all_gather(uneven, own_block, g, True), results[1]),
    "reduce_scatter": (lambda g: dist.reduce_scatter(results[0], blocks, SUM, g, True), results[0]),
    "reduce_scatter to one": (lambda g: dist.reduce_scatter(own_sum, to_one, SUM, g, True), results[0]),
    "all_reduce": (lambda g: dist.all_reduce(results[0], SUM, g, True), results[0]),
    "reduce": (lambda g: dist.reduce(results[0], 0, SUM, g, True), results[0]),
}


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) >> 10


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(matrix, matrix)


def is_over(work: dist.Work) -> str:
    try:
        work.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "done"


def leave(work: dist.Work, group: dist.ProcessGroup, arriving: torch.Tensor) -> None:
    """In the middle of the operation, which the others go on with."""
    before, until = arriving[0].item(), time.monotonic() + DEADLINE
    while arriving[0] == before and time.monotonic() < until:
        time.sleep(0.0001)
    if how == "aborted":
        group.abort()
        return
    try:
        work.wait(timedelta(milliseconds=1))
    except dist.DistBackendError:
        dist.destroy_process_group(group)


for name, (call, arriving) in COLLECTIVES.items():
    for tensor in results:
        tensor.fill_(rank != 0)
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1 << 20), group=group)
    dist.barrier()
    group.set_timeout(timedelta(seconds=DEADLINE))
    before, of_files = status("VmRSS"), status("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    work = call(group)
    if rank == 0 and how in ("aborted", "given-up"):
        leave(work, group, arriving)
        end = "left"
    else:
        if rank == 0 and how == "computing":
            compute(1)
        end = is_over(work)
    for _ in range(100):
        dist.barrier()  # what is still under way comes
    more = status("VmHWM") - before - max(0, status("RssFile") - of_files)  # of libraries: used now, or again
    os.write(1, f"{name} on rank {rank}: {more} MiB, {end.splitlines()[0]}\n".encode())
dist.barrier()
os.write(1, f"end of rank {rank}\n".encode())
if how in ("idle", "computing"):
    dist.destroy_process_group()
