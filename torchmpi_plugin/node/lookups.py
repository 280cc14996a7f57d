"""Host names: whether one can be found, and no long wait for names that nobody needs."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import time
from collections.abc import Iterator
from typing import Any

#: A name may be a moment younger than the job that uses it.
_RESOLVE_SECONDS = 3.0
_RES_INIT = 1


def why_unknown(name: str) -> str:
    """Return why ``name`` cannot be resolved on this node; empty if it can."""
    until = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:  # the latter: a label that is empty or too long
            if time.monotonic() > until or isinstance(error, UnicodeError):
                return str(error)
        else:
            return ""
        time.sleep(0.5)


def _needs_no_lookup(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"  # which is in every list of hosts


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state`` (resolv.h), of which each thread has one."""

    _fields_ = (("seconds", ctypes.c_int), ("attempts", ctypes.c_int), ("options", ctypes.c_ulong))


def _resolver_state() -> Any:
    """This thread's; None where the C library has no such thing."""
    libc = ctypes.CDLL(None)
    find, fill = getattr(libc, "__res_state", None), getattr(libc, "__res_init", None)
    if find is None or fill is None:
        return None
    find.restype = ctypes.POINTER(_ResolverState)
    state = find().contents
    return state if state.options & _RES_INIT or fill() == 0 else None


@contextlib.contextmanager
def lookups_are_short(host: str) -> Iterator[None]:
    """Within, this thread gives a name server one second, once, rather than twice five; if ``host`` is an address.

    torch looks up the name of each address that a store connects to, for its log only. Where no name server answers,
    as on a cluster's inner network, that is what starting a job would take. (The variable RES_OPTIONS does not help: it
    is read once in the life of a process, and for all threads.)
    """
    state = _resolver_state() if _needs_no_lookup(host) else None
    if state is None:
        yield
        return
    before = state.seconds, state.attempts
    state.seconds = state.attempts = 1
    try:
        yield
    finally:
        state.seconds, state.attempts = before
