"""What users may still call by its old name, for one release, with a warning that has the new one."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from torchmpi_plugin import Options, torch_internals
from torchmpi_plugin.errors import RankFailedError


@pytest.mark.parametrize("named", [{"face": "process_group"}, {"api_mode": "process_group"}])
def test_the_old_name_of_the_direct_mode(named: dict[str, str]) -> None:
    with pytest.warns(FutureWarning, match=r"use Options\(api_mode='direct'\)") as told:
        options = Options(**named)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(options, cuda="staged").api_mode == "direct"


def test_the_old_name_of_the_dispatcher_mode(monkeypatch) -> None:
    monkeypatch.setattr(torch_internals, "has_python_backends", lambda: True)
    with pytest.warns(FutureWarning, match=r"use Options\(api_mode='dispatcher'\)"):
        assert Options(face="backend").api_mode == "dispatcher"


@pytest.mark.parametrize("named", [{"face": "neither"}, {"api_mode": "neither"}])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_another_word(named: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is 'direct' or 'dispatcher', not 'neither'"):
        Options(**named)


def test_the_host_of_a_failure() -> None:
    error = RankFailedError("rank 1 failed", ranks=[1], node="node07")
    with pytest.warns(FutureWarning, match=r"use RankFailedError\.node"):
        assert error.host == "node07"
