"""Sums that cross between nodes in the tensor's own type: half the bytes, the same on all ranks, and how far off."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks_in_one_process import Ranks

SLOTS, SLOT = 4, 1024
LONG = 3000  # elements: several chunks, more than is piggybacked
LAYOUTS = [[int(node) for node in nodes] for nodes in ("0011", "00011", "010122", "001", "00112233", "0000111")]
#: The relative error of one rounding.
ROUNDING = {"BF16": 2.0**-8, "F16": 2.0**-11}


def encoded(values, name):
    if name in ("F16", "F8_E5M2"):
        bits = values.astype(np.float16).view(np.uint16)
        return bits if name == "F16" else (bits >> 8).astype(np.uint8)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decoded(bits, name):
    if name == "F16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def reduced(shim, hosts, kind, inputs, how, sums):
    """What comes out on each rank, and the bytes that crossed between nodes."""
    ranks = Ranks(shim, len(hosts), SLOTS, SLOT, hosts, sums)
    ranks.messages()
    block = len(inputs[0]) // (len(hosts) if kind == "reduce_scatter" else 1)
    outs = [np.zeros(block, inputs[0].dtype) for _ in hosts]
    try:
        ranks.reduced(kind, inputs, outs, [how(ranks)] * len(hosts), [block] * len(hosts), root=1)
        crossed = sum(length for source, to, _, length in ranks.messages() if hosts[source] != hosts[to])
        return [outs[1]] if kind == "reduce" else outs, crossed
    finally:
        ranks.close()


def whole(outs, kind):
    return [np.concatenate(outs)] if kind == "reduce_scatter" else outs


def usual(name, op="SUM", divisor=1, premul=None):
    return lambda ranks: ranks.reduction(name, op, premul, divisor)


@given(
    hosts=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(("all_reduce", "reduce", "reduce_scatter")),
    name=st.sampled_from(sorted(ROUNDING)),
    average=st.booleans(),
    count=st.integers(1, LONG // 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_each_node_rounds_once_and_all_ranks_have_the_same(shim_of_all_ranks, hosts, kind, name, average, count, seed):
    size, nodes = len(hosts), max(hosts) + 1
    dice = np.random.default_rng(seed)
    inputs = [encoded(dice.standard_normal(count * 40 // size * size), name) for _ in hosts]
    values = [decoded(one, name) for one in inputs]
    narrow = shim_of_all_ranks.lib.MPP_SUMS_NARROW
    outs, _ = reduced(shim_of_all_ranks, hosts, kind, inputs, usual(name, divisor=size if average else 1), narrow)
    outs = whole(outs, kind)
    assert len({one.tobytes() for one in outs}) == 1
    of_nodes = [sum(value for value, host in zip(values, hosts, strict=True) if host == node) for node in range(nodes)]
    exact, scale = sum(of_nodes), size if average else 1
    allowed = ROUNDING[name] * (sum(map(np.abs, of_nodes)) + np.abs(exact)) * 1.01 + 1e-4
    assert (np.abs(decoded(outs[0], name) * scale - exact) <= allowed).all()


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("hosts", [layout for layout in LAYOUTS if min(map(layout.count, layout)) > 1])
@pytest.mark.parametrize("name", [*ROUNDING, "F8_E5M2"])
def test_half_the_bytes(shim_of_all_ranks, hosts, kind, name):
    """Of the sums; small integers are exact in either way. Results of an all_reduce cross in the same type as ever, and
    so do sums of other types."""
    count = LONG // len(hosts) * len(hosts)
    inputs = [encoded(np.arange(count) % 7.0 - rank, name) for rank in range(len(hosts))]
    lib = shim_of_all_ranks.lib
    wide_outs, wide = reduced(shim_of_all_ranks, hosts, kind, inputs, usual(name), lib.MPP_SUMS_USUAL)
    outs, narrow = reduced(shim_of_all_ranks, hosts, kind, inputs, usual(name), lib.MPP_SUMS_NARROW)
    assert [one.tobytes() for one in outs] == [one.tobytes() for one in wide_outs]
    assert narrow == wide if name not in ROUNDING else narrow < (0.75 if kind == "all_reduce" else 0.7) * wide


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_factors_are_applied_once(shim_of_all_ranks, kind):
    hosts = [0, 0, 1, 1]
    inputs = [encoded(np.full(LONG, float(2 + rank)), "BF16") for rank in range(4)]
    outs, _ = reduced(
        shim_of_all_ranks, hosts, kind, inputs, usual("BF16", premul=0.5), shim_of_all_ranks.lib.MPP_SUMS_NARROW
    )
    assert set(decoded(np.concatenate(outs), "BF16")) == {7.0}


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("name", ROUNDING)
def test_a_minimum_always_crosses_narrow(shim_of_all_ranks, op, name):
    """As rounding changes nothing there: the bits, and the bytes, are the same in both ways."""
    hosts, lib = [0, 0, 1, 1, 2, 2], shim_of_all_ranks.lib
    dice = np.random.default_rng(3)
    values = [decoded(encoded(dice.standard_normal(LONG), name), name) for _ in hosts]
    inputs = [encoded(value, name) for value in values]
    found = [reduced(shim_of_all_ranks, hosts, "all_reduce", inputs, usual(name, op), sums)
             for sums in (lib.MPP_SUMS_USUAL, lib.MPP_SUMS_NARROW)]  # fmt: skip
    wanted = encoded(np.min(values, axis=0) if op == "MIN" else np.max(values, axis=0), name).tobytes()
    assert {one.tobytes() for outs, _ in found for one in outs} == {wanted}
    _, summed = reduced(shim_of_all_ranks, hosts, "all_reduce", inputs, usual(name), lib.MPP_SUMS_USUAL)
    assert found[0][1] == found[1][1] < 0.75 * summed
