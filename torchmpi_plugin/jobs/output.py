"""The ranks' output: cut into lines where it is read, prefixed with the rank where it is shown."""

from __future__ import annotations

import codecs
import re
from typing import TextIO

from .writing import Writer

_FLUSH_BYTES = 1 << 16
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


def without_torchs_prefix(rank: int, data: bytes) -> bytes:
    """Lines without the ``[rank2]: `` that torch puts in front of tracebacks."""
    return re.sub(rb"(?m)^\[rank%d\]: ?" % rank, b"", data)


class LineBuffer:
    """Gathers output until lines are complete, so that those of several ranks do not mix."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now; a progress bar's carriage return ends a line too."""
        data = self._pending + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _FLUSH_BYTES:
            end = len(data)
        self._pending = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """Return what is not a line, or not yet: a prompt, say."""
        data, self._pending = self._pending, b""
        return data

    def __bool__(self) -> bool:
        return bool(self._pending)


class Terminal:
    """The place where the output of all ranks comes together."""

    def __init__(
        self, stream: TextIO, prefix: bool, colour: bool, writer: Writer | None = None, attempt: int = 0
    ) -> None:
        self._stream = stream
        self.writer = writer or Writer()
        self.has_prefix = prefix
        self._attempt = f", restart {attempt}" if attempt else ""
        self._colour = colour
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._unfinished: int | None = None

    def show(self, rank: int, data: bytes) -> None:
        """Have written what a rank has printed."""
        decoder = self._decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        lines = _LINE.findall(decoder.decode(data))
        if lines:
            continues = self._unfinished == rank
            start = "\n" if self._unfinished is not None and not continues else ""
            name = self._name(rank)
            self.writer.write(self._stream, start + ("" if continues else name) + name.join(lines))
            self._unfinished = None if lines[-1].endswith(("\n", "\r")) else rank

    def _name(self, rank: int) -> str:
        if not self.has_prefix:
            return ""
        name = f"[rank {rank}{self._attempt}]"
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m " if self._colour else f"{name} "

    def say(self, text: str) -> None:
        """Have lines of the launcher's own written."""
        if text:
            self.finish()
            self.writer.write(self._stream, text)

    def finish(self) -> None:
        """End a line that a rank has left open."""
        if self._unfinished is not None:
            self.writer.write(self._stream, "\n")
            self._unfinished = None
