"""A test for a connection whose other end has fallen silent, where the kernel would wait for a quarter of an hour.

Keepalive does not run while data is under way that nobody has acknowledged, and TCP_USER_TIMEOUT would also end the
connection to a launcher that was stopped (Ctrl-Z), whose kernel answers, but takes nothing.
"""

from __future__ import annotations

import contextlib
import socket
import struct

SECONDS = 45
#: Of struct tcp_info: how often the same data was sent again in vain, how often in vain it was asked whether more may
#: come, and ms since anything was acknowledged.
_FIELDS = struct.Struct("=2xBB52xI")


def is_silent(connection: socket.socket) -> bool:
    """Return whether the other kernel has not answered for long, though it was asked."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
        repeated, asked, last_answer = _FIELDS.unpack(info)
        # A receiver that is full answers each question, at most two minutes after the one before.
        return bool((repeated or asked > 1) and last_answer > 1000 * SECONDS)
    return False
