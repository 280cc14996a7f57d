"""Start a function on several ranks, from a plain Python process; and the program that each of these ranks is."""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NoReturn

import torch.distributed as dist

from ..dist.failures import Failure
from ..errors import RankFailedError
from ..jobs.guard import attachment
from ..jobs.job import run_job
from ..jobs.outcome import RankFailure
from ..jobs.spec import JobSpec
from ..mpi import runtime
from ..node.processes import python_command
from .parallel import parallelism_is_initialized, reset_parallelism
from .running import MultiprocessConfig, init_and_run, job_size

_RANK = "from torchmpi_plugin.launch.processes import main; main()"
_TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 130
# How long ranks that were told of a failure wait for the one that failed to end first, and to be named for it.
_FAILED_SECONDS = 2.0


def launch_subprocesses(
    func: Callable[..., Any],
    cfg: MultiprocessConfig,
    setup: Callable[[], Any] | None = None,
    rank_offset: int = 0,
    *args: Any,
    daemon: bool = False,
    **kwargs: Any,
) -> None:
    """Run a function on ``cfg.world_size`` ranks, with the world and the parallel groups made.

    In a program that mpirun (or torchrun) has started, this calls ``func`` in place: the ranks are there
    already. In a plain process with more than one rank to run, it starts them through the mpirun that belongs to
    the MPI at hand, and returns when all have ended; there is no time limit. Their output comes through as it
    is, and Ctrl-C ends them all. One rank runs in this process. From ml, whose ranks are started with
    multiprocessing.

    Args:
        func: what the ranks run. It may be defined in ``__main__``, or be a lambda.
        cfg: how; left as it is in the starting process, but for what :meth:`MultiprocessConfig.resolve` fills in.
        setup: called on each rank before anything else.
        rank_offset: ml's; must be 0. MPI numbers the ranks of all nodes.
        *args: for ``func``; like everything here they must be picklable, by cloudpickle.
        daemon: accepted for compatibility: the ranks never outlive this process.
        **kwargs: for ``func``.

    Raises:
        RankFailedError: a rank failed, which ended the others; with its rank, node, exit code and traceback.
            Not in place: what ``func`` raises there is raised as it is.
        ValueError: the program runs on another number of ranks already; or a ``rank_offset``.
        RuntimeError: the ranks could not be started.

    Example::

        def train(epochs): ...

        if __name__ == "__main__":
            launch_subprocesses(train, MultiprocessConfig(world_size=4), epochs=10)
    """
    if rank_offset:
        raise ValueError(
            f"launch_subprocesses: rank_offset is {rank_offset}, but MPI numbers the ranks of all nodes itself; start "
            f"them together, with mpirun or mpiplus run over the nodes"
        )
    in_place = job_size() is not None
    cfg.resolve()
    assert cfg.world_size is not None
    if in_place or cfg.world_size <= 1:
        before = dict(os.environ)
        try:
            payload = Payload(func, setup, cfg, args, kwargs)
            payload.run() if in_place else _run_alone(payload)
        finally:
            _restore(before)
        return
    _start(Payload(func, setup, replace(cfg, rank=-1, local_rank=-1, local_world_size=None), args, kwargs))


launch_subprocess = launch_subprocesses


def _restore(before: dict[str, str]) -> None:
    """Take back the rank's variables: they would tell the next launch that it is part of this one."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name in (*ranks, "INIT_METHOD", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


def _run_alone(payload: Payload) -> None:
    """A failure looks like that of one rank among several."""
    try:
        payload.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        code = exit_code(error)
        if code:
            text = Failure.of(error).traceback
            raise _failed(RankFailure(0, socket.gethostname(), code, text, f"exit code {code}")) from error


def _start(payload: Payload) -> None:
    assert payload.cfg.world_size is not None
    command, size = python_command(_RANK), payload.cfg.world_size
    result = run_job(JobSpec(command, nproc=size, prefix=False, attachment=payload.dumps()))
    if not result.returncode:
        return
    if result.failure is not None:
        raise _failed(result.failure)
    # The message too: ranks that ignore the signal, or have not started yet, end in another way.
    if result.returncode == INTERRUPTED or "mpiplus run: SIGINT" in result.message:
        raise KeyboardInterrupt
    if result.returncode == _TERMINATED:
        raise SystemExit(result.returncode)
    raise RuntimeError(f"launch_subprocesses: {result.message}")


def _failed(failure: RankFailure) -> RankFailedError:
    words = failure.traceback.strip()
    ending = failure.cause or f"exit code {failure.exit_code}"
    return RankFailedError(
        f"rank {failure.rank} on node {failure.node} failed first: {ending}"
        + (f"; its last words:\n{words}" if words else ""),
        ranks=[failure.rank],
        node=failure.node,
        exit_code=failure.exit_code,
        traceback=failure.traceback,
    )


# ---- the program of a rank: the function, and its arguments ----


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
