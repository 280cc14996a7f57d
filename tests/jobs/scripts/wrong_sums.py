"""Runs the command `mpiplus` with an all_reduce that gives twice the sum; or with the word none, no sum at all."""

import sys

import torch

from torchmpi_plugin.cli import main
from torchmpi_plugin.group.process_group import ProcessGroupMPI

right = ProcessGroupMPI.allreduce


def twice(self, tensors, *arguments):
    for tensor in tensors:
        tensor.mul_(2)
    return right(self, tensors, *arguments)


def none(self, tensors, *arguments):
    """All take part, with copies."""
    result = [tensor.clone() for tensor in tensors]
    work = right(self, tensors, *arguments)
    work.wait()
    torch._foreach_copy_(tensors, result)
    return work


words = sys.argv[1:]
ProcessGroupMPI.allreduce = none if words[0] == "none" else twice
main(words[words[0] == "none" :])
