"""Runs the command `mpiplus` with host memory that passes for a CUDA device, shared by all ranks."""

import contextlib
import sys

import torch
import torch.distributed as dist

from torchmpi_plugin.cli import main
from torchmpi_plugin.cli.bench import device


class Posing(device.Device):
    is_cpu = False
    kind = "cuda"

    def pinned(self, count):
        return torch.ones(count, dtype=torch.uint8)

    def new_stream(self):
        return contextlib.nullcontext()

    def settle(self):
        pass


device.why_not = lambda kind: ""
device.choose = lambda kind, *_: Posing(torch.device("cpu"), is_shared=True) if kind == "cuda" else device.CPU
torch.cuda.get_device_name = lambda place: "none"
dist.is_nccl_available = lambda: True
main(sys.argv[1:])
