"""What the collectives between nodes send: the formulas of docs/scaling.md.

``tests/unit/test_message_counts.py`` holds what the engine does to them; ``loggp.py`` makes times of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

LINE = 64
SUMMARY = 192  # bytes: of the calls of a node's ranks
PAYLOAD, WHOLE = 64 << 10, 32 << 10  # the most that is piggybacked; and of what is sent whole at every level
EAGER = 60 << 10  # the most of a chunk that goes to another node whole
RING = 4
MOST_RECV_BYTES = 16 << 20
PERIODS_AHEAD = 4  # of a broadcast's chunks
FEW_CHUNKS, LEAST_FILLED = 8, 4  # of an exchange that goes through slots
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
EXCHANGES = ("all_to_all", "gather", "scatter")
OPERATIONS = ("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", *EXCHANGES)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one rank sends to ranks on other nodes.

    Attributes:
        messages: how many.
        bytes: in all of them; those of a long operation but for the rounding of each to whole cache lines.
        local: messages to ranks on its own node, which MPI carries.
    """

    messages: int = 0
    bytes: float = 0
    local: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes, self.local + other.local)


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks on nodes.

    Attributes:
        node_of: the number of each rank's node, by their first ranks.
        slot: bytes of a slot of shared memory.
        reproducible: sums have the bits of one node.
    """

    node_of: tuple[int, ...]
    slot: int = 64 << 10
    reproducible: bool = False

    @property
    def ranks(self) -> int:
        """P of the formulas."""
        return len(self.node_of)

    @functools.cached_property
    def on_node(self) -> list[list[int]]:
        """The ranks of each node; p of the formulas is how many there are."""
        found: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return found

    @property
    def nodes(self) -> int:
        """H of the formulas."""
        return len(self.on_node)

    @property
    def leaders_per_node(self) -> int:
        """L of the formulas."""
        return min(map(len, self.on_node))

    @functools.cached_property
    def parts(self) -> list[int]:
        """q of the formulas: how many sums each node has to send."""
        counts = [0] * self.nodes
        for node in self._owners(0, self.ranks):
            counts[node] += 1
        return counts if self.reproducible or max(counts) == 1 else [1] * self.nodes

    def _owners(self, begin: int, end: int) -> list[int]:
        if len(set(self.node_of[begin:end])) == 1:
            return [self.node_of[begin]]
        half = 1 << (end - begin - 1).bit_length() - 1
        return self._owners(begin, begin + half) + self._owners(begin + half, end)

    @functools.cached_property
    def is_tree(self) -> bool:
        """Whether the nodes are the leaves of the ranks' tree, or of one of their own: sums are added on the way."""
        sizes = [len(ranks) for ranks in self.on_node]
        whole = len(self._owners(0, self.ranks)) == self.nodes
        alike = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        return alike if whole else not self.reproducible

    @property
    def ranks_per_slot(self) -> int:
        """Of how many ranks' blocks a chunk of a reduce_scatter carries a piece."""
        return min(self.ranks, self.slot // LINE)

    @property
    def recv_buffer(self) -> int:
        """How much of each block from another node a chunk of an all_gather carries."""
        return max(LINE, min(self.slot, EAGER, MOST_RECV_BYTES // (self.ranks * RING) // LINE * LINE))


# ---- with the agreement ----


def levels(nodes: int) -> int:
    """How many messages come one after the other until all nodes know the calls of all."""
    return (nodes - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Piggyback:
    """What travels with an agreement.

    Attributes:
        of_node: bytes that each node brings along.
        way: they lie "side by side", or are "added" up on the way, or that "by halves".
    """

    of_node: list[float]
    way: str = "side by side"

    @functools.cached_property
    def _before(self) -> list[float]:
        return [0.0, *itertools.accumulate(self.of_node)]

    @functools.cached_property
    def _most(self) -> float:
        return max(self.of_node)

    def length(self, begin: int, end: int) -> float:
        """Of what the nodes from one to another one send, bytes."""
        if self.way == "side by side":
            return self._before[end] - self._before[begin]
        return self._most / (2 * (end - begin) if self.way == "by halves" else 1)


def _agreement(group: Group, piggyback: Piggyback) -> list[Sent]:
    """By node, for its first rank: a message of its part of the nodes to the part beside it, at each level."""
    sent = []
    for node in range(group.nodes):
        total = Sent()
        for level in range(levels(group.nodes)):
            begin = node >> level << level
            part, beside = (range(at, min(at + (1 << level), group.nodes)) for at in (begin, begin ^ 1 << level))
            messages = max(0, math.ceil((len(beside) - (node - begin)) / len(part)))
            total += Sent(messages, messages * (SUMMARY + piggyback.length(part.start, part.stop)))
        sent.append(total)
    return sent


def _payload(group: Group, operation: str, nbytes: int, wide: int, root: int) -> Piggyback | None:
    """What each node has to say in an operation that is short enough; None: it is not."""
    nobody = [0.0] * group.nodes
    if operation == "barrier" or not nbytes:
        return Piggyback(nobody)
    if operation == "broadcast":
        mine = [float(nbytes) if node == group.node_of[root] else 0.0 for node in range(group.nodes)]
        return Piggyback(mine) if nbytes <= min(group.slot, WHOLE) else None
    if operation == "all_gather":
        blocks = [float(nbytes * len(there)) for there in group.on_node]
        return Piggyback(blocks) if nbytes * group.ranks <= min(group.slot, PAYLOAD) else None
    return _payload_of_sums(group, operation, nbytes, wide) if operation in REDUCING else None


def _payload_of_sums(group: Group, operation: str, nbytes: int, wide: int) -> Piggyback | None:
    scatters = operation == "reduce_scatter"
    whole = nbytes * (group.ranks if scatters else 1)
    if whole > group.slot:
        return None
    share = max(map(len, group.on_node)) * nbytes if scatters else share_bytes(group, nbytes)
    halves = group.is_tree and group.nodes.bit_count() == 1 and share * wide * group.nodes <= PAYLOAD
    is_short = whole * wide * (1 if group.is_tree else sum(group.parts)) <= WHOLE
    if halves and (scatters or not is_short):
        return Piggyback([float(share * wide * group.nodes)] * group.nodes, "by halves")
    if not is_short:
        return None
    return Piggyback(
        [float(whole * wide * parts) for parts in group.parts], "added" if group.is_tree else "side by side"
    )


def _ends_with_shares(operation: str, piggyback: Piggyback | None) -> bool:
    """Whether nodes send each other their shares of a sum when they have agreed."""
    return piggyback is not None and piggyback.way == "by halves" and operation != "reduce_scatter"


def share_bytes(group: Group, nbytes: int) -> int:
    """Of a tensor whose sum is piggybacked by halves: a node's share, before the shares are sent on."""
    return math.ceil(nbytes / LINE / group.nodes) * LINE


# ---- in chunks, and as messages ----


def _sums(group: Group, node: int, wide: int) -> int:
    """Bytes of a node's sums for each byte of the tensor: a node with one rank sends its elements as they are."""
    return 1 if len(group.on_node[node]) == 1 else wide * group.parts[node]


def _takers(group: Group, node: int, root: int | None) -> int:
    """How many other nodes want a result of which this one has a piece."""
    return group.nodes - 1 if root is None else int(node != group.node_of[root])


def _reduced(group: Group, rank: int, nbytes: int, wide: int, root: int | None) -> Sent:
    node, nodes = group.node_of[rank], group.nodes
    if group.on_node[node].index(rank) >= group.leaders_per_node:
        return Sent()
    if nodes == 2 and root is not None:  # one of them sends everything
        chunks = math.ceil(nbytes / chunk_bytes(group, "reduce", nbytes, wide))
        to = int(node != group.node_of[root])
        part = nbytes / group.leaders_per_node * _sums(group, node, wide)
        return Sent(chunks * to + _paces(group, rank, chunks), to * part)
    chunks = math.ceil(nbytes / chunk_bytes(group, "all_reduce", nbytes, wide))
    piece = nbytes / (group.leaders_per_node * nodes)
    wanted_by = _takers(group, node, root)
    sums = Sent(chunks * (nodes - 1), (nodes - 1) * piece * _sums(group, node, wide))
    return sums + Sent(chunks * wanted_by, wanted_by * piece)


def _shared(group: Group, rank: int, nbytes: int, root: int | None) -> Sent:
    """The shares of sums that came by halves."""
    node, share = group.node_of[rank], share_bytes(group, nbytes)
    mine = max(0, min(share, nbytes - node * share))
    if rank != group.on_node[node][0] or not mine:
        return Sent()
    wanted_by = _takers(group, node, root)
    return Sent(wanted_by, wanted_by * mine)


def _broadcast(group: Group, rank: int, nbytes: int, root: int) -> Sent:
    node, nodes = group.node_of[rank], group.nodes
    if group.on_node[node].index(rank) >= group.leaders_per_node:
        return Sent()
    chunks = math.ceil(nbytes / chunk_bytes(group, "broadcast", nbytes))
    piece = nbytes / (group.leaders_per_node * (nodes - 1))
    to = nodes - 1 if node == group.node_of[root] else nodes - 2
    return Sent(chunks * to + _paces(group, rank, chunks), to * piece)


def _paces(group: Group, rank: int, chunks: int) -> int:
    """The empty messages of a node's first rank; pipeline.c, keep_pace."""
    others = group.nodes - 1
    period = RING * max(1, PERIODS_AHEAD // others)
    is_first = group.on_node[group.node_of[rank]][0] == rank
    return others * max(0, math.ceil(chunks / period) - PERIODS_AHEAD) * is_first


def _reduce_scattered(group: Group, rank: int, nbytes: int, wide: int) -> Sent:
    node = group.node_of[rank]
    mine, here = group.on_node[node].index(rank), len(group.on_node[node])
    blocks = sum(len(there[mine::here]) for other, there in enumerate(group.on_node) if other != node)
    chunks = math.ceil(nbytes / chunk_bytes(group, "reduce_scatter", nbytes, wide))
    return Sent(chunks * blocks, blocks * nbytes * _sums(group, node, wide))


def _goes_through_slots(group: Group, operation: str, nbytes: int) -> bool:
    """Of an exchange: signatures.c, plan_exchange."""
    ranks, lengths = group.ranks, math.ceil(16 * group.ranks / LINE) * LINE
    if group.nodes > 1 or ranks == 1 or lengths > group.slot // 2:
        return False
    places = min(ranks - 1, (group.slot - lengths) // LINE)
    piece = (group.slot - lengths) // places // LINE * LINE
    chunks = max(1, math.ceil(nbytes / piece)) * math.ceil((ranks - 1) / places)
    sent = nbytes * (ranks - 1) * (ranks if operation == "all_to_all" else 1)
    return chunks <= FEW_CHUNKS or sent >= chunks * ranks * group.slot / LEAST_FILLED


def _exchanged(group: Group, operation: str, rank: int, nbytes: int, root: int) -> Sent:
    if _goes_through_slots(group, operation, nbytes):
        return Sent()
    node = group.node_of[rank]
    to = {"all_to_all": set(range(group.ranks)), "gather": {root}}.get(operation)
    if to is None:
        to = set(range(group.ranks)) if rank == root else set()
    far = sum(group.node_of[other] != node for other in to)
    return Sent(far, far * nbytes, len(to - {rank}) - far)


def counts(
    group: Group, operation: str, nbytes: int = 0, wide: int = 1, root: int = 0, of: Sequence[int] | None = None
) -> list[Sent]:
    """What each rank sends in one operation.

    Args:
        nbytes: of the tensor; of one block in all_gather, reduce_scatter, all_to_all, gather and scatter. For a long
            operation a multiple of what one chunk carries.
        wide: bytes of the type that sums are computed in, for each byte of an element: 2 for bfloat16.
        root: where there is one.
        of: these ranks only.
    """
    piggyback = _payload(group, operation, nbytes, wide, root)
    agreement = _agreement(group, piggyback or Piggyback([0.0] * group.nodes))
    sent = []
    for rank in range(group.ranks) if of is None else of:
        node = group.node_of[rank]
        total = agreement[node] if rank == group.on_node[node][0] else Sent()
        if operation in EXCHANGES:
            total += _exchanged(group, operation, rank, nbytes, root)
        elif piggyback is None and group.nodes > 1:
            total += _flown(group, operation, rank, nbytes, wide, root)
        elif _ends_with_shares(operation, piggyback):
            total += _shared(group, rank, nbytes, root if operation == "reduce" else None)
        sent.append(total)
    return sent


def is_short(group: Group, operation: str, nbytes: int, wide: int = 1) -> bool:
    """Whether it goes with the agreement, all or, of a sum by halves, the first part of the way."""
    return _payload(group, operation, nbytes, wide, 0) is not None


def steps(group: Group, operation: str, nbytes: int, wide: int = 1) -> int:
    """Of such an operation: how many messages come one after the other."""
    piggyback = _payload(group, operation, nbytes, wide, 0)
    return levels(group.nodes) + _ends_with_shares(operation, piggyback)


def _long_message(group: Group, nbytes: int) -> int:
    """Where a rank gets so many bytes from each other one: pipeline.c, mpp_long_message."""
    if max(map(len, group.on_node)) > 1 or group.nodes < 3:
        return 0
    length = min(nbytes // 8, (8 << 20) // (group.nodes - 1))
    return min(length, 4 << 20) // LINE * LINE if length >= 2 << 20 else 0


def chunk_bytes(group: Group, operation: str, nbytes: int = 1 << 60, wide: int = 1) -> int:
    """How much one chunk carries of a tensor of so many bytes, or of each block. ``wide`` as in `counts`."""
    if operation == "all_gather":
        return _long_message(group, nbytes) or group.recv_buffer
    usual, most = group.slot, min(EAGER * group.nodes, 4 * group.slot // wide) // LINE * LINE
    if operation == "reduce_scatter":
        usual = group.slot // group.ranks_per_slot // LINE * LINE
        most = max(usual, most // group.ranks // LINE * LINE)
    if operation == "reduce" and group.nodes == 2:
        most //= 2
    if operation == "broadcast":
        pieces = group.leaders_per_node * (group.nodes - 1)
        most = (_long_message(group, nbytes // max(1, pieces)) or EAGER) * pieces or usual
    eighth = nbytes // 8 // LINE * LINE if max(map(len, group.on_node)) == 1 else 0
    return min(max(usual, eighth), most)


def _flown(group: Group, operation: str, rank: int, nbytes: int, wide: int, root: int) -> Sent:
    if operation == "broadcast":
        return _broadcast(group, rank, nbytes, root)
    if operation == "all_gather":
        others = group.nodes - 1
        return Sent(others * math.ceil(nbytes / chunk_bytes(group, "all_gather", nbytes)), others * nbytes)
    if operation == "reduce_scatter":
        return _reduce_scattered(group, rank, nbytes, wide)
    return _reduced(group, rank, nbytes, wide, root if operation == "reduce" else None)
