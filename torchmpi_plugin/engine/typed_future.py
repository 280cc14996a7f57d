"""A future of a list of tensors that C++ can read.

What Python sets in a future is a Python object to C++, also where it is a list of tensors. c10d's built-in hook
FP16_COMPRESS wants a list of tensors there, and ends with an internal assertion. TorchScript knows the type of what a
task of its own returns; so this is a task which waits for the operation, and holds no thread while it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

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


def is_wanted(tensors: list[torch.Tensor]) -> bool:
    """Return whether these may be that hook's: making such a future takes ten times as long, so others go without."""
    return len(tensors) == 1 and tensors[0].dtype == torch.float16


class TypedFuture:
    """The two ends of such a future.

    Attributes:
        future: resolves to the tensors, or to a RuntimeError with the failure's text.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._done: Future[int] = Future()
        self._error = torch.jit.script([""])  # a list that TorchScript shares with Python
        self._error.pop()
        self.future: Future[list[torch.Tensor]] = _start()(self._done, tensors, self._error)

    def set_result(self, _: list[torch.Tensor]) -> None:
        """The operation is complete."""
        self._done.set_result(0)

    def set_exception(self, error: Exception) -> None:
        """The operation has failed."""
        self._error.append(str(error))
        self._done.set_result(0)
