"""Megatron-core's groups, and its cross entropy over a vocabulary that is cut in two: what runs without a GPU."""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from reported import report

dist.init_process_group(sys.argv[1])
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
torch.manual_seed(1)
inputs, targets = torch.randn(4, 3, 8), torch.randint(0, 32, (4, 3))
weight = torch.randn(32, 8).chunk(size)[rank].clone().requires_grad_()
optimizer = torch.optim.SGD([weight], lr=0.5)
losses = []
for _ in range(8):
    logits = tensor_parallel.copy_to_tensor_model_parallel_region(inputs) @ weight.t()
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits, targets).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
total = tensor_parallel.reduce_from_tensor_model_parallel_region(weight.detach().abs().sum())
report([*losses, total.item()])
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
