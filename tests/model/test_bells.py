"""No ring is lost, whatever the order in which ranks sleep, look and ring."""

from __future__ import annotations

import pytest
from bells import MISTAKES, Bells


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize(
    ("ranks", "chunks", "ring"), [(2, 3, 1), (2, 4, 2), (2, 7, 4), (3, 3, 1), (3, 4, 2), (3, 5, 4)]
)
def test_nobody_sleeps_for_ever(ranks: int, chunks: int, ring: int, two_phase: bool) -> None:
    assert Bells(ranks, chunks, ring, two_phase).dead_end() is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    found = [
        Bells(2, chunks, ring, two_phase, mistake) for chunks, ring in ((3, 2), (6, 4)) for two_phase in (False, True)
    ]
    assert any(bells.dead_end() is not None for bells in found)
