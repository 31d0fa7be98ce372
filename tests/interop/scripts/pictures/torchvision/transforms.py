"""The transforms of `torchvision.transforms` that the example scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Compose:
    """Applies one transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Converts a picture to a float tensor of channels x height x width in 0..1."""

    def __call__(self, image: Any) -> Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div(255)


class Normalize:
    """Subtracts the mean of each channel and divides by its deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self._mean) / self._std


class Resize:
    """Resizes a picture to (height, width)."""

    def __init__(self, size: Sequence[int]) -> None:
        self._size = tuple(size)

    def __call__(self, image: Any) -> Any:
        return image.resize(self._size[::-1])


class RandomResizedCrop(Resize):
    """Crops a random square from a picture and resizes it."""

    def __init__(self, size: Sequence[int], scale: tuple[float, float] = (0.08, 1.0)) -> None:
        super().__init__(size)
        self._scale = scale

    def __call__(self, image: Any) -> Any:
        width, height = image.size
        low, high = self._scale
        side = int(min(width, height) * (low + (high - low) * float(torch.rand(()))) ** 0.5)
        left = int(torch.randint(0, width - side + 1, ()))
        top = int(torch.randint(0, height - side + 1, ()))
        return super().__call__(image.crop((left, top, left + side, top + side)))
