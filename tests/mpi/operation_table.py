"""The table of all operations: one row each, which test_operations.py runs over all cases."""

from __future__ import annotations

import contextlib

import moving_operations as moving
import object_operations as objects
import point_to_point as p2p
import reducing_operations as reducing
import torch
from expected import PREFIX_OPS, REDUCE_OPS
from groups import API_MODE
from started import ASYNC, SYNC, Operation

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
    movement(moving.broadcast),
    movement(moving.all_gather),
    movement(moving.all_gather_uneven),
    movement(moving.all_gather_into_tensor),
    movement(moving.all_gather_into_tensor_stacked),
    movement(moving.gather),
    movement(moving.scatter),
    movement(moving.all_to_all),
    movement(moving.all_to_all_uneven),
    movement(moving.all_to_all_single),
    movement(moving.all_to_all_single_splits),
    movement(moving.coalesced_all_gather_into_tensor),
    movement(moving.all_gather_coalesced),
    reduction(reducing.all_reduce),
    reduction(reducing.reduce),
    reduction(reducing.reduce_scatter),
    reduction(reducing.scan, PREFIX_OPS),
    reduction(reducing.exscan, PREFIX_OPS),
    reduction(reducing.reduce_scatter_tensor),
    reduction(reducing.reduce_scatter_tensor_stacked),
    reduction(reducing.coalesced_all_reduce),
    reduction(reducing.all_reduce_coalesced),
    reduction(reducing.coalesced_reduce_scatter_tensor),
    reduction(reducing.sparse_all_reduce, ("SUM",), dtypes=tuple(SPARSE_DTYPES), shapes=SPARSE_SHAPES),
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
