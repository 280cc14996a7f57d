"""Sums on any layout of ranks over nodes: the bits of one node, where they are to be reproducible; in one process."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks_in_one_process import Ranks

SLOTS, SLOT = 4, 1024
MOST = 9
#: Each type as sign, exponents whose numbers are finite in sums, and bits of the mantissa, in so many bytes.
TYPES = {
    "F64": (8, range(1020, 1028), 52),
    "F32": (4, range(120, 134), 23),
    "BF16": (2, range(120, 134), 7),
    "F16": (2, range(8, 18), 10),
    "F8_E4M3FN": (1, range(3, 8), 3),
    "F8_E5M2": (1, range(10, 18), 2),
    "F8_E4M3FNUZ": (1, range(3, 8), 3),
    "F8_E5M2FNUZ": (1, range(10, 18), 2),
    "CFLOAT": (4, range(120, 134), 23),
}
KINDS = ("all_reduce", "reduce", "reduce_scatter")
OPS = ("SUM", "AVG", "PREMUL", "PROD")


def by_first_rank(names):
    """The nodes' numbers as mpiplus gives them: in the order of their first ranks."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


layouts = st.lists(st.integers(0, 4), min_size=2, max_size=MOST).map(by_first_rank)
#: Whatever example a run begins with, all begin with the same.
few = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# ---- which parts of the tree lie where ----


def nodes_of_tree(begin, end):
    """All (begin, end) of the balanced tree over these ranks, each with the one above it."""
    found, todo = {}, [((begin, end), None)]
    while todo:
        node, above = todo.pop()
        found[node] = above
        begin, end = node
        if end - begin > 1:
            half = 1 << (end - begin - 1).bit_length() - 1
            todo += [((begin, begin + half), node), ((begin + half, end), node)]
    return found


def parts(shim, hosts, reproducible):
    """The parts' ranks in the order of the tree, their weights, and whether the nodes are its leaves."""
    size, ffi = len(hosts), shim.ffi
    members, first_in, position, leaf_count = (ffi.new("int[]", size + 1) for _ in range(4))
    regular = ffi.new("int *")
    count = shim.lib.parts_of(
        size, ffi.new("int[]", hosts), reproducible, members, first_in, position, leaf_count, regular
    )
    ranks = {position[part]: list(members[first_in[part] : first_in[part + 1]]) for part in range(count)}
    assert sorted(ranks) == list(range(count))
    return [ranks[number] for number in range(count)], list(leaf_count[0:count]), regular[0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=70).map(by_first_rank))
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_largest_parts_of_the_tree_that_lie_on_one_host(shim_of_all_ranks, hosts):
    found, weights, _ = parts(shim_of_all_ranks, hosts, True)
    tree = nodes_of_tree(0, len(hosts))
    assert [rank for ranks in found for rank in ranks] == list(range(len(hosts)))
    assert weights == [len(ranks) for ranks in found]
    for ranks in found:
        node = ranks[0], ranks[-1] + 1
        assert node in tree and len({hosts[rank] for rank in ranks}) == 1
        above = tree[node]
        assert above is None or len(set(hosts[slice(*above)])) > 1
    owners = [hosts[ranks[0]] for ranks in found]
    assert all(owners.count(host) <= hosts.count(host) for host in hosts)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2, 3], [0] * 8 + [1] * 8 + [2] * 4, [0, 1, 0, 1], [0, 1, 1, 0]])
def test_one_part_for_each_host_unless_asked(shim_of_all_ranks, hosts):
    """An aligned host sends no more where sums are to be reproducible, and they are in any case."""
    found, _, regular = parts(shim_of_all_ranks, hosts, False)
    assert found == [[rank for rank, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
    assert regular  # the last one may have fewer ranks
    several = len(parts(shim_of_all_ranks, hosts, True)[0]) > max(hosts) + 1
    assert several == (hosts != sorted(hosts))


# ---- the bits ----


def contributions(name, size, count):
    """An array of each rank's elements whose sum depends on the order in which they are added."""
    width, exponents, mantissa = TYPES[name]
    dice = np.random.default_rng(size * 1000 + count)
    numbers = count * (2 if name == "CFLOAT" else 1)
    found = []
    for _ in range(size):
        exponent = dice.integers(exponents.start, exponents.stop, numbers, dtype=np.uint64)
        sign = dice.integers(0, 2, numbers, dtype=np.uint64) << np.uint64(8 * width - 1)
        fraction = dice.integers(0, 1 << mantissa, numbers, dtype=np.uint64)
        found.append((sign | exponent << np.uint64(mantissa) | fraction).astype(f"u{width}"))
    return found


def reduced(ranks, kind, name, op, count, root):
    """One reduction on all ranks of a group; what came out on each."""
    factors = [0.3 + rank if op == "PREMUL" else None for rank in range(ranks.size)]
    usual, divisor = "PROD" if op == "PROD" else "SUM", ranks.size if op == "AVG" else 1
    hows = [ranks.reduction(name, usual, factor, divisor) for factor in factors]
    blocks = [count + rank % 3 for rank in range(ranks.size)] if kind == "reduce_scatter" else [count]
    inputs = contributions(name, ranks.size, sum(blocks))
    outs = [np.zeros(max(blocks) * inputs[0].nbytes // sum(blocks), np.uint8) for _ in inputs]
    ranks.reduced(kind, inputs, outs, hows, blocks, root)
    return [outs[root].tobytes()] if kind == "reduce" else [out.tobytes() for out in outs]


def bits(shim, hosts, reproducible, *what, slot=SLOT):
    ranks = Ranks(shim, len(hosts), SLOTS, slot, hosts if max(hosts) else None, reproducible)
    try:
        return reduced(ranks, *what)
    finally:
        ranks.close()


@given(
    hosts=layouts,
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(sorted(TYPES)),
    op=st.sampled_from(OPS),
    count=st.one_of(st.integers(1, 40), st.integers(41, 3000)),
    dice=st.integers(0, MOST),
)
@few
def test_any_layout_has_the_bits_of_one_host(shim_of_all_ranks, hosts, kind, name, op, count, dice):
    what = kind, name, op, count, dice % len(hosts)
    assert bits(shim_of_all_ranks, hosts, True, *what) == bits(shim_of_all_ranks, [0] * len(hosts), False, *what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [5, 3000])
@pytest.mark.parametrize("hosts", [[0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 1, 0, 2, 2, 0]])
def test_other_layouts_have_other_bits_unless_asked(shim_of_all_ranks, kind, count, hosts):
    """Or the tests here would see nothing."""
    what = kind, "F32", "SUM", count, 0
    one_host = bits(shim_of_all_ranks, [0] * len(hosts), False, *what)
    assert bits(shim_of_all_ranks, hosts, False, *what) != one_host
    assert bits(shim_of_all_ranks, hosts, True, *what) == one_host


@pytest.mark.parametrize("hosts", [[0, 1] * 20, [0] + [1] * 39, [0, 1, 2] * 13, list(range(20)) * 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["F8_E5M2", "F32"])
def test_many_parts_fit_into_what_a_flight_has(shim_of_all_ranks, hosts, kind, name):
    """Of the most bytes for each element, with slots that have fewer cache lines than there are ranks, and more."""
    for slot in (SLOT, 8 * SLOT):
        what = kind, name, "SUM", 2 * slot, 1
        one_host = bits(shim_of_all_ranks, [0] * len(hosts), False, *what, slot=slot)
        assert bits(shim_of_all_ranks, hosts, True, *what, slot=slot) == one_host


@given(
    hosts=st.sampled_from([[0, 1], [0, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3], list(range(8))]),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(sorted(TYPES)),
    op=st.sampled_from(OPS),
    nbytes=st.sampled_from([1 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10]),
    more=st.integers(-70, 70),
    dice=st.integers(0, MOST),
)
@settings(few, max_examples=150)
def test_what_rides_with_the_agreement(shim_of_all_ranks, hosts, kind, name, op, nbytes, more, dice):
    """Whole or by halves, up to the lengths from which on it flies; slots are as long as in life."""
    blocks = len(hosts) if kind == "reduce_scatter" else 1
    count = max(1, nbytes // TYPES[name][0] // (2 if name == "CFLOAT" else 1) // blocks + more)
    what = kind, name, op, count, dice % len(hosts)
    one_host = bits(shim_of_all_ranks, [0] * len(hosts), False, *what, slot=64 << 10)
    assert bits(shim_of_all_ranks, hosts, False, *what, slot=64 << 10) == one_host
