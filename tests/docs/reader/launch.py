"""A reader's script that starts its ranks itself; mpirun may do it as well."""

import torch.distributed as dist

from torchmpi_plugin.launch import MultiprocessConfig, launch_subprocesses


def train(epochs: int, lr: float) -> None:
    dist.barrier()


if __name__ == "__main__":
    launch_subprocesses(train, MultiprocessConfig(), None, 0, 10, lr=0.1)
