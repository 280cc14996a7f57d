"""Write docs/operations.md: what becomes of every operation with every dtype of this torch, found out by trying.

    mpirun -n 2 python tests/tools/generate_operations.py            # writes the page
    mpirun -n 2 python tests/tools/generate_operations.py --check    # compares with the page, writes nothing

Each cell of a table is 8 calls: over shared memory and through MPI's own collectives (MPIPLUS_COLLECTIVES=mpi-only),
with 5 and with 40,001 elements, synchronous and asynchronous, each compared on every rank with a plain computation of
the result. The operations are those of the table that tests/mpi tries (operation_table.py), here with dtypes that it
has not, too. Works on any number of ranks from 2. The exit code is 1 when an operation failed or, with --check, the
page differs.
"""

import argparse
import functools
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
sys.path += [str(ROOT / "tests" / "mpi"), str(ROOT / "tests")]
from cases import Case  # noqa: E402
from expected import REDUCE_OPS, reduced  # noqa: E402
from groups import Group  # noqa: E402
from operation_table import REDUCTION, TABLE, reduction  # noqa: E402
from started import Operation, Started, complete, resolve, works_of  # noqa: E402

COUNTS = (5, 40_001)  # elements; the second is several chunks of shared memory for most dtypes
TIMEOUT = timedelta(seconds=60)
YES, OURS, THEIRS, FAIL = "yes", "no", "torch", "**FAIL**"
RAN_WITH = "Written by a run with"


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


@dataclass(frozen=True)
class AnyCase(Case):
    """One call of one operation, on this rank, with a dtype that torch itself need not be able to copy or to add."""

    def number(self, rank: int, slot: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """What ``rank`` gives to a reduction: few and small values, so that every order gives the same result."""
        shape = self.shape if shape is None else shape
        return small_numbers(self.dtype, shape, rank, slot) if is_number(self.dtype) else self.data(rank, slot, shape)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of its bytes."""
        return tensor.view(torch.uint8).clone().view(tensor.dtype)


@functools.lru_cache(maxsize=512)
def small_numbers(dtype: torch.dtype, shape: tuple[int, ...], rank: int, slot: int) -> torch.Tensor:
    """Numbers that every dtype of the kind holds exactly."""
    numbers = (torch.arange(torch.Size(shape).numel()) * 5 + 3 * rank + slot) % 7
    if dtype is torch.bool:
        numbers %= 2
    elif dtype.is_complex:
        numbers = torch.complex((numbers - 3) / 2, (numbers.flip(0) - 3) / 2)
    elif dtype.is_floating_point:
        numbers = (numbers - 3) / 2
    elif not name_of(dtype).startswith("u"):
        numbers -= 3
    return numbers.to(dtype).view(shape)


def check_same(got: torch.Tensor, wanted: torch.Tensor, is_reduced: bool) -> None:
    """Equal to the byte, or what is reduced to the value.

    Raises:
        WrongResultError: they are not.
    """
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    one, other = (tensor.to(wide) if is_reduced else tensor.view(torch.uint8) for tensor in (got, wanted))
    if not torch.equal(one, other):
        wrong = one != other
        found = f"{one[wrong][0].item()} in place of {other[wrong][0].item()}"
        raise WrongResultError(f"{int(wrong.sum())} of {one.numel()} differ, the first: {found}")


# ---- operations ----


def sparse_all_reduce(case: Case) -> Started:
    """Every rank has its own entries, of which some meet: as many as the tests' table has not."""
    length = case.shape[0] * case.size

    def tensor_of(rank: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.arange(case.shape[0])[None] * (rank + 1), case.number(rank), (length,))

    tensor = tensor_of(case.rank)
    work = dist.all_reduce(tensor, case.op, group=case.process_group, async_op=case.is_async)
    dense = [tensor_of(rank).to_dense() for rank in range(case.size)]
    return Started(works_of(work), [tensor.to_dense], [reduced(dense, case.op_name)])


SPARSE = "all_reduce of a sparse (COO) tensor"


def of(*names: str) -> list[Operation]:
    return [TABLE[name] for name in names]


#: The page's rows, each with the operations of the tests' table that it stands for.
MOVING = {
    "send, recv, isend, irecv": of("send_recv", "isend_irecv"),
    "recv, irecv from any source": of("recv_any_source", "irecv_any_source"),
    "batch_isend_irecv": of("batch_isend_irecv"),
    "broadcast": of("broadcast"),
    "all_gather": of("all_gather"),
    "all_gather, uneven lengths": of("all_gather_uneven"),
    "all_gather_into_tensor (all_gather_single)": of("all_gather_into_tensor"),
    "the same, coalesced": of("coalesced_all_gather_into_tensor"),
    "gather": of("gather"),
    "scatter": of("scatter"),
    "all_to_all": of("all_to_all"),
    "all_to_all_single": of("all_to_all_single"),
    "all_to_all_single with split sizes": of("all_to_all_single_splits"),
}
REDUCING = {
    "all_reduce": of("all_reduce"),
    "all_reduce, coalesced": of("coalesced_all_reduce"),
    "reduce": of("reduce"),
    "reduce_scatter": of("reduce_scatter"),
    "reduce_scatter_tensor (reduce_scatter_single)": of("reduce_scatter_tensor"),
    "reduce_scatter_tensor, coalesced": of("coalesced_reduce_scatter_tensor"),
    "torchmpi_plugin.scan": of("scan"),
    "torchmpi_plugin.exscan": of("exscan"),
    SPARSE: [reduction(sparse_all_reduce)],
}
OTHER = {
    "`barrier`, `torchmpi_plugin.monitored_barrier`": of("barrier", "monitored_barrier"),
    "`broadcast_object_list`, `scatter_object_list`": of("broadcast_object_list", "scatter_object_list"),
    "`all_gather_object`, `gather_object`": of("all_gather_object", "gather_object"),
    "`send_object_list`, `recv_object_list`": of("send_recv_object_list"),
}


# ---- trying ----


def run(operation: Operation, case: AnyCase) -> None:
    """Bring it to its end.

    Raises:
        WrongResultError: a result is not what it should be.
    """
    started = operation.start(case)
    complete(started, case.mode)
    is_reduced = operation.kind == REDUCTION
    if is_reduced and not is_number(case.dtype):
        raise WrongResultError(f"{name_of(case.dtype)} was reduced, which has no meaning")
    for got, wanted in zip(started.outputs, started.expected, strict=True):
        check_same(resolve(got), resolve(wanted), is_reduced)
    for tensor, original in started.untouched:
        check_same(tensor, original, False)
    for problem in started.check() if started.check else ():
        raise WrongResultError(problem)


def outcome_of(operation: Operation, case: AnyCase) -> tuple[str, str]:
    """Run one case: what the table says of it, and the error's text."""
    try:
        run(operation, case)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return who_refuses(error), text
    return YES, ""


def who_refuses(error: Exception) -> str:
    """The backend by an argument check of its own, torch before or below it, or nobody: then it is a failure."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
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

    def make_groups(self) -> list[Group]:
        """Two groups of all ranks: over shared memory, and over MPI's own collectives."""
        made = []
        for collectives in ("auto", "mpi-only"):
            os.environ["MPIPLUS_COLLECTIVES"] = collectives
            group = dist.new_group(timeout=TIMEOUT)
            made.append(Group(collectives, group, tuple(range(self.size)), self.rank))
        return made

    def cell(self, operations: Sequence[Operation], place: str, dtype: torch.dtype, kind: str = "SUM") -> str:
        """Try one row's operations in all ways with one dtype; what the table says."""
        found: set[tuple[str, str]] = set()
        for group, count, mode, operation in product(self.groups, COUNTS, ("sync", "wait"), operations):
            if mode not in operation.modes:
                continue
            case = AnyCase(group, dtype, (count,), mode=mode, op_name=kind)
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


def pattern(text: str, dtype: torch.dtype, kind: str) -> str:
    """An error text without what differs between the cells it stands for."""
    text = text.replace(str(dtype), "DTYPE").replace(f"RedOpType.{kind}", "KIND").replace(f"{kind} makes", "KIND makes")
    text = re.sub(r"on ReduceOp\.\w+|ReduceOp\.\w+|<RedOpType.*?>", "KIND", text)
    text = re.sub(r"'(ComplexHalf|U?Int\d*|[A-Z]\w+)'", "'DTYPE'", text)
    return re.sub(r"^(\w+): \w+:", r"\1: OPERATION:", text.partition(" (group '")[0])


# ---- the page ----


def table(corner: str, columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def row_per_dtype(cells: dict[torch.dtype, list[str]]) -> dict[str, list[str]]:
    """A row for the dtypes that have it in common."""
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for dtype, row in cells.items():
        shared[tuple(row)].append(f"`{name_of(dtype)}`")
    return {", ".join(names): list(row) for row, names in shared.items()}


def moving_section(trial: Trial, dtypes: list[torch.dtype]) -> list[str]:
    """A line for the operations that take every dtype, and a table of the others."""
    rows = row_per_dtype({dtype: [trial.cell(each, name, dtype) for name, each in MOVING.items()] for dtype in dtypes})
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


def reducing_section(trial: Trial, dtypes: list[torch.dtype]) -> list[str]:
    """One table for each set of operations that have the same one."""
    same: dict[str, list[str]] = defaultdict(list)
    for name, operations in REDUCING.items():
        kinds = ("SUM", "AVG") if name == SPARSE else REDUCE_OPS
        tried = [dtype for dtype in dtypes if is_number(dtype) or name != SPARSE]
        cells = {dtype: [trial.cell(operations, name, dtype, kind) for kind in kinds] for dtype in tried}
        same["\n".join(table("dtype", list(kinds), row_per_dtype(cells)))].append(name)
    lines = ["## Operations that reduce", ""]
    for text, names in same.items():
        lines += [f"### {'; '.join(names)}", "", text]
    return lines


def other_section(trial: Trial) -> list[str]:
    cells = {name: trial.cell(each, name, torch.uint8) for name, each in OTHER.items()}
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
    library = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())
    versions = f"torch {version('torch').split('+')[0]}, mpi4py {version('mpi4py')}, {library}"
    ran_with = f"{RAN_WITH} {versions}, {trial.size} ranks."
    return "\n".join([INTRODUCTION, ran_with, "", *sections, *notes_section(trial)]).rstrip() + "\n"


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
    old, new = (re.sub(f"{RAN_WITH}.*", "", each) for each in (PAGE.read_text(), text))
    differs = check and trial.rank == 0 and old != new
    if trial.rank == 0 and not check:
        PAGE.write_text(text)
    if trial.rank == 0:
        print("\n".join(notes_section(trial)))
        print("the page differs" if differs else "the page is right" if check else f"wrote {PAGE.name}")
    dist.destroy_process_group()
    return int(trial.failed or differs)


if __name__ == "__main__":
    sys.exit(main())
