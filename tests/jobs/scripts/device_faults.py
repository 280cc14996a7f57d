"""The last rank fails before a long all_reduce on its device: device_faults.py cpu|cuda error|killed."""

import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("mpiplus")
device = torch.device(sys.argv[1])
if device.type == "cuda":
    device = torch.device("cuda", dist.get_node_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
tensor = torch.ones(3_000_000, device=device)
dist.all_reduce(tensor)
if dist.get_rank() == dist.get_world_size() - 1:
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    torch.zeros(4, device=device)[torch.tensor([9], device=device)]  # a kernel that fails, some time
dist.all_reduce(tensor)
print(tensor[0].item())
