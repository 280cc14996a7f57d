"""Which frames are the user's: not torch's, not ours, whatever the user's own directories are called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

import torchmpi_plugin
from torchmpi_plugin.diagnosis import frames


def called_from(file: str, call: str = "look()", **names: object) -> list[str]:
    """The names of the user's functions, as seen from a function in ``file``."""
    found: list[FrameType] = []
    space = {"look": lambda: found.append(sys._getframe(1)), **names}
    exec(compile(f"def there():\n    {call}\n", file, "exec"), space)
    space["there"]()  # type: ignore[operator]
    return [frame.f_code.co_name for frame in frames.of_user(found[0])]


def test_ours_and_torchs_are_left_out() -> None:
    for module in (torch, torchmpi_plugin):
        directory = Path(module.__file__).parent
        for file in (directory / "here.py", directory / "distributed" / "below" / "here.py"):
            assert called_from(str(file))[0] == "called_from"


def test_the_users_own_directory_called_torch() -> None:
    assert called_from("/home/someone/torch/train.py")[:2] == ["there", "called_from"]
    assert called_from("/home/someone/torch/distributed/train.py")[0] == "there"
