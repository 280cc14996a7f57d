"""A script whose main part is not guarded: workers that multiprocessing starts import it, and come to init."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from steps import check_works
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("mpiplus")
check_works()
data = TensorDataset(torch.arange(64.0))
for _ in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1]):
    pass
