"""What travels to the ranks: a function of the caller's, and what it is called with."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .config import MultiprocessConfig
from .parallel import reset_parallelism
from .running import init_and_run


@dataclass
class Payload:
    """A call to be made on every rank."""

    func: Callable[..., Any]
    setup: Callable[[], Any] | None
    cfg: MultiprocessConfig
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> None:
        """Make the call; then undo the initialisation, unless it was there before."""
        if self.setup is not None:
            self.setup()
        there_before = dist.is_initialized()
        init_and_run(self.func, self.cfg, *self.args, **self.kwargs)
        reset_parallelism()
        if not there_before:
            dist.destroy_process_group()

    def dumps(self) -> bytes:
        """As bytes: a pickled tuple of the module search path, and of this, pickled.

        cloudpickle takes the functions and classes of ``__main__`` by value, so that the ranks need not run
        the caller's script to have them.
        """
        import cloudpickle

        return pickle.dumps((sys.path, cloudpickle.dumps(self)))
