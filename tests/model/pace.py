"""Chunks between nodes: c_src/internode/pipeline.c once more, in all orders of what nodes do and what arrives.

A node stands for its ranks, which wait for each other within the ring. It starts a chunk when it is done with the one
that had its slot before, and sends what the chunk sends: short messages, gone at once, which lie in their receiver's
memory until that looks for them. It is done with a chunk when it has received all of it, and is with those before. Once
in a ring it says which chunk it has come to, and others that are a window further wait for that.
"""

from __future__ import annotations

from typing import NamedTuple

#: What could be done wrong, and is to be found.
MISTAKES = ("keeps no pace", "loses a message of pace", "says what is not heard")


class Node(NamedTuple):
    """How many chunks it has started and is done with; for each node how many messages of data, and of pace, it has
    sent there, and how many of those for it it has taken."""

    started: int
    done: int
    sent: tuple[int, ...]
    taken: tuple[int, ...]
    paced: tuple[int, ...]  # sent to each
    heard: tuple[int, ...]  # taken from each


State = tuple[Node, ...]


def added(counts: tuple[int, ...], which: list[int]) -> tuple[int, ...]:
    return tuple(count + (i in which) for i, count in enumerate(counts))


class Pipeline:
    """`sends`: for each node those that it sends every chunk to; `window`: a number of rings. `mistake`: one of
    MISTAKES, or none."""

    def __init__(self, sends: list[list[int]], chunks: int, ring: int, window: int, mistake: str = "") -> None:
        self.sends, self.chunks, self.ring, self.mistake = sends, chunks, ring, mistake
        self.window = window * ring
        self.nodes = range(len(sends))
        self.senders = [[other for other in self.nodes if me in sends[other]] for me in self.nodes]
        self.others = [[other for other in self.nodes if other != me] for me in self.nodes]
        self.most = 0  # messages of one node that another one had not received

    def says(self, chunk: int, me: int) -> bool:
        if self.mistake == "keeps no pace" or (self.mistake.startswith("loses") and (me, chunk) == (1, self.ring)):
            return False
        is_heard = chunk + self.window < self.chunks or self.mistake == "says what is not heard"
        return chunk % self.ring == 0 and is_heard

    def to_hear(self, chunk: int) -> int:
        """Of each node, to be done with this chunk."""
        if self.mistake == "keeps no pace":
            return 0
        return sum(before % self.ring == 0 for before in range(self.window, chunk + 1))

    def start(self, state: State, me: int) -> State | None:
        """mpp_pipeline_start()."""
        node, chunk = state[me], state[me].started
        if chunk == self.chunks or chunk >= node.done + self.ring:
            return None
        paced = added(node.paced, self.others[me]) if self.says(chunk, me) else node.paced
        after = node._replace(started=chunk + 1, sent=added(node.sent, self.sends[me]), paced=paced)
        return (*state[:me], after, *state[me + 1 :])

    def poll(self, state: State, me: int, other: int) -> State | None:
        """mpp_pipeline_poll(): takes what has come from one node, and is done with what is complete."""
        node = state[me]
        taken, heard = list(node.taken), list(node.heard)
        taken[other] = min(state[other].sent[me], node.started)
        heard[other] = min(state[other].paced[me], self.to_hear(node.started - 1))
        done = node.done
        while done < node.started and self.is_complete(me, done, taken, heard):
            done += 1
        after = node._replace(taken=tuple(taken), heard=tuple(heard), done=done)
        return None if after == node else (*state[:me], after, *state[me + 1 :])

    def is_complete(self, me: int, chunk: int, taken: list[int], heard: list[int]) -> bool:
        has_heard = all(heard[other] >= self.to_hear(chunk) for other in self.others[me])
        return has_heard and all(taken[other] > chunk for other in self.senders[me])

    def followers(self, state: State) -> list[State]:
        found = [self.start(state, me) for me in self.nodes]
        found += [self.poll(state, me, other) for me in self.nodes for other in self.others[me]]
        return [after for after in found if after is not None]

    def wrong(self) -> State | None:
        """A state in which nobody can go on, and somebody is not through or messages are left; `most` of all others."""
        none = (0,) * len(self.sends)
        first: State = (Node(0, 0, none, none, none, none),) * len(self.sends)
        known, left = {first}, [first]
        while left:
            state = left.pop()
            after = self.followers(state)
            for me in self.nodes:
                for other in self.senders[me]:
                    self.most = max(self.most, state[other].sent[me] - state[me].taken[other])
            if not after and not self.is_over(state):
                return state
            left.extend(set(after) - known)
            known.update(after)
        return None

    def is_over(self, state: State) -> bool:
        all_done = all(node.done == self.chunks for node in state)
        return all_done and all(state[me].paced[o] == state[o].heard[me] for me in self.nodes for o in self.others[me])
