"""Bytes between the ranks of a group, over torch's collectives.

A message is a head of fixed size that says how long it is and carries up to 246 bytes itself, so a number, a
short text or a small tuple takes one collective; longer ones take a second.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import torch.distributed as dist

from .members import Members

HEAD = 256
_LENGTHS = struct.Struct("<??q")
INLINE = HEAD - _LENGTHS.size


class Message(NamedTuple):
    """The message of one rank."""

    ok: bool  # whether the payload is a value, and not an error
    payload: bytes  # pickled, or a failure's text
    simple: bool = False  # the value is a number or a text, and can be unpickled anywhere


def _as_tensor(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    buffer = bytearray(size)
    buffer[: len(data)] = data
    return torch.frombuffer(buffer, dtype=torch.uint8).to(device)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _head(message: Message) -> bytes:
    return _LENGTHS.pack(message.ok, message.simple, len(message.payload)) + message.payload[:INLINE]


def _all_gather(data: bytes, size: int, members: Members) -> list[bytes]:
    mine = _as_tensor(data, size, members.device)
    everybody = [torch.empty_like(mine) for _ in members.ranks]
    dist.all_gather(everybody, mine, group=members.group)
    return [_as_bytes(tensor) for tensor in everybody]


def _gather(data: bytes, size: int, root: int, members: Members) -> list[bytes] | None:
    mine = _as_tensor(data, size, members.device)
    everybody = [torch.empty_like(mine) for _ in members.ranks] if members.rank == root else None
    dist.gather(mine, everybody, dst=root, group=members.group)
    return None if everybody is None else [_as_bytes(tensor) for tensor in everybody]


def gather(message: Message, members: Members, root: int | None = None) -> list[Message]:
    """The messages of all ranks, in the group's order.

    Args:
        message: this rank's.
        members: the group.
        root: the rank that wants the payloads, all if None. The other ranks get them only where one is not
            ok; then everybody gets the payloads of those that are not, and empty ones of the others.
    """
    heads = _all_gather(_head(message), HEAD, members)
    known = [_LENGTHS.unpack_from(head) for head in heads]
    failed = not all(ok for ok, _, _ in known)
    wanted = [length for ok, _, length in known if not (ok and failed)]
    mine = b"" if failed and message.ok else message.payload
    if max(wanted) <= INLINE:
        bodies = [head[_LENGTHS.size :] for head in heads]
    elif failed or root is None:
        bodies = _all_gather(mine, max(wanted), members)
    else:
        bodies = _gather(mine, max(wanted), root, members) or [b""] * members.size
    return [
        Message(ok, b"" if failed and ok else body[:length], simple)
        for (ok, simple, length), body in zip(known, bodies, strict=True)
    ]


def broadcast(message: Message | None, root: int, members: Members) -> Message:
    """The message of ``root``, which gives it; the others give None."""
    head = _as_tensor(_head(message) if message is not None else b"", HEAD, members.device)
    dist.broadcast(head, src=root, group=members.group)
    ok, simple, length = _LENGTHS.unpack_from(_as_bytes(head))
    if message is None and length <= INLINE:
        return Message(ok, _as_bytes(head)[_LENGTHS.size :][:length], simple)
    if length > INLINE:
        body = _as_tensor(message.payload if message is not None else b"", length, members.device)
        dist.broadcast(body, src=root, group=members.group)
        message = message or Message(ok, _as_bytes(body), simple)
    assert message is not None
    return message
