"""The two small networks that ``mpiplus bench --train`` trains: plain torch, made-up data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CLASSES = 10
_WORDS = 1000
_CONTEXT = 64


class ConvolutionalNetwork(nn.Module):
    """Three convolutions and two layers on colour images of 32 by 32: 1.1 million parameters.

    Without batch norm, whose buffers DDP would broadcast at every step.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, _CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes, [batch, class]."""
        scores: Tensor = self.layers(images)
        return scores


class Transformer(nn.Module):
    """Four layers that guess the next word at each place of 64: 2.2 million parameters."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = nn.Embedding(_CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(width, _WORDS)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the words, [batch, word, place]."""
        length = text.shape[1]
        inner = self.words(text) + self.places.weight[:length]
        mask = torch.full((length, length), float("-inf"), dtype=inner.dtype).triu(1)
        scores: Tensor = self.scores(self.layers(inner, mask=mask, is_causal=True))
        return scores.transpose(1, 2)


def _images(dice: torch.Generator, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = torch.randn(samples, 3, 32, 32, generator=dice).to(dtype)
    return images, torch.randint(_CLASSES, (samples,), generator=dice)


def _text(dice: torch.Generator, samples: int, _: torch.dtype) -> tuple[Tensor, Tensor]:
    text = torch.randint(_WORDS, (samples, _CONTEXT + 1), generator=dice)
    return text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
        name: of the network.
        make: a new network.
        batch: data and what the network should say of them, given dice, samples and dtype.
        samples: a rank's in one step.
        learning_rate: with which a few steps on one batch make its loss fall.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int, torch.dtype], tuple[Tensor, Tensor]]
    samples: int
    learning_rate: float


TASKS = (
    Task("CNN", ConvolutionalNetwork, _images, samples=16, learning_rate=0.05),
    Task("transformer", Transformer, _text, samples=4, learning_rate=0.1),
)
