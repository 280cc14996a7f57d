"""Futures of operations, also for C++.

What Python sets in a future is a Python object to C++, and that has two ends that are not C++'s:

- A failure (``Future.set_exception``) is raised by Python's ``wait`` alone; to C++ it is a value, the exception.
  DistributedDataParallel's reducer, which waits in C++, takes it for the object with its gradients, has the tensors in
  it extracted, which pickles it, and takes the first of none: SIGSEGV. So the value is an object that raises when
  pickled.
- A list of tensors is no list of tensors. c10d's built-in hook FP16_COMPRESS wants one, and ends with an internal
  assertion. TorchScript knows the type of what a task of its own returns; so for that hook the future is a task which
  waits for the operation, and holds no thread while it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import futures

from .. import _bridge, torch_internals
from . import engine

Tensors = list[torch.Tensor]
_script_list: Callable[[list[str]], Any] = torch_internals.find("torch._C:ScriptList")


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


class Future(futures.Future[Tensors]):
    """One that tells the timeline when Python waits for it. C++ does so unseen, as DDP's part there does."""

    #: The Work's.
    call: _bridge.Call | None = None
    #: It was made for tensors on devices; then it looks for such tensors once, when it is set.
    has_devices = False

    def wait(self) -> Tensors:
        _bridge.asked_for(self)
        return super().wait()

    def fail(self, error: Exception) -> None:
        """Complete it with an error, which whoever waits for it gets: in C++ as a RuntimeError with its text."""
        self._set_unwrap_func(_Failure.throw)
        self.set_result(_Failure(error, int(self.has_devices)))  # type: ignore[arg-type]


class MessageFuture(Future):
    """Of a message that is under way where only the main thread may call MPI: ``wait()`` completes it.

    Whoever waits in C++, chains or looks would wait for ever, as nobody calls MPI meanwhile: they get an error at once.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.call, self._work = work.call, work
        self.fail(RuntimeError(f"{work}: {engine.ONE_THREAD}, or call wait() of the Work instead"))

    def wait(self) -> Tensors:
        _bridge.asked_for(self)
        return cast(Tensors, self._work.result())


TASK = """
def after(done: Future[int], tensors: List[Tensor], error: List[str]) -> List[Tensor]:
    torch.jit.wait(done)
    if len(error) > 0:
        raise RuntimeError(error[0])
    return tensors

def start(done: Future[int], tensors: List[Tensor], error: List[str]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, done, tensors, error)
"""


@functools.cache
def _start() -> Callable[..., Any]:
    return torch.jit.CompilationUnit(TASK).start


def is_typed(tensors: Tensors) -> bool:
    """Return whether these may be that hook's: making such a future takes ten times as long, so others go without."""
    return len(tensors) == 1 and tensors[0].dtype == torch.float16


class TypedFuture:
    """The two ends of one that C++ can read; ``future`` becomes the tensors, or a RuntimeError of the same text."""

    def __init__(self, tensors: Tensors) -> None:
        self._done: futures.Future[int] = futures.Future()
        self._error = _script_list([""])  # that TorchScript shares with Python; torch.jit.script makes one and warns
        self._error.pop()
        self.future: futures.Future[Tensors] = _start()(self._done, tensors, self._error)

    def set_result(self, _: Tensors) -> None:
        self._done.set_result(0)

    def fail(self, error: Exception) -> None:
        self._error.append(str(error))
        self._done.set_result(0)
