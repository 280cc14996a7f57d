"""Memory that other processes of this node can map: tensors that windows reach without messages.

It belongs to no file system, so the size of /dev/shm does not limit it and nothing is left of it when a process is
killed.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch

from .. import settings
from ..node import shared_files
from ..node.processes import Process
from ..node.shared_files import Share

# By address, as long as a tensor lies there.
_shares: dict[int, Share] = {}


def _anonymous_file() -> int | None:
    try:
        return os.memfd_create("mpiplus", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # an old libc, a strict container
        return None


def _forget(address: int, descriptor: int) -> None:
    share = _shares.get(address)
    if share is not None and share.descriptor == descriptor:  # or another lies there already
        del _shares[address]
    os.close(descriptor)


def allocate(length: int) -> torch.Tensor:
    """So many bytes, at least one, all zero; ordinary memory where it cannot or must not be shared.

    Raises:
        MemoryError: there is not so much.
    """
    descriptor = None if settings.unshared() else _anonymous_file()
    if descriptor is None:
        return torch.zeros(length, dtype=torch.uint8, device="cpu")
    try:
        # Not posix_fallocate: it would find no limit, and take memory until the kernel kills somebody.
        if length > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
            raise OSError("more than this node has")
        os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, length)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"mpiplus: no {length} bytes of memory that ranks can share: {error}") from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    _shares[address] = shared_files.share(descriptor, length)
    weakref.finalize(memory, _forget, address, descriptor).atexit = False
    return tensor


def share_of(tensor: torch.Tensor) -> Share | None:
    """Return how others can map the memory that ``tensor`` lies in, if they can."""
    return _shares.get(tensor.untyped_storage().data_ptr())


def map_from(process: Process | None, share: Share | None) -> torch.Tensor | None:
    """Another process's memory, as bytes; None where it cannot be seen from here."""
    if process is None or share is None or settings.unshared():
        return None
    try:
        descriptor = shared_files.open_share(process.pid, share)
    except OSError:  # another user's, or not allowed here
        return None
    try:
        return torch.frombuffer(mmap.mmap(descriptor, share.length), dtype=torch.uint8)
    except OSError:
        return None
    finally:
        os.close(descriptor)
