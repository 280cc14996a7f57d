"""The program of a rank that ``launch_subprocesses`` has started: a function of the caller's, and its arguments."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import RankFailedError
from ..jobs.guard import attachment
from ..mpi import runtime
from .parallel import parallelism_is_initialized, reset_parallelism
from .running import MultiprocessConfig, init_and_run

INTERRUPTED = 130
# How long ranks that were told of a failure wait for the one that failed to end first, and to be named for it.
_FAILED_SECONDS = 2.0


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
        world_before, groups_before = dist.is_initialized(), parallelism_is_initialized()
        has_returned = False
        try:
            init_and_run(self.func, self.cfg, *self.args, **self.kwargs)
            has_returned = True
        finally:
            is_alone = not dist.is_initialized() or dist.get_world_size() == 1
            if has_returned or is_alone:  # to undo it takes all ranks; after an error the others may be anywhere
                if not groups_before:
                    reset_parallelism()
                if not world_before and dist.is_initialized():
                    dist.destroy_process_group()

    def dumps(self) -> bytes:
        """As bytes, for :meth:`loads`.

        cloudpickle takes the functions and classes of ``__main__`` by value, so that the ranks need not run
        the caller's script to have them. There they belong to ``__main__`` again: plain pickle looks for them
        in it, as soon as a rank sends one on.
        """
        file = io.BytesIO()
        pickler = _pickler(file)
        pickler.dump(self)
        pickler.dump(pickler.of_main)
        return pickle.dumps((sys.path, sys.argv, file.getvalue()))

    @classmethod
    def loads(cls, data: bytes) -> Payload:
        """Give this process the module search path, the arguments and the ``__main__`` of the caller's."""
        sys.path[:], sys.argv[:], rest = pickle.loads(data)
        unpickler = pickle.Unpickler(io.BytesIO(rest))
        payload: Payload = unpickler.load()
        vars(sys.modules["__main__"]).update(unpickler.load())
        return payload


def _pickler(file: io.BytesIO) -> Any:
    """A cloudpickle Pickler whose ``of_main`` has what it has met of ``__main__``, by name."""
    import cloudpickle

    main = vars(sys.modules["__main__"])

    class Pickler(cloudpickle.Pickler):
        def __init__(self) -> None:
            super().__init__(file)
            self.of_main = {name: main[name] for name in ("__file__",) if name in main}  # multiprocessing wants it

        def reducer_override(self, obj: Any) -> Any:
            name = obj.__name__ if isinstance(obj, (type, FunctionType)) else ""
            if name and main.get(name) is obj:
                self.of_main[name] = obj
            return super().reducer_override(obj)

    return Pickler()


def _receive() -> Payload:
    """Rank 0 has it from the launcher, the others from rank 0."""
    comm = runtime.mpi().COMM_WORLD.Dup()
    data = comm.bcast(attachment() if comm.Get_rank() == 0 else None)
    comm.Free()
    return Payload.loads(data)


def exit_code(error: BaseException) -> int:
    """The exit code of a rank that has raised this, as the shell has it."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _was_told(error: BaseException) -> bool:
    """Return whether another rank has failed, and not this one."""
    if not isinstance(error, RankFailedError) or not error.ranks:
        return False
    return runtime.mpi().COMM_WORLD.Get_rank() not in error.ranks


def _say(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)


def _leave(code: int) -> NoReturn:
    """End at once: an orderly end would wait in MPI for ranks that wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Receive the function, and run it."""
    try:
        _receive().run()
    except BaseException as error:
        code = exit_code(error)
        if code == 0:
            return
        if _was_told(error):
            time.sleep(_FAILED_SECONDS)
        _say(error)
        _leave(code)
