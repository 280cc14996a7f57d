"""Questions to the ranks of running jobs: to this node's on their sockets, to others' through one of these.

Imports neither torch nor MPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import files
from .files import RankSocket

#: For ranks of this node, which answer from memory; for stacks; for what takes their Python, or the job's store.
MEMORY_SECONDS, STACKS_SECONDS, PYTHON_SECONDS = 2.0, 5.0, 8.0
_NOT_HERE = "does not answer: on another node, which may be cut off, or it has ended"
_LONGEST_REQUEST = 200  # the C side has room for 255 bytes
_STATES = {
    "T": "stopped (SIGSTOP, or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "in the kernel (disk, swap, or a file system that does not answer)",
    "Z": "ended",
    "": "ended, or in another container",
}


@dataclass
class Rank:
    """Knowledge of one rank."""

    rank: int  # its number in the world
    answer: dict[str, Any] | None = None  # what it tells; None: nothing
    problem: str = ""  # why it tells nothing
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Told:
    """A rank's answer in words."""

    rank: int
    pid: int = 0
    text: str = ""
    problem: str = ""


def ask(sockets: Sequence[RankSocket], request: str, seconds: float) -> dict[int, str]:
    """Ask ranks of this node at the same time; the answers, by rank, of those that have answered to the end."""
    return asyncio.run(_ask(sockets, request, seconds)) if sockets else {}


async def _ask(sockets: Sequence[RankSocket], request: str, seconds: float) -> dict[int, str]:
    asked = {asyncio.create_task(_ask_one(each, request)): each.rank for each in sockets}
    done, _ = await asyncio.wait(asked, timeout=seconds)
    # An exception: it is gone, or was stopped for so long that callers stand in line.
    return {asked[task]: text for task in done if task.exception() is None and (text := task.result())}


async def _ask_one(each: RankSocket, request: str) -> str:
    with files.address_of(each.path) as address:
        answer, connection = await asyncio.open_unix_connection(address)
    try:
        connection.write(f"{request}\n".encode())
        return (await answer.read()).decode(errors="replace")
    finally:
        connection.close()


def state_of(pid: int) -> str:
    """In words why a process may not answer; empty: it looks as if it could."""
    return _STATES.get(files.state_of(pid), "")


def why_silent(asked: RankSocket) -> str:
    reason = state_of(asked.pid) or "the thread that answers gets no core, or the process is in swap"
    return f"does not answer: process {asked.pid}: {reason}"


def ask_job(sockets: Sequence[RankSocket]) -> list[Rank]:
    """Ask all ranks of a job, those on other nodes too; return their answers by their numbers."""
    return [_understood(told) for told in ask_words(sockets, "status", MEMORY_SECONDS, None)]


def ask_words(sockets: Sequence[RankSocket], request: str, seconds: float, ranks: Sequence[int] | None) -> list[Told]:
    """Ask ranks of a job for words: ``status``, ``stacks``, ``timeline`` or ``dump``.

    Those that are silent though they run are first asked once more, with more time: a rank answers one caller at a
    time, and may be busy with what another one has asked it.

    Raises:
        ValueError: the job has no such rank.
    """
    answers = ask(sockets, "status", MEMORY_SECONDS)
    silent = [each for each in sockets if each.rank not in answers and not state_of(each.pid)]
    answers |= ask(silent, "status", PYTHON_SECONDS)
    size = max((int(_parsed(answer).get("world_size", 0)) for answer in answers.values()), default=0)
    numbers = {each.rank for each in sockets} | set(range(size))
    wanted = numbers if ranks is None else set(ranks)
    if unknown := sorted(wanted - numbers):
        raise ValueError(f"this job has no rank {', '.join(map(str, unknown))}")
    here = [each for each in sockets if each.rank in wanted]
    words = answers if request == "status" else ask(here, request, seconds)
    found = {each.rank: _here(each, words) for each in here}
    if rest := sorted(wanted - set(found)):
        found |= {told.rank: told for told in _ask_elsewhere(sockets, answers, request, rest) if told.rank in wanted}
    return [found.get(rank) or Told(rank, problem=_NOT_HERE) for rank in sorted(wanted)]


def _here(asked: RankSocket, answers: dict[int, str]) -> Told:
    if asked.rank not in answers:
        return Told(asked.rank, asked.pid, problem=why_silent(asked))
    state = state_of(asked.pid)
    return Told(asked.rank, asked.pid, answers[asked.rank], state if state.startswith("stopped") else "")


def _understood(told: Told) -> Rank:
    if not told.text:
        return Rank(told.rank, problem=told.problem)
    parsed = _parsed(told.text)
    if "groups" not in parsed or "world_size" not in parsed:
        return Rank(told.rank, problem=told.problem or "gave an answer that was cut off")
    return Rank(told.rank, parsed, told.problem, parsed["groups"])


def _parsed(text: str) -> dict[str, Any]:
    """An answer; empty where it is none: who answers may be ended meanwhile, or be of another version."""
    with contextlib.suppress(ValueError):
        parsed = json.loads(text)
        return parsed if isinstance(parsed, dict) else {}
    return {}


def _ask_elsewhere(
    sockets: Sequence[RankSocket], answered: dict[int, str], request: str, ranks: Sequence[int] = ()
) -> list[Told]:
    """Through the job's store, by the first rank here whose Python has a moment for it."""
    numbers = ",".join(map(str, ranks))
    line = f"others {request} {numbers if len(numbers) < _LONGEST_REQUEST else ''}".strip()
    for each in sockets:
        if each.rank not in answered:
            continue
        told = ask([each], line, PYTHON_SECONDS).get(each.rank)
        if told:
            said = {int(rank): _parsed(answer) for rank, answer in _parsed(told).items()}
            return [Told(rank, it["pid"], it["text"], it["problem"]) for rank, it in said.items() if "problem" in it]
    return []
