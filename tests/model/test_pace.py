"""Between nodes a node that receives nothing is never far ahead of those it sends to, and none waits for ever."""

from __future__ import annotations

import pytest
from modelled import digest_of
from pace import MISTAKES, Pipeline

TO_ONE, FROM_ONE, PAIR, ONE_WAY = [[], [0], [0]], [[1, 2], [], []], [[1], [0]], [[1], []]
LAYOUTS = [(PAIR, 2, 9), (ONE_WAY, 1, 6), (ONE_WAY, 2, 9), (ONE_WAY, 3, 10), (TO_ONE, 1, 5), (FROM_ONE, 1, 5)]

# What was read of these when pace.py was last compared with it.
COMPARED = {
    "is_one_way": "396e6b5a5b90",
    "pace_period": "bf116d56c3d7",
    "keep_pace": "2e8c764f9b8a",
    "mpp_pipeline_start": "ff47d03eae30",
    "mpp_pipeline_poll": "922b4593c255",
}


@pytest.mark.parametrize("function", COMPARED)
def test_the_c_code_is_what_was_modelled(function: str) -> None:
    digest = digest_of(function, "internode/pipeline.c")
    assert digest == COMPARED[function], f"{function} has changed: look at pace.py, and then write {digest!r} here"


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("sends", "ring", "chunks"), LAYOUTS, ids=str)
def test_the_nodes_keep_pace(sends: list[list[int]], ring: int, chunks: int, window: int) -> None:
    pipeline = Pipeline(sends, chunks, ring, window)
    assert pipeline.wrong() is None
    assert pipeline.most < (window + 3) * ring


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    pipeline = Pipeline(ONE_WAY, 9, 2, 1, mistake)
    assert pipeline.wrong() is not None or pipeline.most >= (1 + 3) * 2
