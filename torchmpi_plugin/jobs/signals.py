"""Signals as events of a selector's loop."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

#: What a launcher, a guard and a supervisor pass on to the program.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@contextlib.contextmanager
def caught(
    numbers: Sequence[signal.Signals], selector: selectors.BaseSelector, handle: Callable[[bytes], None]
) -> Iterator[None]:
    """Have a loop handle signals, where this is the main thread; elsewhere nobody can catch any.

    Args:
        numbers: which.
        selector: the loop's; it calls the data of what is ready.
        handle: gets the numbers of those that came, one byte each.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receive, send = socket.socketpair()
    for end in (receive, send):
        end.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
    selector.register(receive, selectors.EVENT_READ, lambda: handle(receive.recv(4096)))
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        receive.close()
        send.close()
