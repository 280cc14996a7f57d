"""The small networks that ``mpiplus bench --train`` trains: plain torch, made-up data, processes that decode it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

_CLASSES = 10
_WORDS = 1000
_CONTEXT = 64
_ROWS, _ROW = 8, 1024**2
#: Seconds for each of the sleeper's layers.
SLEEP = 0.004
#: Processes of each rank; what each decodes for a batch, of whatever length: as long as a step of the CNN's takes.
WORKERS, _BYTES = 2, 2 << 20


def convolutional_network() -> nn.Module:
    """Three convolutions and two layers on colour images of 32 by 32: 1.1 million parameters.

    Without batch norm, whose buffers DDP would broadcast at every step. It returns the scores of the classes,
    [batch, class].
    """
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, _CLASSES))


class Transformer(nn.Module):
    """Four layers that guess the next word at each place of 64: 2.2 million parameters.

    Without its embeddings, its scores, and some of its layers it is one of the stages of a pipeline.
    """

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.words: nn.Embedding | None = nn.Embedding(_WORDS, width)
        self.places: nn.Embedding | None = nn.Embedding(_CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores: nn.Linear | None = nn.Linear(width, _WORDS)

    def keep_stage(self, stage: int, stages: int) -> Transformer:
        """Become one of the stages of a pipeline, and return it.

        Args:
            stage: 0 has the embeddings, the last one the scores.
            stages: how many there are; at most as many as layers.
        """
        layers = self.layers.layers
        start, end = (index * len(layers) // stages for index in (stage, stage + 1))
        self.layers.layers = layers[start:end]
        if stage > 0:
            self.words = self.places = None
        if stage < stages - 1:
            self.scores = None
        return self

    def forward(self, inner: Tensor) -> Tensor:
        """Return the scores of the words, [batch, word, place]; a stage takes and gives [batch, place, width]."""
        if self.words is not None and self.places is not None:
            inner = self.words(inner) + self.places.weight[: inner.shape[1]]
        # Each place sees those before it.
        mask = nn.Transformer.generate_square_subsequent_mask(inner.shape[1], inner.device, inner.dtype)
        inner = self.layers(inner, mask=mask, is_causal=True)
        return inner if self.scores is None else self.scores(inner).transpose(1, 2)


class _Elsewhere(torch.autograd.Function):
    """Does nothing, and on the way back sleeps: a computation that leaves the core idle, as one on a GPU does."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        return inner.view_as(inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(SLEEP)
        return gradients[0]


class Sleeper(nn.Module):
    """Eight layers of 1 Mi parameters each, with hardly any computation; a sleep before each gradient.

    And one after the last gradient: so all of the communication has something that it can be hidden behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.full((_ROW,), 1 / _ROW) for _ in range(_ROWS)])

    def forward(self, data: Tensor) -> Tensor:
        """Return scores of two classes, [1, class]: the sum of the dot products with ``data``, and nothing."""
        inner: Tensor = data[:1].detach().requires_grad_()
        inner = _Elsewhere.apply(inner)
        for row in self.rows:
            inner = _Elsewhere.apply(inner + torch.dot(row, data))
        return torch.cat((inner, torch.zeros_like(inner))).unsqueeze(0)


def _images(dice: torch.Generator, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.randn(samples, 3, 32, 32, generator=dice).to(dtype)
    return images, torch.randint(_CLASSES, (samples,), generator=dice)


def _text(dice: torch.Generator, samples: int, _: torch.dtype) -> tuple[Tensor, Tensor]:
    text = torch.randint(_WORDS, (samples, _CONTEXT + 1), generator=dice)
    return text[:, :-1], text[:, 1:]


def _numbers(dice: torch.Generator, _: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.rand(_ROW, generator=dice).to(dtype), torch.ones(1, dtype=torch.int64)


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
    """Return these for ever, as processes of this rank decode them while it trains; they end with the iterator."""
    loader = DataLoader(_Encoded(data.cpu(), targets.cpu()), batch_size=None, num_workers=WORKERS)
    return ((inputs.to(data.device), wanted.to(data.device)) for inputs, wanted in loader)


@dataclass(frozen=True)
class Task:
    """A network, and the data it is trained on."""

    name: str  # of the network
    make: Callable[[], nn.Module]  # a new network
    #: data and what the network should say of them, given dice, samples and dtype
    batch: Callable[[torch.Generator, int, torch.dtype], tuple[Tensor, Tensor]]
    samples: int  # a rank's in one step
    learning_rate: float  # with which a few steps on one batch make its loss fall


CNN = Task("CNN", convolutional_network, _images, samples=16, learning_rate=0.05)
TRANSFORMER = Task("transformer", Transformer, _text, samples=4, learning_rate=0.1)
SLEEPER = Task("sleeper", Sleeper, _numbers, samples=1, learning_rate=1e-7)
