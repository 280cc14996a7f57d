"""The file behind a group's shared memory: without a name, for this user's processes, and never another file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from plain_python import printed

from torchmpi_plugin.communicator.shared_memory import create_file
from torchmpi_plugin.node.shared_files import open_share, share


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_file(4096)
    yield made
    os.close(made)


def test_it_has_no_name(descriptor: int) -> None:
    status = os.fstat(descriptor)
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 4096)


def test_another_process_can_open_it(descriptor: int) -> None:
    os.pwrite(descriptor, b"hello", 0)
    program = (
        "import os, sys; from torchmpi_plugin.node import shared_files as s; pid, *offered = map(int, sys.argv[1:]); "
        "print(os.pread(s.open_share(pid, s.Share(*offered)), 5, 0))"
    )
    assert printed(program, os.getpid(), *share(descriptor, 4096)) == "b'hello'\n"


def test_what_another_table_of_processes_has_under_that_number(descriptor: int) -> None:
    offered = share(descriptor, 4096)
    for other in (offered._replace(inode=offered.inode + 1), offered._replace(device=offered.device + 1)):
        with pytest.raises(OSError, match="a file of another process"):
            open_share(os.getpid(), other)
    with pytest.raises(OSError, match="No such file"):
        open_share(0, offered)
