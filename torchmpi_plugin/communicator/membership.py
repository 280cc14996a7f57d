"""Members of a new group: they check in over torch's store, and MPI makes their communicator."""

from __future__ import annotations

import functools
import json
import secrets
import socket
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from .. import protocol
from ..errors import DistBackendError
from ..mpi import runtime
from ..names import describe_ranks
from ..store.checkin import CheckIn, Look
from . import sharing
from .choice import GroupConfig
from .communicator import Communicator
from .steps import Steps


def create(
    base: Any,
    store: Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    compares: bool,
    config: GroupConfig,
    look: Look | None,
) -> tuple[Communicator, CheckIn]:
    """Make the communicator of a group whose members are all here or on their way.

    Only members call this, so it is ``MPI_Comm_create_group`` on ``base`` (or a place on what groups of the same ranks
    share: ``sharing.py``). That call has no deadline and cannot be taken back, hence the check-in over the store before
    it, which has one and knows who is missing.

    Args:
        base: the communicator all members are part of (COMM_WORLD, or what the user gave in Options).
        store: the group's own prefix of torch's store.
        name: torch's name for the group; equal on all members.
        ranks: its members in the world.
        compares: whether this rank was asked to compare the calls.
        config: what else this rank was asked for. Those of rank 0 count.
        look: whether a member has ended and will never come; None where they meet for the first time, in the world.

    Raises:
        DistBackendError: members did not come, or do not agree with MPI on who they are, or something failed on one.
    """
    # A store may outlive a group and see another of its name: these first keys are deleted before anybody
    # leaves, and whatever comes later has a mark of this group in its keys, made by rank 0.
    doing = f"creating group {name!r}"
    size = len(ranks)
    # torch counts groups for their names: others may have this one, where each rank makes its own group only.
    these = f"create {zlib.crc32(repr(sorted(ranks)).encode())}" if look else "create"
    compared = _MembersComparison(look, store, rank, ranks) if look else None
    first = CheckIn(store, these, rank, size, compared)
    kin = sharing.kin[tuple(ranks) if look else ()]
    word = kin.word(rank) if look else sharing.Word()
    try:
        mine = [*protocol.this(socket.gethostname()), *word]
        mark = f"{base.Get_rank()} {secrets.token_hex(8)} {json.dumps(mine)}"
        entries = [entry.split(" ", 2) for entry in first.gather("member", mark, timeout, doing)]
        members = _members(entries, doing)
        words = [sharing.Word(*json.loads(entry[2])[3:]) for entry in entries]
        checkin = CheckIn(store, entries[0][1], rank, size, look)
        steps = Steps(checkin, timeout, doing)
        make = functools.partial(_create_group, base, members, name, doing)
        tags = kin.tags(words)
        comm = steps.make(make) if tags.comm is None else steps.meet(tags.comm)
        first.forget("member")  # all have read it, and wait for this rank in the first step
        if compared is not None:
            compared.forget()
        made = Communicator(comm, base, steps, compares, config, tags)
        if tags.comm is not None and not made.choice.own_for_all:  # those of MPI have no tags
            made.free()
            made = Communicator(steps.make(make), base, steps, compares, config)
        if tags.comm is None:
            kin.add(made, entries[0][1] if tags.shared else "")
    except BaseException:
        kin.shared = None  # on which this rank may have left out a step
        raise
    finally:
        kin.made(word)
    return made, checkin


class _MembersComparison:
    """A look that also compares of which ranks members make a group of this name; asked when somebody is late."""

    def __init__(self, look: Look, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._look, self._ranks, self._has_told = look, [*ranks], False
        self._corner = CheckIn(store, "create", ranks[rank], len(ranks))

    def __call__(self, doing: str) -> DistBackendError | None:
        self._corner.say("ranks", self._ranks)
        self._has_told = True
        first = self._ranks[0]  # each by each would be much for the store
        others = self._corner.heard("ranks", self._ranks if self._corner.rank == first else [first])
        for other, theirs in others.items():
            if theirs is not None and sorted(theirs) != sorted(self._ranks):
                return DistBackendError(
                    f"{doing} of {describe_ranks(self._ranks)}: rank {other} of the world makes it of "
                    f"{describe_ranks(theirs)}. All ranks are to call new_group() with the same lists, in one order"
                )
        return self._look(doing)

    def forget(self) -> None:
        if self._has_told:
            self._corner.say("ranks", None)  # not deleted: another may just be about to read it


def _members(entries: list[list[str]], doing: str) -> list[int]:
    """Their ranks in the communicator that they come from."""
    if different := protocol.disagreement([_build(entry) for entry in entries]):
        raise DistBackendError(f"{doing}: {different}")
    members = [int(entry[0]) for entry in entries]
    if len(set(members)) != len(members):
        raise DistBackendError(
            f"{doing}: its {len(members)} members are MPI ranks {members}, so some process takes part twice "
            f"or two processes were given one rank"
        )
    return members


def _build(entry: list[str]) -> protocol.Build:
    """Return a member's words about its build, which only grow from one build to the next."""
    if len(entry) < 3:
        return protocol.Build(protocol.UNKNOWN, "of an older version", "a node that does not say its name")
    return protocol.Build(*json.loads(entry[2])[:3])


def _create_group(base: Any, members: list[int], name: str, doing: str) -> Any:
    """``MPI_Comm_create_group``, which the members alone call."""
    everybody = base.Get_group()
    group = everybody.Incl(members)
    try:
        return base.Create_group(group, zlib.crc32(name.encode()) & 0x7FFF)
    except runtime.mpi().Exception as error:
        raise DistBackendError(
            f"{doing}: MPI made no communicator: {error}. MPI libraries have about 2,000 to 16,000 in "
            f"all; destroy_process_group(group) gives one back"
        ) from error
    finally:
        group.Free()
        everybody.Free()
