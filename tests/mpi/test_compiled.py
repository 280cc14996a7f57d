"""torch.compile around distributed programs and functional operators: the same as over gloo, in the same run."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import on_gloo, only_up_to
from operator_tables import Results, called, compare, compiled, functionals, needs_operators, operators_of, ramp
from sampling import FULL
from torch import nn

pytestmark = [
    pytest.mark.mpi(min_size=2),
    only_up_to(3 if FULL else 2),  # what is compiled on two ranks is compiled on more
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def train(model: nn.Module, compiler: str) -> Results:
    """Two steps; the losses and what the parameters have become."""
    model = torch.compile(model, backend=compiler)  # type: ignore[assignment]
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


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def ddp(group: Any, compiler: str) -> Results:
    return train(nn.parallel.DistributedDataParallel(net(), process_group=group), compiler)


def graph_breaks(group: Any, compiler: str) -> Results:
    """Collectives that Dynamo does not compile, in a function that it does."""

    def program(tensor: torch.Tensor) -> Results:
        total = tensor * 2
        dist.all_reduce(total, group=group, async_op=True).wait()
        gathered = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor + 1, group=group)
        dist.barrier(group)
        return [total.sin(), *gathered]

    return torch.compile(program, backend=compiler)(torch.arange(5.0) + dist.get_rank())


def messages(group: Any, compiler: str) -> Results:
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size

    def program(tensor: torch.Tensor, received: torch.Tensor) -> Results:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor * 2, group=group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()
        return [received + 1]

    return compiled(program, compiler)(ramp(), torch.zeros(4))


def in_place(group: Any, compiler: str) -> Results:
    """The front end's operations on what a program is given, of which Dynamo makes functional ones."""
    size = dist.get_world_size()

    def program(total: torch.Tensor, mine: torch.Tensor, flat: torch.Tensor, parts: torch.Tensor) -> Results:
        dist.all_reduce(total, group=group)
        dist.all_gather_into_tensor(flat, mine, group=group)
        dist.all_to_all_single(parts, flat + total.sum(), group=group)
        dist.reduce_scatter_tensor(mine, parts * 2, group=group)
        return [total + 1, parts - 1]

    given = [ramp(), ramp(more=1), torch.zeros(4 * size), torch.zeros(4 * size)]
    return [*compiled(program, compiler)(*given), *given]


def functional(group: Any, compiler: str) -> Results:
    """All functional operators in one program."""
    names = [each for each in functionals() if not returns_its_argument(each)]
    assert len(names) > 9
    return called(names, group, compiler)


def returns_its_argument(names: str) -> bool:
    """Of such operators torch compiles none; Inductor itself makes calls of them."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name in operators_of(names)]
    return any(value.alias_info is not None for schema in schemas for value in schema.returns)


def test_which_operators_cannot_be_compiled() -> None:
    wanted = {"all_reduce_", "all_reduce_coalesced_", "broadcast_"}
    wanted |= {"all_gather_into_tensor_out", "reduce_scatter_tensor_out"}
    assert {names for names in functionals() if returns_its_argument(names)} == wanted & {*functionals()}


@pytest.mark.timeout(400)  # with Inductor every rank compiles C++
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.cases(6))])
@pytest.mark.parametrize(
    "program",
    [ddp, graph_breaks, *(pytest.param(each, marks=needs_operators) for each in (messages, in_place, functional))],
)
def test_as_over_gloo(program: Any, compiler: str, channel, group) -> None:
    settings: Any = contextlib.nullcontext()
    if program is messages:
        import torch._dynamo.config as dynamo

        if not hasattr(dynamo, "enable_p2p_compilation"):
            pytest.skip("this torch does not compile messages")
        settings = dynamo.patch(enable_p2p_compilation=True)
    with settings:
        wanted = on_gloo(channel, lambda gloo: program(gloo, compiler), 60)
        torch._dynamo.reset()
        got = program(group, compiler)
    if program is ddp:
        torch.testing.assert_close(got, wanted)
    else:
        assert not compare(wanted, got, program.__name__)
