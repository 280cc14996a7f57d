"""Start a function on several ranks, from a plain Python process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..dist.failures import Failure
from ..errors import RankFailedError
from ..jobs.job import run_job
from ..jobs.outcome import RankFailure
from ..jobs.spec import JobSpec
from ..node.processes import python_command
from .rank import INTERRUPTED, Payload, exit_code
from .running import MultiprocessConfig, job_size

_RANK = "from torchmpi_plugin.launch.rank import main; main()"
_TERMINATED = 128 + signal.SIGTERM


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
