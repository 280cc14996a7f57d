"""Sends and receives. In a group of one, the nonblocking forms talk to themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from cases import Case
from started import Started

TAG = 5


def neighbours(case: Case) -> tuple[int, int]:
    """The group ranks before and after this one, in a ring."""
    return (case.rank - 1) % case.size, (case.rank + 1) % case.size


def send_recv(case: Case) -> Started:
    """Once round the ring; each rank but the first passes on after it has received."""
    before, after = neighbours(case)
    tensor, output = case.place(case.data(case.rank)), case.empty()
    source, target = case.group.ranks[before], case.group.ranks[after]
    returned = None
    if case.rank == 0:
        dist.send(tensor, target, group=case.process_group)
        returned = dist.recv(output, source, group=case.process_group)
    else:
        returned = dist.recv(output, source, group=case.process_group)
        dist.send(tensor, target, group=case.process_group)

    def check() -> Iterator[str]:
        if returned != source:
            yield f"recv returned source {returned}, not {source}"

    return Started(
        outputs=[output], expected=[case.data(before)], untouched=[(tensor, case.data(case.rank))], check=check
    )


def isend_irecv(case: Case) -> Started:
    before, after = neighbours(case)
    tensor, output = case.place(case.data(case.rank)), case.empty()
    send = dist.isend(tensor, group_dst=after, group=case.process_group)
    receive = dist.irecv(output, group_src=before, group=case.process_group)
    return Started(
        [receive], [output], [case.data(before)], untouched=[(tensor, case.data(case.rank))], other_works=[send]
    )


def isend_irecv_tags(case: Case) -> Started:
    """Three messages told apart by their tags, received in the opposite order."""
    before, after = neighbours(case)
    slots = range(3)
    tensors = [case.place(case.data(case.rank, slot)) for slot in slots]
    outputs = [case.empty() for _ in slots]
    group = case.process_group
    sends = [dist.isend(tensors[slot], group_dst=after, group=group, tag=TAG + slot) for slot in slots]
    receives = [dist.irecv(outputs[slot], group_src=before, group=group, tag=TAG + slot) for slot in reversed(slots)]
    expected = [case.data(before, slot) for slot in slots]
    return Started(receives, outputs[::-1], expected[::-1], other_works=sends)


def recv_any_source(case: Case) -> Started:
    """Rank 0 takes a message from everyone, in the order they come."""
    if case.rank:
        dist.send(case.place(case.data(case.rank)), case.group.ranks[0], group=case.process_group)
        return Started(check=lambda: all_came(case))
    outputs = [case.empty() for _ in range(case.size - 1)]
    sources = [dist.recv(output, group=case.process_group) for output in outputs]
    senders = [case.group.ranks.index(source) for source in sources]
    expected = [case.data(sender) for sender in senders]
    return Started(outputs=outputs, expected=expected, check=lambda: all_once(case, senders))


def irecv_any_source(case: Case) -> Started:
    if case.rank:
        tensor = case.place(case.data(case.rank))
        send = dist.isend(tensor, group_dst=0, group=case.process_group, tag=TAG)
        return Started(other_works=[send], check=lambda: all_came(case))
    outputs = [case.empty() for _ in range(case.size - 1)]
    works = [dist.irecv(output, group=case.process_group, tag=TAG) for output in outputs]

    def sent_to(work):
        return lambda: case.data(work._source_rank())

    return Started(
        works,
        outputs,
        [sent_to(work) for work in works],
        check=lambda: all_once(case, [work._source_rank() for work in works]),
    )


def all_once(case: Case, senders: list[int]) -> Iterator[str]:
    if sorted(senders) != list(range(1, case.size)):
        yield f"the senders were {senders}, not each of the others once"
    yield from all_came(case)


def all_came(case: Case) -> Iterator[str]:
    """Hold everyone back until rank 0 has all, or it could take somebody's next message for this."""
    dist.barrier(case.process_group)
    yield from ()


def batch_isend_irecv(case: Case) -> Started:
    """Everyone exchanges with everyone, in one batch."""
    group, everyone = case.process_group, range(case.size)
    tensors = [case.place(case.data(case.rank, peer)) for peer in everyone]
    outputs = [case.empty() for _ in everyone]
    receives = [dist.P2POp(dist.irecv, outputs[peer], group=group, group_peer=peer) for peer in everyone]
    sends = [dist.P2POp(dist.isend, tensors[peer], group=group, group_peer=peer) for peer in everyone]
    works = dist.batch_isend_irecv([*receives, *sends])
    expected = [case.data(peer, case.rank) for peer in everyone]
    if len(works) != 2 * case.size:  # one work for the whole batch, from torch 2.15 on
        return Started(works, outputs, expected)
    return Started(works[: case.size], outputs, expected, other_works=works[case.size :])
