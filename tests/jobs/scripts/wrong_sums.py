"""Runs the command `mpiplus` with an all_reduce that gives twice the sum."""

import sys

from torchmpi_plugin.cli import main
from torchmpi_plugin.group.process_group import ProcessGroupMPI

right = ProcessGroupMPI.allreduce


def twice(self, tensors, *arguments):
    for tensor in tensors:
        tensor.mul_(2)
    return right(self, tensors, *arguments)


ProcessGroupMPI.allreduce = twice
main(sys.argv[1:])
