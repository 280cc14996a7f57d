"""Futures of operations that have failed, for C++ as well.

What ``Future.set_exception`` sets is raised by Python's ``wait`` alone: to C++ it is a value, the exception.
DistributedDataParallel's reducer, which waits in C++, takes it for the object with its gradients, has the tensors in it
extracted, which pickles it, and takes the first of none: SIGSEGV. So the value is an object that raises when pickled.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.futures import Future


class _Failure:
    """A failure in the place of a result."""

    def __init__(self, error: Exception, looked_at: int) -> None:
        self._error = error
        self._looked_at = looked_at

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._looked_at:
            self._looked_at -= 1
            return tuple, ()
        raise self._error

    def throw(self) -> NoReturn:
        """Raise it, for Python's ``wait``."""
        raise self._error


def fail(future: Future[Any], error: Exception, has_devices: bool) -> None:
    """Complete a future with an error, which whoever waits for it gets: in C++ as a RuntimeError with its text.

    Args:
        future: of Python's.
        error: what Python's ``wait`` raises.
        has_devices: it was made for tensors on devices; then it looks for such tensors once, when it is set.
    """
    future._set_unwrap_func(_Failure.throw)
    future.set_result(_Failure(error, int(has_devices)))
