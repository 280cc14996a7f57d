"""launch_subprocesses, where the batch system's allocation decides which nodes the ranks are on."""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist

from torchmpi_plugin.launch import MultiprocessConfig, launch_subprocesses


def train(data: bytes) -> None:
    total = torch.ones(3)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} on {socket.gethostname()}: {total.tolist()}, {len(data)} bytes", flush=True)


if __name__ == "__main__":
    print(f"from {socket.gethostname()}", flush=True)
    port = int(sys.argv[1]) or None
    launch_subprocesses(train, MultiprocessConfig(world_size=2, master_port=port), None, 0, b"x" * 100_000_000)
