"""The protocol of shared memory, run in every order: no deadlock, no data read before it is there or after it is gone,
and all ranks at the same chunk afterwards. MPIPLUS_TEST_FULL=1 tries more."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import sys
import types
from pathlib import Path

import protocol
import pytest
from explore import Explorer, ProtocolError
from mistakes import MISTAKES
from protocol import NO_MEMORY, Call
from sampling import FULL, share

FLAT, FLAT_2, FLAT_3 = (Call("all_reduce", chunks) for chunks in (1, 2, 3))
TWO_PHASE_2, TWO_PHASE_3 = (Call("all_reduce", chunks, two_phase=True) for chunks in (2, 3))
BROADCAST, REDUCE, REDUCE_2_PHASE = Call("broadcast", 2), Call("reduce", 2), Call("reduce", 2, two_phase=True)
BARRIER, OOM = Call("barrier"), Call(NO_MEMORY, oom=True)
EXCHANGE, EXCHANGE_3 = Call("exchange"), Call("exchange", 3)  # which agree
FLAT_3_BUS, BROADCAST_3_BUS = FLAT_3._replace(bus=True), Call("broadcast", 3, bus=True, at_once=True)
EXCHANGE_3_BUS, REDUCE_BUS = EXCHANGE_3._replace(bus=True), REDUCE._replace(bus=True)
PEERS = [call._replace(bus=True, peers=True) for call in (Call("broadcast", 3), EXCHANGE_3)]
HALVES = FLAT_3._replace(bus=True, peers=True, halves=True)
IN_SLOTS = [call._replace(bus=True, halves=True) for call in (FLAT_3, REDUCE, TWO_PHASE_3)]
CALLS = (FLAT, FLAT_2, TWO_PHASE_2, BROADCAST, REDUCE, BARRIER, OOM)
WITHDRAWN = [
    call._replace(withdrawn=True) for call in (FLAT_3, TWO_PHASE_3, BROADCAST, EXCHANGE_3, *PEERS, HALVES, *IN_SLOTS)
]

# What was read of these when protocol.py was last compared with it.
COMPARED = {
    "reached": "402e228e559f",
    "may_write": "1a90576b4395",
    "may_read": "82f8204c6902",
    "reduce_part": "71c1d2a6fdf9",
    "advance": "5f551b0aec5a",
    "mismatch": "198448a3dbed",
    "check": "fe2846373891",
    "mpp_check_calls": "8833297aa2ff",
    "take_numbers": "f83bb7553324",
    "plan_exchange": "274c8cada704",
    "plan_bus": "29ee061e2d10",
    "pass_over": "181547dfd32a",
    "move": "32dfabbf88eb",
    "step": "5ba691a48268",
    "step_oom_placeholder": "8b32ee27028c",
    "mpp_shm_out_of_memory": "96d91017c868",
    "mpp_enqueue_shm": "c5446268ee41",
}


def digest_of(function: str) -> str:
    """Without comments and layout."""
    sources = Path(__file__).resolve().parents[2] / "c_src" / "shm"
    text = "".join((sources / name).read_text() for name in ("protocol.c", "signatures.c"))
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(
        rf"^[a-z][^;{{}}()]*\b{function}\([^;]*?\) {{(?:[^\n]*}}$|.*?^}})", code, re.DOTALL | re.MULTILINE
    )
    assert found, f"there is no function {function}"
    return hashlib.sha256("".join(found[0].split()).encode()).hexdigest()[:12]


@pytest.mark.every_change
@pytest.mark.parametrize("function", COMPARED)
def test_the_c_code_is_what_was_modelled(function: str) -> None:
    digest = digest_of(function)
    assert digest == COMPARED[function], (
        f"{function} in c_src/shm has changed: change it in protocol.py too where its accesses to shared memory or its "
        f"decisions have, and then write {digest!r} here"
    )
    assert callable(getattr(protocol, function))


# ---- two ranks: all programs of two calls ----


@pytest.mark.parametrize("ring", [1, 2, 3] if FULL else [2])
@pytest.mark.parametrize("ahead", [1, 2])
def test_all_programs_of_two_calls(ring: int, ahead: int) -> None:
    pairs = list(itertools.product(CALLS, repeat=2))
    for first, second in itertools.product(pairs, pairs if FULL else zip(CALLS, CALLS, strict=True)):
        Explorer(protocol, list(zip(first, second, strict=True)), ring, ahead).run_all()


# ---- more ranks, longer programs, other rings: a choice ----


def random_programs(dice: random.Random, size: int, length: int) -> list[list[Call]]:
    calls = (*CALLS, FLAT_3, TWO_PHASE_3, REDUCE_2_PHASE, EXCHANGE, EXCHANGE_3)
    agreed = [dice.choice(calls) for _ in range(length)]
    agrees = dice.choice([0.7, 0.9, 1.0])

    def one_ranks(call: Call) -> Call:
        if dice.random() >= agrees:
            return dice.choice(calls)
        return dice.choice([EXCHANGE, EXCHANGE_3]) if call.kind == "exchange" else call

    return [[one_ranks(call) for call in agreed] for _ in range(size)]


@pytest.mark.parametrize("seed", share("model: random programs", range(120), 30))
def test_two_ranks(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(10):
        programs = random_programs(dice, 2, dice.choice([3, 4]))
        Explorer(protocol, programs, dice.choice([1, 2, 3]), dice.choice([1, 2, 3])).run_all()


ON_BUS = [FLAT_3_BUS, BROADCAST_3_BUS, REDUCE_BUS, EXCHANGE_3_BUS, *PEERS, HALVES, *IN_SLOTS]


@pytest.mark.parametrize("mine", ON_BUS, ids=str)
@pytest.mark.parametrize("ring", [1, 2])
def test_a_rank_on_the_bus(mine: Call, ring: int) -> None:
    """Which reads the others' devices if all can; the other one is and can, or not; what follows is in flight already,
    or disagrees."""
    is_offered = mine.peers or mine.halves
    others = [mine._replace(peers=False, halves=False) if is_offered else mine._replace(bus=False)]
    if mine is HALVES:
        others.append(IN_SLOTS[0])
    for theirs, after in itertools.product((mine, *others), (FLAT_2, BARRIER, OOM, mine)):
        Explorer(protocol, [[mine, after, FLAT], [theirs, FLAT_2, FLAT]], ring, 2).run_all()
        if is_offered:
            Explorer(protocol, [[mine, after, mine], [theirs, after, theirs]], ring, 2).run_all()
    Explorer(protocol, [[mine, mine if mine.peers else FLAT]] * 3, ring, 1).run_all()


@pytest.mark.parametrize("mine", WITHDRAWN, ids=str)
@pytest.mark.parametrize("ring", [1, 2])
def test_a_call_that_is_withdrawn(mine: Call, ring: int) -> None:
    """Whatever the other one calls, and what follows is in flight already."""
    for theirs, after in itertools.product((mine._replace(withdrawn=False), mine, BARRIER, OOM), (FLAT_2, OOM, mine)):
        Explorer(protocol, [[mine, after, FLAT], [theirs, FLAT_2, FLAT]], ring, 2).run_all()
    Explorer(protocol, [[mine, FLAT], *[[mine._replace(withdrawn=False), FLAT]] * 2], ring, 1).run_all()


@pytest.mark.parametrize("programs", [
    [[TWO_PHASE_2]] * 3,
    [[FLAT_2, TWO_PHASE_2]] * 3,
    [[REDUCE_2_PHASE, FLAT]] * 3,
    [[BROADCAST, REDUCE]] * 3,
    [[FLAT_2, FLAT], [BARRIER, FLAT], [BARRIER, FLAT]],
    [[OOM, FLAT], [FLAT_3, FLAT], [BROADCAST, FLAT]],
    [[OOM, OOM, FLAT], [FLAT, OOM, FLAT], [FLAT_2, BARRIER, FLAT]],
    [[EXCHANGE_3, FLAT], [EXCHANGE, FLAT], [EXCHANGE, FLAT]],
    [[EXCHANGE_3, FLAT], [OOM, FLAT], [EXCHANGE, FLAT]],
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ring", [1, 2])
def test_three_ranks(programs: list[list[Call]], ring: int) -> None:
    Explorer(protocol, programs, ring, ahead=1).run_all()


@pytest.mark.skipif(not FULL, reason="MPIPLUS_TEST_FULL=1 asks for what takes long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(40))
def test_three_ranks_at_random(seed: int) -> None:
    dice = random.Random(1000 + seed)
    programs = random_programs(dice, 3, 2)
    Explorer(protocol, programs, dice.choice([1, 2, 3]), dice.choice([1, 2]), limit=20_000_000).run_all()


@pytest.mark.parametrize("aborts", [0, 1])
@pytest.mark.parametrize("call", [*CALLS, EXCHANGE_3], ids=str)
def test_an_aborted_rank(call: Call, aborts: int) -> None:
    """At any time: the others may wait for it for ever, and read nothing wrong."""
    for programs in ([[call, FLAT, TWO_PHASE_2]] * 2, [[call, OOM, FLAT_2], [call, FLAT, FLAT_2]]):
        Explorer(protocol, programs, 2, 2, aborts).run_all()


# ---- whether a mistake would be seen ----

REVEALING = [
    ([[FLAT_3, FLAT_3]] * 2, 1),
    ([[TWO_PHASE_3, FLAT]] * 2, 1),
    ([[BROADCAST, REDUCE]] * 2, 1),
    ([[FLAT_3, FLAT], [BARRIER, FLAT]], 2),
    ([[FLAT, OOM, OOM, FLAT], [FLAT, BARRIER, FLAT_2, FLAT]], 3),
    ([[FLAT, OOM, FLAT], [FLAT, FLAT, FLAT]], 3),
    ([[OOM, OOM, FLAT], [OOM, FLAT_3, FLAT]], 1),
    ([[FLAT_2, FLAT]] * 3, 1),
    ([[WITHDRAWN[0], FLAT]] * 2, 1),
    ([[EXCHANGE_3, FLAT], [EXCHANGE, FLAT]], 2),
    ([PEERS] * 2, 1),
    ([[HALVES, FLAT]] * 2, 2),
    ([[HALVES._replace(two_phase=True), FLAT]] * 2, 1),
    ([[HALVES, FLAT], [HALVES._replace(peers=False, halves=False), FLAT]], 1),
    ([[IN_SLOTS[1], FLAT]] * 2, 2),
    ([[IN_SLOTS[0], FLAT], [HALVES._replace(peers=False, halves=False), FLAT]], 1),
    ([PEERS, [call._replace(peers=False) for call in PEERS]], 1),
    ([[BROADCAST_3_BUS, FLAT], [Call("broadcast", 3), FLAT]], 1),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MISTAKES[mistake]
    source = Path(protocol.__file__).read_text()
    assert source.count(right) == 1
    mistaken = types.ModuleType("mistaken")
    monkeypatch.setitem(sys.modules, "mistaken", mistaken)  # dataclasses look there
    exec(compile(source.replace(right, wrong), "mistaken", "exec"), mistaken.__dict__)
    with pytest.raises(ProtocolError):
        for programs, ahead in REVEALING:
            calls = [[mistaken.Call(*call) for call in program] for program in programs]
            Explorer(mistaken, calls, 2, ahead).run_all()
