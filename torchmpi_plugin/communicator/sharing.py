"""Many groups of the same ranks share a communicator, on which each has tags of its own: MPICH has about 2,000 in all.

Rank 0 gives the tags out, and none twice: what comes late for a group that is gone meets nobody. Such a communicator is
never freed; it serves thousands of groups.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..mpi import runtime

#: So many open groups of the same ranks have communicators of their own, with all of MPI's tags and long slots.
MOST_PRIVATE = 32
#: Of a group that shares one; the largest of them are ours, as elsewhere.
TAGS = 1 << 16
#: Its slots of shared memory: thousands of groups cost less.
SHORT_SLOT = 4 << 10


class Word(NamedTuple):
    """A rank's message about a new group before it is made."""

    known: str = ""  # the communicator that it could be on; empty: none
    place: int = 0  # the group's on that, by rank 0; 0: none
    opens: bool = False  # others may come onto the group's own communicator, by rank 0


class Shared:
    """A communicator that groups share; its name is equal on all its ranks, and no other's."""

    def __init__(self, comm: Any, name: str) -> None:
        self.comm, self.name, self.places = comm, name, 1


class Tags(NamedTuple):
    """A communicator and the first tag of a group's messages on it."""

    comm: Any = None  # None: one of its own, which is to be made
    first: int = 0
    shared: bool = False  # others have theirs there, or may


PRIVATE = Tags()


class Kin:
    """The groups of the same ranks in this process."""

    def __init__(self) -> None:
        self.shared: Shared | None = None  # the communicator that the next one could be on
        self._all: dict[str, Shared] = {}
        self._private: list[weakref.ref[Any]] = []
        self._is_making = False

    def word(self, rank: int) -> Word:
        """Return the words of this rank, which will be ``rank``; :meth:`made` follows once its part is over."""
        # Who has the same communicator under the same rank is in a group with the same ranks: all of them say so.
        shared = self.shared
        known = shared.name if shared is not None and shared.comm.Get_rank() == rank else ""
        self._private = [each for each in self._private if (one := each()) is not None and not one.freed]
        if rank or len(self._private) < MOST_PRIVATE:
            return Word(known)
        # Open MPI has more, and with ULFM one group's is revoked, which is to leave the others. And two groups that are
        # made in two threads would meet in their steps.
        mpi = runtime.mpi()
        if self._is_making or not runtime.flavour().shares_communicators:
            return Word()
        most = (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1) // TAGS
        self._is_making = most > 1
        if shared is None or not known or shared.places >= most:
            return Word(opens=most > 1)
        shared.places += 1
        return Word(known, shared.places - 1)

    def tags(self, words: Sequence[Word]) -> Tags:
        """Return the place of a group's messages from these words, by rank: the same on all ranks."""
        first = words[0]
        if first.place and all(word.known == first.known for word in words):
            return Tags(self._all[first.known].comm, first.place * TAGS, True)
        return Tags(shared=first.opens)

    def add(self, made: Any, name: str) -> None:
        """A group has a communicator of its own; with a name for it others may come there."""
        if name and made.choice.own_for_all:
            self.shared = self._all[name] = Shared(made.comm, name)
            return
        made.tags = PRIVATE
        self._private.append(weakref.ref(made))

    def made(self, word: Word) -> None:
        """The group of that word is, or is not: the next one may be given a place."""
        self._is_making = self._is_making and not (word.place or word.opens)


#: By the ranks in the world.
kin: defaultdict[tuple[int, ...], Kin] = defaultdict(Kin)
