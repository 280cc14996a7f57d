"""Data loaders: processes beside a rank that decode its batches, as those of images do, while it trains."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

#: Processes of each rank; what each decodes for a batch, of whatever length: as long as a step of the CNN's takes.
WORKERS, _BYTES = 2, 2 << 20


class _Encoded(IterableDataset[tuple[Tensor, Tensor]]):
    """One batch for ever, decoded anew each time."""

    def __init__(self, data: Tensor, targets: Tensor) -> None:
        self._samples = [zlib.compress(sample.numpy().tobytes(), 1) for sample in data]
        self._like, self._targets = data[0], targets
        self._rounds = max(1, _BYTES // data.nbytes)

    def _decode(self, encoded: bytes) -> Tensor:
        for _ in range(self._rounds):
            plain = zlib.decompress(encoded)
        return torch.frombuffer(bytearray(plain), dtype=self._like.dtype).view(self._like.shape)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.stack([self._decode(sample) for sample in self._samples]), self._targets


def load(data: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return these for ever, as processes of this rank decode them; they end with the iterator."""
    loader = DataLoader(_Encoded(data.cpu(), targets.cpu()), batch_size=None, num_workers=WORKERS)
    return ((inputs.to(data.device), wanted.to(data.device)) for inputs, wanted in loader)
