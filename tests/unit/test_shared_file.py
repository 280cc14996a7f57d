"""The file behind a group's shared memory: without a name, for this user's processes, and never another file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchmpi_plugin import communicator


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = communicator._create_file(4096)
    yield made
    os.close(made)


def test_it_has_no_name(descriptor: int) -> None:
    status = os.fstat(descriptor)
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 4096)


def test_another_process_can_open_it(descriptor: int) -> None:
    os.pwrite(descriptor, b"hello", 0)
    program = (
        "import os, sys; from torchmpi_plugin import communicator as c; "
        "offer = c.Offer(sys.argv[1], *map(int, sys.argv[2:])); print(os.pread(c._open(offer), 5, 0))"
    )
    words = [sys.executable, "-c", program, *map(str, communicator._offer(descriptor))]
    other = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert other.stdout.strip() == "b'hello'", other.stderr


def test_what_another_table_of_processes_has_under_that_number(descriptor: int) -> None:
    offer = communicator._offer(descriptor)
    with pytest.raises(OSError, match="a file of another process"):
        communicator._open(offer._replace(inode=offer.inode + 1))
    with pytest.raises(OSError, match="No such file"):
        communicator._open(offer._replace(path="/proc/0/fd/0"))
