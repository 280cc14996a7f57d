"""Any number of ranks in one process and one thread, without MPI: groups of the C engine that share a segment, or one
for each node, with messages between them; advanced in turns. Allocations of the C code can be made to fail."""

from pathlib import Path

import cffi
import numpy as np
from plain_python import module_of
from reduce_kernels import Reductions

from torchmpi_plugin.communicator import choice

HERE = Path(__file__).parent
C_SRC = Path(__file__).resolve().parents[2] / "c_src"
PENDING, DONE, FAILED = 0, 1, 2
MEMORY, CANCELLED, MISMATCH = 2, 4, 5

# The linker's --wrap sends what the C code allocates through these.
_ALLOCATION = """
#include <stdlib.h>
#include "shim.h"
static size_t refused_from = SIZE_MAX, refused_to = SIZE_MAX;
void refuse_allocations(size_t from, size_t to) { refused_from = from; refused_to = to; }
static int is_refused(size_t bytes) { return bytes >= refused_from && bytes <= refused_to; }
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes) {
    return is_refused(bytes) ? NULL : __real_malloc(bytes);
}
void *__wrap_calloc(size_t count, size_t bytes) {
    return is_refused(count * bytes) ? NULL : __real_calloc(count, bytes);
}
"""

_MESSAGES = """
typedef struct { int source, to, tag, bytes; } sent_message;
int64_t communicator_of(int before, int rank);
void use_messages_in_one_process(void);
void lose_messages_of(int bytes);
void set_deaf(int64_t comm, int deaf);
int waiting_messages(int64_t comm, int bytes);
int idle_of(uintptr_t op);
int sent_messages(const sent_message **list);
int parts_of(int size, const int *node_of, int reproducible, int *members, int *first_in, int *tree_position,
             int *leaf_count, int *regular);
"""


def build(folder):
    """The C code as a module of its own, in ``folder``."""
    build_shim = module_of(C_SRC / "build_shim.py")
    ffi = cffi.FFI()
    ffi.cdef(build_shim.declarations() + "void refuse_allocations(size_t from, size_t to);" + _MESSAGES)
    ffi.set_source(
        "shim_of_all_ranks",
        _ALLOCATION
        + '#include "message/message.h"\n#include "shm/topology.h"\n'
        + "int idle_of(uintptr_t op) { return ((const mpp_op *)op)->idle; }\n"
        + (HERE / "messages_in_one_process.c").read_text(),
        sources=[str(C_SRC / source) for source in build_shim.SOURCES],
        include_dirs=[str(C_SRC)],
        define_macros=[("MPP_HANDLES_ARE_POINTERS", None)],
        libraries=["dl", "pthread"],
        extra_compile_args=["-std=gnu11", "-O2"],
        extra_link_args=["-Wl,--wrap=malloc,--wrap=calloc"],
    )
    module = module_of(ffi.compile(tmpdir=str(folder)), "shim_of_all_ranks")
    module.lib.use_messages_in_one_process()
    return module


class Ranks(Reductions):
    """A group of ``size`` ranks; ``groups[rank]`` is what that rank passes to the C functions.

    ``node_of`` has the number of each rank's node, by their first ranks; None: all are on one.
    """

    _before = 0  # ranks of other groups

    def __init__(self, shim, size, slots, slot_bytes, node_of=None, reproducible=False):
        self.ffi, self.lib, self.size = shim.ffi, shim.lib, size
        nodes = node_of or [0] * size
        numbers = self.ffi.new("int[]", nodes) if node_of else self.ffi.NULL
        self._memory, segments = [], []
        self.ends = []  # of the nodes' segments
        for node in range(max(nodes) + 1):
            length = self.lib.mpp_segment_size(size, nodes.count(node), slots, slot_bytes)
            self._memory.append(self.ffi.new("char[]", length + 64))
            segments.append((int(self.ffi.cast("uintptr_t", self._memory[-1])) + 63) // 64 * 64)
            self.ends.append(segments[-1] + length)
        self.comms = [self.lib.communicator_of(Ranks._before, rank) for rank in range(size)]
        Ranks._before += size
        self.groups = [self.lib.mpp_group_new(comm, rank, size, 1000, 1000, 0) for rank, comm in enumerate(self.comms)]
        for group, node in zip(self.groups, nodes, strict=True):
            assert self.lib.mpp_group_attach(group, segments[node], slots, slot_bytes, numbers, reproducible) == 0
            choice.OWN.tell(self.lib, group, size)

    def begin(self, name, group, **operands):
        """An operation of C's with these operands (``mpp_operands``; a list becomes an array): its handle, 0 if it
        is complete."""
        for key, value in operands.items():
            if isinstance(value, list):
                operands[key] = self.ffi.new("size_t[]" if key.endswith("sizes") else "uintptr_t[]", value)
        given = self.ffi.new("mpp_operands *", {"of": group, "root": -1, "tag": -1, **operands})
        return getattr(self.lib, f"mpp_{name}")(given)

    def messages(self):
        """Those sent since the last call, by all groups: sender, receiver, tag, bytes."""
        found = self.ffi.new("const sent_message **")
        count = self.lib.sent_messages(found)
        return [(m.source, m.to, m.tag, m.bytes) for m in found[0][0:count]]

    def finish(self, ops, patience=1_000_000):
        """Advance everything until all of ``ops`` (0: complete already) are complete; their states."""
        for op in filter(None, ops):
            for _ in range(patience):
                if self.state(op) != PENDING:
                    break
            else:
                raise AssertionError("an operation does not complete")
        return [self.state(op) if op else DONE for op in ops]

    def of_all(self, start):
        """What ``start(rank, group)`` began on all ranks, to its end."""
        ops = [start(rank, group) for rank, group in enumerate(self.groups)]
        assert set(self.finish(ops)) == {DONE}
        self.release(ops)

    def reduce(self, kind, rank, mine, out, how, counts, root=0):
        """Begin one rank's all_reduce, reduce or reduce_scatter: the first two of one block of so many elements."""
        group, source = self.groups[rank], mine.ctypes.data
        operands = {"input": source, "output": out.ctypes.data, "count": counts[0], "how": how}
        if kind == "all_reduce":
            return self.begin("allreduce", group, **operands)
        if kind == "reduce":
            return self.begin("reduce_to", group, **operands, root=root)
        begins = np.cumsum([0, *counts[:-1]]) * (mine.nbytes // (sum(counts) or 1))
        operands |= {"inputs": [source + int(begin) for begin in begins], "input_sizes": counts}
        return self.begin("reduce_scatter", group, **operands, flat=len(set(counts)) == 1)

    def gather(self, rank, mine, out, length):
        """Begin one rank's all_gather of so many bytes each, at these addresses."""
        outputs = [out + length * other for other in range(self.size)]
        sizes = [length] * self.size
        return self.begin("allgather", self.groups[rank], input=mine, outputs=outputs, output_sizes=sizes, flat=True)

    def broadcast(self, rank, address, length, root):
        return self.begin("broadcast", self.groups[rank], input=address, output=address, count=length, root=root)

    def reduced(self, kind, inputs, outs, hows, counts, root=0):
        """The same on all ranks, to its end."""
        self.of_all(lambda rank, _: self.reduce(kind, rank, inputs[rank], outs[rank], hows[rank], counts, root))

    def state(self, op):
        return self.lib.mpp_state_of(op) & 3

    def failure(self, op):
        """Why ``op`` failed, the rank that is said to disagree (no memory: 1), and that rank's call."""
        code, first, second = self.ffi.new("int *"), self.ffi.new("int64_t *"), self.ffi.new("int64_t *")
        failure = self.lib.mpp_failure_of(op, code, first, second)
        mine, theirs = self.ffi.new("mpp_call *"), self.ffi.new("mpp_call *")
        if failure == MISMATCH:
            self.lib.mpp_disagreement(op, mine, theirs)
        return failure, first[0], theirs

    def release(self, ops):
        for op in filter(None, ops):
            self.lib.mpp_release(op)

    def close(self):
        for group in self.groups:
            assert self.lib.mpp_group_close(group) == 0
            self.lib.mpp_group_release(group)
