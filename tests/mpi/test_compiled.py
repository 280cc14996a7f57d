"""torch.compile around distributed programs: the same as over gloo, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import on_gloo, only_up_to
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.mpi(min_size=2),
    only_up_to(3),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

Program = Callable[[Any, str], list[torch.Tensor]]


def net(normalised: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(16) if normalised else nn.Tanh()
    return nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 4))


def train(model: nn.Module) -> list[torch.Tensor]:
    """Two steps; the losses and what the parameters have become."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def ddp(group: Any, compiler: str) -> list[torch.Tensor]:
    return train(torch.compile(DistributedDataParallel(net(), process_group=group), backend=compiler))


def ddp_normalised(group: Any, compiler: str) -> list[torch.Tensor]:
    return train(torch.compile(DistributedDataParallel(net(True), process_group=group), backend=compiler))


def ddp_with_a_hook(group: Any, compiler: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(net(), process_group=group)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(torch.compile(model, backend=compiler))


def fsdp1(group: Any, compiler: str) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(net(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    return train(torch.compile(model, backend=compiler))


def graph_breaks(group: Any, compiler: str) -> list[torch.Tensor]:
    """Collectives that Dynamo does not compile, in a function that it does."""
    peer = dist.get_rank() ^ 1

    def program(tensor: torch.Tensor) -> list[torch.Tensor]:
        total = tensor * 2
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        gathered = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor + 1, group=group)
        dist.barrier(group)
        received = torch.zeros_like(tensor)
        if peer < 2 and dist.get_rank() < 2:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor + 2, group=group, group_peer=peer),
                    dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
                ]
            )
            for one in works:
                one.wait()
        return [total.sin(), *gathered, received + 1]

    return torch.compile(program, backend=compiler)(torch.arange(5.0) + dist.get_rank())


PROGRAMS: list[Program] = [ddp, ddp_normalised, ddp_with_a_hook, fsdp1, graph_breaks]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "compiler"),
    [*((program, "aot_eager") for program in PROGRAMS), (ddp, "inductor")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_as_over_gloo(program: Program, compiler: str, channel) -> None:
    wanted = on_gloo(channel, lambda gloo: program(gloo, compiler), 60)
    torch._dynamo.reset()
    got = program(dist.group.WORLD, compiler)
    assert len(got) == len(wanted)
    for mine, its in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, its)
