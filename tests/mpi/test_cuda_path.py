"""Whether MPI is handed the memory of devices: what tells, and that all ranks heed the last one's words."""

from __future__ import annotations

from datetime import timedelta

import inside
import pytest
import torch
import torch.distributed as dist
from groups import only_up_to

from torchmpi_plugin.communicator import cuda_path
from torchmpi_plugin.communicator.steps import Steps
from torchmpi_plugin.mpi import cuda_aware
from torchmpi_plugin.store.checkin import CheckIn

pytestmark = [pytest.mark.mpi(min_size=2), only_up_to(2)]


class Forgetful:
    """A communicator over which messages come, or not, but never their bytes."""

    def __init__(self, comm, delivers: bool) -> None:
        self.Get_rank, self.Get_size = comm.Get_rank, comm.Get_size
        self.Improbe = lambda *_: self if delivers else None

    def Irecv(self, *_):  # noqa: N802 - mpi4py's name
        from mpi4py import MPI

        return MPI.Request(MPI.REQUEST_NULL)

    Isend = Irecv


def test_probe_of_the_direct_path(channel) -> None:
    """On host memory: what comes is compared, and waited for only so long."""
    assert inside.probe(channel) == ""
    assert "wrong contents" in inside.probe(Forgetful(channel, delivers=True))
    assert "did not come within 0.1 s" in inside.probe(Forgetful(channel, delivers=False), 0.1)


@pytest.mark.parametrize("refuses", ["nobody", "library", "probe"])
def test_all_ranks_take_one_path(refuses: str, channel, monkeypatch) -> None:
    """What the last rank says, all heed."""
    last = channel.rank == channel.size - 1
    monkeypatch.setattr(cuda_path, "current", cuda_path.current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_path, "_probe", lambda *_: "it came late" if last and refuses == "probe" else "")
    aware = not (last and refuses == "library")
    monkeypatch.setattr(cuda_aware, "support_of", lambda *_: cuda_aware.Support(aware, f"it says {aware}"))
    checkin = CheckIn(dist.group.WORLD.get_group_store(), "path", channel.rank, channel.size)
    cuda_path.choose(Steps(checkin, timedelta(seconds=30), "settling", channel), None, 0)
    wanted = {
        "nobody": (True, "it says True"),
        "library": (False, f"rank {channel.size - 1}: it says False"),
        "probe": (False, f"rank {channel.size - 1}: it came late"),
    }
    assert cuda_path.current == (*wanted[refuses], False)
