"""A rank's word that it leaves goes into the pipe that it was given, and into nothing else by that number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmpi_plugin import settings
from torchmpi_plugin.node import leaving


def heard(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 9)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("replaced", ["not", "file", "pipe", "closed"])
def test_what_the_number_stands_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: str) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(settings.LEAVING, leaving.name_of(writer))
    users, other = os.pipe()
    if replaced == "file":
        users = other = os.open(tmp_path / "users", os.O_RDWR | os.O_CREAT)
    if replaced == "closed":
        os.close(writer)
    elif replaced != "not":
        os.dup2(other, writer)
    leaving.tell(3)
    assert heard(reader) == (b"\3" if replaced == "not" else b"")
    assert heard(users) == b""
    if replaced == "file":
        assert (tmp_path / "users").read_bytes() == b""
    if replaced in ("file", "pipe"):
        os.fstat(writer)  # open
