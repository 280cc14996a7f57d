"""One window over two nodes: mapped where two ranks are on one, by messages where they are not."""

import os
import time

import torch
import torch.distributed as dist

NUMEL = 1 << 20  # 4 MiB: more than an MPI sends before the other side asks for it

dist.init_process_group("mpiplus")
group = dist.group.WORLD
rank, size = dist.get_rank(), dist.get_world_size()
PART = NUMEL // size
target = group.allocate_tensor(NUMEL, dtype=torch.float32, device="cpu")
window = dist._new_window(target)

# The last rank calls nothing, and has not waited for anything before.
if rank == 0:
    window.put(torch.full((NUMEL,), 5.0), size - 1, 0, False)
elif rank == size - 1:
    until = time.monotonic() + 30
    while target[-1] != 5 and time.monotonic() < until:
        time.sleep(0.001)
    assert target[-1] == 5
dist.barrier()

for turn in range(30):
    works = []
    for other in range(size):
        numel = (1, PART // 2, PART)[turn % 3]
        works += [window.put(torch.full((numel,), turn * 10.0 + rank), other, rank * PART, True)]
        works += [window.signal(other, True)]
    for other in range(size):
        window.wait_signal(other, False)
        part = target[other * PART :][:numel]
        assert part.min() == part.max() == turn * 10 + other, (turn, other)
    for work in works:
        work.wait()
    dist.barrier()

kinds = "".join(window.get_attr(other).access_type.name[0] for other in range(size))
os.write(1, f"window: rank {rank} {kinds}\n".encode())
window.tensor_deregister()
dist.destroy_process_group()
