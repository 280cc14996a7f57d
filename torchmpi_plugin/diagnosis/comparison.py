"""The calls of all ranks where these differ; TORCH_DISTRIBUTED_DEBUG=DETAIL.

C compares the calls of all ranks before it moves data (c_src/shm/signatures.c), in detail if the user asked for it.
Where they differ the call fails on all ranks alike, and they tell each other over torch's store what they called.
torch's own check of this kind wraps C++ groups only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .._bridge import Call
from ..engine.work import PendingWork, in_words
from ..names import describe_ranks
from ..operations import BY_NAME
from ..store.checkin import CheckIn
from ..tensors.dtypes import kind_of

#: How long who has failed waits for the others to say what they called. Seconds.
TELLING_SECONDS = 5.0


def wanted() -> bool:
    """Return whether the user asked this rank for it."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def essence(call: Call) -> str:
    """Return what of a call is equal on ranks that agree, as far as the tensors it returns tell.

    Shapes are not: (2, 3) and (6,) go together, and the parts of an all_gather may differ in length.
    """
    if not call.outputs:
        return call.operation
    (shape, dtype), row = call.outputs[0], BY_NAME.get(call.operation)
    count = f" {math.prod(shape)}" if row and row.equal_counts else ""
    return f"{call.operation}{count} {dtype}"


def who_calls_what(checkin: CheckIn, work: PendingWork) -> str:
    """Meet the ranks whose calls have failed like this one: all calls that differ, with the ranks.

    Returns:
        Nothing where some rank does not say within seconds what it called, or the store does not answer.
    """
    what, within = f"mismatch/{work.call.sequence}", timedelta(seconds=TELLING_SECONDS)
    mine = json.dumps([in_full(work), _lengths(work.call, checkin)])
    nobody: list[str] = []
    told = checkin.briefly(lambda: checkin.gather(what, mine, within, work.call.operation), nobody, TELLING_SECONDS + 1)
    if told:  # everybody came, and so has left the one before
        checkin.briefly(lambda: checkin.forget(checkin.mismatch), None)
        checkin.mismatch = what
    said = [json.loads(each) for each in told]
    texts, lengths = [text for text, _ in said], [of_rank for _, of_rank in said]
    problems = [*_different_calls(texts), *(_different_lengths(lengths) if all(lengths) else ())]
    return f"detected mismatch between collectives on ranks: {'; '.join(problems)}" if problems else ""


def _different_calls(texts: list[str]) -> list[str]:
    callers = {text: [rank for rank, other in enumerate(texts) if other == text] for text in dict.fromkeys(texts)}
    calls = [f"{describe_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {t}" for t, ranks in callers.items()]
    return calls if len(calls) > 1 else []


def in_full(work: PendingWork) -> str:
    """The call with its reduction, root and device, and the blocks of a reduce_scatter."""
    call, opts, row = work.call, work._opts, BY_NAME.get(work.call.operation)
    if row is None or opts is None:
        return in_words(call)
    how = f" ({kind_of(opts.reduceOp).name})" if row.reduces else ""
    text, lengths = in_words(call, how), call.lengths or []
    blocks = lengths[: len(lengths) // 2]
    if row.start == "reduce_scatter" and len({*blocks}) > 1:
        text += f" in blocks of {', '.join(map(str, blocks))}"
    if work._tensors and not work._tensors[0].is_cpu:
        text += f" on {work._tensors[0].device.type}"
    return text + (f" with root {opts.rootRank}" if "root" in row.roles.split() else "")


def _lengths(call: Call, checkin: CheckIn) -> list[list[int]]:
    """The bytes to each rank, and those that are expected from each; nothing of other operations."""
    row, size = BY_NAME.get(call.operation), checkin.size
    if row is None or not call.lengths or (row.start != "exchange" and row.roles != "out[]+in"):
        return []
    first, second = call.lengths[:size], call.lengths[size:]
    return [first, second] if row.start == "exchange" else [[second[checkin.rank]] * size, second]


def _different_lengths(lengths: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """``lengths[rank]`` holds what it sends to each rank, and what it expects from each."""
    ranks = range(len(lengths))
    pairs = [(a, b, lengths[a][0][b], lengths[b][1][a]) for a in ranks for b in ranks]
    wrong = [pair for pair in pairs if pair[2] != pair[3]]
    return [f"rank {a} sends {sent} bytes to rank {b}, which expects {expected}" for a, b, sent, expected in wrong[:4]]
