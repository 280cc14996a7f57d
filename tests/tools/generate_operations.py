"""Write docs/operations.md: what becomes of every operation with every dtype of this torch, found out by trying.

    mpirun -n 2 python tests/tools/generate_operations.py            # writes the page
    mpirun -n 2 python tests/tools/generate_operations.py --check    # compares with the page, writes nothing

Each cell of a table is 8 calls: over shared memory and through MPI's own collectives (MPIPLUS_COLLECTIVES=mpi-only),
with 5 and with 40,001 elements, synchronous and asynchronous, each compared on every rank with a plain computation of
the result. Works on any number of ranks from 2. The exit code is 1 when an operation failed or, with --check, the page
differs.
"""

import argparse
import functools
import os
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import torchmpi_plugin

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
COUNTS = (5, 40_001)  # elements; the second is several chunks of shared memory for most dtypes
TIMEOUT = timedelta(seconds=60)
KINDS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR")
FACTOR = 2.0  # of PREMUL_SUM
YES, OURS, THEIRS, FAIL = "yes", "no", "torch", "**FAIL**"
RAN_WITH = "Written by a run with"

# torch 2.13 renamed these two, and warns of the old names.
all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class WrongResultError(Exception):
    """An operation ended without an error and gave something else than it should."""


# ---- dtypes and data ----


def all_dtypes() -> list[torch.dtype]:
    """Every dtype torch has a name for, those of numbers first."""
    found = {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
    return sorted(found, key=lambda dtype: (not is_number(dtype), kind_of(dtype), dtype.itemsize, str(dtype)))


def kind_of(dtype: torch.dtype) -> int:
    """Where the dtype stands in the tables: bool, integers, floats, complex, the rest."""
    name = name_of(dtype)
    prefixes = ("bool", "uint", "int", "bfloat", "float", "complex")
    return next((place for place, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_number(dtype: torch.dtype) -> bool:
    """Whether a sum or a minimum of such elements has a meaning: not so for packed, quantised and scale types."""
    numbers = r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex\d+|float8_e[45]m[23].*"
    return bool(re.fullmatch(numbers, name_of(dtype)))


@dataclass
class Buffer:
    """Elements of any dtype, and the bytes they consist of."""

    tensor: torch.Tensor
    raw: torch.Tensor


def of_bytes(raw: torch.Tensor, dtype: torch.dtype) -> Buffer:
    return Buffer(raw.view(dtype), raw)


@dataclass(frozen=True)
class Case:
    """One call of one operation, on this rank."""

    group: Any
    rank: int
    size: int
    dtype: torch.dtype
    count: int
    asynchronous: bool
    kind: str = "SUM"

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    @property
    def op(self) -> Any:
        return dist._make_nccl_premul_sum(FACTOR) if self.kind == "PREMUL_SUM" else getattr(dist.ReduceOp, self.kind)

    @property
    def everybody(self) -> range:
        return range(self.size)

    def data(self, rank: int, slot: int = 0, count: int | None = None) -> Buffer:
        """What ``rank`` sends from ``slot``: any bytes at all."""
        count = self.count if count is None else count
        generator = torch.Generator().manual_seed(1000 * rank + slot)
        limit = 2 if self.dtype is torch.bool else 256
        raw = torch.randint(limit, (count * self.dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return of_bytes(raw, self.dtype)

    def empty(self, count: int | None = None) -> Buffer:
        """A place for a result."""
        count = self.count if count is None else count
        return of_bytes(torch.ones(count * self.dtype.itemsize, dtype=torch.uint8), self.dtype)

    def numbers(self, rank: int, slot: int = 0) -> torch.Tensor:
        """What ``rank`` gives to a reduction: few and small values, so that every order gives the same sum."""
        if not is_number(self.dtype):
            return self.data(rank, slot).tensor
        return values(self.dtype, self.count, 3 * rank + slot).to(self.dtype, copy=True)

    def reduced(self, slot: int = 0, ranks: int | None = None) -> torch.Tensor:
        """The reduction of everybody's numbers, or of so many ranks'."""
        if not is_number(self.dtype):
            raise WrongResultError(f"{name_of(self.dtype)} was reduced, which has no meaning")
        wide = [values(self.dtype, self.count, 3 * rank + slot) for rank in self.everybody[:ranks]]
        return reduce_plainly(wide, self.kind, self.dtype)

    def wait(self, work: Any) -> None:
        """Wait for the operation if it is asynchronous."""
        if work is not None:
            work.wait()

    def expect(self, got: Buffer, wanted: Buffer) -> None:
        """The bytes must be equal.

        Raises:
            WrongResultError: they are not.
        """
        if not torch.equal(got.raw, wanted.raw):
            raise WrongResultError(f"{int((got.raw != wanted.raw).sum())} bytes of {len(got.raw)} differ")

    def expect_numbers(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """The numbers must be equal.

        Raises:
            WrongResultError: they are not.
        """
        different = widen(got) != widen(wanted)
        if bool(different.any()):
            first = int(different.nonzero()[0])
            found = f"{widen(got)[first].item()} in place of {widen(wanted)[first].item()}"
            raise WrongResultError(f"{int(different.sum())} of {len(got)} elements differ, the first: {found}")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that a plain computation uses."""
    if dtype.is_complex:
        return torch.complex128 if dtype is torch.complex128 else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return torch.int64


def widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


@functools.lru_cache(maxsize=512)
def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Numbers that every dtype of the kind holds exactly, in its wide type."""
    numbers = (torch.arange(count) * 5 + seed) % 7
    if dtype is torch.bool:
        return numbers % 2
    if dtype.is_complex:
        return torch.complex((numbers - 3) / 2, (numbers.flip(0) - 3) / 2).to(wide_dtype(dtype))
    if dtype.is_floating_point:
        return ((numbers - 3) / 2).to(wide_dtype(dtype))
    return numbers if name_of(dtype).startswith("u") else numbers - 3


def reduce_plainly(tensors: list[torch.Tensor], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """One rank's tensor after the other, in the wide type; one rounding at the end."""
    combine: Callable[..., torch.Tensor] = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }.get(kind, torch.add)
    if kind == "PREMUL_SUM":
        tensors = [(tensor * FACTOR).to(tensor.dtype) for tensor in tensors]
    result = functools.reduce(combine, tensors)
    if kind == "AVG":
        whole = not (dtype.is_floating_point or dtype.is_complex)
        result = torch.div(result, len(tensors), rounding_mode="trunc") if whole else result / len(tensors)
    return result.to(dtype)  # to bool: nonzero is true


# ---- operations that move data ----


def send_recv(case: Case) -> None:
    """Around a ring; every rank sends and receives once."""
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    got = case.empty()
    if case.asynchronous:
        works = [
            dist.isend(case.data(case.rank).tensor, after, group=case.group),
            dist.irecv(got.tensor, before, group=case.group),
        ]
        for work in works:
            case.wait(work)
    elif case.rank == 0:
        dist.send(case.data(0).tensor, after, group=case.group)
        dist.recv(got.tensor, before, group=case.group)
    else:
        dist.recv(got.tensor, before, group=case.group)
        dist.send(case.data(case.rank).tensor, after, group=case.group)
    case.expect(got, case.data(before))


def recv_any_source(case: Case) -> None:
    if case.rank != 0:
        dist.send(case.data(case.rank).tensor, 0, group=case.group)
        return
    for _ in range(case.size - 1):
        got = case.empty()
        if case.asynchronous:
            work = dist.irecv(got.tensor, None, group=case.group)
            case.wait(work)
            source = work._source_rank()
        else:
            source = dist.recv(got.tensor, None, group=case.group)
        case.expect(got, case.data(source))


def batch_isend_irecv(case: Case) -> None:
    got = [case.empty() for _ in case.everybody]
    others = [rank for rank in case.everybody if rank != case.rank]
    messages = [dist.P2POp(dist.irecv, got[rank].tensor, rank, case.group) for rank in others]
    messages += [dist.P2POp(dist.isend, case.data(case.rank, rank).tensor, rank, case.group) for rank in others]
    for work in dist.batch_isend_irecv(messages):
        case.wait(work)
    for rank in others:
        case.expect(got[rank], case.data(rank, case.rank))


def broadcast(case: Case) -> None:
    root = case.size - 1
    buffer = case.data(root) if case.rank == root else case.empty()
    case.wait(dist.broadcast(buffer.tensor, root, **case.how))
    case.expect(buffer, case.data(root))


def all_gather(case: Case) -> None:
    got = [case.empty() for _ in case.everybody]
    case.wait(dist.all_gather([buffer.tensor for buffer in got], case.data(case.rank).tensor, **case.how))
    for rank in case.everybody:
        case.expect(got[rank], case.data(rank))


def all_gather_uneven(case: Case) -> None:
    got = [case.empty(case.count + rank) for rank in case.everybody]
    mine = case.data(case.rank, count=case.count + case.rank)
    case.wait(dist.all_gather([buffer.tensor for buffer in got], mine.tensor, **case.how))
    for rank in case.everybody:
        case.expect(got[rank], case.data(rank, count=case.count + rank))


def gathered(case: Case) -> Buffer:
    return of_bytes(torch.cat([case.data(rank).raw for rank in case.everybody]), case.dtype)


def all_gather_tensor(case: Case) -> None:
    got = case.empty(case.count * case.size)
    case.wait(all_gather_into_tensor(got.tensor, case.data(case.rank).tensor, **case.how))
    case.expect(got, gathered(case))


def coalesced_all_gather(case: Case) -> None:
    got = [case.empty(case.count * case.size) for _ in range(2)]
    with dist._coalescing_manager(group=case.group, async_ops=case.asynchronous) as manager:
        for buffer in got:
            all_gather_into_tensor(buffer.tensor, case.data(case.rank).tensor, group=case.group)
    case.wait(manager if case.asynchronous else None)
    for buffer in got:
        case.expect(buffer, gathered(case))


def gather(case: Case) -> None:
    root = case.size - 1
    got = [case.empty() for _ in case.everybody] if case.rank == root else []
    tensors = [buffer.tensor for buffer in got] or None
    case.wait(dist.gather(case.data(case.rank).tensor, tensors, root, **case.how))
    for rank, buffer in enumerate(got):
        case.expect(buffer, case.data(rank))


def scatter(case: Case) -> None:
    root = case.size - 1
    tensors = [case.data(root, rank).tensor for rank in case.everybody] if case.rank == root else None
    got = case.empty()
    case.wait(dist.scatter(got.tensor, tensors, root, **case.how))
    case.expect(got, case.data(root, case.rank))


def all_to_all(case: Case) -> None:
    got = [case.empty() for _ in case.everybody]
    send = [case.data(case.rank, rank).tensor for rank in case.everybody]
    case.wait(dist.all_to_all([buffer.tensor for buffer in got], send, **case.how))
    for rank in case.everybody:
        case.expect(got[rank], case.data(rank, case.rank))


def all_to_all_single(case: Case) -> None:
    send = torch.cat([case.data(case.rank, rank).raw for rank in case.everybody])
    wanted = torch.cat([case.data(rank, case.rank).raw for rank in case.everybody])
    got = case.empty(case.count * case.size)
    case.wait(dist.all_to_all_single(got.tensor, of_bytes(send, case.dtype).tensor, **case.how))
    case.expect(got, of_bytes(wanted, case.dtype))


def all_to_all_splits(case: Case) -> None:
    """Rank a sends ``count + a`` elements to rank 0, and none to the last."""

    def length(source: int, target: int) -> int:
        return 0 if target == case.size - 1 else case.count + source + target

    ins = [length(case.rank, rank) for rank in case.everybody]
    outs = [length(rank, case.rank) for rank in case.everybody]
    send = torch.cat([case.data(case.rank, rank, ins[rank]).raw for rank in case.everybody])
    wanted = torch.cat([case.data(rank, case.rank, outs[rank]).raw for rank in case.everybody])
    got = case.empty(sum(outs))
    case.wait(dist.all_to_all_single(got.tensor, of_bytes(send, case.dtype).tensor, outs, ins, **case.how))
    case.expect(got, of_bytes(wanted, case.dtype))


MOVING: dict[str, Callable[[Case], None]] = {
    "send, recv, isend, irecv": send_recv,
    "recv, irecv from any source": recv_any_source,
    "batch_isend_irecv": batch_isend_irecv,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather, uneven lengths": all_gather_uneven,
    "all_gather_into_tensor (all_gather_single)": all_gather_tensor,
    "the same, coalesced": coalesced_all_gather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single with split sizes": all_to_all_splits,
}


# ---- operations that reduce ----


def all_reduce(case: Case) -> None:
    tensor = case.numbers(case.rank)
    case.wait(dist.all_reduce(tensor, case.op, **case.how))
    case.expect_numbers(tensor, case.reduced())


def scan(case: Case) -> None:
    tensor = case.numbers(case.rank)
    case.wait(torchmpi_plugin.scan(tensor, case.op, **case.how))
    case.expect_numbers(tensor, case.reduced(ranks=case.rank + 1))


def exscan(case: Case) -> None:
    tensor = case.numbers(case.rank)
    case.wait(torchmpi_plugin.exscan(tensor, case.op, **case.how))
    case.expect_numbers(tensor, case.reduced(ranks=case.rank) if case.rank else case.numbers(0))


def coalesced_all_reduce(case: Case) -> None:
    tensors = [case.numbers(case.rank, slot) for slot in range(2)]
    with dist._coalescing_manager(group=case.group, async_ops=case.asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, case.op, group=case.group)
    case.wait(manager if case.asynchronous else None)
    for slot, tensor in enumerate(tensors):
        case.expect_numbers(tensor, case.reduced(slot))


def reduce(case: Case) -> None:
    root = case.size - 1
    tensor = case.numbers(case.rank)
    case.wait(dist.reduce(tensor, root, case.op, **case.how))
    wanted = case.reduced()
    case.expect_numbers(tensor, wanted if case.rank == root else case.numbers(case.rank))


def reduce_scatter(case: Case) -> None:
    tensors = [case.numbers(case.rank, rank) for rank in case.everybody]
    got = case.empty().tensor
    case.wait(dist.reduce_scatter(got, tensors, case.op, **case.how))
    case.expect_numbers(got, case.reduced(case.rank))


def joined(case: Case) -> torch.Tensor:
    if not is_number(case.dtype):
        return case.data(case.rank, count=case.count * case.size).tensor
    wide = [values(case.dtype, case.count, 3 * case.rank + rank) for rank in case.everybody]
    return torch.cat(wide).to(case.dtype)


def reduce_scatter_single(case: Case) -> None:
    got = case.empty().tensor
    case.wait(reduce_scatter_tensor(got, joined(case), case.op, **case.how))
    case.expect_numbers(got, case.reduced(case.rank))


def coalesced_reduce_scatter(case: Case) -> None:
    got = [case.empty().tensor for _ in range(2)]
    with dist._coalescing_manager(group=case.group, async_ops=case.asynchronous) as manager:
        for tensor in got:
            reduce_scatter_tensor(tensor, joined(case), case.op, group=case.group)
    case.wait(manager if case.asynchronous else None)
    for tensor in got:
        case.expect_numbers(tensor, case.reduced(case.rank))


def sparse_all_reduce(case: Case) -> None:
    """Every rank has its own entries, of which some meet."""

    def tensor_of(rank: int) -> torch.Tensor:
        indices = torch.arange(case.count)[None] * (rank + 1)
        length = case.count * case.size
        return torch.sparse_coo_tensor(indices, case.numbers(rank), (length,))

    tensor = tensor_of(case.rank)
    case.wait(dist.all_reduce(tensor, case.op, **case.how))
    dense = [torch.zeros(case.count * case.size, dtype=wide_dtype(case.dtype)) for _ in case.everybody]
    for rank in case.everybody:
        dense[rank][:: rank + 1][: case.count] = widen(case.numbers(rank))
    case.expect_numbers(tensor.to_dense(), reduce_plainly(dense, case.kind, case.dtype))


REDUCING: dict[str, Callable[[Case], None]] = {
    "all_reduce": all_reduce,
    "all_reduce, coalesced": coalesced_all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor (reduce_scatter_single)": reduce_scatter_single,
    "reduce_scatter_tensor, coalesced": coalesced_reduce_scatter,
    "torchmpi_plugin.scan": scan,
    "torchmpi_plugin.exscan": exscan,
    "all_reduce of a sparse (COO) tensor": sparse_all_reduce,
}


# ---- operations without a dtype ----


def barriers(case: Case) -> None:
    case.wait(dist.barrier(**case.how))
    torchmpi_plugin.monitored_barrier(case.group)


def objects_from_root(case: Case) -> None:
    things: list[Any] = [{"rank": case.rank}, case.rank]
    dist.broadcast_object_list(things, 1, group=case.group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(case.everybody) if case.rank == 0 else None, 0, group=case.group)
    if things != [{"rank": 1}, 1] or mine != [case.rank]:
        raise WrongResultError(f"{things} and {mine}")


def objects_gathered(case: Case) -> None:
    every: list[Any] = [None] * case.size
    dist.all_gather_object(every, ("rank", case.rank), group=case.group)
    root: list[Any] | None = [None] * case.size if case.rank == 0 else None
    dist.gather_object(("rank", case.rank), root, 0, group=case.group)
    wanted = [("rank", rank) for rank in case.everybody]
    if every != wanted or root not in (None, wanted):
        raise WrongResultError(f"{every} and {root}")


def object_messages(case: Case) -> None:
    things: list[Any] = [{"from": case.rank}]
    if case.rank == 0:
        dist.send_object_list(things, 1, group=case.group)
    elif case.rank == 1:
        dist.recv_object_list(things, 0, group=case.group)
        if things != [{"from": 0}]:
            raise WrongResultError(str(things))


OTHER: dict[str, Callable[[Case], None]] = {
    "`barrier`, `torchmpi_plugin.monitored_barrier`": barriers,
    "`broadcast_object_list`, `scatter_object_list`": objects_from_root,
    "`all_gather_object`, `gather_object`": objects_gathered,
    "`send_object_list`, `recv_object_list`": object_messages,
}


# ---- trying ----


def outcome_of(operation: Callable[[Case], None], case: Case) -> tuple[str, str]:
    """Run one case: what the table says of it, and the error's text."""
    try:
        operation(case)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return who_refuses(error), text
    return YES, ""


def who_refuses(error: Exception) -> str:
    """The backend by an argument check of its own, torch before or below it, or nobody: then it is a failure."""
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    if isinstance(error, (WrongResultError, dist.DistBackendError)):
        return FAIL
    if isinstance(error, NotImplementedError):
        return THEIRS  # an operator on tensors, which the backend or the comparison needs
    if not any("distributed_c10d" in file or "torchmpi_plugin/api" in file for file in files):
        raise error  # a mistake of this script
    if not any("torchmpi_plugin" in file for file in files):
        return THEIRS
    return OURS if isinstance(error, (TypeError, ValueError)) else FAIL


class Trial:
    """Ranks that try operations in step, and what became of them.

    Attributes:
        notes: by outcome and pattern of the error text, where it was met.
    """

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.notes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.failed = False
        self.groups = self.make_groups()

    @staticmethod
    def make_groups() -> list[Any]:
        """Two groups of all ranks: over shared memory, and over MPI's own collectives."""
        shared = dist.new_group(timeout=TIMEOUT)
        with environment("MPIPLUS_COLLECTIVES", "mpi-only"):
            messages = dist.new_group(timeout=TIMEOUT)
        return [shared, messages]

    def cell(self, operation: Callable[[Case], None], place: str, dtype: torch.dtype, kind: str = "SUM") -> str:
        """Try one operation in all ways with one dtype; what the table says."""
        found: set[tuple[str, str]] = set()
        for group, count, asynchronous in product(self.groups, COUNTS, (False, True)):
            case = Case(group, self.rank, self.size, dtype, count, asynchronous, kind)
            everywhere = set(self.comm.allgather(outcome_of(operation, case)))
            found |= everywhere
            if any(outcome == FAIL for outcome, _ in everywhere):
                self.groups = self.make_groups()  # what failed may be out of step
        words = {outcome for outcome, _ in found}
        answer = words.pop() if len(words) == 1 else FAIL
        if answer == FAIL:
            self.failed = True
            self.notes[FAIL, f"{place}, {kind}: {max(found)[1]}"].append(name_of(dtype))
        elif answer != YES:
            for _, text in sorted(found):
                self.notes[answer, pattern(text, dtype, kind)].append(name_of(dtype))
        return answer


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set one variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


def pattern(text: str, dtype: torch.dtype, kind: str) -> str:
    """An error text without what differs between the cells it stands for."""
    text = text.replace(str(dtype), "DTYPE").replace(f"RedOpType.{kind}", "KIND").replace(f"{kind} makes", "KIND makes")
    text = re.sub(r"on ReduceOp\.\w+|ReduceOp\.\w+|<RedOpType.*?>", "KIND", text)
    text = re.sub(r"'(ComplexHalf|U?Int\d*|[A-Z]\w+)'", "'DTYPE'", text)
    return re.sub(r"^(\w+): \w+:", r"\1: OPERATION:", text)


# ---- the page ----


def table(corner: str, columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def row_per_dtype(dtypes: list[torch.dtype], cells: Callable[[torch.dtype], list[str]]) -> dict[str, list[str]]:
    """A row for the dtypes that have it in common."""
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for dtype in dtypes:
        shared[tuple(cells(dtype))].append(f"`{name_of(dtype)}`")
    return {", ".join(names): list(row) for row, names in shared.items()}


def moving_section(trial: Trial, dtypes: list[torch.dtype]) -> list[str]:
    """A line for the operations that take every dtype, and a table of the others."""
    rows = row_per_dtype(dtypes, lambda dtype: [trial.cell(run, name, dtype) for name, run in MOVING.items()])
    lines = ["## Operations that move data", ""]
    columns = {name: [row[place] for row in rows.values()] for place, name in enumerate(MOVING)}
    always = [name for name, column in columns.items() if set(column) == {YES}]
    if always:
        names = [f"`{name_of(dtype)}`" for dtype in dtypes]
        said = f"{YES.capitalize()} with every dtype ({', '.join(names)}): {'; '.join(always)}."
        lines += [*textwrap.wrap(said, 120, break_long_words=False, break_on_hyphens=False), ""]
    rest = [name for name in MOVING if name not in always]
    if rest:
        places = [list(MOVING).index(name) for name in rest]
        lines += table("dtype", rest, {name: [row[place] for place in places] for name, row in rows.items()})
    return lines


def reduction_cells(
    trial: Trial, run: Callable[[Case], None], name: str, kinds: tuple[str, ...], dtype: torch.dtype
) -> list[str]:
    return [trial.cell(run, name, dtype, kind) for kind in kinds]


def reducing_section(trial: Trial, dtypes: list[torch.dtype]) -> list[str]:
    """One table for each set of operations that have the same one."""
    same: dict[str, list[str]] = defaultdict(list)
    for name, run in REDUCING.items():
        is_sparse = run is sparse_all_reduce
        kinds = KINDS[:1] + KINDS[4:5] if is_sparse else KINDS
        tried = [dtype for dtype in dtypes if is_number(dtype) or not is_sparse]
        rows = row_per_dtype(tried, functools.partial(reduction_cells, trial, run, name, kinds))
        same["\n".join(table("dtype", list(kinds), rows))].append(name)
    lines = ["## Operations that reduce", ""]
    for text, names in same.items():
        lines += [f"### {'; '.join(names)}", "", text]
    return lines


def other_section(trial: Trial) -> list[str]:
    cells = {name: trial.cell(run, name, torch.uint8) for name, run in OTHER.items()}
    return ["## Operations without a dtype", "", *(f"- {name}: {cell}" for name, cell in cells.items()), ""]


def notes_section(trial: Trial) -> list[str]:
    titles = {OURS: "Refused by mpiplus", THEIRS: "Refused by torch", FAIL: "Failures"}
    lines = ["## What the errors say", ""]
    for outcome, title in titles.items():
        found = {text: list(dict.fromkeys(where)) for (kind, text), where in trial.notes.items() if kind == outcome}
        if found:
            lines += [f"{title}:", ""]
            lines += [f"- `{text}` ({', '.join(where)})" for text, where in found.items()] + [""]
    return lines


def library_name() -> str:
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())


INTRODUCTION = f"""# Operations and dtypes

Which operation takes which dtype: to look up whether a call works on your tensors. `tests/tools/generate_operations.py`
writes this page, and tries everything it claims:

<!-- not run: takes minutes -->
```sh
mpirun -n 2 python tests/tools/generate_operations.py
```

Each cell stands for 8 calls: over shared memory and through MPI's own collectives, with {COUNTS[0]} and with
{COUNTS[1]:,} elements, synchronous and asynchronous. Each result is compared on every rank with a plain computation
of it: data that moves to the byte, reductions to the value.

| in the tables | means |
|---|---|
| {YES} | all 8 calls gave the right result on every rank |
| {OURS} | mpiplus raises `TypeError` or `ValueError` in the call, on every rank; the group stays usable |
| {THEIRS} | torch itself raises, in its front end or in an operator on the tensor |
| {FAIL} | a wrong result, or an error that depends on the way |
"""


def page(trial: Trial) -> str:
    """The whole page."""
    dtypes = all_dtypes()
    sections = moving_section(trial, dtypes) + reducing_section(trial, dtypes) + other_section(trial)
    versions = f"torch {version('torch').split('+')[0]}, mpi4py {version('mpi4py')}, {library_name()}"
    ran_with = f"{RAN_WITH} {versions}, {trial.size} ranks."
    return "\n".join([INTRODUCTION, ran_with, "", *sections, *notes_section(trial)]).rstrip() + "\n"


def without_versions(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(RAN_WITH)]


def main() -> int:
    """Try everything, write or compare the page on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/operations.md from a run on live process groups.")
    parser.add_argument("--check", action="store_true", help="compare with the page, whatever the versions")
    check = parser.parse_args().check
    warnings.simplefilter("ignore")  # torch calls complex32 experimental, and old names deprecated
    torch.set_num_threads(1)
    dist.init_process_group("mpiplus", timeout=TIMEOUT)
    if dist.get_world_size() == 1:
        sys.exit("run it on 2 ranks or more: mpirun -n 2 python tests/tools/generate_operations.py")
    trial = Trial()
    text = page(trial)
    differs = check and trial.rank == 0 and without_versions(text) != without_versions(PAGE.read_text())
    if trial.rank == 0 and not check:
        PAGE.write_text(text)
    if trial.rank == 0:
        print("\n".join(notes_section(trial)))
        print("the page differs" if differs else "the page is right" if check else f"wrote {PAGE.name}")
    dist.destroy_process_group()
    return int(trial.failed or differs)


if __name__ == "__main__":
    sys.exit(main())
