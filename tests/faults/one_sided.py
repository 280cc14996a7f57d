"""A window from its registration to its end, as one operation of the walk: on every torch, past torch's own names."""

from __future__ import annotations

import torch
from cases import Case
from started import SYNC, Operation, Started

from torchmpi_plugin.group.windows import Window


def put_and_signal(case: Case) -> Started:
    """Everybody puts two elements into everybody's tensor, in memory that only messages reach."""
    window, size = Window(case.process_group, 0), case.size
    tensor = torch.zeros(2 * size)
    window.tensor_register(tensor)
    for peer in range(size):
        window.put(torch.full((2,), case.rank + 1.0), peer, 2 * case.rank, False)
        window.signal(peer, False)
    for peer in range(size):
        window.wait_signal(peer, False)
    expected = torch.arange(1.0, size + 1).repeat_interleave(2)
    window.tensor_deregister()
    return Started(outputs=[tensor], expected=[expected])


WINDOW = Operation("window", put_and_signal, "one-sided", modes=SYNC)
