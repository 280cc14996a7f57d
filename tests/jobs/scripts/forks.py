"""Child processes of a rank, while its groups are in use."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch
import torch.distributed as dist
from steps import ME, SIZE, check_works, raises, run, say
from torch.utils.data import DataLoader, TensorDataset


def busy(action: Callable[[], None]) -> None:
    """Do something while a message is awaited and the progress thread has work."""
    tensor = torch.zeros(1 << 16)
    receive = dist.irecv(tensor, (ME - 1) % SIZE, tag=9)
    action()
    dist.send(torch.full((1 << 16,), 3.0), (ME + 1) % SIZE, tag=9)
    receive.wait()
    assert tensor[-1] == 3.0
    check_works()


def child_target(queue, live_group: bool) -> None:
    if live_group:
        with raises(RuntimeError, "forked", "parent", "spawn"):  # forked_objects.py tries all that a child inherits
            dist.new_group()
        assert (dist.get_rank(), dist.get_world_size()) == (ME, SIZE)
        dist.destroy_process_group()
    else:
        assert not dist.is_initialized()
    queue.put(ME)


def worker_processes() -> None:
    """multiprocessing's children by each method, and a DataLoader's, while messages are under way."""
    dist.init_process_group("mpiplus")
    check_works()
    for method in ("fork", "spawn", "forkserver"):
        busy(lambda method=method: start_one(method))
        say(f"{method} works")
    for method in ("fork", "spawn", "forkserver"):
        busy(lambda method=method: load(method))
        say(f"DataLoader works with {method}")
    dist.destroy_process_group()
    dist.init_process_group("mpiplus")
    check_works()


def start_one(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=child_target, args=(queue, method == "fork"))
    child.start()
    child.join()
    assert child.exitcode == 0, (method, child.exitcode)
    assert queue.get() == ME


def load(method: str) -> None:
    """All batches come, with collectives between them."""
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    total = torch.zeros(())
    for (batch,) in DataLoader(
        data, batch_size=4, num_workers=2 if method == "fork" else 1, multiprocessing_context=method
    ):
        part = batch.sum()
        dist.all_reduce(part)
        total += part
    assert total == SIZE * 64 * 63 / 2


if __name__ == "__main__":
    run(globals())
