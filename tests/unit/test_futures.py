"""A future of a failed operation is one for C++ too, which looks for tensors in what Python has set."""

from __future__ import annotations

import pytest

from torchmpi_plugin.engine.futures import Future
from torchmpi_plugin.errors import RankFailedError

ERROR = RankFailedError("rank 1 has ended", ranks=[1])


@pytest.mark.parametrize("has_devices", [False, True])
def test_whoever_waits_in_python(has_devices: bool) -> None:
    future = Future()
    future.has_devices = has_devices
    future.fail(ERROR)
    assert future.done()
    with pytest.raises(RankFailedError, match="rank 1 has ended"):
        future.wait()
    with pytest.raises(RankFailedError):
        future.value()
