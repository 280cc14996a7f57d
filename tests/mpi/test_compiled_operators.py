"""torch's functional operators in compiled programs: the same as over gloo, in the same run."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from groups import on_gloo, only_up_to
from operator_tables import Results, called, compare, compiled, functionals, operators_of, ramp
from sampling import FULL, share

from torchmpi_plugin import torch_operators

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(
        not torch_operators.operators_tell_the_reduction(), reason="this torch does not tell operators' reductions"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def in_pairs(group: Any, compiler: str) -> tuple[Results, int]:
    """Pairs of collectives that Inductor can put into buckets; and how many calls it made of these six, 0 if none."""
    name, size = group.group_name, dist.get_world_size()
    plain = torch.ops._c10d_functional

    def program(a: torch.Tensor, b: torch.Tensor) -> Results:
        first = plain.all_gather_into_tensor(a * 2, size, name)
        second = plain.all_gather_into_tensor(b + 1, size, name)
        total = plain.all_reduce(a + b, "sum", name)
        difference = plain.all_reduce(a - b, "sum", name)
        third = plain.reduce_scatter_tensor(torch.cat([a] * size), "sum", size, name)
        fourth = plain.reduce_scatter_tensor(torch.cat([b] * size), "sum", size, name)
        waited = [plain.wait_tensor(tensor) for tensor in (first, second, total, difference, third, fourth)]
        return [tensor.sin() for tensor in waited]

    call, given = compiled(program, compiler), (ramp(), ramp(more=1))
    if compiler != "inductor":
        return call(*given), 0
    from torch._inductor.utils import run_and_get_code  # slow to import

    results, [code] = run_and_get_code(call, *given)
    calls = re.findall(r"^ *(?:\w+ = )?torch\.ops\._c10d_functional\.(?:all|reduce)_\w+\.default\(", code, re.MULTILINE)
    return results, len(calls)


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


class Setting(NamedTuple):
    """Of Inductor; and how many calls it makes of six with it."""

    values: dict[str, Any]
    calls: int


BUCKETS = {f"bucket_{name}_fx": "all" for name in ("all_gathers", "reduce_scatters", "all_reduces")}
SETTINGS = {
    "as it is": Setting({}, 6),
    "buckets": Setting(BUCKETS, 3),
    "buckets, reordered": Setting({"bucket_all_gathers_fx": "all", "reorder_for_compute_comm_overlap": True}, 5),
}


#: What is compiled on two ranks is compiled on more.
on_two = only_up_to(3 if FULL else 2)


def returns_its_argument(names: str) -> bool:
    """Of such operators torch compiles none; Inductor itself makes calls of them."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name in operators_of(names)]
    return any(value.alias_info is not None for schema in schemas for value in schema.returns)


def test_which_operators_cannot_be_compiled() -> None:
    wanted = {"all_reduce_", "all_reduce_coalesced_", "broadcast_"}
    wanted |= {"all_gather_into_tensor_out", "reduce_scatter_tensor_out"}
    assert {names for names in functionals() if returns_its_argument(names)} == wanted & {*functionals()}


@on_two
@pytest.mark.timeout(400)
@pytest.mark.cases(2)  # Inductor compiles C++ for a minute
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_all_functional_operators_in_one_program(compiler: str, channel, group, fresh_compiler) -> None:
    names = [each for each in functionals() if not returns_its_argument(each)]
    assert len(names) > 9
    wanted = on_gloo(channel, lambda gloo: called(names, gloo, compiler), 60)
    torch._dynamo.reset()
    assert not compare(wanted, called(names, group, compiler), "all in one program")


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


@on_two
@pytest.mark.timeout(400)
@pytest.mark.cases(3)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compiled_operations_in_place_as_over_gloo(compiler: str, channel, group, fresh_compiler) -> None:
    wanted = on_gloo(channel, lambda gloo: in_place(gloo, compiler), 60)
    torch._dynamo.reset()
    assert not compare(wanted, in_place(group, compiler), "in place")


@on_two
@pytest.mark.timeout(400)  # every rank compiles C++; 24 s on three ranks and two idle cores
@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("compiler", "how"),
    [
        *(("eager", "as it is"), ("aot_eager", "as it is")),
        *(("inductor", how) for how in share("compiled collectives: Inductor's settings", list(SETTINGS), 3)),
    ],
)
def test_compiled_collectives_as_over_gloo(compiler: str, how: str, channel, group, fresh_compiler) -> None:
    import torch._inductor.config as inductor

    setting = SETTINGS[how]
    if torch.__version__ < "2.13" and not all(hasattr(inductor, name) for name in setting.values):
        pytest.skip("this torch has not all of these settings")
    with inductor.patch(setting.values):
        wanted, _ = on_gloo(channel, lambda gloo: in_pairs(gloo, compiler), 60)
        torch._dynamo.reset()
        got, calls = in_pairs(group, compiler)
    assert not compare(wanted, got, how)
    assert compiler != "inductor" or calls == setting.calls


@on_two
@pytest.mark.timeout(400)
@pytest.mark.cases(3)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compiled_messages_as_over_gloo(compiler: str, channel, group, fresh_compiler) -> None:
    import torch._dynamo.config as dynamo

    if not hasattr(dynamo, "enable_p2p_compilation"):
        pytest.skip("this torch does not compile messages")
    with dynamo.patch(enable_p2p_compilation=True):
        wanted = on_gloo(channel, lambda gloo: messages(gloo, compiler), 60)
        torch._dynamo.reset()
        assert not compare(wanted, messages(group, compiler), "messages")
