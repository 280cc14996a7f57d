"""The table of all operations: one row each, which test_operations.py runs over all cases."""

from __future__ import annotations

import contextlib

import object_operations as objects
import point_to_point as p2p
import torch
import torch.distributed as dist
from cases import Case
from collectives import COLLECTIVES
from expected import REDUCE_OPS, reduced
from groups import API_MODE
from started import ASYNC, SYNC, Operation, Started, works_of

MOVEMENT, REDUCTION, OBJECTS, BARRIER = "movement", "reduction", "objects", "barrier"

SPARSE_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
# torch's own all_reduce takes the real view, which torch 2.8 does not have of a sparse tensor.
with contextlib.suppress(NotImplementedError):
    torch.view_as_real(torch.eye(1, dtype=torch.complex64).to_sparse_coo())
    SPARSE_DTYPES.append(torch.complex64)
SPARSE_SHAPES = ((1,), (5,), (3, 4), (1000,))


def movement(start, **options) -> Operation:
    return Operation(start.__name__, start, MOVEMENT, **options)


def reduction(start, op_names=REDUCE_OPS, **options) -> Operation:
    return Operation(start.__name__, start, REDUCTION, op_names=op_names, **options)


def sparse_tensor(case: Case, rank: int) -> torch.Tensor:
    """A COO tensor of rows, as embeddings have for gradients.

    Ranks hold different numbers of rows, rank 1 none, and a row may come twice. The numbers are
    small and whole, so that no order of additions rounds.
    """
    height = case.shape[0]
    count = 0 if rank == 1 else min(height, 2 + rank)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, height, (1, count), generator=generator)
    values = torch.randint(-4, 5, (count, *case.shape[1:]), generator=generator)
    return torch.sparse_coo_tensor(rows, values.to(case.dtype), case.shape)


def sparse_all_reduce(case: Case) -> Started:
    tensor = sparse_tensor(case, case.rank)
    work = dist.all_reduce(tensor, case.op, group=case.process_group, async_op=case.is_async)
    inputs = [sparse_tensor(case, rank).to_dense() for rank in range(case.size)]
    return Started(works_of(work), [tensor.to_dense], [reduced(inputs, "SUM")])


# Below torch's own group nobody can say who sent (docs/api-modes.md).
FROM_ANY_SOURCE = (
    movement(p2p.recv_any_source, modes=SYNC, min_size=2),
    movement(p2p.irecv_any_source, modes=ASYNC, min_size=2),
)
OPERATIONS = (
    movement(p2p.send_recv, modes=SYNC, min_size=2),
    movement(p2p.isend_irecv, modes=ASYNC),
    movement(p2p.isend_irecv_tags, modes=ASYNC),
    *(FROM_ANY_SOURCE if API_MODE == "direct" else ()),
    movement(p2p.batch_isend_irecv, modes=ASYNC),
    *(
        Operation(name, row.start, REDUCTION if row.op_names else MOVEMENT, op_names=row.op_names)
        for name, row in COLLECTIVES.items()
    ),
    reduction(sparse_all_reduce, ("SUM",), dtypes=tuple(SPARSE_DTYPES), shapes=SPARSE_SHAPES),
    Operation("broadcast_object_list", objects.broadcast_object_list, OBJECTS, SYNC),
    Operation("all_gather_object", objects.all_gather_object, OBJECTS, SYNC),
    Operation("gather_object", objects.gather_object, OBJECTS, SYNC),
    Operation("scatter_object_list", objects.scatter_object_list, OBJECTS, SYNC),
    Operation("send_recv_object_list", objects.send_recv_object_list, OBJECTS, SYNC, min_size=2),
    Operation("barrier", objects.barrier, BARRIER),
    Operation("monitored_barrier", objects.monitored_barrier, BARRIER, SYNC),
)
TABLE = {operation.name: operation for operation in OPERATIONS}


def of_kind(*kinds: str) -> list[Operation]:
    return [operation for operation in OPERATIONS if operation.kind in kinds]
